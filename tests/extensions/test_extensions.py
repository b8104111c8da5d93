"""Another package adds one extension of each kind, and a real run uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extensions.package import FILES
from tests.multi.conftest import spawn
from tests.train.helpers import build, place_here, steps

from windlass.clusters import load_cluster
from windlass.config import Recipe, load_recipe
from windlass.data.tokenizer import train_bpe
from windlass.energy.sensors import SENSORS
from windlass.errors import EXIT_DONE, ConfigError
from windlass.evaluate.generate import Sampling, generate
from windlass.evaluate.open_model import open_model
from windlass.evaluate.suites import SUITES, SuiteOptions
from windlass.evaluate.task_files import read_task_file, run_task
from windlass.launch.start import bind_start
from windlass.models.presets import model_spec
from windlass.planner import plan
from windlass.registry import BLOCKS, ENGINES, OBJECTIVES, OPTIMIZERS, PRESETS, SCHEDULES, TRACKERS
from windlass.runs.folder import create_run
from windlass.train import loop
from windlass.train.hooks import Hook
from windlass.train.tracking import Trackers

REGISTRIES = (OPTIMIZERS, SCHEDULES, OBJECTIVES, TRACKERS, ENGINES, SENSORS, SUITES)
RECIPE = """
name = "demo"
model = { family = "recurrent", layers = 2, width = 32, ffn = 48, vocab = 300, recurrence = { rate = 0.8 } }
data = { seq_len = 16, batch_tokens = 128 }
layout = { micro_batch = 8 }
energy = { interval_seconds = 0.01 }
optim = { name = "demo", schedule = "demo", lr = 0.01, weight_decay = 0.0, clip = 0.0 }
train = { steps = 4, precision = "fp32", objective = "demo", engine = "demo" }
save = { every = 2 }
trackers = { demo = true }
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with entry points, and a recipe that uses all of them."""
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    recipe = tmp_path / "demo.toml"
    recipe.write_text(RECIPE)
    yield recipe
    for name in [name for name in sys.modules if name.partition(".")[0] in ("demo_windlass", "recurrence_block")]:
        del sys.modules[name]


@pytest.mark.integration
def test_a_run_with_one_extension_of_each_kind(package: Path, tmp_path: Path) -> None:
    for registry in REGISTRIES:
        assert registry.names()[-1] == "demo" and "demo" not in registry.builtin
    assert BLOCKS.names()[-1] == "recurrence" and PRESETS.names()[-2:] == ["recurrent", "sandwich"]
    loaded = load_recipe(package)
    assert loaded.recipe.trackers.enabled == ("demo",)
    assert loaded.recipe.model.block_table("recurrence").rate == 0.8

    changes: list[set[float]] = []

    class Watch(Hook):
        def on_start(self, training: Any) -> None:
            self.weights = training.optimizer.slots[-1].weights.detach().clone()

        def on_step_end(self, training: Any, result: Any) -> None:
            slot = training.optimizer.slots[-1]
            changes.append({round(value, 6) for value in (slot.weights - self.weights).flatten().tolist()})
            self.weights = slot.weights.detach().clone()

    messages: list[str] = []
    torch.set_num_threads(1)
    run = create_run(tmp_path / "run", loaded)
    start = bind_start(run, devices=1, devices_per_node=1, device="cpu")
    assert loop.run(run.recipe(), run, start, place_here(), [Watch(), Trackers()], messages.append) == EXIT_DONE
    rates = [0.01, 0.01, 0.005, 0.005]
    assert all(change <= {-rate, 0.0, rate} for change, rate in zip(changes, rates, strict=True))
    assert changes[0] >= {-0.01, 0.01} and changes[3] >= {-0.005, 0.005}
    assert "engine: demo" in messages

    from demo_windlass.tracker import ListTracker

    lines = list(run.metrics_lines())
    assert ListTracker.closed and ListTracker.lines == [
        (n, line.step, line.lr, line.loss) for n, line in enumerate(lines, 1)
    ]
    assert [line.lr for line in lines] == [0.01, 0.01, 0.005, 0.005]
    assert 10.0 < (lines[0].loss or 0) < 13.0  # twice log(300)
    assert '"demo"' in run.energy_file.read_text() and (lines[-1].energy_joules or 0) > 0

    opened = open_model(run.path)
    assert generate(opened.model, [5, 6, 7], Sampling(tokens=4, temperature=0.0)).ids
    tokenizer = train_bpe(["a ship on the sea and a winch on the ship"] * 20, 300, tmp_path / "tokenizer")
    task = tmp_path / "phrases.jsonl"
    task.write_text(json.dumps({"phrase": "a winch on the sea"}) + "\n")
    (score,) = run_task(opened, tokenizer, read_task_file(task), SuiteOptions())
    assert score.metric == "nats" and (score.value or 0) > 1


def recipe_of(family: str, micro_batch: int, **layout: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "blocks",
            "model": {"family": family, "layers": 2, "width": 32, "ffn": 48, "heads": 2, "vocab": 100},
            "data": {"seq_len": 16, "batch_tokens": 128},
            "layout": {"micro_batch": micro_batch, **layout},
            "energy": {"enabled": False},
            "optim": {"name": "sgd", "lr": 0.1},
            "train": {"steps": 2, "precision": "fp32"},
        }
    )


def train_all(recipes: list[Recipe]) -> list[list[tuple[float, float]]]:
    return [steps(build(recipe), 2) for recipe in recipes]


@pytest.mark.multi
@pytest.mark.parametrize("family", ["recurrent", "sandwich"])
def test_a_family_of_another_package_trains_on_two_processes(package: Path, family: str) -> None:
    """`recurrent` has a block of its own, `sandwich` combines blocks of windlass in another way."""
    one = steps(training := build(recipe_of(family, 8)), 2)
    parameters = sum(parameter.numel() for _, parameter in training.parts.named_parameters())
    assert model_spec(training.recipe.model).params.stored == parameters
    layouts: list[dict[str, Any]] = [{"shard": "full"}, {"tensor": 2}, {"pipeline": 2}]
    for curves in spawn(train_all, 2, [recipe_of(family, 4, **layout) for layout in layouts]):
        for curve, layout in zip(curves, layouts, strict=True):
            assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in one], rel=3e-6), layout
            assert [norm for _, norm in curve] == pytest.approx([norm for _, norm in one], rel=3e-5), layout


@pytest.mark.parametrize("family", ["recurrent", "sandwich"])
def test_the_planner_prices_it(package: Path, family: str) -> None:
    recipe = recipe_of(family, 8).model_copy(update={"layout": None})
    plans = plan(recipe, load_cluster("snellius-h100"), nodes=1)
    assert plans.best.fits and plans.best.layout.context == 1


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("model.recurrence.rat=0.5", "model.recurrence.rat", "rate"),
        ("model.recurrence.rate=2.0", "model.recurrence.rate", "less than 1"),
        ("model.recurence.rate=0.5", "model.recurence", "recurrence"),
    ],
)
def test_keys_of_a_block_are_checked(package: Path, override: str, key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(package, [override])
    assert f"{key}: " in caught.value.message and suggestion in caught.value.message.split(key + ":")[1]


def test_names_are_checked_without_torch(package: Path) -> None:
    """`windlass plan` and `launch` read recipes on login nodes."""
    code = """
import sys
from windlass.config import load_recipe
from windlass.models.presets import model_spec
from windlass.registry import ENGINES, OBJECTIVES, OPTIMIZERS, PRESETS, SCHEDULES, TRACKERS
recipe = load_recipe(sys.argv[1]).recipe
assert model_spec(recipe.model).params.terms["recurrence"] == 2 * 3 * 32**2
assert OPTIMIZERS.load(recipe.optim.name).state_bytes(4) == 4 and OPTIMIZERS.load("adamw").state_bytes(2) == 4
print([registry.names() for registry in (ENGINES, OBJECTIVES, OPTIMIZERS, PRESETS, SCHEDULES, TRACKERS)])
assert "torch" not in sys.modules
load_recipe(sys.argv[1], ["optim.name=adamw"])
"""
    command = [sys.executable, "-c", code, str(package)]
    paths = [str(package.parent / "site"), *filter(None, sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(paths)}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([
        ["deepspeed", "native", "demo"], ["next_token", "demo"], ["adamw", "ademamix", "lion", "muon", "sgd", "demo"], 
        ["apertus", "deepseek_v2", "deepseek_v3", "gemma3", "gpt_oss", "hf", "llama", "mixtral", "nemotron", "nemotron_h", "olmo2", "olmo3", "olmoe", "qwen2", "qwen3", "qwen3_moe", "retnet", "smollm3", "recurrent", "sandwich"],
        ["constant", "cosine", "linear", "wsd", "demo"], ["mlflow", "tensorboard", "wandb", "demo"],
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("model.family=lama", "model.family", "llama"),
        ("optim.name=adamx", "optim.name", "adamw"),
        ("optim.schedule=cosin", "optim.schedule", "cosine"),
        ("train.objective=next_tokens", "train.objective", "next_token"),
        ("train.engine=deepsped", "train.engine", "deepspeed"),
        ("trackers.wandbb=true", "trackers.wandbb", "wandb"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(package: Path, override: str, key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(package, [override])
    assert f"{key}: " in caught.value.message and suggestion in caught.value.message.split(key)[1]


def test_a_tracker_key_is_a_boolean(package: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(package, ["trackers.demo=maybe"])
    assert "trackers.demo" in caught.value.message


def test_every_builtin_entry_loads() -> None:
    for registry in (OPTIMIZERS, SCHEDULES, OBJECTIVES, TRACKERS, ENGINES):
        for name in registry.builtin:
            assert registry.load(name) is not None
    with pytest.raises(ConfigError) as caught:
        OPTIMIZERS.load("adam")
    assert caught.value.code == "registry.unknown-optimizer"
