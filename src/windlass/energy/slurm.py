"""What did SLURM count? `sacct`'s ConsumedEnergyRaw in joules; a batch step overlaps the srun steps, so it is one or the other.

The job's own row adds up all its steps, batch and extern included, and would count a node twice: it is not used.
Numbers are of whole nodes, neighbours included where a node is shared.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
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
UNKNOWN = {"", "0", "18446744073709551614", "18446744073709551615", "4294967294"}
"""Blank or 0 where the site gathers no energy; the large ones are SLURM's "no value"."""
SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
GOING = ("RUNNING", "PENDING", "SUSPENDED", "REQUEUED", "COMPLETING")

Cells = Mapping[str, str]


@dataclass(frozen=True)
class JobEnergy:
    job: str
    joules: float | None
    """None: the site does not gather energy, or the record is not complete."""
    seconds: float
    nodes: int
    """That the figure covers."""
    note: str


def sacct(jobs: Sequence[str]) -> str:
    """Ask the accounting; `--parsable2` keeps raw numbers without K and M suffixes, `--duplicates` what a job did before a requeue."""
    command = ["sacct", "--parsable2", "--duplicates", f"--format={FORMAT}", "--jobs", ",".join(jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise LaunchError(
            "energy.sacct-machine",
            "sacct is not on this machine",
            hint="run it on the cluster and pass the output with --sacct FILE",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            "energy.sacct-gave-answer-within",
            "sacct gave no answer within 60 s",
            hint="the accounting may be busy; try again later",
        ) from None
    if done.returncode:
        raise LaunchError(
            "energy.sacct-failed",
            f"sacct failed: {done.stderr.strip()}",
            hint="check the job ids with `windlass jobs RUN`",
        )
    return done.stdout


def read_sacct(text: str, where: str = "sacct") -> list[JobEnergy]:
    """Energy per job from lines of `sacct --parsable2`: by the names in its header, else in the order of FORMAT."""
    names = [name.lower() for name in FORMAT.split(",")]
    steps: dict[str, list[tuple[str, Cells]]] = {}
    for line in text.splitlines():
        words = [c.strip() for c in line.strip().rstrip("|").split("|")]
        if words[0].lower() in COLUMNS["job"] or "consumedenergy" in line.lower():
            names = [w.lower() for w in words]
            continue
        cells = dict(zip(names, words, strict=False))
        job, _, step = _cell(cells, "job").partition(".")
        if len(words) > 1 and job:
            steps.setdefault(job, []).append((step, cells))
    if not steps and text.strip():
        raise RunError(
            "energy.holds-line-sacct-s",
            f"{where} holds no line of sacct's parsable output (it begins with {text.strip().splitlines()[0][:60]!r})",
            hint=f"write it with: sacct --parsable2 --duplicates --format={FORMAT} --jobs JOBS",
        )
    return [_job(job, rows) for job, rows in steps.items()]


def _cell(cells: Cells, meaning: str) -> str:
    return next((cells[name] for name in COLUMNS[meaning] if name in cells), "")


def _job(job: str, rows: Iterable[tuple[str, Cells]]) -> JobEnergy:
    rows = list(rows)
    numbered = [cells for step, cells in rows if step.split("+")[0].isdigit()]
    batch = [cells for step, cells in rows if step == "batch"]
    used, note = (
        (numbered, "sum of the srun steps")
        if any(_joules(c) for c in numbered)
        else (batch, "batch step: first node only")
    )
    found = [j for c in used if (j := _joules(c)) is not None]
    whole = [cells for step, cells in rows if step == ""] or [rows[0][1]]
    elapsed = sum(_number(c, "seconds") for c in whole)
    if any(_cell(c, "state").startswith(GOING) for c in (*whole, *used)):
        return JobEnergy(job, None, elapsed, _nodes(whole), "still running: its record is not complete")
    if not found:
        return JobEnergy(job, None, elapsed, _nodes(whole), "SLURM gathered no energy for it")
    if len(found) < len(used):
        note += f"; {len(used) - len(found)} of {len(used)} steps without energy"
    if any(_cell(c, "joules")[-1:] in SUFFIXES for c in used):
        note += "; rounded by sacct (ConsumedEnergyRaw is exact)"
    # Steps may run side by side, and then their times add up to more than the job's.
    seconds = sum(_number(c, "seconds") for c in used)
    return JobEnergy(job, sum(found), min(seconds, elapsed) if elapsed else seconds, _nodes(used), note)


def _joules(cells: Cells) -> float | None:
    text = _cell(cells, "joules")
    scale = SUFFIXES.get(text[-1:], 1.0)
    try:
        found = None if text in UNKNOWN else float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        return None
    return found if found is not None and 0 < found < 1e18 else None


def _nodes(rows: Iterable[Cells]) -> int:
    return max((int(_number(c, "nodes")) for c in rows), default=0)


def _number(cells: Cells, meaning: str) -> float:
    text = _cell(cells, meaning)
    return float(text) if text.isdigit() else 0.0
