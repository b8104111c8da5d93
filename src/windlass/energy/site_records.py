"""Energy records of the site (EAR, sacct), appended to the energy.jsonl of the run that they belong to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from windlass.energy.ear import EarRow
from windlass.energy.ledger import WHOLE_JOB, meter_started_at
from windlass.energy.sacct import JobEnergy
from windlass.errors import RunError
from windlass.files import append_line, read_json_lines
from windlass.runs.folder import Run


def record_ear(run: Run, rows: Sequence[EarRow], path: str = "the CSV") -> int:
    """Append the rows of this run's jobs; appending them twice changes nothing. Returns how many were taken."""
    jobs = _own_jobs(run, {row.job for row in rows if row.joules is not None}, path)
    own_rows = [row for row in rows if row.joules is not None and row.job in jobs]
    for row in own_rows:
        by_scope = {
            "node": row.joules,
            "device": sum(row.gpu_joules.values()),
            "cpu": row.cpu_joules,
            "memory": row.memory_joules,
        }
        for scope, joules in by_scope.items():
            if joules:
                _append(
                    run,
                    row.node,
                    jobs[row.job],
                    f"ear:{row.name}",
                    seconds=row.seconds,
                    scope=scope,
                    method="power",
                    joules=joules,
                )
    return len(own_rows)


def record_slurm(run: Run, jobs: Sequence[JobEnergy], path: str = "sacct's answer") -> int:
    """Append sacct's figures of this run's jobs; appending them twice changes nothing. Returns how many were taken."""
    run_jobs = _own_jobs(run, {job.job for job in jobs if job.joules is not None}, path)
    own = [job for job in jobs if job.joules is not None and job.job in run_jobs]
    for job in own:
        nodes = max(1, job.nodes)
        _append(
            run,
            WHOLE_JOB,
            run_jobs[job.job],
            f"slurm:{job.job}",
            scope="node",
            method="counter",
            joules=job.joules,
            seconds=job.seconds * nodes,
            nodes=nodes,
            note=job.note,
        )
    return len(own)


def _append(run: Run, node: str, job: str | None, session: str, **fields: Any) -> None:
    source = session.partition(":")[0]
    line = {"time": time.time(), "node": node, "job": job, "session": session, "source": source, **fields}
    append_line(run.energy_file, line)


def _own_jobs(run: Run, jobs: set[str], path: str) -> dict[str, str | None]:
    """Job of the record -> job of the run; other jobs are left out. A run without known jobs accepts all."""
    submitted = {str(line.get("job") or line.get("job_id") or "") for line in read_json_lines(run.jobs_file)}
    meters = [
        line for line in read_json_lines(run.energy_file) if meter_started_at(str(line.get("session"))) is not None
    ]
    run_jobs = (submitted | {str(line["job"]) for line in meters if line.get("job")}) - {""}
    if not run_jobs:  # meters outside any job have job None; the same job keeps both from being counted
        is_outside = any(not line.get("job") for line in meters)
        return {job: None if is_outside else job for job in jobs}
    own: dict[str, str | None] = {}
    for job in jobs:  # sacct writes `77+0` and `77_3` for the parts of a job that was submitted as 77
        names = (job, job.partition("+")[0], job.partition("_")[0])
        if name := next((name for name in names if name in run_jobs), None):
            own[job] = name
    if jobs and not own:
        raise RunError(
            "energy.no-job-of-this-run",
            f"{path} has jobs {_first_names(jobs)}, and none of them belongs to this run ({_first_names(run_jobs)})",
            hint="EAR names an array's tasks by their own numbers: write the run's job id into the JOBID column",
        )
    return own


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")
