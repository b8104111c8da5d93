"""What did each step say? Numbers are read back a little later, so that the device never waits for the log; rank 0 writes the line.

Every rank reads the same reduced numbers of a step at the same later step, so that decisions made from them agree.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from windlass.clusters.load import device_by_driver_name
from windlass.cost.flops import hfu, mfu
from windlass.models.presets import model_spec
from windlass.runs.events import StepSkipped
from windlass.runs.metrics import MetricsLine, MetricsWriter
from windlass.train.guard import OK, REASONS
from windlass.train.hooks import Hook, each

if TYPE_CHECKING:
    from windlass.train.job import Job
    from windlass.train.step import StepResult

LAG = 2
"""Steps after which a GPU's numbers are read; they are long there by then. A CPU's are read at once."""


@dataclass
class Pending:
    step: int
    tokens: int
    lr: float
    time: float
    host: torch.Tensor
    ready: Any
    data_seconds: float
    watch: Any
    logged: bool
    steps: int = 1
    """Steps since the last logged one, this one included."""
    memory_bytes: int | None = None
    energy: dict[str, float | None] | None = None
    gathered: Any = None


class CostOfTokens:
    """Joules per token over the last seconds of training: a counter moves ten times a second, so a short step seems to cost nothing or
    double. Unknown, not 0, until enough of them have passed."""

    LONG, SHORT = 10.0, 2.0
    """Seconds of training to look back upon; at the beginning of a run, at least."""

    def __init__(self) -> None:
        self._clock, self._nodes = 0.0, 0
        self._past: deque[tuple[float, int, float]] = deque()

    def now(self, seconds: float, tokens: int, joules: float | None, nodes: int) -> float | None:
        """After `seconds` more of training: tokens trained and joules used so far, as measured on `nodes` nodes."""
        self._clock += seconds
        if joules is None or nodes != self._nodes:  # sums over other nodes do not compare
            self._past.clear()
            self._nodes = nodes
        if joules is None:
            return None
        while len(self._past) > 1 and self._clock - self._past[1][0] >= self.LONG:
            self._past.popleft()
        self._past.append((self._clock, tokens, joules))
        at, before, used = self._past[0]
        if self._clock - at < self.SHORT or tokens <= before or joules < used:
            return None
        return (joules - used) / (tokens - before)


class Recorder(Hook):
    """Turns step results into metrics lines, counts skipped steps, and says when there were too many."""

    def __init__(self) -> None:
        self.pending: deque[Pending] = deque()
        self.skipped_in_a_row = 0
        self.last_loss: float | None = None
        self.too_many: str | None = None
        self.validation: dict[str, float | None] = {}
        self._group: Any = None
        self._forward: float | None = None
        """Seconds of this rank's forward passes in the newest step whose times are known."""
        self._before: tuple[float, int] | None = None
        self._steps_since, self._data_since = 0, 0.0
        self._aside = 0.0
        """Joules of this node that were not training's."""
        self._cost = CostOfTokens()

    def on_start(self, job: Job) -> None:
        self.peak, self.peak_name = peak_of(job.world.device, job.recipe.train.precision)
        self._group = dist.new_group(backend="gloo") if job.world.size > 1 else None
        self._before = (time.time(), job.tokens)
        self._steps_since, self._data_since = 0, 0.0

    def on_step_end(self, job: Job, result: StepResult) -> None:
        host, ready = to_host(result.values)
        self._steps_since += 1
        self._data_since += job.data_seconds
        logged = job.step % job.recipe.train.log_every == 0 or job.step == job.geometry.steps
        item = Pending(
            job.step, job.tokens, result.lr, time.time(), host, ready, self._data_since, result.forward, logged
        )
        if logged:
            item.steps, item.data_seconds = self._steps_since, self._data_since / self._steps_since
            self._steps_since, self._data_since = 0, 0.0
            self._measure(job, item)
        self.pending.append(item)
        self.drain(job, LAG if job.world.device.type == "cuda" else 0)

    def on_eval(self, job: Job, val_loss: float) -> None:
        self.validation = job.validation.line() if job.validation is not None else {"val_loss": val_loss}

    def on_stop(self, job: Job, reason: str | None) -> None:
        if reason != "error":
            self.drain(job, 0)

    def leave_out(self, seconds: float, joules: float | None) -> None:
        """What was not training's, such as a validation pass, is in no step's: call after a `drain` to the last step."""
        if self._before is not None:
            self._before = (self._before[0] + seconds, self._before[1])
        self._aside += joules or 0.0

    def forget(self) -> None:
        """After a rollback: what was skipped before it no longer counts."""
        self.pending.clear()
        self._cost = CostOfTokens()
        self.skipped_in_a_row, self.too_many = 0, None

    def drain(self, job: Job, keep: int) -> None:
        while len(self.pending) > keep:
            self._read(job, self.pending.popleft())

    # -- one step ---------------------------------------------------------------------------------------------------

    def _measure(self, job: Job, item: Pending) -> None:
        """This rank's numbers; they travel to rank 0 on the CPU while training goes on."""
        item.memory_bytes = memory_bytes(job.world.device)
        item.energy = job.energy()
        if self._group is None:
            return
        if item.watch is not None and job.world.device.type != "cuda":
            self._forward = item.watch.seconds()
        forward = None if self._forward is None else self._forward + item.data_seconds
        energy = item.energy
        mine = torch.tensor(
            [
                _number(v)
                for v in (
                    item.memory_bytes,
                    forward,
                    item.data_seconds,
                    energy["joules"],
                    energy["watts"],
                    energy["utilization"],
                    self._training_joules(energy),
                )
            ],
            dtype=torch.float64,
        )
        everyone = [torch.empty_like(mine) for _ in range(job.world.size)]
        item.gathered = (dist.all_gather(everyone, mine, group=self._group, async_op=True), everyone)

    def _training_joules(self, energy: dict[str, float | None]) -> float | None:
        return None if energy["joules"] is None else energy["joules"] - self._aside

    def _read(self, job: Job, item: Pending) -> None:
        if item.ready is not None:
            item.ready.synchronize()
        if item.watch is not None and item.ready is not None:
            # A GPU's own times are known by now; they go into the next line.
            self._forward = item.watch.seconds()
        loss, norm, reason, extra = item.host.tolist()
        self.last_loss = loss
        self._judge(job, item, int(reason), loss, norm)
        if item.logged:
            line = self._line(job, item, loss, norm, int(reason), extra)
            if job.world.is_main:
                MetricsWriter(job.run.metrics_file).write(line)
                each(job.hooks, "on_log", job, line.as_dict())

    def _judge(self, job: Job, item: Pending, reason: int, loss: float, norm: float) -> None:
        if reason == OK:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        if job.world.is_main:
            job.run.record(StepSkipped(step=item.step, reason=REASONS[reason], value={"loss": loss, "grad_norm": norm}))
        if self.skipped_in_a_row >= job.recipe.train.max_skipped:
            self.too_many = f"{self.skipped_in_a_row} steps in a row up to step {item.step} were skipped ({REASONS[reason]}; loss {loss:g}, gradient norm {norm:g})"

    def _line(self, job: Job, item: Pending, loss: float, norm: float, reason: int, extra: float) -> MetricsLine:
        ranks = self._ranks(item)
        energy = _energy(ranks, job.world.place.nodes)
        before_time, before_tokens = self._before
        seconds = max(1e-9, item.time - before_time)
        speed = (item.tokens - before_tokens) / seconds
        self._before = (item.time, item.tokens)
        validation, self.validation = self.validation, {}
        return MetricsLine(
            step=item.step,
            tokens=item.tokens,
            loss=loss,
            grad_norm=norm,
            lr=item.lr,
            step_seconds=seconds / item.steps,
            tokens_per_second=speed,
            memory_bytes=_largest(ranks["memory"]),
            energy_joules=energy["joules"],
            time=item.time,
            tokens_per_second_per_device=speed / job.world.size,
            watts=energy["watts"],
            joules_per_token=self._cost.now(seconds, item.tokens, energy["training_joules"], energy["nodes"]),
            energy_nodes=energy["nodes"],
            nodes=job.world.place.nodes,
            utilization=energy["utilization"],
            data_seconds=item.data_seconds,
            skipped=int(reason != OK),
            z_loss=extra if job.recipe.train.z_loss else None,
            **self._shares(job, speed / job.world.size),
            **_spread(ranks["forward"]),
            extra=validation,
        )

    def _ranks(self, item: Pending) -> dict[str, list[float | None]]:
        if item.gathered is None:
            e = item.energy or {}
            values = [
                [
                    _number(v)
                    for v in (
                        item.memory_bytes,
                        None,
                        item.data_seconds,
                        e.get("joules"),
                        e.get("watts"),
                        e.get("utilization"),
                        self._training_joules(e) if e else None,
                    )
                ]
            ]
        else:
            work, everyone = item.gathered
            work.wait()
            values = [v.tolist() for v in everyone]
        names = ("memory", "forward", "data", "joules", "watts", "utilization", "training_joules")
        return {
            name: [None if row[i] != row[i] or row[i] < 0 else row[i] for row in values] for i, name in enumerate(names)
        }

    def _shares(self, job: Job, speed: float) -> dict[str, float | None]:
        if self.peak is None or job.recipe.model.family == "hf":
            return {"mfu": None}
        shape, length, recompute = model_spec(job.recipe.model), job.geometry.seq_len, job.recipe.train.recompute
        shares: dict[str, float | None] = {"mfu": mfu(shape, length, speed, self.peak).value}
        if recompute != "budget":  # the compiler decides what it computes again, and does not say
            shares["hfu"] = hfu(shape, length, speed, self.peak, recompute=recompute).value
        return shares


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _largest(values: list[float | None]) -> int | None:
    known = [v for v in values if v is not None]
    return int(max(known)) if known else None


def _energy(ranks: dict[str, list[float | None]], nodes: int) -> dict[str, Any]:
    """One rank per node reports; unknown nodes are counted, not guessed."""
    joules = [v for v in ranks["joules"] if v is not None]
    watts = [v for v in ranks["watts"] if v is not None]
    busy = [v for v in ranks["utilization"] if v is not None]
    return {
        "joules": sum(joules) if joules else None,
        "training_joules": sum(v for v in ranks["training_joules"] if v is not None) if joules else None,
        "watts": sum(watts) if watts else None,
        "nodes": len(joules),
        "utilization": sum(busy) / len(busy) if busy else None,
    }


def _spread(forward: list[float | None]) -> dict[str, Any]:
    known = [(v, rank) for rank, v in enumerate(forward) if v is not None]
    if len(known) < 2:
        return {}
    return {"spread_seconds": max(known)[0] - min(known)[0], "slowest_rank": max(known)[1]}


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on its way to the host, and the event that says when it is there (None: it is)."""
    if values.device.type != "cuda":
        return values.detach().clone(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def memory_bytes(device: torch.device) -> int | None:
    """Highest allocator peak on a GPU; highest resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of(device: torch.device, precision: str) -> tuple[float | None, str]:
    """The denominator of MFU: the dense bf16 peak (fp8 runs too, so that they can be compared), or None for an unknown device."""
    if device.type != "cuda":
        return None, "no peak is known for this CPU"
    name = torch.cuda.get_device_name(device)
    known = device_by_driver_name(name)
    if known is None:
        return None, f"{name} is in no device file"
    peak = known.fp32_tflops if precision == "fp32" else known.bf16_tflops
    return (
        peak,
        f"{peak:g} TFLOP/s ({known.name}, dense {'fp32' if precision == 'fp32' else 'bf16'})"
        if peak
        else f"{known.name}: peak unknown",
    )
