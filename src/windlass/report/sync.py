"""How do offline W&B parts reach the server? In the order they were written, once each, from any machine that holds a copy of the folder.

A part goes out when it is closed: W&B appends what it is sent to the run, so that a part sent twice, shorter and longer, would be in the
curves twice. While the job runs it is asked (a file) to close its part and begin another. The key is W&B's own affair (its environment variable or netrc); it is neither asked for nor written here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.errors import LaunchError, RunError
from windlass.files import append_line, read_json_lines, write_atomic
from windlass.report.redact import redact_text
from windlass.runs.folder import Run
from windlass.runs.lock import locked

TRIGGER = "sync"
"""File in the run's requests/ that a job writes when there is something new to send."""
REQUEST = "part"
"""File in the run's requests/ that asks the job to close its part and begin another."""
LIVE_SECONDS = 600.0
"""A run without an end in its events whose last line is younger than this is taken to be running."""
WAIT_SECONDS = 60.0
PART_SECONDS = 300.0
"""With --watch: how often the running job is asked for a part."""
Sender = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def parts(run: Run) -> list[Path]:
    """`offline-run-20261115_031500-ID` folders, oldest first: the name holds the time."""
    return sorted(run.trackers.glob("wandb/**/offline-run-*"), key=lambda p: p.name)


def _sent_file(run: Run) -> Path:
    return run.trackers / "sent.jsonl"


def sent(run: Run) -> dict[str, int]:
    """Part -> bytes that were sent of it."""
    return {
        str(line["part"]): int(line["bytes"])
        for line in read_json_lines(_sent_file(run))
        if "part" in line and isinstance(line.get("bytes"), int)
    }


def sync_once(run: Run, *, dry_run: bool = False, send: Sender | None = None) -> list[dict[str, Any]]:
    """Send what is closed and new; stops at the first failure, because a later part before an earlier one tears the curve."""
    if dry_run or not parts(run):
        return _in_turn(run, dry_run, send)
    with locked(run.trackers / "sync.lock"):  # two that send at once would send a part twice
        return _in_turn(run, dry_run, send)


def _in_turn(run: Run, dry_run: bool, send: Sender | None) -> list[dict[str, Any]]:
    done: list[dict[str, Any]] = []
    known = sent(run)
    found = parts(run)
    open_part = found[-1] if found and is_live(run) else None
    for part in found:
        if part == open_part:
            done.append({"part": part.name, "bytes": None, "state": "still being written"})
            continue
        size = sum(p.stat().st_size for p in part.glob("*.wandb"))
        if size == 0:
            done.append({"part": part.name, "bytes": 0, "state": "empty, passed over"})
            continue
        if known.get(part.name) == size:
            done.append({"part": part.name, "bytes": size, "state": "sent before"})
            continue
        if not dry_run:
            _send(part, send or _run)
            append_line(_sent_file(run), {"part": part.name, "bytes": size, "time": time.time()})
        # A job that was silent for long and then went on: rather some lines twice than the rest not at all.
        grown = " again, because it has grown: the curves may show its first lines twice" if part.name in known else ""
        done.append({"part": part.name, "bytes": size, "state": ("would be sent" if dry_run else "sent") + grown})
    return done


def is_live(run: Run, now: float | None = None) -> bool:
    """Is a job writing here? By files only: what the last start came to, and how old the last line is."""
    kind = next((e.event for e in reversed(list(run.events())) if e.event in STARTS | ENDS), None)
    at = run.last_metrics().time
    fresh = at is not None and (time.time() if now is None else now) - at < LIVE_SECONDS
    return kind not in ENDS and fresh


STARTS = frozenset({"started", "resumed", "restarted"})
ENDS = frozenset({"finished", "gave_up", "stopped"})


def ask_for_part(run: Run, wait: float = WAIT_SECONDS) -> bool:
    """Ask the running job to close its part; True once it has begun another."""
    before = len(parts(run))
    if not before or not is_live(run):
        return False
    request = run.requests / REQUEST
    write_atomic(request, f"{time.time()}\n", sync=False)
    end = time.monotonic() + wait
    while time.monotonic() < end:
        if len(parts(run)) > before and not request.exists():
            return True
        time.sleep(0.2)
    return False


def command(part: Path, help_text: str = "") -> list[str]:
    """The parts of one run share its id, so that they join on the server; releases before 0.26 must be told to append."""
    append = ["--append"] if "--append" in help_text else []
    return [_wandb(), "sync", "--include-synced", *append, str(part)]


def _wandb() -> str:
    beside = Path(sys.executable).with_name("wandb")
    return str(beside) if beside.exists() else shutil.which("wandb") or "wandb"


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(words), capture_output=True, text=True, timeout=3600)


def _send(part: Path, send: Sender) -> None:
    try:
        answer = send(command(part, send([_wandb(), "sync", "--help"]).stdout))
    except FileNotFoundError:
        raise LaunchError(
            "report.wandb-command-installed-here",
            "the wandb command is not installed here",
            hint="pip install 'windlass[trackers]', or copy the run folder to a machine that has it",
        ) from None
    if answer.returncode:
        said = redact_text((answer.stderr or answer.stdout).strip())[-400:]
        raise LaunchError(
            "report.sent-exit-code",
            f"{part.name} was not sent (exit code {answer.returncode}): {said}",
            hint="run `wandb login` on this machine; parts sent before are remembered",
        )


def sync_watch(
    run: Run, every: float, *, say: Callable[[str], None], rounds: int | None = None, send: Sender | None = None
) -> None:
    """Send at the start and whenever the trigger file appears, until Ctrl-C or the run is finished and sent. A failure is said and tried again."""
    trigger = run.requests / TRIGGER
    due, asked_at, failed = True, -1e9, False
    while rounds is None or rounds > 0:
        if is_live(run) and time.monotonic() - asked_at >= PART_SECONDS:
            asked_at = time.monotonic()
            ask_for_part(run, wait=0.0)
        if due or trigger.exists():
            trigger.unlink(missing_ok=True)  # before sending: what is written meanwhile asks again
            due = failed = not _say_sent(run, say, send)
        finished = any(e.event in ("finished", "gave_up") for e in run.events())
        if finished and not failed and not trigger.exists():
            return
        rounds = None if rounds is None else rounds - 1
        time.sleep(every)


def _say_sent(run: Run, say: Callable[[str], None], send: Sender | None) -> bool:
    """False when something could not be sent; it is then tried at the next look."""
    try:
        for part in sync_once(run, send=send):
            if str(part["state"]).startswith("sent") and part["state"] != "sent before":
                say(f"{part['part']}: {part['state']}")
    except (LaunchError, RunError) as error:
        if send is None and "not installed" in error.message:
            raise  # waiting does not help
        say(f"{error.message}; tried again at the next look")
        return False
    return True
