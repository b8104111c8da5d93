"""EAR's application CSV in three header families. Energy is node power x time; the batch step overlaps the srun steps.

`eacct` prints an energy column too, but its unit changed from joules to kWh at version 6.0; it is only used where power
or time is missing, and then its unit must be in its name.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import RunError

BATCH_STEP = "4294967291"
OTHER_STEPS = {"4294967292": "extern", "4294967290": "interactive"}

# Columns of one meaning, preferred first: legacy dashes without units, v4 to 5.0, v5.2 and later.
# Names are compared without case, dashes, underscores or spaces.
COLUMNS: dict[str, tuple[str, ...]] = {
    "node": ("NODENAME", "NODEID", "NODE"),
    "job": ("JOBID", "JOB"),
    "step": ("STEPID", "STEP"),
    "app": ("APPID",),
    "start": ("STARTTIME", "JOBSTARTTIME"),
    "end": ("ENDTIME", "JOBENDTIME"),
    "seconds": ("TIMESEC", "TIME", "ELAPSEDSEC", "TIME(S)"),
    "watts": ("DCNODEPOWERW", "DCNODEPOWER", "AVGDCPOWERW", "POWER(W)", "POWERW"),
    "cpu_watts": ("PCKPOWERW", "PCKPOWER", "PCKNODEPOWER"),
    "memory_watts": ("DRAMPOWERW", "DRAMPOWER"),
    # EAR 5.2 and later: figures of the node manager, for programs that ran without EAR's library (theirs are 0).
    "manager_seconds": ("NODEMGRTIMESEC",),
    "manager_watts": ("NODEMGRDCNODEPOWERW",),
    "manager_cpu_watts": ("NODEMGRPCKPOWERW",),
    "manager_memory_watts": ("NODEMGRDRAMPOWERW",),
    "joules": ("ENERGY(J)", "ENERGYJ", "ENERGYJOULES", "DCENERGYJ"),
    "kwh": ("ENERGY(KWH)", "ENERGYKWH"),
}


@dataclass(frozen=True)
class EarRow:
    """One (job, step, program, node)."""

    job: str
    step: str
    node: str
    seconds: float
    joules: float | None
    cpu_joules: float | None = None
    memory_joules: float | None = None
    gpu_joules: dict[str, float] = field(default_factory=dict)
    app: str = ""
    start: float | None = None
    end: float | None = None

    @property
    def name(self) -> str:
        """Name of this program of this step: `77.0`, or `77.0.4242` where EAR separates programs."""
        return ".".join(filter(None, (self.job, self.step, self.app)))


def read_ear(path: Path) -> list[EarRow]:
    """The rows that may be added; see `without_overlap`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        hint = "name the CSV that `eacct -c` or --ear-user-db wrote"
        raise RunError("energy.file-unreadable", f"{path} cannot be read: {error.strerror}", hint=hint) from None
    return without_overlap(parse(text, str(path)))


def parse(text: str, path: str) -> list[EarRow]:
    reader = csv.DictReader(io.StringIO(text), delimiter=";")
    header = {_normalized(name): name for name in reader.fieldnames or () if name}
    columns = {
        key: next(header[name] for name in names if name in header)
        for key, names in COLUMNS.items()
        if any(name in header for name in names)
    }
    absent = [key for key in ("node", "job", "seconds") if not {key, f"manager_{key}"} & set(columns)]
    if absent or not {"watts", "manager_watts", "joules", "kwh"} & set(columns):
        start = ", ".join(list(reader.fieldnames or ())[:6]) or "nothing"
        raise RunError(
            "energy.not-an-ear-file",
            f"{path} is not an EAR application CSV: no column for {', '.join(absent) or 'node power'} "
            f"(it begins with {start})",
            hint="the separator is ';'; loop files (LOOPID) have no totals, give the _apps file",
        )
    return [_row(record, columns) for record in reader if (record.get(columns["node"]) or "").strip()]


def _normalized(name: str) -> str:
    return name.strip().upper().replace("_", "").replace("-", "").replace(" ", "")


def _row(record: Mapping[str, str | None], columns: Mapping[str, str]) -> EarRow:
    def text(key: str) -> str:
        return (record.get(columns[key]) or "").strip() if key in columns else ""

    def energy(watts: float | None) -> float | None:
        return None if watts is None else watts * seconds

    numbers = {key: _number(record.get(column)) for key, column in columns.items()}
    # 0 means that EAR has no figure: no node runs on 0 W, and no program for 0 s.
    is_managed = numbers.get("manager_watts") and not (numbers.get("seconds") and numbers.get("watts"))
    prefix = "manager_" if is_managed else ""
    seconds = numbers.get(f"{prefix}seconds") or numbers.get("seconds") or 0.0
    joules = energy(numbers.get(f"{prefix}watts")) or None
    if joules is None:
        kwh = numbers.get("kwh")
        joules = (numbers.get("joules") if kwh is None else kwh * 3.6e6) or None
    gpu_joules: dict[str, float] = {}
    for column, raw in record.items():
        name, watts = _normalized(column or ""), _number(raw if column else None)
        if name.startswith("GPU") and name.removesuffix("W").endswith("POWER") and watts is not None:
            gpu_joules[name.removesuffix("W").removesuffix("POWER").lower()] = watts * seconds
    start, end = numbers.get("start"), numbers.get("end")
    return EarRow(
        job=text("job"),
        step=text("step"),
        node=text("node"),
        seconds=seconds,
        joules=joules,
        cpu_joules=energy(numbers.get(f"{prefix}cpu_watts")),
        memory_joules=energy(numbers.get(f"{prefix}memory_watts")),
        gpu_joules=gpu_joules,
        app=text("app") if start and end else "",
        start=start,
        end=end,
    )


def _number(raw: str | None) -> float | None:
    try:
        value = float((raw or "").strip().replace(",", "."))
    except ValueError:
        return None
    return value if value >= 0 else None


def without_overlap(rows: list[EarRow]) -> list[EarRow]:
    """srun steps where a job has them, else its batch step: the batch step spans the same time on the first node.

    A row's power is that of the whole node. Of steps or programs that ran at the same time on a node (one per rank,
    for example) only the longest counts, or the node would be counted several times.
    """
    jobs_with_steps = {row.job for row in rows if row.step not in OTHER_STEPS and row.step != BATCH_STEP}
    steps = [
        row
        for row in rows
        if row.step not in OTHER_STEPS and (row.step != BATCH_STEP or row.job not in jobs_with_steps)
    ]
    kept: list[EarRow] = []
    for row in sorted(steps, key=lambda r: -r.seconds):
        if not any(_ran_together(row, other) for other in kept):
            kept.append(row)
    return [row for row in steps if row in kept]


def _ran_together(row: EarRow, other: EarRow) -> bool:
    """Whether two programs of one node overlap for more than half of the first one's time."""
    if (row.job, row.node) != (other.job, other.node):
        return False
    if row.start is None or row.end is None or other.start is None or other.end is None:
        return False
    overlap_seconds = min(row.end, other.end) - max(row.start, other.start)
    return overlap_seconds > 0 and overlap_seconds > (row.end - row.start) / 2
