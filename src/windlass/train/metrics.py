"""Metrics lines: a step's numbers are read back a little later, so that the device never waits for the log.

Every rank reads the same reduced numbers of a step at the same later step, so that decisions made from them agree;
rank 0 writes the line.
"""

import math
import resource
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.clusters.load import device_by_driver_name, load_device
from windlass.cost.flops import hfu, mfu
from windlass.runs.events import ExpertLoads, LayersMeasured, StepSkipped
from windlass.runs.metrics import MetricsLine
from windlass.train.guard import OK, SKIP_REASONS
from windlass.train.hooks import Hook, Training, each
from windlass.train.instruments import Instruments
from windlass.train.step import StepResult
from windlass.train.validate import Validation

# Steps after which a GPU's numbers are read; they have long arrived by then. A CPU's are read at once.
LAG = 2
# Times in a run that the load of every expert is written down: 128 experts in 94 layers take 50 kB each time.
SAMPLES = 40
# What each rank contributes to a line, as floats; NaN: not measured.
RANK_FIELDS = ("memory", "forward", "joules", "watts", "utilization", "training_joules")


@dataclass(frozen=True)
class PendingLine:
    """What only a logged step has."""

    # Steps since the last logged one, this one included.
    steps: int
    # Mean wait for data per step.
    data_seconds: float
    # RANK_FIELDS of each rank, travelling on the CPU while training continues; complete when `gathered` is.
    rows: list[Tensor]
    # None for a single rank.
    gathered: dist.Work | None


@dataclass(frozen=True)
class PendingStep:
    """A step whose numbers are still on their way to the host."""

    step: int
    tokens: int
    time: float
    result: StepResult
    # Host copy of `result.values`, complete when `ready` is.
    values: Tensor
    ready: torch.cuda.Event | None
    logged: PendingLine | None
    # Host copy of `result.layers`, complete when `ready` is.
    layers: Tensor | None


class EnergyPerToken:
    """Joules per token over the last seconds of training.

    A counter moves ten times a second, so a single short step seems to cost nothing or double. None until enough
    seconds have passed."""

    WINDOW_SECONDS, MIN_SECONDS = 10.0, 2.0

    def __init__(self) -> None:
        self._seconds, self._nodes = 0.0, 0
        self._past: deque[tuple[float, int, float]] = deque()

    def add(self, seconds: float, tokens: int, joules: float | None, nodes: int) -> float | None:
        """After `seconds` more of training: tokens trained and joules used so far, as measured on `nodes` nodes."""
        self._seconds += seconds
        if joules is None or nodes != self._nodes:  # sums over other nodes do not compare
            self._past.clear()
            self._nodes = nodes
        if joules is None:
            return None
        while len(self._past) > 1 and self._seconds - self._past[1][0] >= self.WINDOW_SECONDS:
            self._past.popleft()
        self._past.append((self._seconds, tokens, joules))
        first_seconds, first_tokens, first_joules = self._past[0]
        if self._seconds - first_seconds < self.MIN_SECONDS or tokens <= first_tokens or joules < first_joules:
            return None
        return (joules - first_joules) / (tokens - first_tokens)


class Recorder(Hook):
    """Turns step results into metrics lines, counts skipped steps, and reports when there were too many."""

    def __init__(self, listeners: Sequence[Hook] = ()) -> None:
        # Hooks that are told of each line.
        self.listeners = listeners
        self.pending: deque[PendingStep] = deque()
        self.skipped_in_a_row = 0
        self.last_loss: float | None = None
        # Why the run must stop or roll back: too many skipped steps in a row.
        self.too_many: str | None = None
        self.validation: dict[str, float | None] = {}
        self._group: dist.ProcessGroup | None = None
        # Of this rank's forward passes in the newest step whose times are known.
        self._forward_seconds: float | None = None
        # Since the last logged step.
        self._steps, self._data_seconds = 0, 0.0
        self._excluded_joules = 0.0
        self._energy_per_token = EnergyPerToken()

    def on_start(self, training: Training) -> None:
        self.peak, _ = peak_of(training.world.device, training.recipe.train.precision)
        self._group = dist.new_group(backend="gloo") if training.world.size > 1 else None
        self._last_time, self._last_tokens = time.time(), training.tokens

    def on_step_end(self, training: Training, result: StepResult) -> None:
        cuda = training.world.cuda
        values = _sent_to_host(result.values)
        layers = None if result.layers is None else _sent_to_host(result.layers)
        ready = torch.cuda.Event() if cuda else None
        if ready is not None:
            ready.record()
        self._steps += 1
        self._data_seconds += result.data_seconds
        now, line = time.time(), None
        if training.step % training.recipe.train.log_every == 0 or training.step == training.plan.steps:
            line = self._start_line(training, result)
        self.pending.append(PendingStep(training.step, training.tokens, now, result, values, ready, line, layers))
        self.drain(training, LAG if cuda else 0)

    def on_eval(self, training: Training, validation: Validation) -> None:
        self.validation = validation.line()

    def on_stop(self, training: Training, reason: str | None) -> None:
        if reason != "error":
            self.drain(training, 0)

    def leave_out(self, seconds: float, joules: float | None) -> None:
        """Exclude time and energy of something else, such as a validation pass. Call after a complete `drain`."""
        self._last_time += seconds
        self._excluded_joules += joules or 0.0

    def forget(self) -> None:
        """After a rollback: steps skipped before it no longer count."""
        self.pending.clear()
        self._energy_per_token = EnergyPerToken()
        self.skipped_in_a_row, self.too_many = 0, None

    def drain(self, training: Training, keep: int) -> None:
        """Read the numbers of all but the newest `keep` steps, waiting for them where needed."""
        while len(self.pending) > keep:
            item = self.pending.popleft()
            if item.ready is not None:
                item.ready.synchronize()
                self._forward_seconds = item.result.forward_seconds()  # known by now; goes into the next line
            loss, norm, code, auxiliary, *others = item.values.tolist()
            names = item.result.further
            routing, further = others[: len(others) - len(names)], others[len(others) - len(names) :]
            self.last_loss = loss
            self.skipped_in_a_row = 0 if code == OK else self.skipped_in_a_row + 1
            if code != OK:
                reason, value = SKIP_REASONS[int(code)], {"loss": loss, "grad_norm": norm}
                if training.world.is_main:
                    training.run.record(StepSkipped(step=item.step, reason=reason, value=value))
                if self.skipped_in_a_row >= training.recipe.train.max_skipped:
                    self.too_many = (
                        f"{self.skipped_in_a_row} steps in a row up to step {item.step} were skipped "
                        f"({reason}; loss {loss:g}, gradient norm {norm:g})"
                    )
            if item.layers is not None and training.world.is_main:
                columns = [[v if math.isfinite(v) else None for v in column] for column in item.layers.T.tolist()]
                measured: dict[str, Any] = dict(zip(Instruments.NAMES, columns, strict=True))
                training.run.record(LayersMeasured(step=item.step, **measured))
            if item.logged is None:
                continue
            line = self._line(training, item, item.logged)
            line.loss, line.grad_norm, line.skipped = loss, norm, int(code != OK)
            line.z_loss = auxiliary if training.recipe.train.z_loss else None
            if routing:
                line.expert_imbalance, line.router_entropy, line.router_loss = routing
                line.dropped_tokens = 0
            line.extra, self.validation = {**dict(zip(names, further, strict=True)), **self.validation}, {}
            if training.world.is_main:
                if item.result.expert_loads is not None and is_sampled(item.step, item.logged.steps, training):
                    loads = item.result.expert_loads.cpu()
                    percent = (100.0 * loads / loads.mean(1, keepdim=True)).round().int().tolist()
                    layers = zip(item.result.expert_layers, percent, strict=True)
                    training.run.record(ExpertLoads(step=item.step, percent=dict(layers)))
                training.run.record_metrics(line)
                each(self.listeners, "on_log", training, line.as_dict())

    def _start_line(self, training: Training, result: StepResult) -> PendingLine:
        """Measure this rank and send its numbers on their way."""
        steps, data_seconds = self._steps, self._data_seconds / self._steps
        self._steps, self._data_seconds = 0, 0.0
        if not training.world.cuda:
            self._forward_seconds = result.forward_seconds()
        energy = training.energy()
        joules = energy["joules"]
        measured = {
            **energy,
            "memory": memory_bytes(training.world.device),
            "forward": None if self._forward_seconds is None else self._forward_seconds + data_seconds,
            "training_joules": None if joules is None else joules - self._excluded_joules,
        }
        values = [math.nan if (value := measured[name]) is None else float(value) for name in RANK_FIELDS]
        row = torch.tensor(values, dtype=torch.float64)
        if self._group is None:
            return PendingLine(steps, data_seconds, [row], None)
        rows = [torch.empty_like(row) for _ in range(training.world.size)]
        work = dist.all_gather(rows, row, group=self._group, async_op=True)
        return PendingLine(steps, data_seconds, rows, work)

    def _line(self, training: Training, item: PendingStep, line: PendingLine) -> MetricsLine:
        """Everything but the step's own numbers. One rank per node reports energy; other values are "not measured"."""
        if line.gathered is not None:
            line.gathered.wait()
        columns = zip(*(row.tolist() for row in line.rows), strict=True)
        ranks = {
            name: {rank: value for rank, value in enumerate(column) if value >= 0}  # NaN is not
            for name, column in zip(RANK_FIELDS, columns, strict=True)
        }
        reported = {name: list(values.values()) for name, values in ranks.items()}
        joules, watts, training_joules = (
            sum(reported[name]) if reported[name] else None for name in ("joules", "watts", "training_joules")
        )
        seconds = max(1e-9, item.time - self._last_time)
        tokens_per_second = (item.tokens - self._last_tokens) / seconds
        self._last_time, self._last_tokens = item.time, item.tokens
        per_device, nodes = tokens_per_second / training.world.size, len(reported["joules"])
        busy, forward = reported["utilization"], ranks["forward"]
        record = MetricsLine(
            step=item.step,
            tokens=item.tokens,
            lr=item.result.lr,
            step_seconds=seconds / line.steps,
            tokens_per_second=tokens_per_second,
            memory_bytes=int(max(reported["memory"])) if reported["memory"] else None,
            energy_joules=joules,
            time=item.time,
            tokens_per_second_per_device=per_device,
            watts=watts,
            joules_per_token=self._energy_per_token.add(seconds, item.tokens, training_joules, nodes),
            energy_nodes=nodes,
            nodes=training.world.place.nodes,
            utilization=sum(busy) / len(busy) if busy else None,
            data_seconds=line.data_seconds,
        )
        if self.peak is not None and training.recipe.model.family != "hf":
            spec, recompute = training.spec, training.start.step.recompute
            record.mfu = mfu(spec, training.plan.seq_len, per_device, self.peak).value
            if recompute != "budget":  # the compiler decides what it recomputes, and does not report it
                record.hfu = hfu(spec, training.plan.seq_len, per_device, self.peak, recompute=recompute).value
        if len(forward) > 1:
            record.slowest_rank = max(forward, key=lambda rank: (forward[rank], rank))
            record.spread_seconds = max(forward.values()) - min(forward.values())
        return record


def is_sampled(step: int, since_last_line: int, training: Training) -> bool:
    """Whether a line has the loads of experts beside it: about SAMPLES of a run, and the last."""
    interval = max(1, training.plan.steps // SAMPLES)
    return step // interval > (step - since_last_line) // interval or step == training.plan.steps


def _sent_to_host(values: Tensor) -> Tensor:
    """A copy in host memory that is complete when the device gets there."""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values.detach(), non_blocking=True)


def memory_bytes(device: torch.device) -> int:
    """Peak of the allocator on a GPU; peak resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of(device: torch.device, precision: str) -> tuple[float | None, str]:
    """TFLOP/s by which MFU divides, and their description; None for an unknown device.

    The dense bf16 peak also for fp8 runs, so that they can be compared."""
    if device.type != "cuda":
        cpu = load_device("cpu")
        fact = cpu.sources.get("fp32_tflops")
        # The shipped figure is an order of magnitude; only a measurement of this machine makes an MFU.
        if precision != "fp32" or cpu.fp32_tflops is None or fact is None or fact.status != "measured":
            return None, "no peak is known for this CPU"
        return cpu.fp32_tflops, f"{cpu.fp32_tflops:.3g} TFLOP/s per process ({fact.source})"
    name = torch.cuda.get_device_name(device)
    listed_device = device_by_driver_name(name)
    if listed_device is None:
        return None, f"{name} is not in any device file"
    kind = "fp32" if precision == "fp32" else "bf16"
    peak = listed_device.fp32_tflops if kind == "fp32" else listed_device.bf16_tflops
    if not peak:
        return None, f"{listed_device.name}: peak unknown"
    return peak, f"{peak:g} TFLOP/s ({listed_device.name}, dense {kind})"
