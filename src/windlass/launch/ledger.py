"""What every job has cost: node-hours, allocation units and energy per job, run and project; and when a chain may end.

The sources are jobs.jsonl and the scheduler; the forecast of a chain also uses the newest metrics.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.config.ramp import planned_tokens
from windlass.errors import LaunchError
from windlass.files import append_line, read_json, read_json_lines
from windlass.launch.chain import JobStart, job_starts, judge, records
from windlass.launch.executor import UNKNOWN, Executor, JobState
from windlass.launch.job import folder_mark
from windlass.launch.logs import log_files, read_tail
from windlass.launch.slurm import state_from_log
from windlass.runs import Run
from windlass.units import print_figure, print_seconds, print_tokens

# A heartbeat younger than this means that the run trains, even if the scheduler has forgotten its job.
HEARTBEAT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One job of a run. None: unknown."""

    run: str
    job: str
    kind: str
    link: int | None
    links: int | None
    executor: str
    cluster: str | None
    account: str | None
    partition: str | None
    submitted_at: float | None
    state: JobState
    nodes: int | None
    limit_seconds: float | None
    node_hours: float | None  # used so far
    units: float | None
    unit: str | None
    energy_joules: float | None
    began_step: int | None
    step: int | None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kwh": None if self.energy_joules is None else self.energy_joules / 3.6e6}


def entries(run: Run, executors: Mapping[str, Executor], *, strict: bool = False) -> list[LedgerEntry]:
    """Every job of a run with its state; the end of a job is kept in jobs.jsonl, because schedulers forget.

    A scheduler that does not answer is skipped, and the run folder is used instead; `strict` makes it an error.
    """
    lines = records(run)
    closed = {line.get("mark") for line in lines if line.get("record") in ("submitted", "refused")}
    if "slurm" in executors and any(r.get("record") == "submitting" and r.get("mark") not in closed for r in lines):
        try:
            adopt_jobs(run.jobs_file, executors["slurm"])
        except LaunchError:
            if strict:
                raise
        lines = records(run)
    # A job may be recorded twice: by the process that submitted it and by one that found it in the queue.
    by_job = {str(line["job"]): line for line in lines if line.get("record") == "submitted" and line.get("job")}
    submitted = list(by_job.values())
    starts = job_starts(lines)
    states = _job_states(run, lines, submitted, executors, strict)
    energy = _energy_by_job(run, [start for start in starts if start.job])
    ledger = []
    for line in submitted:
        job, rate = str(line["job"]), line.get("units_per_node_hour")
        own, state = [start for start in starts if start.job == job], states[job]
        nodes, seconds = state.nodes or line.get("nodes"), 0.0 if state.waiting else state.elapsed_seconds
        # Requeued: the scheduler reports the last run only, and none while the job waits again.
        if earlier := own if state.waiting else own[:-1]:
            seconds = (seconds or 0.0) + sum(_start_seconds(run, start, starts) for start in earlier)
        node_hours = None if seconds is None or nodes is None else seconds * int(nodes) / 3600
        ended = [r for r in lines if r.get("record") == "ended" and r.get("job") == job and r.get("step") is not None]
        entry = LedgerEntry(
            run=str(run.path),
            job=job,
            kind=str(line.get("kind", "train")),
            executor=str(line.get("executor")),
            submitted_at=line.get("time"),
            state=state,
            nodes=nodes,
            limit_seconds=line.get("seconds"),
            node_hours=node_hours,
            units=None if node_hours is None or rate is None else node_hours * rate,
            energy_joules=state.energy_joules if state.energy_joules is not None else energy.get(job),
            began_step=own[-1].began_step if own else None,
            step=ended[-1]["step"] if ended else None,
            **{key: line.get(key) for key in ("link", "links", "cluster", "account", "partition", "unit")},
        )
        ledger.append(entry)
    return ledger


def _start_seconds(run: Run, start: JobStart, starts: Sequence[JobStart]) -> float:
    """How long a start lasted that is over; without a record of its end, until its last sign of life."""
    if start.ended_at is not None:
        return start.ended_at - start.began_at
    limit = min((other.began_at for other in starts if other.began_at > start.began_at), default=math.inf)
    times = [*(m.time for m in run.metrics_lines()), *(line.get("time") for line in read_json_lines(run.events_file))]
    signs = [float(t) for t in times if isinstance(t, (int, float)) and start.began_at <= t < limit]
    return max(signs, default=start.began_at) - start.began_at


def adopt_jobs(jobs_file: Path, executor: Executor) -> list[str]:
    """Record jobs in the queue that carry this folder's mark and are not in its jobs.jsonl; their ids.

    sbatch can queue a job and fail, and a launch can end between sbatch and the record.
    """
    lines = list(read_json_lines(jobs_file))
    submitted = [line for line in lines if line.get("record") == "submitted"]
    requests = {line.get("mark"): line for line in lines if line.get("record") == "submitting"}
    unrecorded = {
        job: mark
        for job, mark in executor.marked(folder_mark(jobs_file.parent)).items()
        if job not in {str(line.get("job")) for line in submitted}
    }
    for job, mark in unrecorded.items():
        # A self-chain's next job, or a folder that was written again: the newest request is the best match.
        request = requests.get(mark) or (submitted[-1] if submitted else {"kind": "train", "executor": executor.name})
        jobs_file.parent.mkdir(parents=True, exist_ok=True)
        record = {"time": time.time(), **request, "record": "submitted", "job": job, "mark": mark, "adopted": True}
        append_line(jobs_file, record)
    return list(unrecorded)


def active_entries(run: Run, executors: Mapping[str, Executor], *, strict: bool = False) -> list[LedgerEntry]:
    """Jobs that wait or run, without those that will never start."""
    return [e for e in entries(run, executors, strict=strict) if e.state.active and not e.state.never_starts]


def _job_states(
    run: Run,
    lines: Sequence[Mapping[str, Any]],
    submitted: Sequence[Mapping[str, Any]],
    executors: Mapping[str, Executor],
    strict: bool,
) -> dict[str, JobState]:
    """In this order: settled record, scheduler (squeue, sacct), our own records and heartbeat, log."""
    states = {
        str(line["job"]): JobState(**{k: v for k, v in line.items() if k in JobState.__dataclass_fields__})
        for line in lines
        if line.get("record") == "settled" and line.get("job") and line.get("state")
    }
    for name, executor in executors.items():
        asked = [str(r["job"]) for r in submitted if r.get("executor") == name and str(r["job"]) not in states]
        try:
            answers = executor.states(asked) if asked else {}
        except LaunchError:
            if strict:
                raise
            continue
        states |= answers
        for state in (state for state in answers.values() if state.over):
            values = {k: v for k, v in asdict(state).items() if v is not None}
            append_line(run.jobs_file, {"record": "settled", "time": time.time(), **values})
    missing = {str(record["job"]) for record in submitted} - states.keys()
    return states | {job: _state_from_folder(run, lines, job) for job in missing}


def _state_from_folder(run: Run, lines: Sequence[Mapping[str, Any]], job: str) -> JobState:
    """For a job that the scheduler has forgotten, or while the scheduler does not answer."""
    starts = [start for start in job_starts(lines) if start.job == job]
    last = starts[-1] if starts else None
    elapsed_seconds = None if last is None or last.ended_at is None else last.ended_at - last.began_at
    if any(line.get("record") == "cancelled" and line.get("job") == job for line in lines):
        return JobState(job=job, state="CANCELLED", elapsed_seconds=elapsed_seconds, evidence="record")
    if last is not None and last.ended_at is not None:
        return JobState(
            job=job,
            state="COMPLETED" if last.code == 0 else "FAILED",
            exit_code=last.code,
            started_at=starts[0].began_at,
            ended_at=last.ended_at,
            elapsed_seconds=elapsed_seconds,
            evidence="record",
        )
    beats = [(read_json(path) or {}).get("time") for path in run.ranks.glob("heartbeat-*.json")]
    newest_beat, now = max((float(t) for t in beats if isinstance(t, (int, float))), default=0.0), time.time()
    if last is not None and now - newest_beat < HEARTBEAT_SECONDS:
        return JobState(
            job=job,
            state="RUNNING",
            started_at=last.began_at,
            elapsed_seconds=now - last.began_at,
            evidence="heartbeat",
        )
    files = log_files(run, job)
    from_log = state_from_log(job, read_tail(files[0])) if files else None
    return from_log or JobState(job=job, state=UNKNOWN, started_at=last.began_at if last else None)


def _energy_by_job(run: Run, starts: Sequence[JobStart]) -> dict[str, float]:
    """The run's energy counter continues over restarts: a job's share is the increase until the next job starts."""
    if not starts:
        return {}
    readings = [
        (m.time, m.energy_joules) for m in run.metrics_lines() if m.energy_joules is not None and m.time is not None
    ]
    joules_by_job: dict[str, float] = {}
    ends = [*(start.began_at for start in starts[1:]), math.inf]
    for start, end in zip(starts, ends, strict=True):
        before = max((joules for moment, joules in readings if moment < start.began_at), default=0.0)
        during = [joules for moment, joules in readings if start.began_at <= moment < end]
        if during and start.job:
            joules_by_job[start.job] = joules_by_job.get(start.job, 0.0) + max(during) - before
    return joules_by_job


# -- over many runs ---------------------------------------------------------------------------------------------------


def runs_below(folder: Path) -> list[Run]:
    """Run folders in a folder, at most two levels deep."""
    patterns = ("jobs.jsonl", "*/jobs.jsonl", "*/*/jobs.jsonl")
    return [Run(path) for path in sorted({file.parent for pattern in patterns for file in folder.glob(pattern)})]


def committed_node_hours(ledger: Iterable[LedgerEntry], *, cluster: str, account: str | None) -> float:
    """Used by ended jobs, plus everything that waiting and running ones may still use."""
    return sum(
        (entry.node_hours or 0.0) if entry.state.state == UNKNOWN else _most_node_hours(entry)
        for entry in ledger
        if (entry.cluster, entry.account) == (cluster, account)
    )


def _most_node_hours(entry: LedgerEntry) -> float:
    """What a finished job used; otherwise all that its wall-time limit allows, plus its time before a requeue."""
    if entry.state.over:
        return entry.node_hours or 0.0
    seconds = (entry.limit_seconds or 0.0) - (0.0 if entry.state.waiting else entry.state.elapsed_seconds or 0.0)
    return (entry.node_hours or 0.0) + seconds * (entry.nodes or 0) / 3600


@dataclass(frozen=True)
class LedgerTotal:
    name: str
    jobs: int
    node_hours: float
    units: float | None
    unit: str | None
    energy_joules: float | None
    unknown_hours: int  # jobs of unknown length; they are not in the sums
    unmeasured: int  # jobs that ran without an energy record


def totals(ledger: Sequence[LedgerEntry], by: str) -> list[LedgerTotal]:
    """Totals by "run" or by "project" (account and cluster)."""
    groups: dict[str, list[LedgerEntry]] = {}
    for entry in ledger:
        project = f"{entry.account or 'no account'} on {entry.cluster or 'this machine'}"
        groups.setdefault(Path(entry.run).name if by == "run" else project, []).append(entry)
    return [
        LedgerTotal(
            name=name,
            jobs=len(group),
            node_hours=sum(e.node_hours or 0.0 for e in group),
            units=sum_known(e.units for e in group),
            unit=next((e.unit for e in group if e.unit), None),
            energy_joules=sum_known(e.energy_joules for e in group),
            unknown_hours=sum(e.node_hours is None for e in group),
            unmeasured=sum(not e.state.waiting for e in group) - sum(e.energy_joules is not None for e in group),
        )
        for name, group in groups.items()
    ]


def sum_known(values: Iterable[float | None]) -> float | None:
    """The sum without unknown values; None when all are unknown."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


# -- the forecast of a chain ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChainForecast:
    """How far a chain is and when it may end. None: unknown."""

    node_hours_used: float
    node_hours_left: float  # what the waiting and running jobs may still use at most
    tokens: int | None
    tokens_target: int | None
    remaining_seconds: float | None  # of training at the newest speed; time in the queue comes on top
    estimated_end: float | None
    links_needed: int | None
    verdict: str
    reason: str

    def lines(self) -> list[str]:
        progress = f"{print_tokens(self.tokens)} of {print_tokens(self.tokens_target)} tokens"
        reserved = f"{print_figure(self.node_hours_left)} still reserved by waiting and running jobs"
        end = "estimated end: unknown until the first steps are logged"
        if self.verdict != "go":
            end = f"the chain has ended: {self.reason}"
        elif self.estimated_end is not None:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.estimated_end))
            more = f", about {self.links_needed} more jobs" if self.links_needed else ""
            training = f"{print_seconds(self.remaining_seconds)} of training{more}"
            end = f"estimated end: {day} ({training}), if no job waits in the queue"
        return [f"node-hours: {print_figure(self.node_hours_used)} used, {reserved}; {progress}", end]


def forecast_chain(run: Run, ledger: Sequence[LedgerEntry]) -> ChainForecast:
    last, recipe, verdict = run.last_metrics(), run.recipe(), judge(run)
    tokens, target = last.tokens, planned_tokens(recipe, last.step, last.tokens)
    remaining_seconds = 0.0 if verdict.answer == "finished" else None
    if remaining_seconds is None and target is not None and tokens is not None and last.tokens_per_second:
        remaining_seconds = max(0.0, (target - tokens) / last.tokens_per_second)
    limit = next((e.limit_seconds for e in reversed(ledger) if e.limit_seconds), None)
    return ChainForecast(
        node_hours_used=sum(e.node_hours or 0.0 for e in ledger),
        node_hours_left=sum(max(0.0, _most_node_hours(e) - (e.node_hours or 0.0)) for e in ledger),
        tokens=tokens,
        tokens_target=target,
        remaining_seconds=remaining_seconds,
        estimated_end=None if remaining_seconds is None else time.time() + remaining_seconds,
        links_needed=None if remaining_seconds is None or not limit else int(remaining_seconds // limit),
        verdict=verdict.answer,
        reason=verdict.reason,
    )
