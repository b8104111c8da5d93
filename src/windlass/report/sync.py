"""How do offline W&B parts reach the server? In the order they were written, once each, from any machine that holds a copy of the folder.

The key is W&B's own affair (its environment variable or netrc); it is neither asked for nor written here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.errors import LaunchError
from windlass.report.redact import redact_text
from windlass.runs.files import append_line, read_lines
from windlass.runs.folder import Run

TRIGGER = "sync"
"""File in the run's requests/ that a job writes when there is something new to send."""
Sender = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def parts(run: Run) -> list[Path]:
    """`offline-run-20261115_031500-ID` folders, oldest first: the name holds the time."""
    return sorted(run.trackers.glob("wandb/**/offline-run-*"), key=lambda p: p.name)


def _sent_file(run: Run) -> Path:
    return run.trackers / "sent.jsonl"


def sent(run: Run) -> dict[str, int]:
    """Part -> bytes that were sent of it; a part that has grown since is sent again."""
    return {
        str(line["part"]): int(line["bytes"])
        for line in read_lines(_sent_file(run))
        if "part" in line and isinstance(line.get("bytes"), int)
    }


def sync_once(run: Run, *, dry_run: bool = False, send: Sender | None = None) -> list[dict[str, Any]]:
    """Send what is new; stops at the first failure, because a later part before an earlier one tears the curve."""
    done: list[dict[str, Any]] = []
    known = sent(run)
    for part in parts(run):
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
        done.append({"part": part.name, "bytes": size, "state": "would be sent" if dry_run else "sent"})
    return done


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
            "the wandb command is not installed here",
            hint="pip install 'windlass[trackers]', or copy the run folder to a machine that has it",
        ) from None
    if answer.returncode:
        said = redact_text((answer.stderr or answer.stdout).strip())[-400:]
        raise LaunchError(
            f"{part.name} was not sent (exit code {answer.returncode}): {said}",
            hint="run `wandb login` on this machine; parts sent before are remembered",
        )


def sync_watch(
    run: Run, every: float, *, say: Callable[[str], None], rounds: int | None = None, send: Sender | None = None
) -> None:
    """Send at the start and whenever the trigger file appears, until Ctrl-C or the run is finished and sent."""
    trigger = run.requests / TRIGGER
    first = True
    while rounds is None or rounds > 0:
        asked = trigger.exists()
        if first or asked:
            trigger.unlink(missing_ok=True)  # before sending: what is written meanwhile asks again
            for part in sync_once(run, send=send):
                if part["state"] == "sent":
                    say(f"{part['part']}: sent")
        finished = any(e.get("event") in ("finished", "gave_up") for e in run.events())
        if finished and not trigger.exists():
            return
        first, rounds = False, None if rounds is None else rounds - 1
        time.sleep(every)
