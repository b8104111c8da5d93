"""How is a checkpoint written without stopping training? A copy to host memory, then a thread that writes, checks and renames.

All ranks call the same methods in the same order; the thread of each rank talks to the others over a gloo group of its own, so
it never meets the collectives of training. Whatever goes wrong on one rank becomes the same failed save on all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import windlass
from windlass.checkpoint import files, keep, rng
from windlass.checkpoint.stage import Stager, available_bytes, state_bytes, state_extent
from windlass.config.save import SaveConfig
from windlass.errors import CheckpointError
from windlass.files import write_json
from windlass.runs.events import Saved, SaveFailed
from windlass.runs.folder import Run
from windlass.units import print_bytes

# DCP warns at every save of a single process, which is no accident here; `catch_warnings` would not be safe in a thread.
warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")

RETRY_SECONDS = 60.0
"""Pause before a failed save is tried again; doubled each time, up to sixteen times."""


@dataclass
class Outcome:
    """How one save went; the same on every rank but for the times."""

    step: int
    stall_seconds: float
    """How long training waited."""
    path: Path | None = None
    """None: it failed."""
    metric: float | None = None
    bytes: int | None = None
    write_seconds: float | None = None
    error: str | None = None
    removed: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class _Job:
    step: int
    state: dict[str, Any]
    extra: dict[str, Any]
    metric: float | None
    stall_seconds: float | None
    """None: training waits for the whole save."""
    random_state: dict[str, Any]


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(
        self, run: Run, config: SaveConfig, *, rank: int = 0, world_size: int = 1, local_world_size: int = 1
    ) -> None:
        self.run, self.config, self.rank, self.world_size = run, config, rank, world_size
        self.last: Outcome | None = None
        """The newest finished save, good or bad."""
        self.good: Outcome | None = None
        """The newest one that succeeded."""
        self._local_world_size = local_world_size
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-save")
        self._stager = Stager()
        self._pending: Future[Outcome] | None = None
        self._failures, self._retry_at = 0, 0.0

    # -- what the loop calls --------------------------------------------------------------------------------------------

    def prepare(self, state: dict[str, Any]) -> str:
        """Reserve the memory for asynchronous saves; the sentence says what was decided and why."""
        if not self.config.asynchronous:
            return "checkpoints: training waits while they are written (save.asynchronous = false)"
        need, free = state_bytes(state) * self._local_world_size, available_bytes()
        if free is not None and need > 0.9 * free:
            self._stager.close()
            self._blocking_reason = f"the copy needs {print_bytes(need)} of host memory and {print_bytes(free)} is free"
            return f"checkpoints: training waits while they are written ({self._blocking_reason})"
        self._stager.prepare(state)
        return f"checkpoints: written in the background from a copy of {print_bytes(need)} in host memory"

    _blocking_reason: str | None = None

    def forecast(self, state: dict[str, Any], *, steps: int, batch_tokens: int) -> keep.Forecast:
        """Disk use of the whole run; a run whose save.quota cannot hold it is refused before its first step."""
        names, mine = state_extent(state)
        with self._together("forecasting") as said:
            said["extent"] = (names, mine)
            if self.rank == 0:
                said["free"] = shutil.disk_usage(self.run.checkpoints).free + sum(
                    s.bytes for s in files.list_saved(self.run)
                )
        whole = sum(dict(heard["extent"] for heard in self._heard).values())  # pipeline stages add up, copies do not
        found = keep.forecast(
            whole, self.config, steps=steps, batch_tokens=batch_tokens, free_bytes=self._heard[0]["free"]
        )
        keep.check_quota(found)
        return found

    def save(
        self, step: int, state: dict[str, Any], extra: dict[str, Any], metric: float | None = None, block: bool = False,
        began: float | None = None,
    ) -> Outcome | None:  # fmt: skip
        """Begin a save of `state` (tensors, any sharding) and `extra` (JSON). With `block`, wait and return how it went.

        A save that is still under way is waited for first: there are never two half-written ones. `began`: when training
        began to wait (`time.perf_counter`), where gathering `extra` took time too.
        """
        begin = time.perf_counter() if began is None else began
        self.finish()
        if not block and self.config.asynchronous and self._blocking_reason is None:
            job = _Job(step, self._stager.stage(state), extra, metric, time.perf_counter() - begin, rng.capture())
            self._pending = self._thread.submit(self._write, job)
            return None
        outcome = self._write(_Job(step, state, extra, metric, None, rng.capture()))
        outcome.stall_seconds = time.perf_counter() - begin
        self._note(outcome)
        return outcome

    def poll(self) -> Outcome | None:
        """How the save in the background went, once it is done; None while it runs or when there is none."""
        return self.finish() if self._pending is not None and self._pending.done() else None

    def finish(self) -> Outcome | None:
        """Wait for the save in the background, if there is one."""
        if self._pending is None:
            return None
        outcome, self._pending = self._pending.result(), None
        self._note(outcome)
        return outcome

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def retry_due(self) -> bool:
        """A save has failed and its pause is over: save again at the next step."""
        return self._failures > 0 and not self.busy and time.monotonic() >= self._retry_at

    def seconds_needed(self) -> float | None:
        """How long a blocking save took or would take, from what was measured; None before the first."""
        good = self.good
        return None if good is None or good.write_seconds is None else good.write_seconds + good.stall_seconds

    @property
    def trouble(self) -> str | None:
        """What the person at the terminal should hear of failing saves: at the first failure, the second, the fourth, ..."""
        if self.last is None or self.last.ok or self._failures & (self._failures - 1):
            return None
        good = (
            f"the newest good one is step {self.good.step}" if self.good else "there is no good one of this start yet"
        )
        times = "" if self._failures == 1 else f", {self._failures} times in a row"
        return f"step {self.last.step} could not be saved{times}: {self.last.error}; training goes on and tries again; {good}"

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()
        self._stager.close()

    def _note(self, outcome: Outcome) -> None:
        self.last = outcome
        if outcome.ok:
            self.good, self._failures = outcome, 0
        else:
            self._failures += 1
            self._retry_at = time.monotonic() + RETRY_SECONDS * 2 ** min(self._failures - 1, 4)

    # -- what the thread does -------------------------------------------------------------------------------------------

    def _write(self, job: _Job) -> Outcome:
        begin = time.perf_counter()
        outcome = Outcome(job.step, job.stall_seconds or 0.0, metric=job.metric)
        try:
            self._write_files(job)
            outcome.path, outcome.bytes = self._publish(job, outcome, begin)
            outcome.write_seconds = time.perf_counter() - begin
            outcome.stall_seconds = outcome.write_seconds if job.stall_seconds is None else job.stall_seconds
        except Exception as error:
            outcome.error = _first_line(error)
            self._failed(job, outcome.error)
            return outcome
        if self.rank == 0:
            self._saved(job, outcome)
        return outcome

    def _write_files(self, job: _Job) -> None:
        folder = files.temporary(self.run, job.step)
        with self._together("preparing the folder"):
            if self.rank == 0:
                self._make_room(folder)
        with self._together("writing"), _quiet_dcp(), _without_zip_checksums():
            dcp.save(
                job.state,
                storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1),
                planner=DefaultSavePlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )

    def _make_room(self, folder: Path) -> None:
        """A fresh temporary folder, on a disk that has space for what the last save took."""
        files.sweep_removed(self.run)
        for _, leftover in files.temporaries(self.run):
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir(parents=True)
        need = self.good.bytes if self.good else None
        free = shutil.disk_usage(folder).free
        if need is not None and free < need:
            raise CheckpointError(
                "checkpoint.disk-free-checkpoint-needs",
                f"the disk of {self.run.checkpoints} has {print_bytes(free)} free and a checkpoint needs {print_bytes(need)}",
            )

    def _publish(self, job: _Job, outcome: Outcome, begin: float) -> tuple[Path, int]:
        """Checksums of every rank's files, the manifest, the rename; the final folder and its size."""
        folder, target = files.temporary(self.run, job.step), self.run.checkpoint(job.step)
        with self._together("reading back") as said:
            mine = sorted(p.name for p in folder.glob(f"__{self.rank}_*.distcp")) + (
                [".metadata"] if self.rank == 0 else []
            )
            said["files"], said["rng"] = files.describe(folder, mine), job.random_state
        with self._together("completing") as told:
            if self.rank == 0:
                told["bytes"] = self._complete(job, folder, target, begin)
        return target, int(self._heard[0]["bytes"])

    def _complete(self, job: _Job, folder: Path, target: Path, begin: float) -> int:
        write_json(folder / files.EXTRA, {"extra": job.extra, "rng": [heard["rng"] for heard in self._heard]})
        listed = {name: entry for heard in self._heard for name, entry in heard["files"].items()} | files.describe(
            folder, [files.EXTRA]
        )
        manifest = {
            "format": files.FORMAT, "windlass": windlass.__version__, "algorithm": files.ALGORITHM, "step": job.step,
            "tokens": job.extra.get("tokens"), "metric": job.metric, "metric_name": self.config.metric, "world_size": self.world_size,
            "stall_seconds": job.stall_seconds, "write_seconds": time.perf_counter() - begin, "written_at": time.time(), "files": listed,
        }  # fmt: skip
        files.publish(folder, manifest, target)
        return sum(entry["bytes"] for entry in listed.values())

    _heard: list[dict[str, Any]]
    """What every rank said at the end of the last `_together`."""

    @contextlib.contextmanager
    def _together(self, doing: str) -> Iterator[dict[str, Any]]:
        """Run a phase on all ranks: an error on one is raised on all, and each hears what the others said."""
        said: dict[str, Any] = {}
        failure: BaseException | None = None
        try:
            yield said
        except Exception as error:
            failure, said["error"] = error, f"rank {self.rank}, {doing}: {_first_line(error)}"
        heard = [said]
        if self._group is not None:
            heard = [{} for _ in range(self.world_size)]
            dist.all_gather_object(heard, said, group=self._group)
        self._heard = heard
        if problems := [h["error"] for h in heard if "error" in h]:
            raise CheckpointError("checkpoint.failed", "; ".join(dict.fromkeys(problems))[:1000]) from failure

    def _saved(self, job: _Job, outcome: Outcome) -> None:
        with contextlib.suppress(OSError):  # a full disk must not turn a good save into a failed one
            self.run.record(Saved(step=job.step, tokens=job.extra.get("tokens"), bytes=outcome.bytes, stall_seconds=outcome.stall_seconds,
                write_seconds=outcome.write_seconds, checkpoint=str(outcome.path.name if outcome.path else ""), metric=job.metric))  # fmt: skip
            outcome.removed = keep.tidy(self.run, self.config)

    def _failed(self, job: _Job, error: str) -> None:
        if self.rank:
            return
        shutil.rmtree(files.temporary(self.run, job.step), ignore_errors=True)
        with contextlib.suppress(OSError):
            self.run.record(SaveFailed(step=job.step, error=error))


@contextlib.contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """torch.save's own CRC takes half of the time of a write and is never read; the manifest has our checksums of every byte."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def _quiet_dcp() -> Iterator[None]:
    """DCP reports a failure of any rank as one exception that holds all of them; name the first in a line."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (inner, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            "checkpoint.rank-could-write", f"rank {rank} could not write: {_first_line(inner)}"
        ) from inner


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    text = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}: {text[0]}"
        if text and not isinstance(error, CheckpointError)
        else (text[0] if text else type(error).__name__)
    )


def plain_write_speed(folder: Path, size: int = 2**28) -> float:
    """Bytes per second of a plain sequential write with sync, to set a save's time beside."""
    block, path = os.urandom(2**22), folder / ".speed"
    begin = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(size // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        return size / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)
