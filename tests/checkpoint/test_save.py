"""Saving: whole or not at all, in the background, one at a time, and a failure that stops nothing."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from windlass.checkpoint import files, save
from windlass.checkpoint.load import find_latest, restore
from windlass.checkpoint.save import Saver
from windlass.config.save import SaveConfig
from windlass.errors import ConfigError


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    return {"model": dict(model.state_dict()), **({"optimizer": optimizer.state_dict()} if optimizer else {})}


def events(run, kind: str) -> list[dict]:
    return [e for e in run.events() if e.event == kind]


def test_a_save_is_complete_named_and_recorded(run, net) -> None:
    saver = Saver(run, SaveConfig())
    saver.save(5, state_of(net()), {"tokens": 640, "data": {"position": 3}}, metric=2.5)
    outcome = saver.finish()
    assert outcome is not None and outcome.ok
    saved = files.complete(run.checkpoint(5))
    assert (saved.step, saved.tokens, saved.metric, saved.world_size) == (5, 640, 2.5, 1)
    assert saved.bytes == sum(p.stat().st_size for p in saved.path.iterdir() if p.name != files.MANIFEST)
    assert files.temporaries(run) == []
    [event] = events(run, "saved")
    assert event.step == 5 and event.bytes == saved.bytes and event.stall_seconds >= 0 and event.write_seconds > 0


def test_training_may_change_the_weights_while_they_are_written(run, net, monkeypatch) -> None:
    model, gate = net(), threading.Event()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    real = dcp.save

    def slow(*args, **kwargs):
        gate.wait(10)
        return real(*args, **kwargs)

    monkeypatch.setattr(save, "save_distributed", slow)
    saver = Saver(run, SaveConfig())
    saver.save(1, state_of(model), {})
    assert saver.busy and saver.poll() is None
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    gate.set()
    assert saver.finish().ok
    other = net(seed=9)
    restore(find_latest(run), state := state_of(other))
    assert all(torch.equal(state["model"][k], before[k]) for k in before)


def test_a_second_save_waits_for_the_first(run, net, monkeypatch) -> None:
    at_once, most, real = [], [], dcp.save

    def counted(*args, **kwargs):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.1)
        try:
            return real(*args, **kwargs)
        finally:
            at_once.pop()

    monkeypatch.setattr(save, "save_distributed", counted)
    saver = Saver(run, SaveConfig())
    for step in (1, 2, 3):
        saver.save(step, state_of(net()), {})
        assert len(files.temporaries(run)) <= 1
    saver.finish()
    assert max(most) == 1 and [s.step for s in files.list_saved(run)] == [1, 2, 3]


def test_the_stall_is_the_copy_and_not_the_writing(run, net, monkeypatch) -> None:
    real = dcp.save
    monkeypatch.setattr(save, "save_distributed", lambda *a, **k: (time.sleep(0.2), real(*a, **k))[1])
    saver = Saver(run, SaveConfig())
    saver.save(1, state_of(net()), {})
    outcome = saver.finish()
    assert outcome.stall_seconds < 0.2 <= outcome.write_seconds
    waited = Saver(run, SaveConfig(asynchronous=False)).save(2, state_of(net()), {})
    assert waited.stall_seconds >= 0.2
    assert [e.stall_seconds >= 0.2 for e in events(run, "saved")] == [False, True]


def test_a_failed_save_is_recorded_leaves_nothing_and_is_tried_again(run, net, monkeypatch) -> None:
    monkeypatch.setattr(save, "RETRY_SECONDS", 0.0)
    real, calls = dcp.save, []

    def fails_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(save, "save_distributed", fails_once)
    saver = Saver(run, SaveConfig())
    saver.save(1, state_of(net()), {})
    outcome = saver.finish()
    assert not outcome.ok and outcome.path is None and "No space left" in outcome.error
    assert [(e.step, "No space left" in e.error) for e in events(run, "save_failed")] == [(1, True)]
    assert list(run.checkpoints.iterdir()) == [] and saver.retry_due
    saver.save(2, state_of(net()), {})
    assert saver.finish().ok and not saver.retry_due


def test_a_failed_save_pauses_before_the_next_try(run, net, monkeypatch) -> None:
    monkeypatch.setattr(
        save, "save_distributed", lambda *a, **k: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    saver = Saver(run, SaveConfig())
    assert not saver.save(1, state_of(net()), {}, block=True).ok
    assert not saver.retry_due  # 60 s have not passed


def test_a_save_that_would_not_fit_is_not_begun(run, net, monkeypatch) -> None:
    saver = Saver(run, SaveConfig())
    assert saver.save(1, state_of(net()), {}, block=True).ok
    usage = type("Usage", (), {"free": 100, "total": 1000, "used": 900})
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: usage)
    outcome = saver.save(2, state_of(net()), {}, block=True)
    assert "100 B free" in outcome.error
    assert [s.step for s in files.list_saved(run)] == [1]


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write everywhere; tests/faults mounts a read-only folder instead"
)
def test_a_read_only_folder_fails_the_save_and_not_the_run(run, net) -> None:
    run.checkpoints.chmod(0o555)
    outcome = Saver(run, SaveConfig()).save(1, state_of(net()), {}, block=True)
    run.checkpoints.chmod(0o755)
    assert not outcome.ok and "Permission denied" in outcome.error


def test_without_host_memory_for_the_copy_training_waits_and_says_so(run, net, monkeypatch) -> None:
    monkeypatch.setattr(save, "available_bytes", lambda: 1000)
    saver = Saver(run, SaveConfig())
    assert "1000 B" in saver.prepare(state_of(net()))
    assert saver.save(1, state_of(net()), {}).ok  # done on return


def test_a_quota_that_cannot_hold_the_run_is_refused_before_it_starts(run, net) -> None:
    state = state_of(net())  # 16 x 64 + 64 + 64 x 16 + 16 = 2,128 numbers of 4 bytes
    with pytest.raises(ConfigError) as error:
        Saver(run, SaveConfig(quota=10_000)).forecast(state, steps=10, batch_tokens=1)
    assert error.value.code == "checkpoint.quota-too-small"
    assert all(number in error.value.message for number in ("33.2 KiB", "9.8 KiB", "3 ", "8.3 KiB"))
    assert Saver(run, SaveConfig(quota=40_000)).forecast(state, steps=10, batch_tokens=1).checkpoint_bytes == 4 * 2128


def test_the_same_step_again_replaces_the_old_one(run, net) -> None:
    saver = Saver(run, SaveConfig())
    saver.save(4, state_of(net(seed=1)), {"tokens": 1}, block=True)
    saver.save(4, state_of(net(seed=2)), {"tokens": 2}, block=True)
    assert [(s.step, s.tokens) for s in files.list_saved(run)] == [(4, 2)]


def test_old_ones_go_by_the_rules(run, net) -> None:
    saver = Saver(run, SaveConfig(keep_last=2, keep_best=1))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        saver.save(step, state_of(net()), {}, metric=loss)
    saver.finish()
    assert [s.step for s in files.list_saved(run)] == [2, 3, 4]
    assert [e.step for e in events(run, "removed")] == [1]


@pytest.mark.multi
def test_one_rank_that_cannot_write_fails_the_save_on_all(run, net, spread) -> None:
    def body(rank, world, run):
        from windlass.checkpoint import files as inner

        saver = Saver(run, SaveConfig(), rank=rank, world_size=world)
        if rank == 1:
            inner.describe = lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        torch.manual_seed(0)
        saver.save(1, {"model": {"w": torch.ones(8)}}, {})
        return saver.finish().error

    answers = spread(2, body, run)
    assert answers[0] == answers[1] and "rank 1, reading back: Input/output error" in answers[0]
    assert list(run.checkpoints.iterdir()) == [] and len(events(run, "save_failed")) == 1
