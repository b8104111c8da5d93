"""Energy records of the site (EAR, SLURM), read and appended to the energy.jsonl of the run that they belong to.

EAR's application CSV has three header families. Energy is node power x time; the batch step overlaps the srun steps.
`eacct` prints an energy column too, but its unit changed from joules to kWh at version 6.0; it is only used where power
or time is missing, and then its unit must be in its name.

SLURM's `sacct` gives ConsumedEnergyRaw in joules, from srun steps or from the batch step, never both. The job's own row
adds up all its steps, batch and extern included, and would count a node twice: it is not used. Figures are of whole
nodes, other jobs included where a node is shared.
"""

import contextlib
import csv
import io
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from windlass.energy.ledger import WHOLE_JOB, meter_started_at
from windlass.errors import LaunchError, RunError
from windlass.files import append_line, read_json_lines
from windlass.runs.folder import Run

BATCH_STEP = "4294967291"
OTHER_STEPS = {"4294967292": "extern", "4294967290": "interactive"}

# Columns of one meaning, preferred first: legacy dashes without units, v4 to 5.0, v5.2 and later.
# Names are compared without case, dashes, underscores or spaces.
EAR_COLUMNS: dict[str, tuple[str, ...]] = {
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
        raise RunError(
            "energy.file-unreadable",
            f"{path} cannot be read: {error.strerror}",
            hint="name the CSV that `eacct -c` or --ear-user-db wrote",
        ) from None
    return without_overlap(parse_ear(text, str(path)))


def parse_ear(text: str, path: str) -> list[EarRow]:
    reader = csv.DictReader(io.StringIO(text), delimiter=";")
    header = {_normalized(name): name for name in reader.fieldnames or () if name}
    columns = {
        key: next(header[name] for name in names if name in header)
        for key, names in EAR_COLUMNS.items()
        if any(name in header for name in names)
    }
    absent = [key for key in ("node", "job", "seconds") if not {key, f"manager_{key}"} & set(columns)]
    if absent or not {"watts", "manager_watts", "joules", "kwh"} & set(columns):
        raise RunError(
            "energy.not-an-ear-file",
            f"{path} is not an EAR application CSV: no column for {', '.join(absent) or 'node power'} "
            f"(it begins with {', '.join(list(reader.fieldnames or ())[:6]) or 'nothing'})",
            hint="give the _apps file, with ';' as separator; loop files (LOOPID) have no totals",
        )
    return [_ear_row(record, columns) for record in reader if (record.get(columns["node"]) or "").strip()]


def _normalized(name: str) -> str:
    return name.strip().upper().replace("_", "").replace("-", "").replace(" ", "")


def _ear_row(record: Mapping[str, str | None], columns: Mapping[str, str]) -> EarRow:
    def text(key: str) -> str:
        return (record.get(columns[key]) or "").strip() if key in columns else ""

    def energy(name: str) -> float | None:
        watts = numbers.get(prefix + name)
        return None if watts is None else watts * seconds

    numbers = {key: _number(record.get(column)) for key, column in columns.items()}
    # 0 means that EAR has no figure: no node runs on 0 W, and no program for 0 s.
    is_managed = numbers.get("manager_watts") and not (numbers.get("seconds") and numbers.get("watts"))
    prefix = "manager_" if is_managed else ""
    seconds = numbers.get(f"{prefix}seconds") or numbers.get("seconds") or 0.0
    kwh, start, end = numbers.get("kwh"), numbers.get("start"), numbers.get("end")
    gpu_joules: dict[str, float] = {}
    for column, raw in record.items():
        name, watts = _normalized(column or "").removesuffix("W"), _number(raw if column else None)
        if name.startswith("GPU") and name.endswith("POWER") and watts is not None:
            gpu_joules[name.removesuffix("POWER").lower()] = watts * seconds
    return EarRow(
        job=text("job"),
        step=text("step"),
        node=text("node"),
        seconds=seconds,
        joules=energy("watts") or (numbers.get("joules") if kwh is None else kwh * 3.6e6) or None,
        cpu_joules=energy("cpu_watts"),
        memory_joules=energy("memory_watts"),
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
    rows = [row for row in rows if row.step not in OTHER_STEPS]
    jobs_with_steps = {row.job for row in rows if row.step != BATCH_STEP}
    steps = [row for row in rows if row.step != BATCH_STEP or row.job not in jobs_with_steps]
    kept: list[EarRow] = []
    for row in sorted(steps, key=lambda r: -r.seconds):
        overlaps = [
            min(row.end, other.end) - max(row.start, other.start)
            for other in kept
            if (row.job, row.node) == (other.job, other.node)
            and not (row.start is None or row.end is None or other.start is None or other.end is None)
        ]
        # Simultaneous: they overlap for more than half of this row's time.
        if not any(seconds > max(0.0, ((row.end or 0.0) - (row.start or 0.0)) / 2) for seconds in overlaps):
            kept.append(row)
    return [row for row in steps if row in kept]


SACCT_FORMAT = "JobID,ConsumedEnergyRaw,ElapsedRaw,NNodes,State"
SACCT_COLUMNS: dict[str, tuple[str, ...]] = {
    "job": ("jobid", "jobidraw"),
    "joules": ("consumedenergyraw", "consumedenergy"),
    "seconds": ("elapsedraw",),
    "nodes": ("nnodes", "allocnodes"),
    "state": ("state",),
}
# Blank or 0 where the site does not account energy; the large numbers are SLURM's "no value".
UNKNOWN_VALUES = {"", "0", "18446744073709551614", "18446744073709551615", "4294967294"}
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
    command = ["sacct", "--parsable2", "--duplicates", f"--format={SACCT_FORMAT}", "--jobs", ",".join(jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise LaunchError(
            "energy.sacct-missing",
            "sacct is not on this machine",
            hint="run it on the cluster and pass the output with --sacct FILE",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            "energy.sacct-timeout",
            "sacct gave no answer within 60 s",
            hint="try again later: the accounting may be busy",
        ) from None
    if done.returncode:
        raise LaunchError(
            "energy.sacct-failed",
            f"sacct failed: {done.stderr.strip()}",
            hint="check the job ids with `windlass jobs RUN`",
        )
    return done.stdout


def read_sacct(text: str, path: str = "sacct") -> list[JobEnergy]:
    """Energy per job from lines of `sacct --parsable2`: by the names in its header, else as in SACCT_FORMAT."""
    header = SACCT_FORMAT.lower().split(",")
    jobs: dict[str, list[_SacctRow]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().rstrip("|").split("|")]
        if cells[0].lower() in SACCT_COLUMNS["job"] or "consumedenergy" in line.lower():
            header = [cell.lower() for cell in cells]
            continue
        by_name = dict(zip(header, cells, strict=False))
        values = {key: next((by_name[n] for n in names if n in by_name), "") for key, names in SACCT_COLUMNS.items()}
        job, _, step = values["job"].partition(".")
        if len(cells) > 1 and job:
            seconds, nodes = (int(values[key]) if values[key].isdigit() else 0 for key in ("seconds", "nodes"))
            consumed, number = values["joules"], 0.0
            scale = SUFFIXES.get(consumed[-1:])
            with contextlib.suppress(ValueError):
                number = (
                    0.0 if consumed in UNKNOWN_VALUES else float(consumed[:-1]) * scale if scale else float(consumed)
                )
            joules = number if 0 < number < 1e18 else None
            row = _SacctRow(step, joules, scale is not None, float(seconds), nodes, values["state"])
            jobs.setdefault(job, []).append(row)
    if not jobs and text.strip():
        raise RunError(
            "energy.not-sacct-output",
            f"{path} has no line of sacct's parsable output (it begins with {text.strip().splitlines()[0][:60]!r})",
            hint=f"write it with: sacct --parsable2 --duplicates --format={SACCT_FORMAT} --jobs JOBS",
        )
    return [_job_energy(job, rows) for job, rows in jobs.items()]


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
    seconds = min(sum(row.seconds for row in counted), job_seconds or float("inf"))
    return JobEnergy(job, sum(joules), seconds, max(row.nodes for row in counted), note)


_Record = TypeVar("_Record", EarRow, JobEnergy)


def record_ear(run: Run, rows: Sequence[EarRow], path: str = "the CSV") -> int:
    """Append the rows of this run's jobs; appending them twice changes nothing. Returns how many were taken."""
    own = _own_records(run, [row for row in rows if row.joules is not None], path)
    for row, job in own:
        parts = {"device": sum(row.gpu_joules.values()), "cpu": row.cpu_joules, "memory": row.memory_joules}
        for scope, joules in ({"node": row.joules} | parts).items():
            if joules:
                fields = {"seconds": row.seconds, "scope": scope, "method": "power", "joules": joules}
                _append(run, row.node, job, f"ear:{row.name}", fields)
    return len(own)


def record_slurm(run: Run, jobs: Sequence[JobEnergy], path: str = "sacct's answer") -> int:
    """Append sacct's figures of this run's jobs; appending them twice changes nothing. Returns how many were taken."""
    own = _own_records(run, [record for record in jobs if record.joules is not None], path)
    for record, job in own:
        nodes = max(1, record.nodes)
        fields = {"scope": "node", "method": "counter", "joules": record.joules, "seconds": record.seconds * nodes}
        _append(run, WHOLE_JOB, job, f"slurm:{record.job}", {**fields, "nodes": nodes, "note": record.note})
    return len(own)


def _append(run: Run, node: str, job: str | None, session: str, fields: dict[str, Any]) -> None:
    line = {"time": time.time(), "node": node, "job": job, "session": session, "source": session.partition(":")[0]}
    append_line(run.energy_file, line | fields)


def _own_records(run: Run, records: list[_Record], path: str) -> list[tuple[_Record, str | None]]:
    """The records of this run's jobs, each with the job of the run. A run without known jobs accepts all."""
    jobs = {record.job for record in records}
    submitted = {str(line.get("job") or line.get("job_id") or "") for line in read_json_lines(run.jobs_file)}
    meters = [
        line for line in read_json_lines(run.energy_file) if meter_started_at(str(line.get("session"))) is not None
    ]
    run_jobs = (submitted | {str(line["job"]) for line in meters if line.get("job")}) - {""}
    if not run_jobs:  # meters outside any job have job None; the same job keeps both from being counted
        is_outside = any(not line.get("job") for line in meters)
        return [(record, None if is_outside else record.job) for record in records]
    own = {  # sacct writes `77+0` and `77_3` for the parts of a job that was submitted as 77
        job: name
        for job in jobs
        for name in (job.partition("_")[0], job.partition("+")[0], job)  # the last of them wins
        if name in run_jobs
    }
    if jobs and not own:
        raise RunError(
            "energy.no-job-of-this-run",
            f"{path} has jobs {_first_names(jobs)}, but none of them belongs to this run ({_first_names(run_jobs)})",
            hint="write the run's job id into the JOBID column: EAR gives the tasks of an array their own numbers",
        )
    return [(record, own[record.job]) for record in records if record.job in own]


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")
