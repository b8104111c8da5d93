"""SLURM's energy accounting: `sacct`'s ConsumedEnergyRaw in joules, from srun steps or from the batch step, never both.

The job's own row adds up all its steps, batch and extern included, and would count a node twice: it is not used.
Figures are of whole nodes, other jobs included where a node is shared.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.errors import LaunchError, RunError

FORMAT = "JobID,ConsumedEnergyRaw,ElapsedRaw,NNodes,State"
COLUMNS: dict[str, tuple[str, ...]] = {
    "job": ("jobid", "jobidraw"),
    "joules": ("consumedenergyraw", "consumedenergy"),
    "seconds": ("elapsedraw",),
    "nodes": ("nnodes", "allocnodes"),
    "state": ("state",),
}
# Blank or 0 where the site does not account energy; the large numbers are SLURM's "no value".
UNKNOWN = {"", "0", "18446744073709551614", "18446744073709551615", "4294967294"}
SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNFINISHED = ("RUNNING", "PENDING", "SUSPENDED", "REQUEUED", "COMPLETING")


@dataclass(frozen=True)
class JobEnergy:
    job: str
    joules: float | None  # none: the site does not account energy, or the record is not complete
    seconds: float
    nodes: int  # nodes that the figure covers
    note: str


@dataclass(frozen=True)
class _SacctRow:
    step: str
    joules: float | None
    is_rounded: bool
    seconds: float
    nodes: int
    state: str


def sacct(jobs: Sequence[str]) -> str:
    """Ask the accounting. `--parsable2` gives numbers without suffixes, `--duplicates` the energy before a requeue."""
    command = ["sacct", "--parsable2", "--duplicates", f"--format={FORMAT}", "--jobs", ",".join(jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        hint = "run it on the cluster and pass the output with --sacct FILE"
        raise LaunchError("energy.sacct-missing", "sacct is not on this machine", hint=hint) from None
    except subprocess.TimeoutExpired:
        hint = "the accounting may be busy; try again later"
        raise LaunchError("energy.sacct-timeout", "sacct gave no answer within 60 s", hint=hint) from None
    if done.returncode:
        hint = "check the job ids with `windlass jobs RUN`"
        raise LaunchError("energy.sacct-failed", f"sacct failed: {done.stderr.strip()}", hint=hint)
    return done.stdout


def read_sacct(text: str, path: str = "sacct") -> list[JobEnergy]:
    """Energy per job from lines of `sacct --parsable2`: by the names in its header, else in the order of FORMAT."""
    header = FORMAT.lower().split(",")
    jobs: dict[str, list[_SacctRow]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().rstrip("|").split("|")]
        if cells[0].lower() in COLUMNS["job"] or "consumedenergy" in line.lower():
            header = [cell.lower() for cell in cells]
            continue
        by_name = dict(zip(header, cells, strict=False))
        values = {key: next((by_name[n] for n in names if n in by_name), "") for key, names in COLUMNS.items()}
        job, _, step = values["job"].partition(".")
        if len(cells) > 1 and job:
            jobs.setdefault(job, []).append(_row(step, values))
    if not jobs and text.strip():
        raise RunError(
            "energy.not-sacct-output",
            f"{path} has no line of sacct's parsable output (it begins with {text.strip().splitlines()[0][:60]!r})",
            hint=f"write it with: sacct --parsable2 --duplicates --format={FORMAT} --jobs JOBS",
        )
    return [_job_energy(job, rows) for job, rows in jobs.items()]


def _row(step: str, values: dict[str, str]) -> _SacctRow:
    seconds, nodes = (int(values[key]) if values[key].isdigit() else 0 for key in ("seconds", "nodes"))
    text, joules = values["joules"], None
    scale = SUFFIXES.get(text[-1:])
    try:
        number = 0.0 if text in UNKNOWN else float(text[:-1]) * scale if scale else float(text)
        joules = number if 0 < number < 1e18 else None
    except ValueError:
        pass
    return _SacctRow(step, joules, scale is not None, float(seconds), nodes, values["state"])


def _job_energy(job: str, rows: Sequence[_SacctRow]) -> JobEnergy:
    numbered = [row for row in rows if row.step.split("+")[0].isdigit()]
    counted, note = [row for row in rows if row.step == "batch"], "batch step: first node only"
    if any(row.joules for row in numbered):
        counted, note = numbered, "sum of the srun steps"
    job_rows = [row for row in rows if row.step == ""] or [rows[0]]
    job_seconds, job_nodes = sum(row.seconds for row in job_rows), max(row.nodes for row in job_rows)
    if any(row.state.startswith(UNFINISHED) for row in (*job_rows, *counted)):
        return JobEnergy(job, None, job_seconds, job_nodes, "still running: its record is not complete")
    joules = [row.joules for row in counted if row.joules is not None]
    if not joules:
        return JobEnergy(job, None, job_seconds, job_nodes, "SLURM recorded no energy for it")
    if len(joules) < len(counted):
        note += f"; {len(counted) - len(joules)} of {len(counted)} steps without energy"
    if any(row.is_rounded for row in counted):
        note += "; rounded by sacct (ConsumedEnergyRaw is exact)"
    # Steps may run at the same time, and then their times add up to more than the job's.
    seconds = sum(row.seconds for row in counted)
    nodes = max(row.nodes for row in counted)
    return JobEnergy(job, sum(joules), min(seconds, job_seconds) if job_seconds else seconds, nodes, note)
