"""What the loop does around a save: which weights are the best, what a failed save changes, what is known before the first one."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.faults.lab import recipe as fault_recipe
from tests.faults.lab import write_store

from windlass.checkpoint import files
from windlass.checkpoint.load import read_extra
from windlass.checkpoint.save import Saver
from windlass.clusters.scheduler import Place
from windlass.config import Recipe
from windlass.errors import CheckpointError, ConfigError
from windlass.files import append_line, write_json
from windlass.launch.start import bind_start
from windlass.runs.events import Compiled
from windlass.runs.folder import Run
from windlass.train import loop, validate
from windlass.train.hooks import Hook
from windlass.train.progress import ProgressDisplay

ALONE = Place(0, 1, 0, 1, 0, 1, None, None, "single")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store"))


def small(store: Path, *, steps: int, **tables: Any) -> Recipe:
    tables["train"] = {"eval_every": 1, "eval_tokens": 32, **tables.get("train", {})}
    return fault_recipe(store, steps=steps, **tables)


def train(run: Run, recipe: Recipe, *hooks: Hook, said: list[str] | None = None, say: Any = None) -> int:
    write_json(run.config_file, recipe.model_dump(mode="json"))
    start = bind_start(run, devices=1, devices_per_node=1)
    return loop.run(recipe, run, start, ALONE, hooks, say or (([] if said is None else said).append))


def judged_as(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Validation says these, pass after pass."""
    left = iter(losses)

    def combine(held: Any, means: Any) -> validate.Validation:
        overall = validate.HeldOutLoss(loss=next(left), bits_per_byte=None)
        return validate.Validation(overall=overall, sources={}, languages={})

    monkeypatch.setattr(validate, "combine", combine)


def metrics_on_disk(run: Run) -> dict[int, float | None]:
    return {saved.step: saved.metric for saved in files.list_saved(run)}


def test_the_last_checkpoint_has_the_loss_of_the_last_validation(run: Run, store: Path) -> None:
    train(run, small(store, steps=4, train={"eval_every": 0}, save={"every": 2}))
    assert [(step, metric is None) for step, metric in metrics_on_disk(run).items()] == [(2, True), (4, False)]


def test_a_validation_that_is_not_a_number_is_never_the_best(run, store, monkeypatch) -> None:
    judged_as(monkeypatch, [3.0, math.nan, 2.0, math.nan, 2.5, 1.0])
    made = small(store, steps=4, save={"every": 100, "keep_last": 1, "keep_best": 1})
    assert train(run, made) == 0
    assert metrics_on_disk(run) == {3: 2.0, 4: None}
    assert read_extra(run.checkpoint(4))["extra"]["best"] == [2.0]
    # It goes on from there, and 2.5 is no better; the last step is.
    assert train(run, small(store, steps=6, save={"every": 100, "keep_last": 1, "keep_best": 1})) == 0
    assert metrics_on_disk(run) == {6: 1.0}


def test_a_best_one_that_could_not_be_saved_is_no_mark_to_beat(run, store, monkeypatch) -> None:
    judged_as(monkeypatch, [3.0, 1.0, 2.0, 2.5])
    publish, said = files.publish, []

    def fail_once(temporary: Path, manifest: dict[str, Any], target: Path) -> None:
        if manifest["step"] == 2:
            raise OSError(28, "No space left on device")
        publish(temporary, manifest, target)

    monkeypatch.setattr(files, "publish", fail_once)
    made = small(store, steps=4, save={"every": 3, "keep_last": 1, "keep_best": 1})
    assert train(run, made, said=said) == 0
    assert metrics_on_disk(run) == {3: 2.0, 4: 2.5}
    [line] = [text for text in said if "could not be saved" in text]
    assert line.startswith("step 2 could not be saved: ") and "No space left on device" in line
    assert line.endswith("step 1")


def test_failures_in_a_row_are_said_less_and_less_often(run, store, monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "publish", fail)
    said: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        train(run, small(store, steps=9, train={"eval_every": 0}, save={"every": 1, "keep_best": 0}), said=said)
    assert caught.value.code == "checkpoint.last-save-failed"
    told = [text for text in said if "could not be saved" in text]
    assert ["times in a row" in text for text in told][:2] == [False, True] and 3 <= len(told) <= 5
    assert "newest complete checkpoint is step" not in told[0]
    assert files.steps_on_disk(run) == []


def test_lines_of_a_step_are_written_before_its_checkpoint_begins(run, store, monkeypatch) -> None:
    """A GPU's numbers are read two steps late: a kill after the checkpoint must not lose the lines before it."""
    monkeypatch.setattr("windlass.train.metrics.Recorder.on_step_end", lagging(2))
    seen, begin = {}, Saver.save

    def watched(self: Saver, step: int, *args: Any, **options: Any) -> Any:
        seen[step] = self.run.last_metrics().step or 0
        return begin(self, step, *args, **options)

    monkeypatch.setattr(Saver, "save", watched)
    assert train(run, small(store, steps=6, train={"eval_every": 0}, save={"every": 2, "keep_best": 0})) == 0
    assert seen == {2: 2, 4: 4, 6: 6} and [m.step for m in run.metrics_lines()] == [1, 2, 3, 4, 5, 6]


def lagging(steps: int) -> Any:
    from windlass.train.metrics import Recorder

    inner, drain = Recorder.on_step_end, Recorder.drain

    def on_step_end(self: Any, job: Any, result: Any) -> None:
        self.drain = lambda job, keep: drain(self, job, max(keep, steps))
        inner(self, job, result)
        del self.drain

    return on_step_end


class Look(Hook):
    """When the loop showed life."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def on_wait(self, training: Any, phase: str) -> None:
        self.waits.append(phase)


def test_a_long_validation_and_a_save_show_life_to_the_watchdog(run, store) -> None:
    look = Look()
    made = small(
        store, steps=2, train={"eval_every": 2, "eval_tokens": 16 * 8 * 5}, save={"every": 100, "keep_best": 0}
    )
    assert train(run, made, look) == 0
    # Micro-batches of one sequence: forty of them are validated, then the last save waits.
    assert look.waits == ["validation"] * 40 + ["save"]


@pytest.fixture
def begins(monkeypatch) -> list[tuple[float, float | None]]:
    """(lead before the wall-time limit, energy of earlier starts) at the first step of each start."""
    values, run_steps = [], loop.run_steps

    def watched(training: Any, checkpoints: Any, hooks: Any) -> Any:
        values.append((checkpoints.stop.lead_seconds, checkpoints.carried_joules))
        return run_steps(training, checkpoints, hooks)

    monkeypatch.setattr(loop, "run_steps", watched)
    return values


def test_what_the_last_start_measured_and_used_is_known_at_the_next(run, store, begins) -> None:
    save = {"every": 2, "keep_best": 0}
    train(run, small(store, steps=2, train={"eval_every": 0}, save=save))
    # Two steps that were lost with a kill: they are trained again, their energy is spent.
    append_line(run.metrics_file, {"step": 4, "tokens": 512, "energy_joules": 1234.5, "time": 0})
    train(run, small(store, steps=4, train={"eval_every": 0}, save=save))
    (first_lead, first_energy), (second_lead, second_energy) = begins
    assert first_lead == 300 and 30 < second_lead < 200  # five minutes before the first save; then from the manifest
    assert (first_energy, second_energy) == (None, 1234.5)


def test_energy_before_the_first_checkpoint_counts_too(run, store, begins) -> None:
    append_line(run.metrics_file, {"step": 3, "tokens": 384, "energy_joules": 70.0, "time": 0})
    train(run, small(store, steps=1, train={"eval_every": 0}, save={"keep_best": 0}))
    assert begins[0][1] == 70.0


def test_a_source_that_is_not_held_out_cannot_judge(run, store) -> None:
    with pytest.raises(ConfigError) as caught:
        train(run, small(store, steps=1, save={"metric": "val_loss/dutch"}))
    assert caught.value.code == "train.metric-source-missing" and "noise" in caught.value.hint
    assert train(run, small(store, steps=1, save={"metric": "val_loss/noise"})) == 0
    assert metrics_on_disk(run)[1] is not None


def test_keep_best_without_validation_says_so(run, store) -> None:
    said: list[str] = []
    train(run, small(store, steps=1, train={"eval_every": 0}, save={"keep_best": 2}), said=said)
    assert (
        "save.keep_best = 2 keeps no checkpoint by val_loss: train.eval_every = 0, so only the last step is validated"
        in said
    )


class Full(io.StringIO):
    """A log on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_log_that_takes_nothing_more_does_not_end_the_run(run, store) -> None:
    progress = ProgressDisplay()
    progress.console.file = Full()
    assert train(run, small(store, steps=2), progress, say=progress.say) == 0
    assert [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()] == [1, 2]


def test_the_start_up_of_a_run_does_not_count_the_run_before_it_in_the_process(run, store, monkeypatch) -> None:
    monkeypatch.setattr(loop, "process_seconds", lambda: 1000.0)
    train(run, small(store, steps=1))
    [compiled] = run.events(Compiled)
    assert 0 < compiled.seconds < 900
