"""The record of a run, stops and resumes, skipped steps and rollbacks, and what is refused before the first step."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.helpers import build, new_run, run_here, steps

from windlass.config import Recipe
from windlass.convert.source import load_model
from windlass.errors import EXIT_DONE, EXIT_RESUMABLE, ConfigError, DataError
from windlass.runs.events import ExpertLoads
from windlass.runs.folder import Run
from windlass.runs.metrics import METRICS
from windlass.train import loop, metrics
from windlass.train.failure import DivergedError, OutOfMemoryError, explain
from windlass.train.hooks import Hook
from windlass.train.validate import HeldOutLoss, Validation, Validator


def recipe(**tables: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"layers": 2, "width": 32, "ffn": 48, "heads": 2, "vocab": 100}, "data": {"seq_len": 16, "batch_tokens": 128},
        "train": {"steps": 6, "precision": "fp32"}, "layout": {"micro_batch": 4}, "save": {"every": 3}, "energy": {"enabled": False}, "optim": {"lr": 1e-2},
    }  # fmt: skip
    return Recipe.model_validate({"name": "t", **{k: {**v, **tables.get(k, {})} for k, v in base.items()}})


def train(path: Path, value: Recipe, *hooks: Hook) -> tuple[int, Run]:
    run = new_run(path)
    return run_here(value, run, *hooks), run


def losses(run: Run) -> list[float]:
    return [line.loss for line in run.metrics_lines()]


def test_the_record_of_a_run(tmp_path: Path) -> None:
    code, run = train(tmp_path, recipe())
    assert code == EXIT_DONE
    lines = [m.as_dict() for m in run.metrics_lines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    required = "step tokens loss grad_norm lr step_seconds tokens_per_second mfu memory_bytes energy_joules time"
    assert all(key in line for line in lines for key in required.split())
    assert set().union(*lines) <= set(METRICS)
    assert lines[-1]["tokens"] == 6 * 128
    assert lines[-1]["mfu"] is None and lines[-1]["energy_joules"] is None
    events = [e.event for e in run.events()]
    assert events[0] == "started" and events[-1] == "finished" and events.count("saved") == 2
    manifest = json.loads(run.manifest_file.read_text())
    assert manifest["world_size"] == 1 and manifest["tokens_per_step"] == 128
    assert manifest["mfu_denominator"] == "no peak is known for this CPU"


def test_it_learns(tmp_path: Path) -> None:
    class Same(Hook):
        """The same batch every time."""

        def on_start(self, training: Any) -> None:
            sequences = training.stream.sequences
            training.stream.sequences = lambda indexes: sequences(np.asarray(indexes) % 8)

    _, run = train(tmp_path, recipe(train={"steps": 40}, save={"every": 1000}), Same())
    assert losses(run)[0] == pytest.approx(np.log(100), abs=0.2)
    assert losses(run)[-1] < 1.5


class StopAfter(Hook):
    """A signal in the middle of training, as the scheduler sends it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, training: Any, result: Any) -> None:
        if training.step == self.step:
            signal.raise_signal(signal.SIGUSR1)


def test_a_stop_loses_nothing(tmp_path: Path) -> None:
    _, uncut = train(tmp_path / "uncut", recipe())
    code, run = train(tmp_path / "cut", recipe(), StopAfter(4))
    assert code == EXIT_RESUMABLE
    assert [e.event for e in run.events()][-1] == "stopped"
    code, run = train(tmp_path / "cut", recipe())
    assert code == EXIT_DONE
    assert losses(run) == losses(uncut)
    assert next(e for e in run.events() if e.event == "resumed").step == 4


def test_a_router_is_measured_and_its_bias_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    experts = {"count": 4, "top_k": 2, "balance": "bias", "balance_weight": 0.01, "z_loss": 1e-3}
    value = recipe(model={"experts": experts})
    _, uncut = train(tmp_path / "uncut", value)
    lines = list(uncut.metrics_lines())
    assert all(1.0 <= line.expert_imbalance <= 4.0 and line.dropped_tokens == 0 for line in lines)
    assert lines[0].router_entropy == pytest.approx(math.log(4), rel=1e-2)
    sampled = list(uncut.events(ExpertLoads))
    assert [event.step for event in sampled] == [line.step for line in lines], "fewer steps than samples"
    assert [max(map(max, event.rows().values())) for event in sampled] == [
        pytest.approx(100 * line.expert_imbalance, abs=0.5) for line in lines
    ]
    assert all(list(e.rows()) == ["0", "1"] and sum(e.rows()["1"]) == pytest.approx(400, abs=2) for e in sampled)
    assert lines[0].router_loss == pytest.approx(2 * 1e-3 * math.log(4) ** 2, rel=0.1)  # of two layers
    train(tmp_path / "cut", value, StopAfter(4))
    _, run = train(tmp_path / "cut", value)
    assert losses(run) == losses(uncut)
    assert [line.expert_imbalance for line in run.metrics_lines()] == [line.expert_imbalance for line in lines]
    model = load_model(value, run.checkpoint(6), torch.device("cpu"), torch.float32)
    assert model.layers["1"].feed_forward.bias.any()


def test_another_schedule_changes_no_past(tmp_path: Path) -> None:
    _, a = train(tmp_path / "a", recipe(optim={"schedule": "constant"}))
    train(tmp_path / "b", recipe(optim={"schedule": "constant"}), StopAfter(3))
    _, b = train(tmp_path / "b", recipe(optim={"schedule": "linear", "lr": 5e-3}))
    assert losses(b)[:4] == losses(a)[:4]
    assert losses(b)[4:] != losses(a)[4:]


def test_accumulation_does_not_change_the_curve(tmp_path: Path) -> None:
    _, a = train(tmp_path / "a", recipe(layout={"micro_batch": 8}))
    _, b = train(tmp_path / "b", recipe(layout={"micro_batch": 1}))
    assert losses(b) == pytest.approx(losses(a), rel=3e-6)


class Poison(Hook):
    """Weights that give no finite loss, at some steps, once each."""

    def __init__(self, *steps: int) -> None:
        self.steps = set(steps)

    def on_step_begin(self, training: Any) -> None:
        weight = training.parts.modules[0].norm.weight
        if training.step + 1 in self.steps:
            self.kept = weight.detach().clone()
            weight.data[0] = float("nan")

    def on_step_end(self, training: Any, result: Any) -> None:
        if training.step in self.steps:
            self.steps.remove(training.step)
            training.parts.modules[0].norm.weight.data.copy_(self.kept)


def test_a_step_without_a_finite_loss_changes_nothing(tmp_path: Path) -> None:
    code, run = train(tmp_path, recipe(), Poison(3))
    assert code == EXIT_DONE
    lines = [m.as_dict() for m in run.metrics_lines()]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert lines[2]["loss"] is None
    assert next(e for e in run.events() if e.event == "skipped").step == 3
    assert np.isfinite(lines[-1]["loss"])


class Spike(Hook):
    """A head ten times as steep at some steps, once each: finite, but far from the steps before; put back after the step."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.weights = set(steps), {}

    def on_step_begin(self, training: Any) -> None:
        if training.step + 1 in self.steps:
            training.parts.modules[0].head.weight.data.mul_(10.0)

    def on_step_end(self, training: Any, result: Any) -> None:
        if training.step in self.steps:
            self.steps.remove(training.step)
            training.parts.modules[0].head.weight.data.div_(10.0)
        self.weights[training.step] = training.parts.modules[0].layers["0"].attention.wq.weight.detach().clone()


SPIKY = {"steps": 40, "skip_spike_sigma": 8.0, "max_skipped": 2}


def test_a_spiking_step_changes_nothing_and_is_recorded(tmp_path: Path) -> None:
    hook = Spike(36)
    code, run = train(tmp_path, recipe(train=SPIKY, optim={"lr": 1e-3}, save={"every": 1000}), hook)
    assert code == EXIT_DONE
    lines = {line.step: line.as_dict() for line in run.metrics_lines()}
    assert [step for step, line in lines.items() if line["skipped"]] == [36]
    assert np.isfinite(lines[36]["loss"]) and lines[36]["loss"] > lines[35]["loss"] + 0.05
    event = next(e for e in run.events() if e.event == "skipped")
    assert event.step == 36 and "spike" in event.reason
    assert event.value == {"loss": lines[36]["loss"], "grad_norm": lines[36]["grad_norm"]}
    assert torch.equal(hook.weights[36], hook.weights[35]) and not torch.equal(hook.weights[37], hook.weights[36])


def test_without_the_switch_a_spike_is_a_step_like_any_other(tmp_path: Path) -> None:
    _, run = train(tmp_path, recipe(train={**SPIKY, "skip_spike_sigma": 0.0}, optim={"lr": 1e-3}), Spike(36))
    assert not any(line.skipped for line in run.metrics_lines())


def test_a_spike_among_the_first_steps_is_not_judged(tmp_path: Path) -> None:
    """The spread is not known yet; the first loss of a run is always the highest."""
    _, run = train(tmp_path, recipe(train=SPIKY, optim={"lr": 1e-3}), Spike(10))
    assert not any(line.skipped for line in run.metrics_lines())


def test_spikes_in_a_row_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        train(tmp_path, recipe(train=SPIKY, optim={"lr": 1e-3}), Spike(36, 37))
    assert caught.value.code == "train.diverged" and caught.value.exit_code == 14
    assert re.search(r"\b2 steps .* step 37\b.*spike", caught.value.message)
    assert json.loads(Run(tmp_path).error_file(0).read_text())["exit_code"] == 14


def test_spikes_in_a_row_go_back_when_asked(tmp_path: Path) -> None:
    tables = {"train": {**SPIKY, "rollback": True}, "optim": {"lr": 1e-3}, "save": {"every": 10, "asynchronous": False}}
    code, run = train(tmp_path, recipe(**tables), Spike(36, 37))
    assert code == EXIT_DONE
    event = next(e for e in run.events() if e.event == "rollback")
    assert (event.step, event.to_step, event.skipped_tokens) == (37, 30, 7 * 128)
    assert [line.step for line in run.metrics_lines()][-10:] == list(range(31, 41))


def test_the_guards_memory_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    """After a restart a spike is known at once, not only after the next thirty steps."""
    tables = {"train": SPIKY, "optim": {"lr": 1e-3}, "save": {"every": 1000}}
    train(tmp_path, recipe(**tables), StopAfter(35))
    _, run = train(tmp_path, recipe(**tables), Spike(36))
    assert [line.step for line in run.metrics_lines() if line.skipped] == [36]


def test_too_many_of_them_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        train(tmp_path, recipe(train={"max_skipped": 2}), Poison(4, 5))
    assert caught.value.exit_code == 14 and re.search(r"\b2 steps .* step 5\b", caught.value.message)
    record = json.loads(Run(tmp_path).error_file(0).read_text())
    assert record["exit_code"] == 14 and caught.value.message in record["error"]


def test_rollback_goes_back_once_and_leaves_the_range_out(tmp_path: Path) -> None:
    code, run = train(
        tmp_path, recipe(train={"max_skipped": 2, "rollback": True}, save={"asynchronous": False}), Poison(5, 6)
    )
    assert code == EXIT_DONE
    event = next(e for e in run.events() if e.event == "rollback")
    assert (event.step, event.to_step, event.skipped_tokens) == (6, 3, 3 * 128)
    assert [line.step for line in run.metrics_lines()][-3:] == [4, 5, 6]


@pytest.mark.parametrize(
    ("tables", "code"),
    [
        ({"layout": {"micro_batch": 7}}, "layout.batch-not-divisible"),
        ({"layout": {"tensor": 2}}, "layout.too-few-devices"),
        ({"train": {"precision": "fp8"}}, "train.fp8-device"),
        ({"model": {"family": "retnet"}, "data": {"mask_documents": True}}, "model.no-document-mask"),
        ({"layout": {"offload": "parameters"}}, "layout.offload-needs-processes"),
        ({"layout": {"offload": "parameters"}, "train": {"precision": "bf16"}}, "layout.offload-needs-processes"),
        ({"data": {"store": "/nonexistent"}}, "data.store-missing"),
    ],
    ids=str,
)
def test_refusals(tmp_path: Path, tables: dict[str, Any], code: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        train(tmp_path, recipe(**tables))
    assert caught.value.code == code
    # A layout is refused before workers start; all else leaves a fault record.
    assert Run(tmp_path).error_file(0).is_file() != code.startswith("layout.")


def flat_store(folder: Path, tokens: int) -> Path:
    """A store of one flat array, every token below the test model's vocabulary."""
    folder.mkdir()
    np.save(folder / "part-0.npy", np.arange(tokens, dtype="<u2") % 90)
    return folder


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """A flat array does not say its largest token, so it is found where it is read."""
    store = flat_store(tmp_path / "store", 16 * 60 + 1)
    tables = {"data": {"store": str(store), "max_epochs": 9.0}, "model": {"vocab": 50}}
    with pytest.raises(DataError) as caught:
        train(tmp_path / "run", recipe(**tables))
    assert caught.value.code == "data.token-outside-vocabulary" and " 50" in caught.value.message
    assert json.loads(Run(tmp_path / "run").error_file(0).read_text())["exit_code"] == caught.value.exit_code


def test_bf16_is_refused_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    world: Any = SimpleNamespace(device=torch.device("cuda", 0), cuda=True)
    for precision in ("bf16", "bf16_pure", "fp8"):
        with pytest.raises(ConfigError) as caught:
            loop.check_precision(recipe(train={"precision": precision}), world)
        assert caught.value.code == "train.no-bf16" and "V100-SXM2-16GB" in caught.value.message
    loop.check_precision(recipe(train={"precision": "fp32"}), world)


def test_a_run_by_steps_that_repeats_a_source_too_often_is_refused(tmp_path: Path) -> None:
    store = flat_store(tmp_path / "store", 16 * 20 + 1)  # 20 sequences; 6 steps of 8 are 2.4 passes
    with pytest.raises(DataError) as caught:
        train(tmp_path / "a", recipe(data={"store": str(store), "max_epochs": 2.0}))
    assert all(number in caught.value.message for number in ("2.40", "321", "2 "))
    messages: list[str] = []
    value = recipe(data={"store": str(store), "max_epochs": 3.0})
    code = run_here(value, new_run(tmp_path / "b"), say=messages.append)
    assert code == EXIT_DONE
    assert any(re.fullmatch(r"epochs: \S+ 2\.40 \(limit 3\)", line) for line in messages)


def test_out_of_memory_is_explained() -> None:
    first = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of")
    explained = explain(first, Run(Path("run")))
    assert isinstance(explained, OutOfMemoryError) and explained.exit_code == 12 and "micro_batch" in explained.hint
    assert "2.50 GiB" in str(explained)
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes."
    second = explain(RuntimeError(message), Run(Path("run")))
    assert "1 GiB" in str(second)
    other = ValueError("x")
    assert explain(other, Run(Path("run"))) is other


def test_a_trial_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trial(Hook):
        message = ""

        def on_start(self, training: Any) -> None:
            before = [p.detach().clone() for p in training.parts.modules[0].parameters()]
            self.message = loop.trial_step(training)
            assert all(torch.equal(a, b) for a, b in zip(before, training.parts.modules[0].parameters(), strict=True))

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    _, plain = train(tmp_path / "a", recipe())
    hook = Trial()
    _, tried = train(tmp_path / "b", recipe(), hook)
    assert losses(tried) == losses(plain)
    assert "1 GiB" in hook.message and "-93 %" in hook.message


def test_precisions_start_alike(tmp_path: Path) -> None:
    _, fp32 = train(tmp_path / "a", recipe())
    _, bf16 = train(tmp_path / "b", recipe(train={"precision": "bf16"}))
    _, pure = train(tmp_path / "c", recipe(train={"precision": "bf16_pure"}, optim={"moments": "bf16"}))
    assert losses(bf16) == pytest.approx(losses(fp32), abs=2e-2)
    assert losses(pure) == pytest.approx(losses(fp32), abs=5e-2)
    assert losses(bf16) != losses(fp32)


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, Any]:
    """GPT-2: dropout, tied embeddings, learned positions."""
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=32, resid_pdrop=0.3, embd_pdrop=0.3, bos_token_id=1, eos_token_id=1,
    ).save_pretrained(tmp_path / "gpt2")  # fmt: skip
    return {"model": {"family": "hf", "config": str(tmp_path / "gpt2")}}


def test_a_foreign_network_is_refused_what_would_be_ignored(tmp_path: Path, foreign: dict[str, Any]) -> None:
    wishes = {"loss": "chunked", "fuse": True, "precision": "fp8", "attention": "flash3"}
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", recipe(**foreign, train=wishes))
    assert caught.value.code == "model.setting-needs-own-blocks"
    assert all(f"train.{key} = " in caught.value.message for key in wishes)


def test_a_foreign_network_has_its_z_loss_decay_groups_and_recompute(foreign: dict[str, Any]) -> None:
    training = build(recipe(**foreign, train={"z_loss": 0.1, "recompute": "selective"}))
    undecayed = {
        slot.name.removeprefix("net.")
        for slot in training.optimizer.slots
        if slot.parameter.ndim > 1 and not slot.decay
    }
    assert undecayed == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert "recompute: full (selective is for our own blocks)" in training.parts.notes
    tokens = torch.arange(32).view(2, 16)
    module = training.parts.modules[0].eval()
    total, entropy = module(tokens, tokens).tolist()
    logits = module(tokens).double()
    assert total - entropy == pytest.approx(0.1 * float(logits.detach().logsumexp(-1).pow(2).sum()), rel=1e-4)


def test_validation_of_a_foreign_network_drops_nothing_and_changes_nothing(foreign: dict[str, Any]) -> None:
    curves = []
    for validates in (False, True):
        training = build(recipe(**foreign))
        validator = Validator(training.stream, 8, training.recipe, training.world, training.parts, training.stepper)
        curve = []
        for step in range(3):
            if validates and step:
                assert validator.run() == validator.run(), "dropout is off"
            curve += steps(training, 1)
        curves.append(curve)
    assert curves[0] == curves[1]


def test_a_validation_pass_is_in_no_steps_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else tokens/s and MFU would dip after each pass. The clock is the test's: a step takes 1 s, a pass 50."""
    now = [1000.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))

    class Slow(Hook):
        def on_step_begin(self, training: Any) -> None:
            now[0] += 1.0

        def run(self, stopping: Any) -> Any:
            now[0] += 50.0
            return Validation(HeldOutLoss(2.0, None), {}, {})

    slow = Slow()
    monkeypatch.setattr(loop, "open_validator", lambda *args: SimpleNamespace(run=slow.run, held=[]))
    _, run = train(tmp_path, recipe(train={"eval_every": 2}), slow)
    assert [line.step_seconds for line in run.metrics_lines()] == pytest.approx([1.0] * 6)
    assert [line.tokens_per_second for line in run.metrics_lines()] == pytest.approx([128.0] * 6)
    assert [e.seconds for e in run.events() if e.event == "evaluated"] == [50.0] * 3
    assert [line.val_loss for line in run.metrics_lines()] == [None, None, 2.0, None, 2.0, None]
