"""What has every job cost? Node-hours, allocation units and kWh per job, run and project, from jobs.jsonl and the scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.errors import LaunchError
from windlass.files import append_line, read_json
from windlass.launch.chain import links, records
from windlass.launch.executor import ENDED, UNKNOWN, Executor, State
from windlass.launch.slurm import from_log
from windlass.runs import Run

HEARTBEAT_SECONDS = 300.0
"""A heartbeat younger than this means that somebody trains, whatever the scheduler has forgotten."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One job of a run, as the ledger shows it."""

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
    state: State
    nodes: int | None
    limit_seconds: float | None
    node_hours: float | None
    """Used so far; None when nobody knows how long it ran."""
    units: float | None
    unit: str | None
    energy_joules: float | None
    began_step: int | None
    step: int | None

    def as_dict(self) -> dict[str, Any]:
        value = asdict(self)
        value["kwh"] = None if self.energy_joules is None else self.energy_joules / 3.6e6
        return value


def submitted(run: Run) -> list[dict[str, Any]]:
    """The `submitted` records, oldest first."""
    return [line for line in records(run) if line.get("record") == "submitted" and line.get("job")]


def entries(run: Run, executors: Mapping[str, Executor], *, strict: bool = False) -> list[Entry]:
    """Every job of a run with its state; the end of a job is kept in jobs.jsonl, because schedulers forget.

    A scheduler that gives no answer is passed over, and the run folder tells what it knows; `strict` makes it an error.
    """
    lines = records(run)
    mine = [line for line in lines if line.get("record") == "submitted" and line.get("job")]
    states = job_states(run, lines, mine, executors, strict=strict)
    energy = _energy_by_job(run, lines)
    return [_entry(run, line, states[str(line["job"])], lines, energy) for line in mine]


def job_states(
    run: Run,
    lines: Sequence[Mapping[str, Any]],
    mine: Sequence[Mapping[str, Any]],
    executors: Mapping[str, Executor],
    *,
    strict: bool = False,
) -> dict[str, State]:
    """In this order: settled record, scheduler (squeue, sacct), our own records and heartbeat, log."""
    found = {str(r["job"]): _settled(r) for r in lines if r.get("record") == "settled"}
    for name, executor in executors.items():
        asked = [str(r["job"]) for r in mine if r.get("executor") == name and str(r["job"]) not in found]
        for job, state in _ask(executor, asked, strict).items():
            found[job] = state
            if state.over:
                _settle(run, lines, state)
    for record in mine:
        job = str(record["job"])
        if job not in found:
            found[job] = _from_folder(run, lines, job)
    return found


def _ask(executor: Executor, jobs: Sequence[str], strict: bool) -> Mapping[str, State]:
    try:
        return executor.states(jobs) if jobs else {}
    except LaunchError:
        if strict:
            raise
        return {}


def _settle(run: Run, lines: Sequence[Mapping[str, Any]], state: State) -> None:
    append_line(
        run.jobs_file,
        {"record": "settled", "time": time.time(), **{k: v for k, v in asdict(state).items() if v is not None}},
    )


def _settled(record: Mapping[str, Any]) -> State:
    keys = State.__dataclass_fields__
    return State(**{k: v for k, v in record.items() if k in keys})


def _from_folder(run: Run, lines: Sequence[Mapping[str, Any]], job: str) -> State:
    """The scheduler has forgotten the job (or is away): what the run folder tells."""
    starts = [link for link in links(lines) if link.job == job]
    if any(r.get("record") == "cancelled" and r.get("job") == job for r in lines):
        return State(job=job, state="CANCELLED", elapsed_seconds=_spans(starts), evidence="record")
    if starts and starts[-1].ended_at is not None:
        code = starts[-1].code
        state = "COMPLETED" if code == 0 else "FAILED"
        return State(
            job=job,
            state=state,
            exit_code=code,
            started_at=starts[0].began_at,
            ended_at=starts[-1].ended_at,
            elapsed_seconds=_spans(starts),
            evidence="record",
        )
    if starts and (beat := newest_heartbeat(run)) is not None and time.time() - beat < HEARTBEAT_SECONDS:
        return State(
            job=job,
            state="RUNNING",
            started_at=starts[-1].began_at,
            elapsed_seconds=time.time() - starts[-1].began_at,
            evidence="heartbeat",
        )
    log = log_file(run, job)
    if log is not None and (state_ := from_log(job, tail(log))) is not None:
        return state_
    return State(job=job, state=UNKNOWN, started_at=starts[-1].began_at if starts else None, evidence="none")


def _spans(starts: Iterable[Any]) -> float | None:
    known = [link.ended_at - link.began_at for link in starts if link.ended_at is not None]
    return sum(known) if known else None


def newest_heartbeat(run: Run) -> float | None:
    """When any rank last gave a sign of life."""
    beats = [read_json(p) or {} for p in run.ranks.glob("heartbeat-*.json")] if run.ranks.is_dir() else []
    times = [float(b["time"]) for b in beats if isinstance(b.get("time"), (int, float))]
    return max(times, default=None)


def log_file(run: Run, job: str) -> Path | None:
    for name in (f"{job}.out", f"{job}_0.out"):
        if (run.logs / name).is_file():
            return run.logs / name
    return None


def tail(path: Path, size: int = 65536) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode("utf-8", "replace")


def _energy_by_job(run: Run, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The run's own meter counts over all restarts: a job's share is the rise between its beginning and the next one's."""
    starts = [link for link in links(lines) if link.job]
    if not starts:
        return {}
    readings = [
        (m.time, m.energy_joules) for m in run.metrics_lines() if m.energy_joules is not None and m.time is not None
    ]
    found: dict[str, float] = {}
    for index, link in enumerate(starts):
        end = starts[index + 1].began_at if index + 1 < len(starts) else float("inf")
        before = max((j for t, j in readings if t < link.began_at), default=0.0)
        inside = [j for t, j in readings if link.began_at <= t < end]
        if inside and link.job:
            found[link.job] = found.get(link.job, 0.0) + max(inside) - before
    return found


def _entry(
    run: Run, line: Mapping[str, Any], state: State, lines: Sequence[Mapping[str, Any]], energy: Mapping[str, float]
) -> Entry:
    job = str(line["job"])
    starts = [link for link in links(lines) if link.job == job]
    nodes = state.nodes or line.get("nodes")
    seconds = state.elapsed_seconds
    if len(starts) > 1:  # requeued: the scheduler reports its last run only
        seconds = max(
            seconds or 0.0,
            sum((link.ended_at or link.began_at) - link.began_at for link in starts[:-1]) + (seconds or 0.0),
        )
    if state.waiting:
        seconds = 0.0
    hours = None if seconds is None or nodes is None else seconds * int(nodes) / 3600
    per_hour = line.get("units_per_node_hour")
    steps = [
        r.get("step") for r in lines if r.get("record") == "ended" and r.get("job") == job and r.get("step") is not None
    ]
    return Entry(
        run=str(run.path), job=job, kind=str(line.get("kind", "train")), link=line.get("link"), links=line.get("links"), executor=str(line.get("executor")),
        cluster=line.get("cluster"), account=line.get("account"), partition=line.get("partition"), submitted_at=line.get("time"), state=state,
        nodes=nodes, limit_seconds=line.get("seconds"), node_hours=hours, units=None if hours is None or per_hour is None else hours * per_hour,
        unit=line.get("unit"), energy_joules=state.energy_joules if state.energy_joules is not None else energy.get(job),
        began_step=starts[-1].began_step if starts else None, step=steps[-1] if steps else None,
    )  # fmt: skip


# -- over many runs -----------------------------------------------------------------------------------------------------------


def runs_below(folder: Path) -> list[Run]:
    """Run folders in a folder, at most two levels deep."""
    found = {p.parent for pattern in ("jobs.jsonl", "*/jobs.jsonl", "*/*/jobs.jsonl") for p in folder.glob(pattern)}
    return [Run(path) for path in sorted(found)]


def committed_node_hours(all_entries: Iterable[Entry], *, cluster: str, account: str | None) -> float:
    """Used by ended jobs, plus everything that waiting and running ones may still use."""
    total = 0.0
    for entry in all_entries:
        if entry.cluster != cluster or entry.account != account:
            continue
        if entry.state.state in ENDED or entry.state.state == UNKNOWN:
            total += entry.node_hours or 0.0
        elif entry.limit_seconds is not None and entry.nodes is not None:
            total += entry.limit_seconds * entry.nodes / 3600
    return total


@dataclass(frozen=True)
class Sum:
    name: str
    jobs: int
    node_hours: float
    units: float | None
    unit: str | None
    energy_joules: float | None
    unknown_hours: int
    """Jobs whose length nobody knows; they are not in the sums."""
    unmeasured: int
    """Jobs without an energy record."""


def sums(all_entries: Sequence[Entry], by: str) -> list[Sum]:
    """Totals by "run" or by "project" (account and cluster)."""
    groups: dict[str, list[Entry]] = {}
    for entry in all_entries:
        name = (
            Path(entry.run).name
            if by == "run"
            else f"{entry.account or 'no account'} on {entry.cluster or 'this machine'}"
        )
        groups.setdefault(name, []).append(entry)
    return [_sum(name, group) for name, group in groups.items()]


def _sum(name: str, group: Sequence[Entry]) -> Sum:
    known = [e.units for e in group if e.units is not None]
    measured = [e.energy_joules for e in group if e.energy_joules is not None]
    ran = [e for e in group if not e.state.waiting]
    return Sum(
        name, len(group), sum(e.node_hours or 0.0 for e in group), sum(known) if known else None, next((e.unit for e in group if e.unit), None),
        sum(measured) if measured else None, sum(e.node_hours is None for e in group), len(ran) - len(measured),
    )  # fmt: skip
