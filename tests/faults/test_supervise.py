"""The supervisor with small workers that fail on purpose; no torch in them, so each takes a tenth of a second."""

from __future__ import annotations

import os
import signal
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
import os, sys, time, signal
from pathlib import Path
from windlass.runs.folder import Run
from windlass.runs.faults import record_fault
from windlass import errors
run, rank, attempt = Run(Path(sys.argv[1])), int(os.environ["RANK"]), int(sys.argv[2])
"""


def go(run, body: str, devices: int = 2, **options) -> int:
    options = {"grace_seconds": 0.5, "pause_seconds": 0.01, **options}

    def argv(attempt: int) -> list[str]:
        return [sys.executable, "-c", HEAD + body, str(run.path), str(attempt)]

    return run_workers(argv, devices, run, **options)


def events(run, kind: str) -> list[dict]:
    return [e for e in run.events() if e.event == kind]


def put_checkpoint(run, step: int) -> None:
    run.checkpoint(step).mkdir(parents=True, exist_ok=True)
    write_json(run.checkpoint(step) / files.MANIFEST, {"format": 1, "step": step, "files": {}})


def test_done_and_resumable_pass_through(run) -> None:
    assert go(run, "") == errors.EXIT_DONE
    assert go(run, "sys.exit(75)") == errors.EXIT_RESUMABLE
    assert list(run.events()) == []


def test_ranks_get_their_places(run) -> None:
    body = "Path(sys.argv[1], f'seen-{rank}').write_text(' '.join(os.environ[k] for k in ('WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')))"
    assert go(run, body, devices=3) == 0
    assert [(run.path / f"seen-{r}").read_text() for r in range(3)] == [f"3 {r} 3 127.0.0.1" for r in range(3)]


def test_the_port_where_ranks_meet_is_held_from_the_start(run) -> None:
    """Rank 0 inherits the bound socket, so that nobody can take its port while torch is imported."""
    body = """
import socket
handle, port = int(os.environ["WINDLASS_LISTEN_HANDLE"]), int(os.environ["MASTER_PORT"])
if rank == 0:
    held = socket.socket(fileno=handle)
    assert held.getsockname() == ("127.0.0.1", port)
    try: socket.socket().bind(("127.0.0.1", port))
    except OSError: pass
    else: sys.exit(1)
"""
    assert go(run, body) == errors.EXIT_DONE


def test_a_crash_is_restarted_and_the_cause_is_named_not_its_victims(run) -> None:
    code = go(run, """
if attempt == 0:
    if rank == 1:
        record_fault(run, rank, ValueError("the cause"))
        sys.exit(1)
    record_fault(run, rank, RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
    sys.exit(1)
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
    record_fault(run, rank, RuntimeError("Connection closed by peer"))
    sys.exit(1)
""")  # fmt: skip
    assert code == 0
    [fault] = events(run, "fault")
    assert (fault.rank, fault.kind) == (1, "killed") and "SIGKILL" in fault.error


def test_the_others_are_ended_after_a_grace(run) -> None:
    assert go(run, "sys.exit(3) if rank == 0 else time.sleep(60)") == 3
    assert events(run, "gave_up")[0].reason.startswith(INCURABLE[3])


def test_every_worker_is_polled_so_a_dead_rank_other_than_0_is_noticed_at_once(run) -> None:
    """Ranks 0 and 1 work on and would for a minute: rank 2 alone decides when the attempt ends."""
    body = "Path(sys.argv[1], 'died').write_text(str(time.time())) and sys.exit(3) if rank == 2 else time.sleep(60)"
    assert go(run, body, devices=3, grace_seconds=0.1) == 3
    seconds = time.time() - float((run.path / "died").read_text())
    [fault] = events(run, "fault")
    assert (fault.rank, fault.exit_code) == (2, 3) and seconds < 5


def test_two_identical_failures_without_a_new_checkpoint_end_it(run) -> None:
    put_checkpoint(run, 10)
    assert (
        go(
            run,
            "record_fault(run, rank, ValueError(f'bad thing {os.getpid()}')); sys.exit(1)",
            devices=1,
            max_restarts=9,
        )
        == 1
    )
    assert len(events(run, "fault")) == 2
    assert "the same failure twice without a new checkpoint (still at step 10)" in events(run, "gave_up")[0].reason


def test_with_new_checkpoints_the_same_failure_may_come_until_the_limit(run) -> None:
    body = """
from windlass.files import write_json
folder = run.checkpoint(attempt); folder.mkdir(parents=True)
write_json(folder / "manifest.json", {"format": 1, "step": attempt, "files": {}})
record_fault(run, rank, ValueError("bad thing")); sys.exit(1)
"""
    assert go(run, body, devices=1, max_restarts=3) == 1
    assert len(events(run, "fault")) == 4 and "4 failures with 3 restarts allowed" in events(run, "gave_up")[0].reason


def test_a_port_that_is_taken_is_no_lost_peer() -> None:
    assert (
        kind_of(RuntimeError("The server socket has failed to listen: EADDRINUSE, address already in use")) == "crash"
    )
    assert kind_of(RuntimeError("Connection reset by peer")) == "lost"


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        ("errors.ConfigError('x.bad', 'bad recipe')", 2, "bad recipe"),
        ("MemoryError('too much')", errors.EXIT_OUT_OF_MEMORY, "too much"),
        ("errors.DataError('x.missing', 'no store')", 5, "no store"),
    ],
)
def test_what_a_restart_cannot_cure_is_not_tried_again(run, raised, code, text) -> None:
    assert go(run, f"sys.exit(record_fault(run, rank, {raised}).exit_code)", devices=1) == code
    assert len(events(run, "fault")) == 1 and text in events(run, "gave_up")[0].reason


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
    assert "asked to stop" in events(run, "gave_up")[0].reason


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


def test_many_restarts_of_a_run_that_gets_on_do_not_wait_ever_longer(run, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_PAUSE_SECONDS", 0.3)
    body = """
from windlass.files import write_json
folder = run.checkpoint(attempt // 3); folder.mkdir(parents=True, exist_ok=True)
write_json(folder / "manifest.json", {"format": 1, "step": attempt // 3, "files": {}})
if attempt < 5: record_fault(run, rank, ValueError(f"bad thing {'abcde'[attempt]}")); sys.exit(1)
"""
    assert go(run, body, devices=1, max_restarts=20, pause_seconds=0.1) == 0
    pairs = zip(events(run, "fault"), events(run, "restarted"), strict=True)
    pauses = [restarted.time - fault.time for fault, restarted in pairs]
    # At steps 0, 0, 0, 1, 1: each failure at the same step doubles the pause up to the limit; a new checkpoint ends that.
    expected = [0.1, 0.2, 0.3, 0.1, 0.2]
    assert all(want <= pause < want + 0.095 for want, pause in zip(expected, pauses, strict=True)), pauses


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
record_fault(run, rank, ValueError("bad thing")); sys.exit(1)
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
