"""The supervisor with small workers that fail on purpose; no torch in them, so each takes a tenth of a second."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from windlass import errors
from windlass.checkpoint import files
from windlass.files import write_json
from windlass.runs.faults import INCURABLE, exit_code_of, kind_of, record_fault
from windlass.train import supervisor
from windlass.train.supervisor import run_workers

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
run, rank, attempt = Path(sys.argv[1]), int(os.environ["RANK"]), int(sys.argv[2])
def fail(error, kind="crash", code=1):
    record = {"rank": rank, "kind": kind, "error": error, "exit_code": code, "time": time.time()}
    (run / "ranks" / f"error-{rank:05d}.json").write_text(json.dumps(record))
    sys.exit(code)
"""
"""Workers without windlass and torch: they begin within 30 ms."""


def go(run, body: str, devices: int = 2, **options) -> int:
    options = {"grace_seconds": 0.5, "pause_seconds": 0.01, **options}

    def argv(attempt: int) -> list[str]:
        return [sys.executable, "-S", "-c", HEAD + body, str(run.path), str(attempt)]

    return run_workers(argv, devices, run, **options)


def events(run, kind: str) -> list[dict]:
    return [e for e in run.events() if e.event == kind]


def put_checkpoint(run, step: int) -> None:
    run.checkpoint(step).mkdir(parents=True, exist_ok=True)
    write_json(run.checkpoint(step) / files.MANIFEST, {"format": 1, "step": step, "files": {}})


def test_places_port_and_exit_codes_of_workers_that_end_well(run) -> None:
    """Rank 0 inherits the bound socket where the ranks meet, so that nobody can take its port while torch is imported."""
    body = """
import socket
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
(run / f"place-{rank}").write_text(" ".join(os.environ[name] for name in names))
if rank == 0:
    held, port = socket.socket(fileno=int(os.environ["WINDLASS_LISTEN_HANDLE"])), int(os.environ["MASTER_PORT"])
    assert held.getsockname() == ("127.0.0.1", port)
    try: socket.socket().bind(("127.0.0.1", port))
    except OSError: pass
    else: sys.exit(1)
"""
    assert go(run, body, devices=3) == errors.EXIT_DONE
    assert [(run.path / f"place-{r}").read_text() for r in range(3)] == [f"3 {r} 3 127.0.0.1" for r in range(3)]
    assert go(run, "sys.exit(75)") == errors.EXIT_RESUMABLE
    assert list(run.events()) == []


def test_a_crash_is_restarted_and_the_cause_is_named_not_its_victims(run) -> None:
    code = go(run, """
if attempt == 0:
    if rank == 1: fail("the cause")
    fail("Connection closed by peer [127.0.0.1]:1234", "lost")
""")  # fmt: skip
    assert code == 0
    [fault] = events(run, "fault")
    assert (fault.rank, fault.kind, fault.error) == (1, "crash", "the cause")
    [again] = events(run, "restarted")
    assert again.attempt == 1 and "rank 1: crash: the cause" in again.reason


def test_a_killed_rank_is_the_cause_although_it_says_nothing(run) -> None:
    code = go(run, """
if attempt == 0:
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    fail("Connection closed by peer", "lost")
""")  # fmt: skip
    assert code == 0
    [fault] = events(run, "fault")
    assert (fault.rank, fault.kind) == (1, "killed") and "SIGKILL" in fault.error


def test_every_worker_is_polled_so_a_dead_rank_other_than_0_is_noticed_at_once(run) -> None:
    """Ranks 0 and 1 would work for a minute; after rank 2 they get a grace of half a second, then they are ended."""
    body = "Path(sys.argv[1], 'died').write_text(str(time.time())) and sys.exit(3) if rank == 2 else time.sleep(60)"
    assert go(run, body, devices=3) == 3
    seconds = time.time() - float((run.path / "died").read_text())
    [fault] = events(run, "fault")
    assert (fault.rank, fault.exit_code) == (2, 3) and seconds < 5


def test_a_death_is_named_within_5_seconds_although_the_others_wait_in_a_collective_forever(run) -> None:
    """A stand-in for a collective library that neither notices a lost peer nor reacts to signals."""
    body = """
if rank == 1:
    while not all((run / f"waits-{other}").exists() for other in (0, 2)): time.sleep(0.01)
    (run / "died").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
(run / f"waits-{rank}").touch()
while True: time.sleep(60)
"""
    assert go(run, body, devices=3, max_restarts=0, grace_seconds=supervisor.GRACE_SECONDS) == 128 + signal.SIGKILL
    [fault] = events(run, "fault")
    assert (fault.rank, fault.kind, fault.host) == (1, "killed", socket.gethostname()) and "SIGKILL" in fault.error
    assert fault.time - float((run.path / "died").read_text()) < 5


ATTENDED = """
import os, signal, sys, time
from pathlib import Path
from windlass.runs.folder import Run
from windlass.train.supervisor import attend
run = Path(sys.argv[1])
attend(Run(run), 3)
signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))
(run / "pid.new").write_text(str(os.getpid()))
(run / "pid.new").rename(run / "pid")
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["rank killed", "parent killed", "asked to stop"])
def test_of_a_rank_of_srun_and_its_parent_each_says_that_the_other_was_killed(run, end) -> None:
    task = subprocess.Popen([sys.executable, "-c", ATTENDED, str(run.path)], start_new_session=True)
    while not (run.path / "pid").exists():
        assert task.poll() is None
        time.sleep(0.02)
    rank_pid, moment = int((run.path / "pid").read_text()), time.time()
    if end == "asked to stop":
        os.killpg(task.pid, signal.SIGTERM)  # SLURM sends it to every process of the task
    else:
        os.kill(rank_pid if end == "rank killed" else task.pid, signal.SIGKILL)
    code = task.wait(10)
    while _runs(rank_pid):
        assert time.time() - moment < 5
        time.sleep(0.02)
    faults = [(e.rank, e.kind, e.host, e.exit_code) for e in events(run, "fault") if e.time - moment < 5]
    if end == "asked to stop":
        assert (code, faults, run.faults()) == (errors.EXIT_RESUMABLE, [], [])
    else:
        assert code == (137 if end == "rank killed" else -signal.SIGKILL)
        assert faults == [(3, "killed", socket.gethostname(), 137)]
        victim = rank_pid if end == "rank killed" else task.pid
        assert [(f.rank, f.is_cause, f.pid) for f in run.faults()] == [(3, True, victim)]


class FakeTime:
    """A clock that only pauses move."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def decide(run, monkeypatch):
    """`decide(outcomes)`: the supervisor with attempts that end so, without processes; exit code and pauses in seconds.

    An outcome is (newest checkpoint's step, error, exit code), or None for an attempt that ends well.
    """

    def supervise(*outcomes: tuple[int, str, int] | None, **options) -> tuple[int, list[float]]:
        clock, left, begun_at = FakeTime(), iter(outcomes), []

        def attempt(*args) -> tuple[int, supervisor.WorkerFault | None]:
            begun_at.append(clock.now)
            outcome = next(left)
            if outcome is None:
                return 0, None
            step, error, code = outcome
            put_checkpoint(run, step)
            return 0, supervisor.WorkerFault(0, "crash", error, code, "node01")

        monkeypatch.setattr(supervisor, "_run_attempt", attempt)
        monkeypatch.setattr(supervisor, "time", clock)
        code = run_workers(lambda number: [], 1, run, **options)
        return code, [later - earlier for earlier, later in itertools.pairwise(begun_at)]

    return supervise


def test_two_identical_failures_without_a_new_checkpoint_end_it(run, decide) -> None:
    code, pauses = decide((10, "bad thing 123", 1), (10, "bad thing 456", 1), max_restarts=9)
    assert code == 1 and len(pauses) == 1
    assert len(events(run, "fault")) == 2 and "step 10" in events(run, "gave_up")[0].reason


def test_with_new_checkpoints_the_same_failure_may_come_until_the_limit(run, decide) -> None:
    code, _ = decide(*((step, "bad thing", 1) for step in range(4)), max_restarts=3)
    assert code == 1 and len(events(run, "fault")) == 4
    reason = events(run, "gave_up")[0].reason
    assert "4 failures" in reason and "3 restarts" in reason


@pytest.mark.parametrize("code", sorted(INCURABLE))
def test_what_a_restart_cannot_cure_is_not_tried_again(run, decide, code) -> None:
    assert decide((0, "bad recipe", code)) == (code, [])
    assert len(events(run, "fault")) == 1 and INCURABLE[code] in events(run, "gave_up")[0].reason


def test_pauses_double_at_the_same_checkpoint_up_to_a_minute_and_a_new_one_ends_that(run, decide) -> None:
    steps = [0, 0, 0, 10, 10, *[20] * 8]
    code, pauses = decide(
        *((step, f"error {'abcdefghijklm'[n]}", 1) for n, step in enumerate(steps)), None, max_restarts=20
    )
    assert code == 0
    assert pauses == pytest.approx([1, 2, 4, 1, 2, 1, 2, 4, 8, 16, 32, 60, 60], abs=0.06)


def test_a_port_that_is_taken_is_no_lost_peer() -> None:
    assert (
        kind_of(RuntimeError("The server socket has failed to listen: EADDRINUSE, address already in use")) == "crash"
    )
    assert kind_of(RuntimeError("Connection reset by peer")) == "lost"


def test_a_signal_reaches_every_worker_and_their_answer_is_passed_on(run) -> None:
    body = """
signal.signal(signal.SIGUSR1, lambda *a: (Path(sys.argv[1], f"heard-{rank}").touch(), sys.exit(75)))
Path(sys.argv[1], f"ready-{rank}").touch()
for _ in range(200): time.sleep(0.1)
"""

    def send() -> None:
        while not all((run.path / f"ready-{r}").exists() for r in range(2)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=send).start()
    assert go(run, body) == errors.EXIT_RESUMABLE
    assert all((run.path / f"heard-{r}").exists() for r in range(2))


def test_a_failure_after_a_signal_is_not_restarted(run) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *a: sys.exit(1))
Path(sys.argv[1], "ready").touch()
for _ in range(200): time.sleep(0.1)
"""

    def send() -> None:
        while not (run.path / "ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert go(run, body, devices=1) == 1
    assert "a stop was requested" in events(run, "gave_up")[0].reason


def test_workers_die_with_their_supervisor(run) -> None:
    script = f"""
import sys
from pathlib import Path
from windlass.runs.folder import Run
from windlass.train.supervisor import run_workers
body = "import os, sys, time; from pathlib import Path; Path(sys.argv[1], 'pid-' + os.environ['RANK']).write_text(str(os.getpid())); time.sleep(60)"
run_workers(lambda attempt: [sys.executable, "-c", body, {str(run.path)!r}], 2, Run(Path({str(run.path)!r})))
assert "torch" not in sys.modules
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script])
    pids = []
    for rank in range(2):
        path = run.path / f"pid-{rank}"
        while not path.exists() or not path.read_text():
            time.sleep(0.05)
        pids.append(int(path.read_text()))
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_supervisor_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, windlass.train.supervisor; sys.exit('torch' in sys.modules)"]
    )
    assert done.returncode == 0


def test_kinds_of_errors(run) -> None:
    import torch

    cases = [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", 12),
        (OSError(28, "No space left on device"), "disk", 1),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3"), "lost", 1),
        (torch.distributed.DistBackendError("NCCL error"), "lost", 1),
        (errors.CheckpointError("x.y", "x"), "checkpoint", 7),
        (KeyboardInterrupt(), "interrupted", 130),
        (RuntimeError("shapes differ"), "crash", 1),
    ]
    assert [(kind_of(e), exit_code_of(e)) for e, _, _ in cases] == [(k, c) for _, k, c in cases]
    record = record_fault(run, 3, errors.ConfigError("x.y", "first line\nsecond", hint="do this"))
    assert (record.error, record.hint, run.faults()[0].rank) == ("first line", "do this", 3)


def test_a_worker_whose_supervisor_died_while_it_was_made_does_not_live_on() -> None:
    """The kernel's promise to end it begins only with the worker's own call: whoever was orphaned before that leaves by itself."""
    script = """
import os, time
from windlass.processes import end_with_parent
hook, parent = end_with_parent(), os.getpid()
if os.fork() == 0:  # a worker
    while os.getppid() == parent: time.sleep(0.01)
    hook()
    print("lives on", flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.stdout == b"" and done.stderr == b""


def test_a_signal_in_the_pause_ends_it_without_another_start(run) -> None:
    body = """
Path(sys.argv[1], f"start-{attempt}").touch()
fail("bad thing")
"""

    def send() -> None:
        while not events(run, "fault"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert go(run, body, devices=1, pause_seconds=30) == errors.EXIT_RESUMABLE
    assert [p.name for p in run.path.glob("start-*")] == ["start-0"]


def test_under_nohup_a_closed_terminal_does_not_stop_it(run) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        body = "Path(sys.argv[1], 'ready').touch(); time.sleep(0.5)"

        def send() -> None:
            while not (run.path / "ready").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGHUP)

        threading.Thread(target=send).start()
        assert go(run, body, devices=1) == errors.EXIT_DONE
    finally:
        signal.signal(signal.SIGHUP, before)
