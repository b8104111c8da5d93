"""How did a point end, and how do we know? Scheduler first, then the ranks' error records, the kernel, the log, the supervisor, the exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass import errors
from windlass.launch.executor import State
from windlass.runs.events import FaultEvent
from windlass.runs.faults import FaultRecord
from windlass.runs.folder import Run

OUTCOMES = ("ok", "oom", "timeout", "node-failure", "pre-empted", "error", "skipped")
GROUPS = {"fail": ("error", "timeout", "node-failure", "pre-empted"), "failed": ("error", "timeout", "node-failure", "pre-empted")}  # fmt: skip
"""Words of `--only` that stand for several outcomes."""
_BY_STATE = {
    "OUT_OF_MEMORY": "oom", "TIMEOUT": "timeout", "DEADLINE": "timeout", "NODE_FAIL": "node-failure", "BOOT_FAIL": "node-failure",
    "PREEMPTED": "pre-empted", "REVOKED": "pre-empted", "CANCELLED": "error",
}  # fmt: skip
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("oom", re.compile(r"out of memory|OutOfMemoryError|can't allocate memory|cannot allocate memory|\bMemoryError\b|oom-kill|oom_kill|std::bad_alloc|HIP_ERROR_OutOfMemory", re.I)),
    ("timeout", re.compile(r"DUE TO TIME LIMIT", re.I)),
    ("node-failure", re.compile(r"DUE TO NODE FAILURE|node failure|NODE_FAIL|uncorrectable ECC|GPU has fallen off the bus", re.I)),
    ("pre-empted", re.compile(r"DUE TO PREEMPTION|preempted", re.I)),
)  # fmt: skip
_ERROR_LINE = re.compile(r"(?:^|\s)(?:[A-Za-z_.]*(?:Error|Exception)\b.*|error: .*|fatal: .*|gave up: .*)", re.I)
COMMAND_MARK = "$ "
"""Begins the line of a point's log that shows its command."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict and what it rests on."""

    outcome: str
    evidence: str
    """scheduler, record, kernel, log, supervisor, exit, limit, results or plan."""
    detail: str = ""
    """The words of the evidence: the scheduler's state, or the first error line."""
    rank: int | None = None
    host: str | None = None
    file: str | None = None
    exit_code: int | None = None
    further: list[str] = field(default_factory=list)
    """What else was seen, in order."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def classify(
    run: Run,
    exit_code: int | None,
    *,
    log: Path | None = None,
    state: State | None = None,
    timed_out: float | None = None,
    since: float = 0.0,
    oom_kills: int = 0,
) -> Outcome:
    """The first of these that knows: our own time limit, the scheduler, the ranks' records, the kernel, the log, the supervisor, the exit code."""
    seen = list(_evidence(run, exit_code, log, state, timed_out, since, oom_kills))
    first = seen[0]
    if first.outcome == "ok" and exit_code == 0:
        return first
    return Outcome(**{**vars(first), "further": [_words(o) for o in seen[1:4]]})


def _words(o: Outcome) -> str:
    return f"{o.evidence}: {o.outcome}: {o.detail}"


def _evidence(
    run: Run, code: int | None, log: Path | None, state: State | None, timed_out: float | None, since: float, oom_kills: int
) -> Iterator[Outcome]:  # fmt: skip
    # A cancelled job says exit code 0 too: the scheduler's state comes first.
    if code == errors.EXIT_DONE and timed_out is None and (state is None or state.state not in _BY_STATE):
        yield Outcome(outcome="ok", evidence="exit", detail="exit code 0", exit_code=0)
        return
    if timed_out is not None:
        yield Outcome(
            outcome="timeout", evidence="limit", detail=f"ended after its limit of {timed_out:g} s", exit_code=code
        )
    if state is not None and state.state in _BY_STATE:
        words = f"{state.state}" + (f" ({state.reason})" if state.reason else "")
        yield Outcome(outcome=_BY_STATE[state.state], evidence="scheduler", detail=words, exit_code=code)
    causes, lost = _records(run, code, since)
    yield from causes
    if oom_kills:
        words = f"the kernel killed {oom_kills} process{'es' * (oom_kills > 1)} because the job's memory was used up"
        yield Outcome(outcome="oom", evidence="kernel", detail=words, exit_code=code)
    yield from _log(log, code)
    yield from _fault(run, code, since)
    yield from lost
    yield from _error_line(log, code)
    yield _by_code(code)


def _records(run: Run, code: int | None, since: float) -> tuple[list[Outcome], list[Outcome]]:
    """Error records of ranks, first come first: those that say what happened, and those that only lost another rank."""
    records = sorted((r for r in run.faults() if r.time >= since - 1), key=lambda r: r.time)
    causes = [_of_record(run, r, code) for r in records if r.is_cause]
    return causes[:1], [_of_record(run, r, code) for r in records if not r.is_cause][:1]


def _of_record(run: Run, record: FaultRecord, code: int | None) -> Outcome:
    return Outcome(
        outcome="oom" if record.kind == "oom" else "error",
        evidence="record",
        detail=record.error,
        rank=record.rank,
        host=record.host,
        file=str(run.error_file(record.rank or 0).relative_to(run.path)),
        exit_code=code,
    )


def _fault(run: Run, code: int | None, since: float) -> Iterator[Outcome]:
    """A rank that was killed leaves no record; the supervisor has seen its end."""
    for event in run.events(FaultEvent):
        if event.kind != "lost" and (event.time or 0.0) >= since - 1:
            yield Outcome(
                outcome="oom" if event.kind == "oom" else "error",
                evidence="supervisor",
                detail=f"rank {event.rank}: {event.error}",
                rank=event.rank,
                host=event.host,
                exit_code=code,
            )
            return


def _log(log: Path | None, code: int | None) -> Iterator[Outcome]:
    lines = _said(log)
    for outcome, pattern in _PATTERNS:
        hit = next((line for line in lines if pattern.search(line)), None)
        if hit is not None:
            yield Outcome(outcome=outcome, evidence="log", detail=hit.strip()[:300], file=str(log), exit_code=code)


def _error_line(log: Path | None, code: int | None) -> Iterator[Outcome]:
    lines = _said(log)
    hit = next((line for line in lines if _ERROR_LINE.search(line)), None)
    if hit is not None:
        yield Outcome(outcome="error", evidence="log", detail=hit.strip()[:300], file=str(log), exit_code=code)


def _said(log: Path | None) -> list[str]:
    """What the command said: the line with the command itself, which we wrote, is no evidence whatever words it has."""
    return [line for line in tail(log) if not line.startswith(COMMAND_MARK)] if log is not None else []


def tail(log: Path, most: int = 256 * 1024) -> list[str]:
    """Lines of the end of a log; none when there is no log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _by_code(code: int | None) -> Outcome:
    if code is None:
        return Outcome(outcome="error", evidence="exit", detail="ended without an exit code")
    if code == errors.EXIT_OUT_OF_MEMORY:
        return Outcome(outcome="oom", evidence="exit", detail=f"exit code {code}: out of memory", exit_code=code)
    if code == errors.EXIT_RESUMABLE:
        return Outcome(
            outcome="pre-empted", evidence="exit", detail=f"exit code {code}: stopped on request", exit_code=code
        )
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return Outcome(outcome="error", evidence="exit", detail=f"ended by {name}", exit_code=code)
    return Outcome(outcome="error", evidence="exit", detail=f"exit code {code}", exit_code=code)


def read_only(words: str) -> set[str]:
    """`oom,fail` -> outcomes to repeat."""
    found: set[str] = set()
    for word in (w.strip() for w in words.split(",") if w.strip()):
        if word in GROUPS:
            found.update(GROUPS[word])
        elif word in OUTCOMES:
            found.add(word)
        else:
            raise errors.ConfigError(
                "launch.only-such-outcome",
                f"--only {word}: there is no such outcome",
                hint=f"known: {', '.join((*OUTCOMES, 'fail'))}",
            )
    return found
