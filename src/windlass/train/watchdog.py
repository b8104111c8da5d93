"""Names the rank that hangs: every rank keeps a small file up to date, and when progress stops, the files are
compared.

A rank that waits for others looks as stuck as the one they wait for. What tells them apart is how far each one came:
the ranks in a collective have beaten once more than the rank that never entered it. A process that no longer writes
its file is frozen or gone. No clock of another host is trusted: a file is fresh when its counter changes between two
reads.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch._C import _distributed_c10d as c10d

from windlass.errors import EXIT_HANG
from windlass.files import read_json, write_json
from windlass.runs.events import Hang
from windlass.runs.faults import FaultRecord, write_fault
from windlass.runs.folder import Run
from windlass.runs.lock import touch
from windlass.train.hooks import Hook, Training
from windlass.train.step import StepResult
from windlass.train.validate import Validation

# A rank looks this often whether it has come further, and whether another one has reported a hang: it then writes its
# heartbeat at once. A hang is named one look, a wait of two and a half looks and the reading of all heartbeats after
# the limit: within 10 s, also on 1,000 ranks.
HANG_LOOK_SECONDS = 2.0
WRITE_SECONDS = 2.0
# Beyond MANY_RANKS: thousands of files every two seconds are a burden for a parallel file system.
MANY_RANKS, SLOW_WRITE_SECONDS = 64, 30.0
# Phases that may take this many times longer than a step: a cold compile cache takes ten minutes.
PATIENT_PHASES = {"start": 3.0, "compile": 3.0, "restore": 3.0, "save": 3.0}

Heartbeats = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class HangCause:
    """The rank that held the others up."""

    # None: every rank waits in the same place.
    rank: int | None
    text: str


class Heartbeat(Hook):
    """`beat(step, phase)` costs a few assignments; a thread writes the file and checks that beats still come."""

    def __init__(
        self,
        run: Run,
        rank: int = 0,
        *,
        world_size: int = 1,
        timeout_seconds: float = 600.0,
        started_at: float | None = None,
        write_seconds: float | None = None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self.run, self.rank, self.world_size, self.timeout_seconds = run, rank, world_size, timeout_seconds
        # When the start was created, the same on all ranks: files of an earlier start are not read.
        self.started_at = started_at
        every = write_seconds or (WRITE_SECONDS if world_size <= MANY_RANKS else SLOW_WRITE_SECONDS)
        self._every = min(every, max(0.2, timeout_seconds / 5)) if timeout_seconds else every
        self._look = min(HANG_LOOK_SECONDS, self._every)
        self._step, self._phase, self._beats, self._beat_at = 0, "start", 0, time.monotonic()
        self._first_step: int | None = None
        self._writes, self._leave, self._closed = 0, leave, threading.Event()
        self._main_thread = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._watch, name="windlass-heartbeat", daemon=True)

    def start(self) -> Self:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder; read when a group is created
        earlier = set(self.run.ranks.glob("hang-*") if self.rank == 0 else ()) - {self.run.hang_file(self.started_at)}
        for path in (self.run.heartbeat_file(self.rank), self.run.error_file(self.rank), *earlier):
            path.unlink(missing_ok=True)
        self._write()
        self._thread.start()
        return self

    def beat(self, step: int, phase: str) -> None:
        """This rank reached `phase` of `step`."""
        self._step, self._phase, self._beats, self._beat_at = step, phase, self._beats + 1, time.monotonic()

    def step_phase(self, phase: str) -> None:
        """This rank reached `phase` of the current step; the first step of a process compiles."""
        first = self._first_step is None or self._step == self._first_step
        self.beat(self._step, "compile" if first else phase)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._every)
        self.beat(self._step, "ended")
        self._write()

    # -- as a hook of the loop; the phases inside a step come through `step_phase` -----------------------------------

    def on_start(self, training: Training) -> None:
        self._first_step = training.step
        self.beat(training.step, "data")

    def on_step_end(self, training: Training, result: StepResult) -> None:
        self.beat(training.step, "data")

    def on_wait(self, training: Training, phase: str) -> None:
        self.beat(training.step, phase)

    def on_save(self, training: Training) -> None:
        self.beat(training.step, "data")

    def on_eval(self, training: Training, validation: Validation) -> None:
        self.beat(training.step, "data")

    # -- the thread --------------------------------------------------------------------------------------------------

    @property
    def idle_seconds(self) -> float:
        return time.monotonic() - self._beat_at

    def _write(self, **extra: Any) -> None:
        self._writes += 1
        record = {
            "rank": self.rank,
            "started_at": self.started_at,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step,
            "phase": self._phase,
            "beats": self._beats,
            "idle_seconds": round(self.idle_seconds, 2),
            "writes": self._writes,
            "time": time.time(),
            **extra,
        }
        with contextlib.suppress(OSError):  # a full disk is not a hang
            write_json(self.run.heartbeat_file(self.rank), record, sync=False)
        if self.rank == 0:
            touch(self.run.lock_file)

    def _watch(self) -> None:
        """When beats stop: write where this rank stands, give the others time to do the same, name one and leave."""
        hang_file, written_at = self.run.hang_file(self.started_at), time.monotonic()
        while not self._closed.wait(self._look):
            if time.monotonic() - written_at >= self._every - self._look / 2 or hang_file.exists():
                self._write()
                written_at = time.monotonic()
            limit_seconds = self.timeout_seconds * PATIENT_PHASES.get(self._phase, 1.0)
            if limit_seconds and self.idle_seconds > limit_seconds:
                break
        else:
            return
        is_first = True
        with contextlib.suppress(OSError):  # a full disk is not a hang
            try:
                hang_file.open("x").close()
            except FileExistsError:
                is_first = False
        frame = sys._current_frames().get(self._main_thread)
        stack = [line.rstrip() for line in traceback.format_stack(frame)[-12:]] if frame is not None else []
        self._write(stuck=True, stack=stack, flight=read_flight_recorder())
        # One rank reads the heartbeats of all: a million small reads of 1,000 ranks would take minutes.
        cause = None if is_first else self._wait_for_cause()
        if cause is None:
            first = read_heartbeats(self.run, self.started_at)
            time.sleep(max(2.0, 2.5 * self._look))
            self._write(stuck=True, stack=stack, flight=read_flight_recorder())
            cause = find_hang(first, read_heartbeats(self.run, self.started_at), self.world_size)
        error = f"no progress for {self.idle_seconds:.0f} s in step {self._step}, {self._phase}: {cause.text}"
        record = FaultRecord(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            kind="hang",
            exception="hang",
            error=error,
            culprit=cause.rank,
            traceback=stack,
            time=time.time(),
        )
        with contextlib.suppress(OSError):
            write_fault(self.run, record)
            if is_first:
                write_json(hang_file, asdict(cause), sync=False)
                self.run.record(Hang(rank=cause.rank, seconds=self.idle_seconds, where=cause.text, step=self._step))
        self._leave(EXIT_HANG)

    def _wait_for_cause(self) -> HangCause | None:
        """What the first rank has found; None when it has not within twice the time that it needs."""
        deadline = time.monotonic() + 2 * (max(2.0, 2.5 * self._look) + HANG_LOOK_SECONDS)
        while time.monotonic() < deadline:
            if (value := read_json(self.run.hang_file(self.started_at))) is not None:
                return HangCause(value.get("rank"), str(value.get("text")))
            time.sleep(self._look / 4)
        return None


# -- comparing the heartbeats of all ranks ---------------------------------------------------------------------------


def read_heartbeats(run: Run, started_at: float | None) -> dict[int, dict[str, Any]]:
    """Rank -> its newest heartbeat of this start."""
    records = (read_json(path) or {} for path in sorted(run.ranks.glob("heartbeat-*.json")))
    return {int(r["rank"]): r for r in records if "rank" in r and r.get("started_at") == started_at}


def find_hang(first: Heartbeats, second: Heartbeats, world_size: int) -> HangCause:
    """The rank that holds the others up, from two reads of the heartbeats; the surest sign comes first."""
    ranks = range(world_size)
    missing = [rank for rank in ranks if rank not in second]
    if missing:
        text = f"rank {missing[0]} never started ({len(missing)} of {world_size} ranks without a heartbeat)"
        return HangCause(missing[0], text)
    for rank in ranks:
        # A rank that reports being stuck is alive: it may have named a rank and left already.
        unchanged = rank in first and first[rank].get("writes") == second[rank].get("writes")
        if unchanged and not second[rank].get("stuck"):
            return HangCause(
                rank, f"{_describe(second[rank])} is frozen or gone: its process no longer writes a heartbeat"
            )
    # Flight recorders: a rank that has not entered a collective which others have.
    flights = {rank: second[rank].get("flight") or {} for rank in ranks}
    for group in sorted({name for flight in flights.values() for name in flight}):
        entered = {rank: int(flight[group]["entered"]) for rank, flight in flights.items() if group in flight}
        low, high = min(entered.values()), max(entered.values())
        if low < high:
            rank = next(rank for rank, count in entered.items() if count == low)
            return HangCause(
                rank, f"{_describe(second[rank])} entered {low} collectives of group {group}, the others {high}"
            )
    beats = {rank: int(second[rank]["beats"]) for rank in ranks}
    slowest_rank = min(ranks, key=lambda rank: beats[rank])
    ahead = next((second[rank] for rank in ranks if beats[rank] > beats[slowest_rank]), None)
    if ahead is not None:
        text = f"did not reach the point where the others wait (step {ahead.get('step')}, {ahead.get('phase')})"
        return HangCause(slowest_rank, f"{_describe(second[slowest_rank])} {text}")
    # All came equally far: ranks whose stack is inside torch.distributed wait for one that is elsewhere.
    outside = [
        rank
        for rank in ranks
        if (stack := second[rank].get("stack")) and not any("/torch/distributed/" in line for line in stack)
    ]
    if outside and len(outside) < world_size:
        line = second[outside[0]]["stack"][-1].strip().splitlines()[0]
        text = f"is not in the collective in which the others wait, but at {line}"
        return HangCause(outside[0], f"{_describe(second[outside[0]])} {text}")
    place = f"step {second[0].get('step')}, {second[0].get('phase')}"
    return HangCause(None, f"all {world_size} ranks wait in the same place ({place})")


def _describe(record: Mapping[str, Any]) -> str:
    host, pid = record.get("host", "unknown host"), record.get("pid", "unknown")
    return f"rank {record['rank']} on {host} (pid {pid}, step {record.get('step')}, {record.get('phase')})"


def read_flight_recorder() -> dict[str, dict[str, int]]:
    """Collectives that this rank has entered and completed, by process group; empty without torch's flight recorder."""
    try:
        dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
        return count_collectives(json.loads(dump(True, False))) if dump is not None else {}
    except Exception:  # a help for finding the cause must never hide the hang itself
        return {}


def count_collectives(trace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Last collective entered and completed per group, from a flight recorder's JSON."""
    groups: dict[str, dict[str, int]] = {}
    for entry in trace.get("entries", []):
        name = "/".join(str(part) for part in entry.get("process_group", ["default"]))
        group = groups.setdefault(name, {"entered": 0, "completed": 0})
        number = int(entry.get("collective_seq_id", 0))
        group["entered"] = max(group["entered"], number)
        if entry.get("state") == "completed":
            group["completed"] = max(group["completed"], number)
    return groups
