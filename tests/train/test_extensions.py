"""Extension points: built-in names without torch, and a tracker, schedule, objective, optimizer and engine of another
package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.test_loop import ALONE, new_run

from windlass.config import load_recipe
from windlass.errors import EXIT_DONE, ConfigError
from windlass.registry import ENGINES, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS
from windlass.train import loop
from windlass.train.hooks import Hook
from windlass.train.tracking import Trackers

PACKAGE = {
    "demo_windlass/__init__.py": "",
    "demo_windlass/spec.py": """
from windlass.train.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(moments=("last",), update="demo_windlass.update:SignDescent")
""",
    "demo_windlass/update.py": """
import torch
from windlass.train.optimizers.base import Optimizer

class SignDescent(Optimizer):
    @staticmethod
    def rule(weights, gradient, moments, numbers, decay):
        return weights - numbers[1] * torch.sign(gradient), (gradient,)
""",
    "demo_windlass/steps.py": """
def halves(optim, tokens, total):
    return 1.0 if tokens <= total // 2 else 0.5
""",
    "demo_windlass/objective.py": """
from windlass.models.loss import next_token_loss
from windlass.train.objectives.next_token import NextToken

class Doubled(NextToken):
    def choose_loss(self, config, *, rows, tokens):
        return lambda *args, **options: next_token_loss(*args, **options) * 2.0, "loss: doubled"

OBJECTIVE = Doubled()
""",
    "demo_windlass/tracker.py": """
class ListTracker:
    uploads_later = False
    lines, closed = [], False

    def __init__(self, run, recipe, first_step):
        assert recipe.trackers.demo

    def log(self, line, count):
        self.lines.append((count, line["step"], line["lr"], line["loss"]))

    def close(self):
        ListTracker.closed = True
""",
    "demo_windlass/engine.py": """
from windlass.train.engines import native

def assemble(model, recipe, world, geometry, beat):
    parts, optimizer, stepper = native.assemble(model, recipe, world, geometry, beat)
    parts.notes.append("engine: demo")
    return parts, optimizer, stepper
""",
    "demo_windlass-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo-windlass\nVersion: 1.0\n",
    "demo_windlass-1.0.dist-info/entry_points.txt": """
[windlass.optimizers]
demo = demo_windlass.spec:SPEC
[windlass.schedules]
demo = demo_windlass.steps:halves
[windlass.objectives]
demo = demo_windlass.objective:OBJECTIVE
[windlass.trackers]
demo = demo_windlass.tracker:ListTracker
[windlass.engines]
demo = demo_windlass.engine:assemble
""",
}
RECIPE = """
name = "demo"
model = { layers = 1, width = 32, ffn = 48, heads = 2, vocab = 100 }
data = { seq_len = 16, batch_tokens = 128 }
layout = { micro_batch = 8 }
energy = { enabled = false }
optim = { name = "demo", schedule = "demo", lr = 0.01, weight_decay = 0.0, clip = 0.0 }
train = { steps = 4, precision = "fp32", objective = "demo", engine = "demo" }
save = { every = 2 }
trackers = { demo = true }
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with entry points, and a recipe that uses them."""
    for name, text in PACKAGE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    recipe = tmp_path / "demo.toml"
    recipe.write_text(RECIPE)
    return recipe


def test_a_run_with_extensions_of_another_package(package: Path, tmp_path: Path) -> None:
    for registry in (OPTIMIZERS, SCHEDULES, OBJECTIVES, TRACKERS, ENGINES):
        assert registry.names()[-1] == "demo" and "demo" not in registry.builtin
    recipe = load_recipe(package).recipe
    assert recipe.trackers.enabled == ("demo",)

    changes: list[set[float]] = []

    class Watch(Hook):
        def on_start(self, job: Any) -> None:
            self.weights = job.optimizer.slots[-1].weights.detach().clone()

        def on_step_end(self, job: Any, result: Any) -> None:
            slot = job.optimizer.slots[-1]
            changes.append({round(value, 6) for value in (slot.weights - self.weights).flatten().tolist()})
            self.weights = slot.weights.detach().clone()

    messages: list[str] = []
    torch.set_num_threads(1)
    run = new_run(tmp_path / "run")
    hooks = [Watch(), Trackers()]
    assert loop.run(recipe, run, where=ALONE, hooks=hooks, say=messages.append) == EXIT_DONE
    rates = [0.01, 0.01, 0.005, 0.005]
    assert all(change <= {-rate, 0.0, rate} for change, rate in zip(changes, rates, strict=True))
    assert changes[0] >= {-0.01, 0.01} and changes[3] >= {-0.005, 0.005}
    assert "engine: demo" in messages and "loss: doubled" in messages

    from demo_windlass.tracker import ListTracker

    lines = list(run.metrics_lines())
    assert ListTracker.closed and ListTracker.lines == [
        (n, line.step, line.lr, line.loss) for n, line in enumerate(lines, 1)
    ]
    assert [line.lr for line in lines] == [0.01, 0.01, 0.005, 0.005]
    assert 8.0 < (lines[0].loss or 0) < 10.0  # twice log(100)


def test_names_are_checked_without_torch(package: Path) -> None:
    """`windlass plan` and `launch` read recipes on login nodes."""
    code = """
import sys
from windlass.config import load_recipe
from windlass.registry import ENGINES, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS
recipe = load_recipe(sys.argv[1]).recipe
assert OPTIMIZERS.load(recipe.optim.name).state_bytes(4) == 4 and OPTIMIZERS.load("adamw").state_bytes(2) == 4
print([registry.names() for registry in (ENGINES, OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS)])
assert "torch" not in sys.modules
load_recipe(sys.argv[1], ["optim.name=adamw"])
"""
    command = [sys.executable, "-c", code, str(package)]
    paths = [str(package.parent / "site"), *filter(None, sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(paths)}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([
        ["deepspeed", "native", "demo"], ["next_token", "demo"], ["adamw", "sgd", "demo"],
        ["constant", "cosine", "linear", "wsd", "demo"], ["mlflow", "tensorboard", "wandb", "demo"],
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
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
