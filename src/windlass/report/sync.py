"""Sends offline W&B parts: in the order they were written, once each, from any machine that has a copy of the folder.

A part goes out when it is closed, because W&B appends whatever it is sent: a part sent twice, shorter and longer, would
be in the curves twice. A running job is asked (by a file) to close its part and begin another. The key belongs to W&B
(its environment variable or netrc); it is neither asked for nor written here.
"""

import contextlib
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.config.secret import redact_text
from windlass.errors import LaunchError, RunError
from windlass.files import append_line, read_json_lines, write_atomic
from windlass.runs.events import Finished, GaveUp, ProcessStart, Restarted, Stopped
from windlass.runs.folder import Run
from windlass.runs.lock import locked

# File in the run's requests/ that a job writes when there is something new to send.
TRIGGER = "sync"
# File in the run's requests/ that asks the job to close its part and begin another.
REQUEST = "part"
# A run without an end in its events whose last line is younger than this counts as running.
LIVE_SECONDS = 600.0
PART_WAIT_SECONDS = 60.0
# With --watch: how often the running job is asked for a part.
PART_SECONDS = 300.0
Sender = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def parts(run: Run) -> list[Path]:
    """`offline-run-20261115_031500-ID` folders, oldest first: the name holds the time."""
    return sorted(run.trackers.glob("wandb/**/offline-run-*"), key=lambda p: p.name)


def sync_once(run: Run, *, dry_run: bool = False, send: Sender | None = None) -> list[dict[str, Any]]:
    """Send what is closed and new; stops at the first failure, because a part before an earlier one tears the curve."""
    done: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        if parts(run) and not dry_run:  # two that send at once would send a part twice
            stack.enter_context(locked(run.trackers / "sync.lock"))
        record, folders = run.trackers / "sent.jsonl", parts(run)
        sent = {str(line.get("part")): line.get("bytes") for line in read_json_lines(record)}
        open_part = folders[-1] if folders and is_live(run) else None
        for part in folders:
            size = sum(p.stat().st_size for p in part.glob("*.wandb"))
            if part == open_part:
                state = "still being written"
            elif size == 0:
                state = "empty, skipped"
            elif sent.get(part.name) == size:
                state = "sent before"
            else:
                if not dry_run:
                    _send(part, send or _run)
                    append_line(record, {"part": part.name, "bytes": size, "time": time.time()})
                state = "would be sent" if dry_run else "sent"
                # A job was silent for long and then continued: repeated lines are better than missing lines.
                if part.name in sent:
                    state += " again, because it has grown: the curves may show its first lines twice"
            done.append({"part": part.name, "bytes": None if part == open_part else size, "state": state})
    return done


def is_live(run: Run, now: float | None = None) -> bool:
    """Whether a job writes to this folder, by the last start or end and the age of the last line."""
    ends = (Finished, GaveUp, Stopped)
    last = next((e for e in reversed(list(run.events())) if isinstance(e, (ProcessStart, Restarted, *ends))), None)
    at = run.last_metrics().time
    is_fresh = at is not None and (time.time() if now is None else now) - at < LIVE_SECONDS
    return is_fresh and not isinstance(last, ends)


def ask_for_part(run: Run, wait: float = PART_WAIT_SECONDS) -> bool:
    """Ask the running job to close its part; True once it has begun another."""
    before = len(parts(run))
    if not before or not is_live(run):
        return False
    request = run.requests / REQUEST
    write_atomic(request, f"{time.time()}\n", sync=False)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if len(parts(run)) > before and not request.exists():
            return True
        time.sleep(0.2)
    return False


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(argv), capture_output=True, text=True, timeout=3600)


def _send(part: Path, send: Sender) -> None:
    beside = Path(sys.executable).with_name("wandb")
    wandb = str(beside) if beside.exists() else shutil.which("wandb") or "wandb"
    try:
        # The parts of one run share its id and join on the server; releases before 0.26 need --append for that.
        append = ["--append"] if "--append" in send([wandb, "sync", "--help"]).stdout else []
        answer = send([wandb, "sync", "--include-synced", *append, str(part)])
    except FileNotFoundError:
        raise LaunchError(
            "report.wandb-missing",
            "the wandb command is not installed here",
            hint="pip install 'windlass[trackers]', or copy the run folder to a machine that has it",
        ) from None
    if answer.returncode:
        output = redact_text((answer.stderr or answer.stdout).strip())[-400:]
        raise LaunchError(
            "report.part-not-sent",
            f"{part.name} was not sent (exit code {answer.returncode}): {output}",
            hint="run `wandb login` on this machine; uploaded files are not uploaded again",
        )


def sync_watch(
    run: Run, every: float, *, say: Callable[[str], None], rounds: int | None = None, send: Sender | None = None
) -> None:
    """Send now and whenever the trigger file appears, until the run is finished and sent. Failures are tried again."""
    trigger = run.requests / TRIGGER
    is_due, asked_at = True, -1e9
    for _ in itertools.count() if rounds is None else range(rounds):
        if is_live(run) and time.monotonic() - asked_at >= PART_SECONDS:
            asked_at = time.monotonic()
            ask_for_part(run, wait=0.0)
        if is_due or trigger.exists():
            trigger.unlink(missing_ok=True)  # before sending: what is written meanwhile asks again
            is_due = False
            try:
                for part in sync_once(run, send=send):
                    if part["state"].startswith("sent") and part["state"] != "sent before":
                        say(f"{part['part']}: {part['state']}")
            except (LaunchError, RunError) as error:
                if error.code == "report.wandb-missing" and send is None:
                    raise  # waiting does not help
                say(f"{error.message}; the next check tries again")
                is_due = True
        if not is_due and not trigger.exists() and any(isinstance(e, (Finished, GaveUp)) for e in run.events()):
            return
        time.sleep(every)
