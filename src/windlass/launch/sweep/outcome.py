"""How a point ended, and the evidence.

The first source that knows decides: our own time limit, the scheduler, the ranks' error records, the kernel, the log,
the supervisor, the exit code.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from windlass import errors
from windlass.launch.executor import JobState
from windlass.launch.logs import read_tail
from windlass.runs.events import FaultEvent
from windlass.runs.faults import FaultRecord
from windlass.runs.folder import Run

OUTCOMES = ("ok", "oom", "timeout", "node-failure", "pre-empted", "error", "skipped")
FAILED = ("error", "timeout", "node-failure", "pre-empted")
OUTCOME_GROUPS = {"fail": FAILED, "failed": FAILED}  # names of `--only` for several outcomes
OUTCOME_OF_STATE = {
    "OUT_OF_MEMORY": "oom", "TIMEOUT": "timeout", "DEADLINE": "timeout", "NODE_FAIL": "node-failure",
    "BOOT_FAIL": "node-failure", "PREEMPTED": "pre-empted", "REVOKED": "pre-empted", "CANCELLED": "error",
}  # fmt: skip
# Exit codes of our own -> outcome, and what they mean.
OUTCOMES_BY_CODE = {
    errors.EXIT_OUT_OF_MEMORY: ("oom", ": out of memory"),
    errors.EXIT_RESUMABLE: ("pre-empted", ": stopped on request"),
}
LOG_PATTERNS = {
    "oom": r"out of memory|OutOfMemoryError|can't allocate memory|cannot allocate memory|\bMemoryError\b|oom-kill"
    r"|oom_kill|std::bad_alloc|HIP_ERROR_OutOfMemory",
    "timeout": r"DUE TO TIME LIMIT",
    "node-failure": r"DUE TO NODE FAILURE|node failure|NODE_FAIL|uncorrectable ECC|GPU has fallen off the bus",
    "pre-empted": r"DUE TO PREEMPTION|preempted",
}
ERROR_LINE = r"(?:^|\s)(?:[A-Za-z_.]*(?:Error|Exception)\b.*|error: .*|fatal: .*|gave up: .*)"
COMMAND_MARK = "$ "  # begins the line of a point's log that shows its command
LOG_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class PointOutcome:
    outcome: str
    evidence: str  # scheduler, record, kernel, log, supervisor, exit, limit, results or plan
    detail: str = ""  # the scheduler's state, or the first error line
    rank: int | None = None
    host: str | None = None
    file: str | None = None
    exit_code: int | None = None
    further: tuple[str, ...] = ()  # the next pieces of evidence, in order


def classify(
    run: Run,
    exit_code: int | None,
    *,
    log: Path | None = None,
    state: JobState | None = None,
    timed_out: float | None = None,
    since: float = 0.0,
    oom_kills: int = 0,
) -> PointOutcome:
    """`timed_out`: the limit in seconds that ended the point; `since`: when it began (older records do not count)."""
    # A cancelled job has exit code 0 too: the scheduler's state comes first.
    if exit_code == errors.EXIT_DONE and timed_out is None and (state is None or state.state not in OUTCOME_OF_STATE):
        return PointOutcome(outcome="ok", evidence="exit", detail="exit code 0", exit_code=0)
    first, *others = (
        replace(outcome, exit_code=exit_code)
        for outcome in _evidence(run, exit_code, log, state, timed_out, since, oom_kills)
    )
    return replace(first, further=tuple(f"{o.evidence}: {o.outcome}: {o.detail}" for o in others[:3]))


def _evidence(
    run: Run,
    code: int | None,
    log: Path | None,
    state: JobState | None,
    timed_out: float | None,
    since: float,
    oom_kills: int,
) -> Iterator[PointOutcome]:
    """All evidence of a point that did not end well, strongest first."""
    if timed_out is not None:
        yield PointOutcome(outcome="timeout", evidence="limit", detail=f"stopped at its time limit of {timed_out:g} s")
    if state is not None and state.state in OUTCOME_OF_STATE:
        yield PointOutcome(
            outcome=OUTCOME_OF_STATE[state.state],
            evidence="scheduler",
            detail=state.state + (f" ({state.reason})" if state.reason else ""),
        )
    faults = sorted((f for f in run.faults() if f.time >= since - 1), key=lambda fault: fault.time)
    yield from [_from_fault(run, fault) for fault in faults if fault.is_cause][:1]
    if oom_kills:
        yield PointOutcome(
            outcome="oom",
            evidence="kernel",
            detail=f"the kernel killed {oom_kills} process{'es' * (oom_kills > 1)}: the job's memory was used up",
        )
    # The line with the command itself, which we wrote, is not evidence.
    lines = read_tail(log, LOG_BYTES).splitlines() if log else []
    lines = [line for line in lines if not line.startswith(COMMAND_MARK)]
    for outcome, pattern in LOG_PATTERNS.items():
        yield from _from_log(outcome, pattern, lines, log)
    for event in run.events(FaultEvent):  # a rank that was killed leaves no record, but the supervisor saw its end
        if event.kind != "lost" and (event.time or 0.0) >= since - 1:
            yield PointOutcome(
                outcome="oom" if event.kind == "oom" else "error",
                evidence="supervisor",
                detail=f"rank {event.rank}: {event.error}",
                rank=event.rank,
                host=event.host,
            )
            break
    yield from [_from_fault(run, fault) for fault in faults if not fault.is_cause][:1]
    yield from _from_log("error", ERROR_LINE, lines, log)
    outcome, meaning = OUTCOMES_BY_CODE.get(code or 0, ("error", ""))
    detail = "ended without an exit code" if code is None else f"exit code {code}{meaning}"
    if code is not None and not meaning and (code < 0 or code > 128):
        number = -code if code < 0 else code - 128
        names = {member.value: member.name for member in signal.Signals}
        detail = f"ended by {names.get(number, f'signal {number}')}"
    yield PointOutcome(outcome=outcome, evidence="exit", detail=detail)


def _from_fault(run: Run, fault: FaultRecord) -> PointOutcome:
    return PointOutcome(
        outcome="oom" if fault.kind == "oom" else "error",
        evidence="record",
        detail=fault.error,
        rank=fault.rank,
        host=fault.host,
        file=str(run.error_file(fault.rank or 0).relative_to(run.path)),
    )


def _from_log(outcome: str, pattern: str, lines: list[str], log: Path | None) -> Iterator[PointOutcome]:
    hit = next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), None)
    if hit is not None:
        yield PointOutcome(outcome=outcome, evidence="log", detail=hit.strip()[:300], file=str(log))


def parse_only(text: str) -> set[str]:
    """`oom,fail` -> outcomes to repeat."""
    names = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := names - {*OUTCOMES, *OUTCOME_GROUPS}:
        raise errors.ConfigError(
            "sweep.unknown-outcome",
            f"--only {', '.join(sorted(unknown))}: there is no such outcome",
            hint=f"use one of {', '.join((*OUTCOMES, 'fail'))}",
        )
    return {outcome for name in names for outcome in OUTCOME_GROUPS.get(name, (name,))}


def oom_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processes that the kernel has killed for memory in this job so far; None where no counter can be read.

    A process that is killed this way leaves no message, and the scheduler has its verdict only at the end of the job.
    """
    counts: list[int] = []
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 1 counts for our own group only. Version 2 counts for a group and all below it, so we read the one of
        # the job (slurm/job_7): steps that srun starts are beside ours (slurm/job_7/step_batch/user).
        job = re.sub(r"(^|/)(job_[^/]*)/.*", r"\1\2", path.strip("/"))
        file = root / "memory" / path.strip("/") / "memory.oom_control" if controllers else root / job / "memory.events"
        count = re.search(r"^oom_kill (\d+)", file.read_text() if file.is_file() else "", re.MULTILINE)
        counts += [int(count[1])] if count else []
    return sum(counts) if counts else None
