"""Which layouts are legal for a model, a batch and a machine? Every rule names its numbers and the nearest value that keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from windlass.config import LayoutConfig
from windlass.config.load import divisors, nearest
from windlass.cost.params import count
from windlass.cost.work import Degrees, Work
from windlass.planner.task import Task

MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MAX_PIPELINE = 32
LONG = 8192
"""Tokens that a context rank keeps at least: shorter sequences are not worth cutting."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to divide the work; `data` and `accumulation` follow from it, the devices and the batch."""

    shard: str
    shard_size: int | None
    micro_batch: int
    tensor: int
    pipeline: int
    context: int
    recompute: str
    schedule: str = "1f1b"
    chunks: int = 1
    offload: str = "none"
    sync: str = "auto"
    data: int = 1
    accumulation: int = 1

    @property
    def family(self) -> tuple[object, ...]:
        """Choices of one family differ in micro-batch, recompute, schedule and shard_size only; the best of each is shown."""
        return (self.shard, self.tensor, self.pipeline, self.context, self.offload)

    def config(self) -> LayoutConfig:
        return LayoutConfig.model_validate(
            {
                "shard": self.shard, "shard_size": self.shard_size, "micro_batch": self.micro_batch, "tensor": self.tensor,
                "pipeline": self.pipeline, "context": self.context, "schedule": self.schedule, "pipeline_chunks": max(2, self.chunks),
                "offload": self.offload, "sync": self.sync,
            }
        )  # fmt: skip

    def degrees(self) -> Degrees:
        whole = self.shard in ("none", "zero1")  # gradients are held whole anyway: the engine reduces them once
        sync = self.sync if self.sync != "auto" else "last" if whole else "every"
        return Degrees(
            data=self.data, shard=self.shard, shard_size=self.shard_size, tensor=self.tensor, pipeline=self.pipeline,
            context=self.context, schedule=self.schedule, chunks=self.chunks, offload=self.offload, sync=sync,
        )  # fmt: skip

    def words(self, *, micro_batch: bool = True) -> str:
        """`hybrid 4, tensor 2, micro_batch 2, recompute full`: only what differs from the plainest layout."""
        parts = [self.shard + (f" {self.shard_size}" if self.shard == "hybrid" and self.shard_size else "")]
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"pipeline {self.pipeline} {self.schedule}"] if self.pipeline > 1 else []
        parts += [f"context {self.context}"] if self.context > 1 else []
        parts += [f"micro_batch {self.micro_batch}"] if micro_batch else []
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        parts += [f"offload {self.offload}"] if self.offload != "none" else []
        return ", ".join(parts)


def from_config(layout: LayoutConfig, recompute: str, task: Task) -> Choice:
    """A recipe's layout with the data-parallel degree and accumulation that follow from it (rounded down where illegal)."""
    group = layout.tensor * layout.pipeline * layout.context
    data = max(1, task.devices // group)
    share = data * layout.micro_batch
    accumulation = 1 if task.sequences is None else max(1, task.sequences // share)
    size = layout.shard_size
    if layout.shard == "hybrid" and size is None:
        size = default_shard_size(task, layout.tensor, data * layout.context)
    return Choice(
        shard=layout.shard, shard_size=size if layout.shard == "hybrid" else layout.shard_size, micro_batch=layout.micro_batch,
        tensor=layout.tensor, pipeline=layout.pipeline, context=layout.context, recompute=recompute, schedule=layout.schedule,
        chunks=layout.pipeline_chunks if layout.schedule == "interleaved" else 1, offload=layout.offload, sync=layout.sync,
        data=data, accumulation=accumulation,
    )  # fmt: skip


def default_shard_size(task: Task, tensor: int, group: int) -> int:
    """A node's devices share one copy, as far as tensor parallelism leaves room."""
    return max(1, min(task.per_node // tensor if tensor <= task.per_node else 1, group))


def work_of(task: Task, choice: Choice) -> Work:
    """What one device is asked to do in a step, as the engine does it."""
    train, optim = task.recipe.train, task.recipe.optim
    gpu = task.device.vendor != "cpu"
    return Work(
        seq_len=task.seq_len,
        micro_batch=choice.micro_batch,
        accumulation=choice.accumulation,
        recompute=choice.recompute,
        recompute_budget=train.recompute_budget,
        precision=train.precision,
        compile=gpu if train.compile is None else train.compile,
        flash=train.attention != "math",
        kernel=train.attention,
        loss=_loss(task, choice),
        loss_chunk=train.loss_chunk,
        optimizer=optim.name,
        moments=optim.moments,
        engine="torch" if train.engine == "native" else "deepspeed",
        native=train.engine == "native" and task.recipe.model.family != "hf",
        fuse=_fuses(task, choice),
        fp8_rows=train.fp8_scaling == "row",
        masked=_masked(task),
        every_head=gpu and task.shape.kv_heads < task.shape.heads and (_masked(task) or train.precision == "fp32"),
    )


def _masked(task: Task) -> bool:
    return task.recipe.data.mask_documents and task.shape.arch != "retnet"


def _fuses(task: Task, c: Choice) -> bool:
    """The engine's own rule for train.fuse: in FP8, where it pays; never with divided products."""
    train = task.recipe.train
    automatic = task.device.vendor != "cpu" and train.precision == "fp8"
    return c.tensor == 1 and (automatic if train.fuse is None else train.fuse)


def _loss(task: Task, c: Choice) -> str:
    """The engine's own rule for train.loss = "auto": chunks unless a micro-batch's logits are small."""
    if task.recipe.train.loss != "auto":
        return task.recipe.train.loss
    logits = c.micro_batch * task.seq_len / c.context * task.shape.padded_vocab / c.tensor * 4
    return "plain" if logits <= 64 * 2**20 else "chunked"


def problems(task: Task, c: Choice) -> list[str]:
    """Why a layout cannot run at all; empty when it can. Each line names the numbers and the nearest legal value."""
    devices = list(_device_problems(task, c))
    # Without a whole number of replicas the batch rule would only repeat the trouble in other words.
    rest = [] if devices else [*_batch_problems(task, c), *_shard_problems(task, c), *_host_problems(task, c)]
    return [*_model_problems(task, c), *devices, *rest, *_engine_problems(task, c)]


def _model_problems(task: Task, c: Choice) -> Iterator[str]:
    s = task.shape
    for name, value in (("model.heads", s.heads), ("model.kv_heads", s.kv_heads), ("model.ffn", s.ffn)):
        if value % c.tensor and not (name == "model.kv_heads" and s.kv_heads == s.heads):
            legal = [t for t in divisors(value) if task.per_node % t == 0]
            yield f"layout.tensor ({c.tensor}) does not divide {name} ({value:,}); nearest legal: {nearest(c.tensor, legal)}"
    if s.layers % c.pipeline:
        legal = divisors(s.layers)
        yield f"layout.pipeline ({c.pipeline}) does not divide model.layers ({s.layers}); nearest legal: {nearest(c.pipeline, legal)}"
    elif c.schedule == "interleaved" and (s.layers // c.pipeline) % c.chunks:
        yield f"layout.pipeline_chunks ({c.chunks}) does not divide the {s.layers // c.pipeline} layers of a stage; nearest legal: {nearest(c.chunks, divisors(s.layers // c.pipeline))}"
    if task.seq_len // c.context % c.tensor:
        legal = [t for t in divisors(task.seq_len // c.context) if task.per_node % t == 0]
        yield f"layout.tensor ({c.tensor}) does not divide the {task.seq_len // c.context:,} positions of a rank; nearest legal: {nearest(c.tensor, legal)}"
    if task.seq_len % (2 * c.context) and c.context > 1:
        yield f"data.seq_len ({task.seq_len:,}) is not a multiple of 2 x layout.context ({2 * c.context}); the next larger one is {-(-task.seq_len // (2 * c.context)) * 2 * c.context:,}"


def _device_problems(task: Task, c: Choice) -> Iterator[str]:
    group = c.tensor * c.pipeline * c.context
    if c.tensor > task.per_node:
        yield f"layout.tensor ({c.tensor}) is more than the {task.per_node} devices of a node; nearest legal: {task.per_node}"
    elif task.per_node % c.tensor:
        yield f"layout.tensor ({c.tensor}) does not divide the {task.per_node} devices of a node; nearest legal: {nearest(c.tensor, divisors(task.per_node))}"
    if group > task.devices:
        yield f"tensor {c.tensor} x pipeline {c.pipeline} x context {c.context} = {group} is more than {task.devices} devices; at least {-(-group // task.per_node)} nodes are needed"
    elif task.devices % group:
        yield f"tensor {c.tensor} x pipeline {c.pipeline} x context {c.context} = {group} does not divide {task.devices} devices; nearest legal: {nearest(group, divisors(task.devices))}"


def _batch_problems(task: Task, c: Choice) -> Iterator[str]:
    unit = c.data * c.micro_batch
    if task.sequences is not None and task.sequences % unit:
        yield batch_problem(task, c.data, c.micro_batch)
    if c.pipeline > 1 and c.accumulation < c.pipeline:
        yield f"{c.accumulation} micro-batches cannot fill {c.pipeline} pipeline stages; nearest legal: pipeline {nearest(c.accumulation, [d for d in divisors(task.shape.layers) if d <= c.accumulation] or [1])}, a smaller micro_batch or a larger batch"
    elif c.schedule == "interleaved" and c.pipeline > 1 and c.accumulation % c.pipeline:
        yield f"interleaved: {c.accumulation} micro-batches are not a multiple of pipeline {c.pipeline}; nearest legal: {max(c.pipeline, c.accumulation // c.pipeline * c.pipeline)}, or schedule 1f1b"


def batch_problem(task: Task, data: int, micro_batch: int) -> str:
    assert task.sequences is not None
    unit = data * micro_batch * task.seq_len
    batch = task.sequences * task.seq_len
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    near = f"{above:,}" if below == 0 else f"{below:,} or {above:,}"
    return f"data.batch_tokens ({batch:,}) is not a multiple of {unit:,} = micro_batch {micro_batch} x seq_len {task.seq_len:,} x {data:,} replicas; nearest legal: {near}"


def _shard_problems(task: Task, c: Choice) -> Iterator[str]:
    group = c.data * c.context
    if c.shard != "none" and group == 1:
        yield f"layout.shard ({c.shard}) has one replica and nothing to divide over; nearest legal: none"
    if c.shard == "hybrid" and group > 1:
        size = c.shard_size or 1
        if size > group or group % size:
            yield f"layout.shard_size ({size}) does not divide {group} replicas; nearest legal: {nearest(size, divisors(group))}"
        elif size == 1:
            yield "hybrid with shard_size 1 divides nothing; nearest legal: shard none"
    if c.shard in ("zero2", "hybrid") and c.pipeline > 1:
        yield f"layout.shard {c.shard} with a pipeline would reduce gradients after every micro-batch; nearest legal: zero1"
    if c.offload != "none" and c.shard in _whole_weights(task):
        yield f"layout.offload ({c.offload}) needs sharded weights; nearest legal: shard full or hybrid"


def _whole_weights(task: Task) -> tuple[str, ...]:
    """Ways of sharding beside which an engine cannot offload: DeepSpeed moves the states of ZeRO-1 and 2 as well."""
    return ("none",) if task.recipe.train.engine == "deepspeed" else ("none", "zero1", "zero2")


def _host_problems(task: Task, c: Choice) -> Iterator[str]:
    """Offloaded states of all a node's devices must find room in its memory."""
    room = task.cluster.node.memory_usable or task.cluster.node.memory
    if c.offload == "none" or room is None:
        return
    per_parameter = 8.0 if task.recipe.optim.moments == "fp32" else 4.0
    per_parameter += 4.0 if c.offload == "parameters" else 0.0
    share = count(task.shape).stored / (c.tensor * c.pipeline * c.degrees().shards(task.per_node))
    need = per_parameter * share * task.per_node
    if need > room:
        more = -(-need * task.nodes // room)
        yield f"layout.offload ({c.offload}) puts {need / 2**30:,.0f} GiB into a node's {room / 2**30:,.0f} GiB of memory; at least {more:.0f} nodes are needed"


DIVIDES: dict[str, tuple[str, ...]] = {
    "llama": ("tensor", "pipeline", "context"),
    "retnet": ("tensor", "pipeline"),  # context runs too, but its cost is not in our arithmetic
    "hf": (),
}
"""How our own engine divides a model of each family, as far as its cost is known here."""


def _divides(task: Task, name: str) -> bool:
    return task.recipe.train.engine != "deepspeed" and name in DIVIDES[task.recipe.model.family]


def _engine_problems(task: Task, c: Choice) -> Iterator[str]:
    family, engine = task.recipe.model.family, task.recipe.train.engine
    for name, value in (("tensor", c.tensor), ("pipeline", c.pipeline), ("context", c.context)):
        if value == 1 or _divides(task, name):
            continue
        if engine == "deepspeed":
            yield f"layout.{name} ({value}): the deepspeed engine divides data and states only; nearest legal: 1, or train.engine native"
        elif (family, name) == ("retnet", "context"):
            yield f"layout.{name} ({value}): the engine runs it for family retnet, but what it costs is not known here; nearest legal: 1"
        else:
            can = " and ".join(f for f, names in DIVIDES.items() if name in names)
            yield f"layout.{name} ({value}): built for family {can}, not {family}; nearest legal: 1"
    if engine == "deepspeed" and c.shard == "hybrid":
        yield "layout.shard hybrid: not built for the deepspeed engine; nearest legal: full, zero2 or train.engine native"


def ruled_out(task: Task) -> list[tuple[Choice, str]]:
    """Degrees that somebody might try and that a rule forbids: one at a time, all else plain, each reason once."""
    tried = [{"tensor": t} for t in (2, 4, 8) if t <= 2 * task.per_node]
    tried += [{"pipeline": p} for p in (2, 4, 8, 16) if p <= task.devices]
    tried += [{"micro_batch": m} for m in (2, 4, 8, 16, 32)]
    found: dict[str, Choice] = {}
    for values in tried:
        choice = from_config(
            LayoutConfig.model_validate(values),
            task.recipe.train.recompute,
            task,
        )
        for reason in problems(task, choice)[:1]:
            found.setdefault(reason, choice)
    return [(choice, reason) for reason, choice in found.items()]


def enumerate_choices(task: Task, offload: str = "none") -> Iterator[Choice]:
    """Every layout worth estimating; legality that costs nothing to keep is kept here already."""
    for tensor, pipeline, context in _groups(task):
        data = task.devices // (tensor * pipeline * context)
        if task.sequences is not None and task.sequences % data:
            continue
        each = None if task.sequences is None else task.sequences // data
        for micro in MICRO_BATCHES:
            if each is not None and each % micro:
                continue
            accumulation = 1 if each is None else each // micro
            if accumulation < pipeline:
                continue
            for shard, size in _shards(task, tensor, pipeline, data * context):
                for schedule, chunks in _schedules(task, pipeline, accumulation):
                    for recompute in task.recomputes:
                        yield Choice(
                            shard,
                            size,
                            micro,
                            tensor,
                            pipeline,
                            context,
                            recompute,
                            schedule,
                            chunks,
                            offload,
                            "auto",
                            data,
                            accumulation,
                        )


def _groups(task: Task) -> Iterator[tuple[int, int, int]]:
    s = task.shape
    tensors = [t for t in divisors(task.per_node) if not (s.heads % t or s.kv_heads % t or s.ffn % t)]
    pipelines = [p for p in divisors(s.layers) if p <= min(MAX_PIPELINE, task.nodes)]
    contexts = [c for c in (1, 2, 4, 8, 16) if task.seq_len // c >= LONG or c == 1]
    for tensor in tensors if _divides(task, "tensor") else [1]:
        for pipeline in pipelines if _divides(task, "pipeline") else [1]:
            for context in contexts if _divides(task, "context") else [1]:
                group = tensor * pipeline * context
                whole = context == 1 or task.seq_len % (2 * context) == 0
                if task.devices % group == 0 and whole and task.seq_len // context % tensor == 0:
                    yield tensor, pipeline, context


def _shards(task: Task, tensor: int, pipeline: int, group: int) -> Iterable[tuple[str, int | None]]:
    if group == 1:
        return [("none", None)]
    if pipeline > 1:
        return [("none", None), ("zero1", None)]
    found: list[tuple[str, int | None]] = [("none", None), ("zero1", None), ("zero2", None), ("full", None)]
    if task.recipe.train.engine == "native":
        node = default_shard_size(task, tensor, group)
        sizes = {node * k for k in (1, 2, 4, 8, 16)} if task.nodes > 1 else {node}
        found += [("hybrid", size) for size in sorted(sizes) if 1 < size < group and group % size == 0]
    return found


def _schedules(task: Task, pipeline: int, accumulation: int) -> Iterable[tuple[str, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    even = (task.shape.layers // pipeline) % 2 == 0 and accumulation % pipeline == 0
    return [("1f1b", 1), ("interleaved", 2)] if even else [("1f1b", 1)]
