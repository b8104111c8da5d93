"""What did SLURM count? `sacct`'s ConsumedEnergyRaw in joules; a batch step overlaps the srun steps, so it is one or the other.

The job's own row adds up all its steps, batch and extern included, and would count a node twice: it is not used.
Numbers are of whole nodes, neighbours included where a node is shared.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from windlass.errors import LaunchError

FORMAT = "JobID,ConsumedEnergyRaw,ElapsedRaw,NNodes,State"
UNKNOWN = {"", "0", "18446744073709551614", "18446744073709551615", "4294967294"}
"""Blank or 0 where the site gathers no energy; the large ones are SLURM's "no value"."""


@dataclass(frozen=True)
class JobEnergy:
    job: str
    joules: float | None
    """None: the site does not gather energy, or the record is not complete."""
    seconds: float
    nodes: int
    note: str


def sacct(jobs: Sequence[str]) -> str:
    """Ask the accounting; `--parsable2` keeps raw numbers without K and M suffixes."""
    command = ["sacct", "--parsable2", "--noheader", f"--format={FORMAT}", "--jobs", ",".join(jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise LaunchError(
            "sacct is not on this machine", hint="run it on the cluster and pass the output with --sacct FILE"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            "sacct gave no answer within 60 s", hint="the accounting may be busy; try again later"
        ) from None
    if done.returncode:
        raise LaunchError(f"sacct failed: {done.stderr.strip()}", hint="check the job ids with `windlass jobs RUN`")
    return done.stdout


def read_sacct(text: str) -> list[JobEnergy]:
    """Energy per job from lines `JobID|ConsumedEnergyRaw|ElapsedRaw|NNodes|State`; a header line is passed over."""
    steps: dict[str, list[tuple[str, list[str]]]] = {}
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip().rstrip("|").split("|")]
        if len(cells) < 2 or cells[0] in ("", "JobID"):
            continue
        job, _, step = cells[0].partition(".")
        steps.setdefault(job, []).append((step, cells))
    return [_job(job, rows) for job, rows in steps.items()]


def _job(job: str, rows: Iterable[tuple[str, list[str]]]) -> JobEnergy:
    rows = list(rows)
    numbered = [cells for step, cells in rows if step.split("+")[0].isdigit()]
    batch = [cells for step, cells in rows if step == "batch"]
    used, note = (
        (numbered, "sum of the srun steps")
        if any(_joules(c) for c in numbered)
        else (batch, "batch step: first node only")
    )
    found = [j for c in used if (j := _joules(c)) is not None]
    whole = next((cells for step, cells in rows if step == ""), rows[0][1])
    if not found:
        return JobEnergy(job, None, _number(whole, 2), int(_number(whole, 3)), "SLURM gathered no energy for it")
    if len(found) < len(used):
        note += f"; {len(used) - len(found)} of {len(used)} steps without energy"
    return JobEnergy(job, sum(found), sum(_number(c, 2) for c in used), int(max(_number(c, 3) for c in used)), note)


def _joules(cells: list[str]) -> float | None:
    return None if len(cells) < 2 or cells[1] in UNKNOWN or not cells[1].isdigit() else float(cells[1])


def _number(cells: list[str], index: int) -> float:
    return float(cells[index]) if len(cells) > index and cells[index].isdigit() else 0.0
