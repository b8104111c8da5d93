"""The examples of CONTRIBUTING.md: installed as a package with entry points, planned, trained and called."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from windlass.registry import Registry

TOP = Path(__file__).resolve().parents[2]
TEXT = (TOP / "CONTRIBUTING.md").read_text()
RECIPE = """
name = "extended"
model = { family = "averaging", layers = 2, width = 32, ffn = 48, heads = 2, vocab = 100 }
data = { seq_len = 16, batch_tokens = 128 }
optim = { name = "signs", schedule = "halved", lr = 0.01, weight_decay = 0.0, clip = 0.0 }
train = { steps = 4, precision = "fp32", objective = "smoothed", engine = "announced" }
layout = { micro_batch = 8 }
energy = { enabled = false }
trackers = { csv = true }
"""


def example(title: str, language: str) -> str:
    """The first code block of a language below a heading."""
    section = TEXT.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
    match = re.search(rf"^```{language}[^\n]*\n(.*?)^```", section, re.M | re.S)
    assert match, title
    return match[1]


def names_in(code: str) -> dict:
    names: dict = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that holds `my_windlass` with its entry points."""
    folder = tmp_path_factory.mktemp("site")
    files = re.findall(r'^```python title="([^"]+)"\n(.*?)^```', TEXT, re.M | re.S)
    assert len(files) == 13
    for name, code in [("my_windlass/__init__.py", ""), ("my_windlass/average/__init__.py", ""), *files]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    entries = tomllib.loads(re.search(r"^```toml\n(\[project\.entry-points.*?)^```", TEXT, re.M | re.S)[1])
    lines = []
    for group, points in entries["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    information = folder / "my_windlass-1.0.dist-info"
    information.mkdir()
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-windlass\nVersion: 1.0\n")
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(site))
    return site


def test_the_table_of_packages_is_complete() -> None:
    rows = re.findall(r"^\| .* \| `(\w+)/` \| `([^`]+)` \| (.*) \|$", TEXT, re.M)
    packages = {p.parent.name for p in (TOP / "src" / "windlass").glob("*/__init__.py")}
    assert {package for package, _, _ in rows} == packages | {"docs"}
    for _, file, tests in rows:
        assert (TOP / file).is_file(), file
        assert all((TOP / folder).is_dir() for folder in re.findall(r"`([^`]+)`", tests)), tests


def test_the_table_of_extensions_names_real_folders_and_groups() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+)<?\w*>?[^|]* \| [^|]+ \| `windlass\.(\w+)` \|$", TEXT, re.M)
    assert len(rows) == 9
    for path, group in rows:
        assert (TOP / "src" / "windlass" / path).is_dir(), path
        source = "".join(p.read_text() for p in (TOP / "src" / "windlass").rglob("*.py"))
        assert f'"windlass.{group}"' in source, group


def test_a_run_uses_every_training_extension(site: Path, tmp_path: Path) -> None:
    (tmp_path / "extended.toml").write_text(RECIPE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}

    def windlass(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "windlass", *arguments],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    plans = json.loads(windlass("plan", "extended.toml", "--cluster", "snellius-h100", "--json", "nodes=1"))["plans"]
    assert plans and all(p["layout"]["tensor"] == 1 for p in plans)
    output = windlass("train", "extended.toml", "--run", "run", "--devices", "1")
    assert "engine: announced, 1 rank" in output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines] == [0.01, 0.01, 0.005, 0.005]
    assert 4.0 < lines[0]["loss"] < 5.5  # log(100) is 4.6
    exported = (tmp_path / "run" / "trackers" / "loss.csv").read_text().split()
    assert [float(row.split(",")[1]) for row in exported] == [line["loss"] for line in lines]


def test_the_block_decodes_as_it_trains_and_refuses_tensor_parallelism(installed: Path) -> None:
    import torch
    from my_windlass.average.module import Average
    from my_windlass.average.spec import AverageSpec
    from my_windlass.averaging import PRESET

    from windlass.blocks.base import BlockContext
    from windlass.config import ModelConfig
    from windlass.layout.resolve import JobSize
    from windlass.layout.rules import violations
    from windlass.layout.types import Layout

    block, x = Average(AverageSpec(width=8)), torch.randn(2, 5, 8)
    state, complete = block.new_state(2, 5), block(x, BlockContext({}))
    parts = [block.decode(x[:, i : i + 1], state, torch.tensor([i]), i, None) for i in range(5)]
    assert torch.allclose(torch.cat(parts, 1), complete, atol=1e-6)
    assert sum(p.numel() for p in block.parameters()) == AverageSpec(width=8).params()["average"] == 64

    model = PRESET.spec(ModelConfig(family="averaging", layers=2, width=8, ffn=16, heads=2, vocab=50))
    size = JobSize(devices=2, devices_per_node=2, seq_len=16, sequences=4)
    problems = violations(model, Layout(tensor=2, micro_batch=4), size)
    assert [p.code for p in problems] == ["layout.axis-unsupported"]


def test_the_family_of_known_blocks_gives_defaults_that_a_recipe_may_replace(installed: Path) -> None:
    from windlass.config import ModelConfig
    from windlass.models.presets import model_spec
    from windlass.registry import PRESETS

    sizes = {"family": "squared", "layers": 2, "width": 8, "ffn": 16, "heads": 2, "vocab": 50}
    spec = model_spec(ModelConfig(**sizes))
    attention, mlp = spec.blocks
    assert (attention.qk_norm, mlp.activation, spec.norm.eps) == ("head", "relu2", 1e-6)
    # Two layers of 4 x 8 x 8 (attention) + 2 x 4 (norms of a head) + 2 x 8 x 16 + 2 x 8 (norms), 8, 2 x 50 x 8.
    assert spec.params.total == 2 * (256 + 8 + 256 + 16) + 8 + 800
    assert model_spec(ModelConfig(**sizes, activation="gelu")).blocks[1].activation == "gelu"
    hf = PRESETS.load("squared").hf
    assert hf.hf_name("layers.1.attention.q_norm.weight") == "model.layers.1.self_attn.q_norm.weight"


def test_the_optimizer(installed: Path) -> None:
    import torch
    from my_windlass.signs import SPEC
    from my_windlass.signs_update import Signs

    assert SPEC.state_bytes(4) == 4
    new, (momentum,) = Signs.rule(
        torch.tensor([1.0]), torch.tensor([2.0]), (torch.tensor([0.0]),), torch.tensor([1.0, 0.1]), 0.5, 0.9
    )
    assert new.item() == pytest.approx(1.0 * 0.95 - 0.1) and momentum.item() == pytest.approx(0.2)


def test_the_sensor(installed: Path, tmp_path: Path) -> None:
    from windlass.energy.sensors import SENSORS, SensorHost, SensorMissing

    sensor_class = SENSORS.load("shelf")
    host = SensorHost(root=tmp_path)
    with pytest.raises(SensorMissing):
        sensor_class(host)
    file = tmp_path / "run" / "shelf" / "watts"
    file.parent.mkdir(parents=True)
    file.write_text("812.5\n")
    assert [sample.watts for sample in sensor_class(host).read()] == [812.5]
    file.write_text("")
    assert sensor_class(host).read() == []


def test_the_suite(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from my_windlass import true_or_false

    from windlass.errors import DataError
    from windlass.evaluate.suites import SuiteOptions
    from windlass.evaluate.task_files import read_task_file

    file = tmp_path / "facts.jsonl"
    file.write_text('{"statement": "Water boils.", "is_true": true}\n{"statement": "Ice is hot.", "is_true": false}\n')
    task = read_task_file(file)
    assert task.suite is true_or_false.TrueOrFalse
    answers = [(-1.0, True), (-2.0, False), (-1.0, True), (-3.0, False)]  # always "True"
    monkeypatch.setattr(true_or_false, "score_answers", lambda *arguments: (answers, 0))
    scores = task.suite.run(None, None, "facts", task.items, SuiteOptions())
    assert [score.value for score in scores] == [0.5]
    file.write_text('{"statement": "Water boils.", "is_true": "yes"}\n')
    with pytest.raises(DataError):
        read_task_file(file)


def test_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.planner import plan

    folder = tmp_path / "windlass" / "clusters"
    folder.mkdir(parents=True)
    (folder / "hal.toml").write_text(example("A cluster", "toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    hal = load_cluster("hal")
    assert hal.node.devices == 4
    recipe = load_recipe(TOP / "recipes" / "gptnl_1b_snellius.toml", ["nodes=2"]).recipe
    assert plan(recipe, hal).best.fits


def test_the_layout_rule() -> None:
    from windlass.layout.types import Layout

    problems = names_in(example("A layout rule", "python"))["micro_batch_problems"]
    assert list(problems(Layout(micro_batch=64))) == []
    assert [(p.code, p.nearest) for p in problems(Layout(micro_batch=65))] == [
        ("layout.micro-batch-too-large", "at most 64")
    ]


def test_the_command(tmp_path: Path) -> None:
    from windlass.errors import RunError

    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("age")(names_in(example("A command", "python"))["age"])
    with pytest.raises(RunError) as caught:
        CliRunner().invoke(app, ["age", str(tmp_path)], catch_exceptions=False)
    assert caught.value.code == "runs.no-metrics"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": time.time() - 90}) + "\n")
    done = CliRunner().invoke(app, ["age", str(tmp_path), "--json"])
    assert json.loads(done.stdout)["seconds"] == pytest.approx(90, abs=10)


def test_the_metric() -> None:
    hook = names_in(example("A metric", "python"))["DataWait"]()
    assert hook.share is None
    hook.on_log(None, {"data_seconds": None, "step_seconds": 3.0})
    hook.on_log(None, {"data_seconds": 1.0, "step_seconds": 1.0})
    assert hook.share == 0.25


def test_every_entry_point_group_is_read(installed: Path) -> None:
    points = importlib.metadata.distribution("my-windlass").entry_points
    assert {point.group for point in points} == {
        f"windlass.{name}"
        for name in ("optimizers", "schedules", "objectives", "engines", "trackers", "blocks", "presets", "sensors", "suites")
    }  # fmt: skip
    for point in points:
        if point.group != "windlass.blocks":
            assert Registry(point.group, {}).load(point.name) is not None
