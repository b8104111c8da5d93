"""Requests to stop: signals, wall time, request files, and how several ranks agree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from windlass.clusters.scheduler import end_time
from windlass.config.save import SaveConfig
from windlass.train import signals
from windlass.train.signals import Agreed, StopFlag, listening


@pytest.fixture
def terminal():
    """Signals as a shell in the foreground leaves them, however the tests were started (nohup ignores SIGHUP, &
    ignores SIGINT)."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, signals.SIGTERM),
        (signal.SIGUSR1, signals.SIGUSR1),
        (signal.SIGINT, signals.SIGINT),
        (signal.SIGHUP, signals.SIGHUP),
    ],
)
def test_each_signal_is_a_reason_and_the_handlers_come_back(run, terminal, number, code) -> None:
    before = signal.getsignal(number)
    with listening():
        flag = StopFlag(run, end_time=lambda: None)
        assert flag.agree() == Agreed(None, False)
        os.kill(os.getpid(), number)
        assert flag.agree(save=True) == Agreed(signals.STOP_REASONS[code], True)
    assert signal.getsignal(number) is before


def test_ctrl_c_in_a_terminal_says_what_a_second_one_would_do(run, monkeypatch, capfd) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert capfd.readouterr().err == signals.STOPPING.decode()


def test_a_signal_before_the_flag_exists_is_not_lost(run) -> None:
    with listening():
        os.kill(os.getpid(), signal.SIGTERM)  # while the model is still being built
        assert StopFlag(run, end_time=lambda: None).agree().stop == "SIGTERM"
    assert StopFlag(run, end_time=lambda: None).agree().stop is None


def test_under_nohup_a_closed_terminal_is_not_heard(run) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening():
            flag = StopFlag(run, end_time=lambda: None)
            os.kill(os.getpid(), signal.SIGHUP)
            assert flag.agree().stop is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_save_agreed_on_during_validation_is_done_after_it(run, monkeypatch) -> None:
    monkeypatch.setattr(signals, "STOP_POLL_SECONDS", 0.0)
    flag = StopFlag(run, end_time=lambda: None)
    (run.requests / "save").touch()
    assert flag.agreed_to_stop() is None
    assert flag.agree() == Agreed(None, True) and flag.agree() == Agreed(None, False)


def test_the_second_ctrl_c_stops_at_once_even_inside_a_blocking_call() -> None:
    script = """
import time
from windlass.train.signals import listening
context = listening(); context.__enter__()
print("ready", flush=True)
for _ in range(200): time.sleep(0.1)
"""
    child = subprocess.Popen([sys.executable, "-c", script, "/nonexistent"], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None  # the first only sets the flag
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=5) == -signal.SIGINT


def test_the_wall_time_limit_is_heard_in_time(run, monkeypatch) -> None:
    monkeypatch.setattr(signals, "STOP_POLL_SECONDS", 0.0)
    end = time.time() + 60.5
    flag = StopFlag(run, SaveConfig(lead="60s"), end_time=lambda: end)
    noticed_at = None
    while noticed_at is None and time.time() < end:
        time.sleep(0.05)
        noticed_at = time.time() if flag.agree().stop == signals.STOP_REASONS[signals.WALL_TIME] else None
    assert noticed_at is not None and end - 60 <= noticed_at < end - 30  # not before the lead, and well before the end


def test_the_lead_follows_the_measured_save(run) -> None:
    auto, fixed = StopFlag(run, SaveConfig()), StopFlag(run, SaveConfig(lead="2m"))
    assert auto.lead_seconds == 300
    for flag in (auto, fixed):
        flag.measured(save_seconds=40, step_seconds=8)
    assert auto.lead_seconds == 60 + 3 * 40 + 3 * 8
    assert fixed.lead_seconds == 120


def test_request_files_are_taken_once(run, monkeypatch) -> None:
    monkeypatch.setattr(signals, "STOP_POLL_SECONDS", 0.0)
    flag = StopFlag(run, end_time=lambda: None)
    (run.requests / "save").touch()
    assert flag.agree() == Agreed(None, True) and flag.agree() == Agreed(None, False)
    (run.requests / "stop").touch()
    assert flag.agree().stop == signals.STOP_REASONS[signals.REQUEST] and list(run.requests.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2030-01-02T03:04:05\n", time.mktime((2030, 1, 2, 3, 4, 5, 0, 0, -1))),
        ("N/A\n", None),
        ("UNLIMITED", None),
        (None, 1234.0),
    ],
)
def test_the_end_time_as_squeue_says_it(answer, expected) -> None:
    assert end_time({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1234"}, ask=lambda job: answer) == expected
    assert end_time({}, ask=lambda job: "2030-01-02T03:04:05") is None


def _vote(rank, world, run):
    flag = StopFlag(run, rank=rank, world_size=world, end_time=lambda: None)
    answers = []
    with listening():
        for step in range(6):
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)  # only one rank is signalled
            answers.append(flag.agree(save=rank == 0 and step == 0))
            if answers[-1].stop:
                break
    flag.close()
    return answers


@pytest.mark.multi
def test_all_ranks_find_the_same_answer_at_the_same_step(run, spread) -> None:
    answers = spread(3, _vote, run)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == [Agreed(), Agreed(None, True), Agreed(), Agreed("SIGUSR1", False)]
