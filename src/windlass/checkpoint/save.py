"""Writes checkpoints without stopping training: a copy to host memory, then a thread that writes, checks and renames.

All ranks call the same methods in the same order. The threads of the ranks use a gloo group of their own, so they never
meet the collectives of training. A failure on one rank becomes the same failed save on all of them.
"""

import contextlib
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import windlass
from windlass.checkpoint import files, keep, rng
from windlass.checkpoint.stage import Stager, available_bytes, state_bytes, state_extent
from windlass.config.save import SaveConfig
from windlass.errors import CheckpointError
from windlass.files import write_json
from windlass.runs.events import Saved, SaveFailed
from windlass.runs.folder import Run
from windlass.units import print_bytes

# DCP warns at every save of a single process, which is intended here; `catch_warnings` would not be safe in a thread.
warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")

RETRY_SECONDS = 60.0  # pause before a failed save is tried again; doubled each time, up to sixteen-fold

Result = TypeVar("Result")


@dataclass
class SaveResult:
    """The result of one save; the same on every rank except for the times."""

    step: int
    stall_seconds: float  # how long training waited
    path: Path | None = None  # None: it failed
    metric: float | None = None
    bytes: int | None = None
    write_seconds: float | None = None
    error: str | None = None
    removed: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class SaveRequest:
    """What one save writes."""

    step: int
    state: dict[str, Any]
    extra: dict[str, Any]
    metric: float | None
    stall_seconds: float | None  # None: training waits for the whole save
    random_state: dict[str, Any] = field(default_factory=rng.capture)


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(
        self, run: Run, config: SaveConfig, *, rank: int = 0, world_size: int = 1, local_world_size: int = 1
    ) -> None:
        self.run, self.config, self.rank, self.world_size = run, config, rank, world_size
        self.last: SaveResult | None = None  # the newest finished save
        self.good: SaveResult | None = None  # the newest successful save
        self._local_world_size = local_world_size
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-save")
        self._stager = Stager()
        self._pending: Future[SaveResult] | None = None
        self._failures, self._retry_at = 0, 0.0
        self._is_blocking = not config.asynchronous

    def prepare(self, state: dict[str, Any]) -> str:
        """Reserve the memory for asynchronous saves. Returns one sentence on what was decided and why."""
        if not self.config.asynchronous:
            return "checkpoints: training waits while they are written (save.asynchronous = false)"
        need, free = state_bytes(state) * self._local_world_size, available_bytes()
        if free is not None and need > 0.9 * free:
            self._stager.close()
            self._is_blocking = True
            reason = f"the copy needs {print_bytes(need)} of host memory and {print_bytes(free)} is free"
            return f"checkpoints: training waits while they are written ({reason})"
        self._stager.prepare(state)
        return f"checkpoints: written in the background from a copy of {print_bytes(need)} in host memory"

    def forecast(self, state: dict[str, Any], *, steps: int, batch_tokens: int) -> keep.Forecast:
        """Disk use of the run; a run that does not fit into its save.quota is refused before its first step."""

        def measure() -> tuple[tuple[int, int], int]:
            free = 0
            if self.rank == 0:
                free = shutil.disk_usage(self.run.checkpoints).free + sum(s.bytes for s in files.list_saved(self.run))
            return state_extent(state), free

        answers = self._on_all_ranks("forecasting", measure)
        total_bytes = sum(dict(extent for extent, _ in answers).values())  # pipeline stages add up, copies do not
        need = keep.forecast(total_bytes, self.config, steps=steps, batch_tokens=batch_tokens, free_bytes=answers[0][1])
        keep.check_quota(need)
        return need

    def save(
        self,
        step: int,
        state: dict[str, Any],
        extra: dict[str, Any],
        metric: float | None = None,
        block: bool = False,
        began: float | None = None,
    ) -> SaveResult | None:
        """Start a save of `state` (tensors, any sharding) and `extra` (JSON). With `block`, wait and return the result.

        A save that is still running is awaited first: there are never two unfinished ones. `began`: when training
        started to wait (`time.perf_counter`), where gathering `extra` took time too.
        """
        started = time.perf_counter() if began is None else began
        self.finish()
        if not block and not self._is_blocking:
            request = SaveRequest(step, self._stager.stage(state), extra, metric, time.perf_counter() - started)
            self._pending = self._thread.submit(self._write, request)
            return None
        result = self._write(SaveRequest(step, state, extra, metric, None))
        result.stall_seconds = time.perf_counter() - started
        self._record(result)
        return result

    def poll(self) -> SaveResult | None:
        """The result of the background save once it is done; None while it runs or when there is none."""
        return None if self.busy else self.finish()

    def finish(self) -> SaveResult | None:
        """Wait for the background save, if there is one."""
        if self._pending is None:
            return None
        result, self._pending = self._pending.result(), None
        self._record(result)
        return result

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def retry_due(self) -> bool:
        """A save has failed and its pause is over: save again at the next step."""
        return self._failures > 0 and not self.busy and time.monotonic() >= self._retry_at

    def seconds_needed(self) -> float | None:
        """How long a blocking save takes, as measured; None before the first."""
        good = self.good
        return None if good is None or good.write_seconds is None else good.write_seconds + good.stall_seconds

    @property
    def trouble(self) -> str | None:
        """A message about failing saves for the terminal: at the first failure, the second, the fourth, ..."""
        if self.last is None or self.last.ok or self._failures & (self._failures - 1):
            return None
        good = (
            f"the newest complete checkpoint is step {self.good.step}"
            if self.good
            else "this start has no complete checkpoint yet"
        )
        times = "" if self._failures == 1 else f" ({self._failures} times in a row)"
        problem = f"step {self.last.step} could not be saved{times}: {self.last.error}"
        return f"{problem}; training continues and retries; {good}"

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()
        self._stager.close()

    def _record(self, result: SaveResult) -> None:
        self.last = result
        if result.ok:
            self.good, self._failures = result, 0
        else:
            self._failures += 1
            self._retry_at = time.monotonic() + RETRY_SECONDS * 2 ** min(self._failures - 1, 4)

    # The methods below run in the background thread.

    def _write(self, request: SaveRequest) -> SaveResult:
        started = time.perf_counter()
        result = SaveResult(request.step, request.stall_seconds or 0.0, metric=request.metric)
        folder = files.temporary(self.run, request.step)
        is_first = self.rank == 0

        def read_back() -> tuple[dict[str, Any], dict[str, Any]]:
            shards = sorted(path.name for path in folder.glob(f"__{self.rank}_*.distcp"))
            return files.describe(folder, [*shards, ".metadata"] if is_first else shards), request.random_state

        try:
            self._on_all_ranks("preparing the folder", lambda: self._make_room(folder) if is_first else None)
            self._on_all_ranks("writing", lambda: self._write_tensors(request, folder))
            parts = self._on_all_ranks("reading back", read_back)
            sizes = self._on_all_ranks(
                "completing", lambda: self._complete(request, folder, parts, started) if is_first else 0
            )
        except Exception as error:
            result.error = _first_line(error)
            if is_first:
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self.run.record(SaveFailed(step=request.step, error=result.error))
            return result
        result.path, result.bytes = self.run.checkpoint(request.step), sizes[0]
        result.write_seconds = time.perf_counter() - started
        result.stall_seconds = result.write_seconds if request.stall_seconds is None else request.stall_seconds
        if is_first:
            with contextlib.suppress(OSError):  # a full disk must not turn a good save into a failed one
                self.run.record(
                    Saved(
                        step=request.step,
                        tokens=request.extra.get("tokens"),
                        bytes=result.bytes,
                        stall_seconds=result.stall_seconds,
                        write_seconds=result.write_seconds,
                        checkpoint=result.path.name,
                        metric=request.metric,
                    )
                )
                result.removed = keep.tidy(self.run, self.config)
        return result

    def _make_room(self, folder: Path) -> None:
        """A fresh temporary folder, on a disk with space for what the last save took."""
        files.sweep_removed(self.run)
        for _, leftover in files.temporaries(self.run):
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir(parents=True)
        need, free = (self.good and self.good.bytes) or 0, shutil.disk_usage(folder).free
        if free < need:
            raise CheckpointError(
                "checkpoint.disk-full",
                f"the disk of {self.run.checkpoints} has {print_bytes(free)} free "
                f"and a checkpoint needs {print_bytes(need)}",
            )

    def _write_tensors(self, request: SaveRequest, folder: Path) -> None:
        # torch.save's own CRC takes half of a write's time and is never read; the manifest has checksums of every byte.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save_distributed(
                request.state,
                storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1),
                planner=DefaultSavePlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:  # it holds the failures of all ranks: name the first
            rank, (failure, _) = next(iter(error.failures.items()))
            if isinstance(failure, KeyboardInterrupt):
                raise failure from None
            raise CheckpointError(
                "checkpoint.write-failed", f"rank {rank} could not write: {_first_line(failure)}"
            ) from failure
        finally:
            torch.serialization.set_crc32_options(before)

    def _complete(
        self, request: SaveRequest, folder: Path, parts: list[tuple[dict[str, Any], dict[str, Any]]], started: float
    ) -> int:
        """Write extra.json and the manifest, rename the folder; returns the size of the checkpoint."""
        write_json(folder / files.EXTRA, {"extra": request.extra, "rng": [random_state for _, random_state in parts]})
        listed = {name: entry for described, _ in parts for name, entry in described.items()}
        listed |= files.describe(folder, [files.EXTRA])
        manifest = {
            "format": files.FORMAT,
            "windlass": windlass.__version__,
            "algorithm": files.ALGORITHM,
            "step": request.step,
            "tokens": request.extra.get("tokens"),
            "metric": request.metric,
            "metric_name": self.config.metric,
            "world_size": self.world_size,
            "stall_seconds": request.stall_seconds,
            "write_seconds": time.perf_counter() - started,
            "written_at": time.time(),
            "files": listed,
        }
        files.publish(folder, manifest, self.run.checkpoint(request.step))
        return sum(entry["bytes"] for entry in listed.values())

    def _on_all_ranks(self, phase: str, work: Callable[[], Result]) -> list[Result]:
        """Run a phase on all ranks and return the results of all; an error on one rank is raised on all."""
        answer: dict[str, Any] = {}
        failure: BaseException | None = None
        try:
            answer["result"] = work()
        except Exception as error:
            failure, answer["error"] = error, f"rank {self.rank}, {phase}: {_first_line(error)}"
        answers = [answer] * self.world_size
        if self._group is not None:
            dist.all_gather_object(answers, answer, group=self._group)
        if problems := [a["error"] for a in answers if "error" in a]:
            raise CheckpointError("checkpoint.save-failed", "; ".join(dict.fromkeys(problems))[:1000]) from failure
        return [a["result"] for a in answers]


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    name, lines = type(error).__name__, str(error).strip().splitlines()
    prefix = "" if isinstance(error, CheckpointError) else f"{name}: "
    return prefix + lines[0] if lines else name
