"""How does a run take a trace of itself? A hook that wakes for a few steps, named in the recipe or asked for while the run lives.

Outside a window it compares two numbers per step and looks for a request once a second; the profiler does not exist then.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from windlass.config.observe import ProfileConfig, window_of
from windlass.profile.trace_request import TraceRequest, answer_file, answer_request, read_request, request_file
from windlass.runs import Run
from windlass.train.hooks import Hook

if TYPE_CHECKING:
    from windlass.train.job import Job
    from windlass.train.step import StepResult

POLL_SECONDS = 1.0
MEMORY_EVENTS = 100_000
"""Allocations that a memory snapshot remembers."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps first to end - 1, numbered as in the metrics."""

    first: int
    end: int
    ranks: tuple[int, ...] = (0,)
    """Empty: all."""
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    request: str | None = None

    def includes(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks


def planned_window(config: ProfileConfig) -> Window | None:
    if config.steps is None:
        return None
    first, end = window_of(config.steps)
    return Window(
        first=first,
        end=end,
        ranks=tuple(config.ranks),
        shapes=config.shapes,
        stacks=config.stacks,
        memory=config.memory,
    )


def asked_window(request: TraceRequest) -> Window:
    if request.first is None:
        raise ValueError("rank 0 has not named the first step yet")
    return Window(
        first=request.first, end=request.first + request.steps, ranks=tuple(request.ranks),
        shapes=request.shapes, stacks=request.stacks, memory=request.memory, request=request.id,
    )  # fmt: skip


class Capture:
    """One window on one rank: warm up, record, write. Knows nothing of the loop, so scripts can use it too."""

    _active: ClassVar[Capture | None] = None
    """PyTorch has one profiler per process; a second one crashes it."""

    def __init__(self, window: Window, device: torch.device, folder: Path, rank: int) -> None:
        self.window, self.device, self.folder, self.rank = window, device, folder, rank
        self.steps = 0
        self._mark: Any = None
        self._number: int | None = None
        self._recording = False
        if Capture._active is not None:
            raise RuntimeError("this process is being profiled already")
        Capture._active = self
        self._profiler = torch.profiler.profile(
            activities=_activities(device), record_shapes=window.shapes, with_stack=window.stacks, profile_memory=window.memory
        )  # fmt: skip
        # The first start loads the device's tracing library; one step ahead, so that it does not fall into the window.
        self._profiler.prepare_trace()

    @property
    def recording(self) -> bool:
        return self._recording

    def begin_step(self, number: int) -> None:
        """From here to `end_step` is step `number`; nothing when it has begun already."""
        if self._number == number:
            return
        if not self._recording:
            self._recording = True
            if self.device.type == "cuda":
                # Work launched before the window is not in the trace; without this it would look like idle time of the first step.
                torch.cuda.synchronize(self.device)
            if self.window.memory and self.device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._profiler.start_trace()
        self._number = number
        self._mark = torch.profiler.record_function(f"ProfilerStep#{number}")
        self._mark.__enter__()

    def end_step(self) -> None:
        self._mark.__exit__(None, None, None)
        self._mark = self._number = None
        self.steps += 1

    def finish(self) -> list[Path]:
        """Wait for the device, stop, and write the files; each appears whole."""
        if not self._recording:
            return []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.abandon()
        files = [self._write_trace()] if self.steps else []
        if self.window.memory and self.device.type == "cuda":
            files.append(self._write_memory())
        return files

    def abandon(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if self._recording:
            self._recording = False
            self._profiler.stop_trace()
        if Capture._active is self:
            Capture._active = None

    def _write_trace(self) -> Path:
        path = self.folder / f"rank-{self.rank:05d}.json.gz"
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.stem}.{os.getpid()}.tmp.gz")
        self._profiler.export_chrome_trace(str(beside))
        if self._number is not None:
            _forget_step(beside, self._number)
        beside.replace(path)
        return path

    def _write_memory(self) -> Path:
        path = self.folder / f"memory-{self.rank:05d}.pickle"
        _dump_memory(path)
        torch.cuda.memory._record_memory_history(enabled=None)
        return path


class Profiler(Hook):
    """The hook. A failure in profiling is told and never ends the run."""

    def __init__(self, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._poll_seconds = poll_seconds
        self._polled = time.monotonic()
        self._window: Window | None = None
        self._capture: Capture | None = None
        self._seen: set[str] = set()
        self._step_seconds: float | None = None
        self._stepped: float | None = None

    def on_start(self, job: Job) -> None:
        window = planned_window(job.recipe.profile)
        if window is not None and job.step + 1 <= window.first:
            self._window = window
        if job.world.rank == 0:  # answered in an earlier life of this run
            answer_file(job.run).unlink(missing_ok=True)
        if job.world.device.type == "cuda":
            watch_out_of_memory(job.run, job.world.rank)

    def on_step_begin(self, job: Job) -> None:
        if self._window is None:
            self._look_for_request(job)
        window, number = self._window, job.step + 1
        if window is None or number < window.first - 1 or not window.includes(job.world.rank):
            self._drop_passed(job)
            return
        try:
            self._step(job, window, number)
        except Exception as error:
            self._fail(job, error)

    def on_step_end(self, job: Job, result: StepResult) -> None:
        capture, window = self._capture, self._window
        if capture is None or window is None:
            return
        try:
            if capture.recording:
                capture.end_step()
            if job.step >= window.end - 1:
                self._finish(job)
            elif job.step + 1 >= window.first:
                # The next step begins here, not at its forward pass: waiting for data and saving are part of it.
                capture.begin_step(job.step + 1)
        except Exception as error:
            self._fail(job, error)

    def on_stop(self, job: Job, reason: str | None) -> None:
        capture, self._capture = self._capture, None
        if capture is None:
            return
        if reason == "error" or not capture.steps:
            with contextlib.suppress(Exception):
                capture.abandon()
        else:
            self._capture = capture
            self._finish(job)

    def _step(self, job: Job, window: Window, number: int) -> None:
        if self._capture is None:
            folder = job.run.profile / f"step-{window.first:09d}"
            self._capture = Capture(window, job.world.device, folder, job.world.rank)
        if number >= window.first:
            self._capture.begin_step(number)

    def _finish(self, job: Job) -> None:
        capture, window = self._capture, self._window
        self._capture = self._window = None
        if capture is None or window is None:
            return
        began = time.monotonic()
        files = [str(p.relative_to(job.run.path)) for p in capture.finish()]
        steps = f"{window.first}:{window.first + capture.steps}"
        job.run.event(
            "profiled",
            steps=steps,
            files=files,
            rank=job.world.rank,
            seconds=time.monotonic() - began,
            request=window.request,
        )
        if job.world.rank == 0:
            job.say(
                f"profiled steps {steps}: {', '.join(files)}; `windlass profile {job.run.name}` shows where the time goes"
            )
            answer_file(job.run).unlink(missing_ok=True)

    def _drop_passed(self, job: Job) -> None:
        """A rank that is not in the window forgets it when it is over, so that it can hear the next request."""
        if self._window is not None and job.step + 1 >= self._window.end:
            self._window = None

    def _fail(self, job: Job, error: Exception) -> None:
        if self._capture is not None:
            with contextlib.suppress(Exception):
                self._capture.abandon()
        self._capture = self._window = None
        job.say(f"profiling failed on rank {job.world.rank} and was given up: {type(error).__name__}: {error}")

    # -- requests from another shell ------------------------------------------------------------------------------------

    def _look_for_request(self, job: Job) -> None:
        now = time.monotonic()
        if self._stepped is not None:
            self._step_seconds = now - self._stepped
        self._stepped = now
        if now - self._polled < self._poll_seconds:
            return
        self._polled = now
        with contextlib.suppress(OSError):
            request = self._answer(job) if job.world.rank == 0 else read_request(answer_file(job.run))
            if request is None or request.id in self._seen or request.first is None:
                return
            self._seen.add(request.id)
            # One step is needed to warm up; a rank that sees the answer too late stays out of this window.
            if job.step + 1 < request.first:
                self._window = asked_window(request)

    def _answer(self, job: Job) -> TraceRequest | None:
        path = request_file(job.run)
        if not path.exists():
            return None
        request = read_request(path)
        if request is None:
            path.unlink(missing_ok=True)
            return None
        return answer_request(job.run, request, job.step + 1 + self._lead(job.world.size))

    def _lead(self, world_size: int) -> int:
        """Steps until the window: the other ranks look once per poll, and a shared file system shows files late."""
        if world_size == 1:
            return 1
        seconds = 3 * self._poll_seconds
        return 2 + math.ceil(seconds / max(self._step_seconds or seconds, 1e-3))


def marked(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches, the wait for each named as data loading in a trace; a few microseconds per step."""
    items = iter(batches)
    while True:
        with torch.profiler.record_function("enumerate(DataLoader)#windlass.__next__"):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _forget_step(path: Path, number: int) -> None:
    """The run ended inside this step: its mark must not count as a step."""
    text = gzip.decompress(path.read_bytes()).replace(
        f'"ProfilerStep#{number}"'.encode(), f'"unfinished step {number}"'.encode()
    )
    path.write_bytes(gzip.compress(text, 6))


def _activities(device: torch.device) -> list[Any]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    return [*kinds, torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else kinds


def watch_out_of_memory(run: Run, rank: int) -> None:
    """When the allocator gives up, what held the memory is written before the error unwinds and frees it. Costs nothing until then."""

    def dump(device: int, asked: int, allocated: int, free: int) -> None:
        with contextlib.suppress(Exception):
            _dump_memory(run.profile / f"out-of-memory-{rank:05d}.pickle")

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(dump)


def _dump_memory(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.cuda.memory._dump_snapshot(str(beside))
    beside.replace(path)
