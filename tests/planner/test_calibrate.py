import json
import math
import tomllib
from dataclasses import replace

import pytest

from windlass.clusters import load_cluster
from windlass.clusters.load import user_folder
from windlass.clusters.model import Efficiency
from windlass.cost.step import DEFAULTS, with_efficiency
from windlass.errors import PlanError, RunError
from windlass.planner.calibrate import calibrate, collect_runs, fit, measured_run, store_efficiency
from windlass.runs.folder import open_run

TRUE = Efficiency(matmul=0.52, memory=0.6, network=0.5)


@pytest.fixture(autouse=True)
def _own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


@pytest.fixture
def make_run(tmp_path, small):
    """A run folder whose steps take what the model says for a machine with the constants TRUE."""

    def make(name, *, lines=12, noise=0.0, memory=None, world=8, events=True, **tables):
        recipe = small(name=name, **{"layout": {"shard": "full", "micro_batch": 2}, **tables})
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(recipe.model_dump_json())
        if events:
            started = {
                "time": 1.0,
                "event": "started",
                "world_size": world,
                "nodes": world // 4,
                "devices_per_node": 4,
                "device": "NVIDIA H100",
            }
            (folder / "events.jsonl").write_text(json.dumps(started) + "\n")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "step_seconds": 60.0}) + "\n")
        run = open_run(folder)
        write_steps(folder, [1.0] * lines)
        seconds = measured_run(run, load_cluster("snellius-h100")).predicted_seconds(
            with_efficiency(DEFAULTS, TRUE)
        ) * (1 + noise)
        write_steps(folder, [9.0] + [seconds] * lines, memory)
        return folder

    return make


def write_steps(folder, seconds, memory=None):
    lines = [json.dumps({"step": i, "step_seconds": s, "memory_bytes": memory}) for i, s in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def sweep(make, **changes):
    shapes = [(768, 1), (1536, 2), (2304, 4), (3072, 2)]
    for i, (width, micro) in enumerate(shapes):
        heads = width // 64
        make(f"point-{i}", model={"width": width, "ffn": 4 * width, "heads": heads, "kv_heads": heads}, layout={"shard": "full", "micro_batch": micro}, **changes)  # fmt: skip


def test_a_sweep_finds_the_machine_that_made_it(make_run, tmp_path):
    sweep(make_run)
    result = calibrate([tmp_path / "runs"])
    assert result.cluster == "snellius-h100" and len(result.runs) == 4
    assert result.efficiency.matmul == pytest.approx(0.52, rel=0.12)
    assert result.before_pct > 15 and result.after_pct < 3 and result.left_out_pct < 8
    stored = tomllib.loads((user_folder() / "snellius-h100.toml").read_text())["efficiency"]
    assert stored["matmul"] == result.efficiency.matmul and stored["fitted_from"].startswith("4 runs")
    assert load_cluster("snellius-h100").efficiency.matmul == result.efficiency.matmul


def test_what_it_says(make_run, tmp_path):
    sweep(make_run, memory=5 * 2**30)
    result = calibrate([tmp_path / "runs"], store=False)
    text, value = result.text(), result.json()
    assert "4 measured runs" in text and "before" in text and "point-0" in text and "not stored" in text
    assert (
        value["left_out_median_pct"] == result.left_out_pct and value["file"] is None and value["memory_median_pct"] > 0
    )
    assert not (user_folder() / "snellius-h100.toml").exists()


def test_one_run_has_no_left_out_error(make_run):
    result = calibrate([make_run("alone")], store=False)
    assert result.left_out_pct is None and "needs two runs" in result.text()
    assert result.after_pct < result.before_pct and result.memory_pct is None


def test_one_device_says_nothing_about_the_network(make_run):
    alone = make_run(
        "single", world=4, layout={"shard": "none", "micro_batch": 1, "tensor": 4}, data={"batch_tokens": 2048 * 64}
    )
    result = calibrate([alone], store=False)
    assert result.efficiency.overlap is None


def test_the_warm_up_is_left_out(make_run):
    folder = make_run("warm")
    steps = [60.0, 60.0] + [1.0] * 10
    write_steps(folder, steps)
    assert measured_run(open_run(folder), load_cluster("snellius-h100")).step_seconds == 1.0


def test_unusable_runs_are_named_and_left_out(make_run, tmp_path):
    make_run("good")
    short = make_run("short", lines=8)
    write_steps(short, [1.0, 1.0])
    bare = make_run("bare")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "layout": None}))
    runs, skipped, _ = collect_runs([tmp_path / "runs"], None)
    assert [r.name for r in runs] == ["good"]
    assert any("short has 1 steps" in s for s in skipped) and any("bare has no layout" in s for s in skipped)


def test_nothing_to_calibrate_from(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError) as error:
        calibrate([tmp_path / "empty"])
    assert error.value.code == "planner.no-measured-run"
    with pytest.raises(RunError) as error:
        calibrate([tmp_path / "missing.csv"])
    assert error.value.code == "planner.not-a-run" and "planner_accuracy.py" in error.value.hint


def test_a_fit_that_is_worse_is_not_kept(make_run, monkeypatch):
    monkeypatch.setattr("windlass.planner.calibrate.fit", lambda runs, start, names: replace(start, matmul=0.1))
    result = calibrate([make_run("odd")])
    assert result.file is None and result.after_pct > result.before_pct
    assert "not stored" in result.text()


def test_keeping_leaves_the_rest_of_the_users_file(tmp_path):
    path = user_folder() / "snellius-h100.toml"
    path.parent.mkdir(parents=True)
    path.write_text('title = "mine"\n\n[efficiency]\nmatmul = 0.1\n\n[grid]\npue = 1.3\n')
    for value in (0.5, 0.6):
        store_efficiency("snellius-h100", Efficiency(matmul=value, fitted_from='a "quoted" run'))
    raw = tomllib.loads(path.read_text())
    assert raw == {
        "title": "mine",
        "grid": {"pue": 1.3},
        "efficiency": {"matmul": 0.6, "fitted_from": 'a "quoted" run'},
    }
    assert path.read_text().count("Fitted by") == 1


def test_the_fit_stays_inside_its_limits(make_run):
    run = measured_run(open_run(make_run("fast", noise=-0.95)), load_cluster("snellius-h100"))
    best = fit([run], with_efficiency(DEFAULTS, Efficiency(matmul=0.7)), ("matmul", "memory"))
    assert best.matmul <= 1.0 and best.memory <= 1.0 and math.isfinite(run.error(best))
