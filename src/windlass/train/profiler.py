"""A run's profile of itself: a hook that records a few steps, set in the recipe or requested while the run is alive.

Outside such a window it compares two numbers per step and looks for a request once a second; the profiler does not
exist then.
"""

import contextlib
import gzip
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from windlass.config.observe import ProfileConfig, parse_step_range
from windlass.profile.captures import TraceRequest, answer_file, answer_request, read_request, request_file
from windlass.runs import Run
from windlass.runs.events import Profiled
from windlass.train.hooks import Hook, Training
from windlass.train.step import StepResult

TRACE_POLL_SECONDS = 1.0
# Allocations that a memory snapshot remembers.
MEMORY_EVENTS = 100_000


@dataclass(frozen=True)
class ProfileWindow:
    """Steps first to end - 1, numbered as in the metrics, and what to record of them."""

    first: int
    end: int
    settings: ProfileConfig | TraceRequest


class Capture:
    """One window on one rank: prepare, record, write. Independent of the loop, so that scripts can use it too."""

    # PyTorch has one profiler per process; a second one crashes it.
    _active: ClassVar["Capture | None"] = None

    def __init__(self, window: ProfileWindow, device: torch.device, folder: Path, rank: int) -> None:
        self.window, self.device, self.folder, self.rank = window, device, folder, rank
        self.cuda = device.type == "cuda"
        self.steps, self.recording = 0, False
        self._step_mark = contextlib.ExitStack()
        self._step: int | None = None
        if Capture._active is not None:
            raise RuntimeError("this process is being profiled already")
        Capture._active = self
        cpu, cuda = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
        self._profiler = torch.profiler.profile(
            activities=[cpu, cuda] if self.cuda else [cpu],
            record_shapes=window.settings.shapes,
            with_stack=window.settings.stacks,
            profile_memory=window.settings.memory,
        )
        # The first start loads the device's tracing library; one step ahead, so that this is not inside the window.
        self._profiler.prepare_trace()

    def begin_step(self, step: int) -> None:
        """From here to `end_step` is `step`; no effect when it has begun already."""
        if self._step == step:
            return
        if not self.recording:
            self.recording = True
            if self.cuda:
                # Work launched before the window is not in the trace; without this it would look like idle time.
                torch.cuda.synchronize(self.device)
                if self.window.settings.memory:
                    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._profiler.start_trace()
        self._step = step
        self._step_mark.enter_context(torch.profiler.record_function(f"ProfilerStep#{step}"))

    def end_step(self) -> None:
        self._step_mark.close()
        self._step = None
        self.steps += 1

    def finish(self) -> list[Path]:
        """Wait for the device, stop, and write the files, each atomically."""
        if not self.recording:
            return []
        if self.cuda:
            torch.cuda.synchronize(self.device)
        self.abandon()
        files = [self.folder / f"rank-{self.rank:05d}.json.gz"]
        with _written(files[0]) as temporary:
            self._profiler.export_chrome_trace(str(temporary))
            if self._step is not None:
                # The run ended inside this step: its mark must not count as a step.
                mark, unfinished = f'"ProfilerStep#{self._step}"', f'"unfinished step {self._step}"'
                text = gzip.decompress(temporary.read_bytes()).replace(mark.encode(), unfinished.encode())
                temporary.write_bytes(gzip.compress(text, 6))
        if self.window.settings.memory and self.cuda:
            files.append(self.folder / f"memory-{self.rank:05d}.pickle")
            write_memory_snapshot(files[-1])
            torch.cuda.memory._record_memory_history(enabled=None)
        return files

    def abandon(self) -> None:
        """Stop without writing."""
        self._step_mark.close()
        if self.recording:
            self.recording = False
            self._profiler.stop_trace()
        if Capture._active is self:
            Capture._active = None


class Profiler(Hook):
    """The hook. A failure in profiling is reported and never ends the run."""

    def __init__(self, *, poll_seconds: float = TRACE_POLL_SECONDS) -> None:
        self._poll_seconds = poll_seconds
        self._polled_at = time.monotonic()
        self._window: ProfileWindow | None = None
        self._capture: Capture | None = None
        self._handled_ids: set[str] = set()
        self._step_seconds: float | None = None
        self._step_began_at: float | None = None

    def on_start(self, training: Training) -> None:
        config = training.recipe.profile
        if config.steps is not None:
            window = ProfileWindow(*parse_step_range(config.steps), config)
            self._window = window if training.step < window.first else None
        if training.world.rank == 0:  # left by an earlier start of this run
            answer_file(training.run).unlink(missing_ok=True)
        if training.world.device.type == "cuda":
            watch_out_of_memory(training.run, training.world.rank)

    def on_step_begin(self, training: Training) -> None:
        if self._window is None:
            self._poll_requests(training)
        window, step = self._window, training.step + 1
        if window is None or step < window.first - 1:
            return
        if window.settings.ranks and training.world.rank not in window.settings.ranks:
            if step >= window.end:  # forget it, so that this rank notices the next request
                self._window = None
            return
        with self._reported(training):
            if self._capture is None:
                folder = training.run.profile / f"step-{window.first:09d}"
                self._capture = Capture(window, training.world.device, folder, training.world.rank)
            if step >= window.first:
                self._capture.begin_step(step)

    def on_step_end(self, training: Training, result: StepResult) -> None:
        capture, window = self._capture, self._window
        if capture is None or window is None:
            return
        with self._reported(training):
            if capture.recording:
                capture.end_step()
            if training.step >= window.end - 1:
                self._finish(training, capture)
            elif training.step + 1 >= window.first:
                # The next step begins here, not at its forward pass: waiting for data and saving are part of it.
                capture.begin_step(training.step + 1)

    def on_stop(self, training: Training, reason: str | None) -> None:
        if self._capture is not None and self._capture.steps and reason != "error":
            self._finish(training, self._capture)
        elif self._capture is not None:
            with contextlib.suppress(Exception):
                self._capture.abandon()

    def _finish(self, training: Training, capture: Capture) -> None:
        window, self._capture, self._window = capture.window, None, None
        began_at = time.monotonic()
        files = [str(path.relative_to(training.run.path)) for path in capture.finish()]
        steps = f"{window.first}:{window.first + capture.steps}"
        training.run.record(
            Profiled(
                steps=steps,
                files=files,
                rank=training.world.rank,
                seconds=time.monotonic() - began_at,
                request=getattr(window.settings, "id", None),
            )
        )
        if training.world.rank == 0:
            training.say(
                f"profiled steps {steps}: {', '.join(files)}; "
                f"`windlass profile {training.run.name}` shows where the time goes"
            )
            answer_file(training.run).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reported(self, training: Training) -> Iterator[None]:
        """Report an error of the block and give the window up."""
        try:
            yield
        except Exception as error:
            if self._capture is not None:
                with contextlib.suppress(Exception):
                    self._capture.abandon()
            self._capture = self._window = None
            training.say(
                f"profiling failed on rank {training.world.rank} and was stopped: {type(error).__name__}: {error}"
            )

    def _poll_requests(self, training: Training) -> None:
        """Look for a request of another shell. Rank 0 answers it with the steps; the other ranks read the answer."""
        now = time.monotonic()
        if self._step_began_at is not None:
            self._step_seconds = now - self._step_began_at
        self._step_began_at = now
        if now - self._polled_at < self._poll_seconds:
            return
        self._polled_at = now
        main, path = training.world.rank == 0, request_file(training.run)
        if main and not path.exists():
            return
        with contextlib.suppress(OSError):
            request = read_request(path if main else answer_file(training.run))
            if main and request is None:
                path.unlink(missing_ok=True)
            elif main and request is not None:
                lead_steps = 1
                if training.world.size > 1:  # the others look once per poll, and a shared file system shows files late
                    seconds = 3 * self._poll_seconds
                    lead_steps = 2 + math.ceil(seconds / max(self._step_seconds or seconds, 1e-3))
                request = answer_request(training.run, request, training.step + 1 + lead_steps)
            if request is None or request.id in self._handled_ids or request.first is None:
                return
            self._handled_ids.add(request.id)
            # One step is needed to prepare; a rank that reads the answer too late skips this window.
            if training.step + 1 < request.first:
                self._window = ProfileWindow(request.first, request.first + request.steps, request)


def watch_out_of_memory(run: Run, rank: int) -> None:
    """Write a memory snapshot when the allocator gives up, before the error frees what held the memory."""

    def dump(device: int, requested: int, allocated: int, free: int) -> None:
        with contextlib.suppress(Exception):
            write_memory_snapshot(run.profile / f"out-of-memory-{rank:05d}.pickle")

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(dump)


def write_memory_snapshot(path: Path) -> None:
    with _written(path) as temporary:
        torch.cuda.memory._dump_snapshot(str(temporary))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends; torch only writes to file names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name.partition('.')[0]}.{os.getpid()}.tmp{path.suffix}")
    yield temporary
    temporary.replace(path)
