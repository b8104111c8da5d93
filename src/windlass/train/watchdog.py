"""Which rank hangs, and where? Every rank keeps a small file up to date; when progress stops, they are read together and one is named.

A rank that waits for others looks as stuck as the one they wait for. What tells them apart is how far each one came: the ranks
in a collective have beaten once more than the rank that never entered it. A process that no longer even writes its file is
frozen or gone. No clock of another host is trusted: a file is fresh when its counter moves while we look.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.errors import EXIT_HANG
from windlass.files import read_json, write_json
from windlass.runs.events import Hang
from windlass.runs.faults import FaultRecord, write_fault
from windlass.runs.folder import Run
from windlass.runs.lock import touch
from windlass.train.hooks import Hook

WRITE_SECONDS = 5.0
PATIENT_PHASES = {"start": 3.0, "compile": 3.0, "restore": 3.0, "save": 3.0}
"""Phases that may take this many times longer than a step's: a cold compile cache takes ten minutes."""


@dataclass(frozen=True)
class Verdict:
    """Who held the others up."""

    rank: int | None
    """None: every rank waits in the same place."""
    text: str


class Heartbeat(Hook):
    """`beat(step, phase)` costs a few assignments; a thread writes the file and looks whether beats still come."""

    def __init__(
        self, run: Run, rank: int = 0, *, world_size: int = 1, timeout_seconds: float = 600.0, write_seconds: float | None = None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:  # fmt: skip
        self.run, self.rank, self.world_size, self.timeout_seconds = run, rank, world_size, timeout_seconds
        # Thousands of files every five seconds are a burden for a parallel file system.
        self._every = write_seconds or (WRITE_SECONDS if world_size <= 64 else 30.0)
        self._step, self._phase, self._beats, self._beat_at = 0, "start", 0, time.monotonic()
        self._compute_seconds: float | None = None
        self._writes = 0
        self._leave, self._closed = leave, threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="windlass-heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        os.environ.setdefault(
            "TORCH_FR_BUFFER_SIZE", "2000"
        )  # torch's flight recorder; read when the process group is made
        for path in (self.run.heartbeat_file(self.rank), self.run.error_file(self.rank)):
            path.unlink(missing_ok=True)
        self._write()
        self._thread.start()
        return self

    def beat(self, step: int, phase: str, compute_seconds: float | None = None) -> None:
        """This rank has come to `phase` of `step`; `compute_seconds` is its own time before the last collective."""
        self._step, self._phase, self._beats, self._beat_at = step, phase, self._beats + 1, time.monotonic()
        if compute_seconds is not None:
            self._compute_seconds = compute_seconds

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._every)
        self.beat(self._step, "ended")
        self._write()

    # -- as a hook of the loop: a step's own phases come through `Stepper.beat` -------------------------------------------

    def on_start(self, job: Any) -> None:
        job.stepper.beat = lambda phase: self.beat(job.step, phase if job.step > job.first_step else "compile")
        self.beat(job.step, "data")

    def on_step_end(self, job: Any, result: Any) -> None:
        self.beat(job.step, "data")

    def on_wait(self, job: Any, what: str) -> None:
        self.beat(job.step, what)

    def on_save(self, job: Any) -> None:
        self.beat(job.step, "data")

    def on_eval(self, job: Any, val_loss: float) -> None:
        self.beat(job.step, "data")

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        wait = min(self._every, max(0.2, self.timeout_seconds / 5)) if self.timeout_seconds else self._every
        while not self._closed.wait(wait):
            self._write()
            if self.timeout_seconds and self.idle_seconds > self.limit_seconds:
                self._end_job()
                return

    @property
    def idle_seconds(self) -> float:
        return time.monotonic() - self._beat_at

    @property
    def limit_seconds(self) -> float:
        return self.timeout_seconds * PATIENT_PHASES.get(self._phase, 1.0)

    def record(self, **more: Any) -> dict[str, Any]:
        return {
            "rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "step": self._step, "phase": self._phase,
            "beats": self._beats, "idle_seconds": round(self.idle_seconds, 2), "compute_seconds": self._compute_seconds,
            "writes": self._writes, "time": time.time(), **more,
        }  # fmt: skip

    def _write(self, **more: Any) -> None:
        self._writes += 1
        with contextlib.suppress(OSError):  # a full disk is no hang
            write_json(self.run.heartbeat_file(self.rank), self.record(**more), sync=False)
        if self.rank == 0:
            touch(self.run.lock_file)

    def _end_job(self) -> None:
        """Say where this rank stands, give the others time to do the same, then name one and leave."""
        stack = _stack(self._main)
        self._write(stuck=True, stack=stack, flight=flight())
        first = read_heartbeats(self.run)
        time.sleep(max(2.0, 2.5 * min(self._every, max(0.2, self.timeout_seconds / 5))))
        self._write(stuck=True, stack=stack, flight=flight())
        second = read_heartbeats(self.run)
        verdict = blame(first, second, self.world_size)
        with contextlib.suppress(OSError):
            self._say(verdict, second, stack)
        self._leave(EXIT_HANG)

    def _say(self, verdict: Verdict, records: Mapping[int, Mapping[str, Any]], stack: list[str]) -> None:
        error = f"no progress for {self.idle_seconds:.0f} s in step {self._step}, {self._phase}: {verdict.text}"
        record = FaultRecord(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            kind="hang",
            exception="hang",
            error=error,
            culprit=verdict.rank,
            traceback=stack,
            time=time.time(),
        )
        write_fault(self.run, record)
        speakers = [r for r, record in sorted(records.items()) if record.get("stuck") and r != verdict.rank] or [
            self.rank
        ]
        if self.rank == speakers[0]:
            self.run.record(Hang(rank=verdict.rank, seconds=self.idle_seconds, where=verdict.text, step=self._step))


# -- reading together -----------------------------------------------------------------------------------------------------


def read_heartbeats(run: Run) -> dict[int, dict[str, Any]]:
    """Heartbeats by rank."""
    found = (read_json(path) for path in sorted(run.ranks.glob("heartbeat-*.json")))
    return {int(record["rank"]): record for record in found if record is not None and "rank" in record}


def blame(first: Mapping[int, Mapping[str, Any]], second: Mapping[int, Mapping[str, Any]], world_size: int) -> Verdict:
    """The rank that holds the others up, from two looks at the heartbeats a few writes apart."""
    absent = [rank for rank in range(world_size) if rank not in second]
    if absent:
        return Verdict(
            absent[0], f"rank {absent[0]} never started ({len(absent)} of {world_size} ranks without a heartbeat)"
        )
    # A rank that says it is stuck lives: it may have named somebody and left already.
    frozen = [r for r in range(world_size) if r in first and _still(first[r], second[r]) and not second[r].get("stuck")]
    if frozen:
        return Verdict(
            frozen[0], f"{_where(second[frozen[0]])} is frozen or gone: its process no longer writes a heartbeat"
        )
    late = _behind_in_collectives([second[r] for r in range(world_size)])
    if late is not None:
        return late
    verdict = _behind_in_beats(second, world_size)
    return verdict if verdict.rank is not None else _outside_collectives(second, world_size) or verdict


def _still(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return before.get("writes") == now.get("writes")


def _behind_in_beats(second: Mapping[int, Mapping[str, Any]], world_size: int) -> Verdict:
    fewest = min(int(r["beats"]) for r in second.values())
    behind = [r for r in range(world_size) if int(second[r]["beats"]) == fewest]
    if len(behind) == world_size:
        return Verdict(
            None,
            f"all {world_size} ranks wait in the same place (step {second[0].get('step')}, {second[0].get('phase')})",
        )
    others = next(second[r] for r in range(world_size) if r not in behind)
    return Verdict(
        behind[0],
        f"{_where(second[behind[0]])} did not come to where the others wait (step {others.get('step')}, {others.get('phase')})",
    )


def _outside_collectives(records: Mapping[int, Mapping[str, Any]], world_size: int) -> Verdict | None:
    """All came equally far: those whose stack is inside torch.distributed wait, and the one elsewhere is waited for."""
    elsewhere = [
        r
        for r in range(world_size)
        if not any("/torch/distributed/" in line for line in records[r].get("stack") or ["/torch/distributed/"])
    ]
    if not elsewhere or len(elsewhere) == world_size:
        return None
    last = next((line.strip().splitlines()[0] for line in reversed(records[elsewhere[0]]["stack"])), "unknown")
    return Verdict(
        elsewhere[0], f"{_where(records[elsewhere[0]])} is not in the collective that the others wait in, but at {last}"
    )


def _behind_in_collectives(records: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """From the flight recorders: the rank that has not entered a collective which others have."""
    groups = {name for record in records for name in (record.get("flight") or {})}
    for name in sorted(groups):
        entered = {
            int(r["rank"]): int(r["flight"][name]["entered"]) for r in records if name in (r.get("flight") or {})
        }
        low, high = min(entered.values()), max(entered.values())
        if low < high:
            rank = next(r for r, count in sorted(entered.items()) if count == low)
            record = next(r for r in records if r["rank"] == rank)
            return Verdict(rank, f"{_where(record)} entered {low} collectives of group {name}, the others {high}")
    return None


def _where(record: Mapping[str, Any]) -> str:
    return f"rank {record['rank']} on {record.get('host', 'unknown host')} (pid {record.get('pid', 'unknown')}, step {record.get('step')}, {record.get('phase')})"


def slowest(records: Mapping[int, Mapping[str, Any]]) -> tuple[int, float] | None:
    """(rank, seconds more than the fastest) by each rank's own time before the collective; None when not measured."""
    known = {rank: float(r["compute_seconds"]) for rank, r in records.items() if r.get("compute_seconds") is not None}
    if len(known) < 2:
        return None
    rank = max(known, key=lambda r: known[r])
    return rank, known[rank] - min(known.values())


def flight() -> dict[str, dict[str, int]]:
    """How many collectives this rank has entered and finished, by process group, from torch's flight recorder; empty without one."""
    if "torch" not in sys.modules:
        return {}
    try:
        import json

        from torch._C import _distributed_c10d as c10d

        dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
        return summarise(json.loads(dump(True, False))) if dump is not None else {}
    except Exception:  # a help for finding the culprit must never hide the hang itself
        return {}


def summarise(trace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
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


def _stack(thread: int | None) -> list[str]:
    frame = sys._current_frames().get(thread or 0)
    return [line.rstrip() for line in traceback.format_stack(frame)[-12:]] if frame is not None else []
