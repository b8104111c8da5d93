"""Starts of a run: one file per start says completely how its workers divide and compute a step.

One process writes `starts/<job>.<restart>.json`; every worker waits for exactly that file and plans nothing itself.
"""

import contextlib
import time
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter, ValidationError

from windlass.errors import RunError
from windlass.files import read_json, write_json
from windlass.layout.types import Layout, StepSpec
from windlass.runs.folder import Run

# How long workers wait for their start's file: a parallel file system shows it to other nodes a little later.
WAIT_SECONDS = 300.0
# Ranks that belong together begin within this time of each other.
SAME_START_SECONDS = 10.0
# Within this time rank 0 has replaced the file of an earlier start: it has to plan the run before.
REPLACED_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Start:
    # The scheduler's job id, or "local-" and a time where there is no scheduler.
    job: str
    # How often this job was started before.
    restart: int = 0
    layout: Layout
    step: StepSpec
    # Device type of the workers: "cuda" or "cpu".
    device: str
    devices: int
    devices_per_node: int
    # Why this layout, for the log.
    reason: str = ""
    created_at: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return start_name(self.job, self.restart)


def start_name(job: str, restart: int) -> str:
    return f"{job}.{restart}"


def write_start(run: Run, start: Start) -> None:
    write_json(run.starts / f"{start.name}.json", asdict(start))


def read_start(run: Run, name: str) -> Start | None:
    """The start of this name; None when it is not written yet. RunError: its values cannot be those of a start."""
    path = run.starts / f"{name}.json"
    value = read_json(path)
    if value is None:
        return None
    try:
        start = TypeAdapter(Start).validate_python(value)
        start.layout.config()  # checks its names and degrees
    except ValidationError as error:
        problem = error.errors()[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    else:
        counts = (start.layout.data, start.layout.accumulation, start.devices_per_node, start.step.seq_len)
        if min(counts) > 0 and start.layout.devices == start.devices:
            return start
        reason = f"its layout is for {start.layout.devices:,} devices, not for {start.devices:,}"
    raise RunError(
        "runs.start-damaged",
        f"{path} is damaged: {reason}",
        hint="delete the file; `windlass resume RUN` or the next job writes a new one",
    )


def last_start(run: Run) -> Start | None:
    """The newest readable start of a run; None before the first, and in run folders of version 0.1."""
    starts = []
    for path in run.starts.glob("*.json"):
        with contextlib.suppress(RunError):
            starts.append(read_start(run, path.stem))
    return max((start for start in starts if start), key=lambda start: start.created_at, default=None)


def wait_for_start(run: Run, name: str, seconds: float = WAIT_SECONDS, *, reused_name: bool = False) -> Start:
    """The start of this name, once it is written.

    `reused_name`: ranks that were started by hand have no job id, so an earlier start may have left a file of the same
    name. One that is older than these processes is taken only when no newer one comes.
    """
    begun_at, clock = time.time(), time.monotonic()
    while True:
        start, waited_seconds = read_start(run, name), time.monotonic() - clock
        fresh = start is not None and start.created_at >= begun_at - SAME_START_SECONDS
        if start is not None and (fresh or not reused_name or waited_seconds > REPLACED_SECONDS):
            return start
        if waited_seconds > seconds:
            raise RunError(
                "runs.start-missing",
                f"{run.starts / f'{name}.json'} was not written within {seconds:.0f} s",
                hint="start workers with `windlass train`, `windlass resume` or a job script of `windlass launch`; "
                "the run folder must be on a file system that all nodes share",
            )
        time.sleep(0.1)
