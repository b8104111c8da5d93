"""What did EAR count? Its CSV in three header families; energy is node power x time, and the batch step overlaps the srun steps.

`eacct` prints an energy column too, but it changed from joules to kWh at version 6.0; it is only used where power or time is
missing, and then its unit must be in its name.
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

# One meaning, many spellings: legacy dashes without units, v4 to 5.0, v5.2 and later. Compared without case, dashes or underscores.
NAMES: dict[str, tuple[str, ...]] = {
    "node": ("NODENAME", "NODE_ID", "NODEID", "NODE"),
    "job": ("JOBID", "JOB_ID", "JOB"),
    "step": ("STEPID", "STEP_ID", "STEP"),
    "app": ("APPID",),
    "start": ("START_TIME", "JOB_START_TIME"),
    "end": ("END_TIME", "JOB_END_TIME"),
    "seconds": ("TIME_SEC", "TIME", "ELAPSED_SEC", "TIME(S)", "TIME-SEC"),
    "watts": (
        "DC_NODE_POWER_W",
        "DC-NODE-POWER",
        "DC_NODE_POWER",
        "DC-NODE-POWER-W",
        "AVG_DC_POWER_W",
        "POWER(W)",
        "POWER_W",
    ),
    "cpu_watts": ("PCK_POWER_W", "PCK-POWER", "PCK-NODE-POWER", "PCK_POWER"),
    "memory_watts": ("DRAM_POWER_W", "DRAM-POWER", "DRAM_POWER"),
    # EAR 5.2 and later: the node manager's own figures, for programs that ran without EAR's library (theirs are 0).
    "manager_seconds": ("NODEMGR_TIME_SEC",),
    "manager_watts": ("NODEMGR_DC_NODE_POWER_W",),
    "manager_cpu_watts": ("NODEMGR_PCK_POWER_W",),
    "manager_memory_watts": ("NODEMGR_DRAM_POWER_W",),
    "joules": ("ENERGY(J)", "ENERGY_J", "ENERGY_JOULES", "DC_ENERGY_J"),
    "kwh": ("ENERGY(KWH)", "ENERGY_KWH"),
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
        """Of this program of this step: `77.0`, or `77.0.4242` where EAR tells programs apart."""
        return ".".join(filter(None, (self.job, self.step, self.app)))


def read_ear(path: Path) -> list[EarRow]:
    """The rows that may be added; see `without_overlap`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunError(
            "energy.cannot-read",
            f"{path} cannot be read: {error.strerror}",
            hint="name the CSV that `eacct -c` or --ear-user-db wrote",
        ) from None
    return without_overlap(parse(text, str(path)))


def parse(text: str, where: str) -> list[EarRow]:
    reader = csv.DictReader(io.StringIO(text), delimiter=";")
    columns = {_plain(name): name for name in reader.fieldnames or () if name}
    where_is = {
        key: columns[_plain(n)] for key, names in NAMES.items() for n in reversed(names) if _plain(n) in columns
    }
    lacking = [key for key in ("node", "job", "seconds") if not {key, f"manager_{key}"} & set(where_is)]
    if lacking or not {"watts", "manager_watts", "joules", "kwh"} & set(where_is):
        found = ", ".join(list(reader.fieldnames or ())[:6]) or "nothing"
        raise RunError(
            "energy.ear-application-csv-column",
            f"{where} is no EAR application CSV: no column for {', '.join(lacking) or 'node power'} (it begins with {found})",
            hint="the separator is ';'; loop files (LOOPID) hold no totals, give the _apps file",
        )
    return [_row(record, where_is) for record in reader if (record.get(where_is["node"]) or "").strip()]


def _plain(name: str) -> str:
    return name.strip().upper().replace("_", "").replace("-", "").replace(" ", "")


def _row(record: Mapping[str, str | None], where_is: Mapping[str, str]) -> EarRow:
    def number(key: str) -> float | None:
        return _float(record.get(where_is[key])) if key in where_is else None

    def text(key: str) -> str:
        return (record.get(where_is[key]) or "").strip() if key in where_is else ""

    # 0 is EAR's way to say that it has no figure: no node runs on 0 W, and no program for 0 s.
    own = bool(number("seconds") and number("watts"))
    by = "" if own or not number("manager_watts") else "manager_"
    seconds = number(f"{by}seconds") or number("seconds") or 0.0
    joules = _times(number(f"{by}watts"), seconds) or None
    if joules is None:
        kwh = number("kwh")
        joules = (number("joules") if kwh is None else kwh * 3.6e6) or None
    gpus = {
        _plain(name).removesuffix("POWERW").removesuffix("POWER").lower(): watts * seconds
        for name, raw in record.items()
        if name
        and _plain(name).startswith("GPU")
        and _plain(name).removesuffix("W").endswith("POWER")
        and (watts := _float(raw)) is not None
    }
    return EarRow(
        text("job"),
        text("step"),
        text("node"),
        seconds,
        joules,
        _times(number(f"{by}cpu_watts"), seconds),
        _times(number(f"{by}memory_watts"), seconds),
        gpus,
        text("app") if number("start") and number("end") else "",
        number("start"),
        number("end"),
    )


def _times(watts: float | None, seconds: float) -> float | None:
    return None if watts is None else watts * seconds


def _float(raw: str | None) -> float | None:
    try:
        value = float((raw or "").strip().replace(",", "."))
    except ValueError:
        return None
    return value if value == value and value >= 0 else None


def without_overlap(rows: list[EarRow]) -> list[EarRow]:
    """srun steps where a job has them, else its batch step: the batch step spans the same time on the first node.

    A row's power is the whole node's. Steps or programs that ran side by side on a node (one a rank, say) would count it
    several times, so of those the longest stands for all.
    """
    with_steps = {row.job for row in rows if row.step not in OTHER_STEPS and row.step != BATCH_STEP}
    steps = [
        row for row in rows if row.step not in OTHER_STEPS and (row.step != BATCH_STEP or row.job not in with_steps)
    ]
    kept: list[EarRow] = []
    for row in sorted(steps, key=lambda r: -r.seconds):
        if not any(_side_by_side(row, other) for other in kept):
            kept.append(row)
    return [row for row in steps if row in kept]


def _side_by_side(row: EarRow, other: EarRow) -> bool:
    if (row.job, row.node) != (other.job, other.node):
        return False
    if row.start is None or row.end is None or other.start is None or other.end is None:
        return False
    both = min(row.end, other.end) - max(row.start, other.start)
    return both > 0 and both > (row.end - row.start) / 2
