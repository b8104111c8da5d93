"""Which layouts are valid. Every rule is defined here once, with a stable code, the numbers and the nearest valid
value.

`violations` are layouts that the engine cannot run. `not_ranked` are layouts that it runs, but that the planner does
not propose: it does not know what they cost, or they are never faster."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.layout.resolve import JobSize
from windlass.layout.types import AXES, Layout
from windlass.models.spec import ModelSpec
from windlass.units import divisors, nearest


@dataclass(frozen=True, slots=True)
class Violation:
    code: str
    # What is wrong, with the numbers.
    message: str
    # The nearest valid value or values.
    nearest: str

    def __str__(self) -> str:
        return f"{self.message}; nearest valid value: {self.nearest}"


def violations(model: ModelSpec, layout: Layout, size: JobSize, engine: str = "native") -> list[Violation]:
    """Why the engine cannot run this layout; empty when it can. `engine` is the recipe's `train.engine`."""
    return [
        *_model_problems(model, layout, size, engine),
        *_device_problems(layout, size),
        *_broken(
            (
                engine == "deepspeed" and layout.is_hybrid,
                "layout.hybrid-unsupported",
                f"the deepspeed engine does not support layout.shard {layout.shard}",
                "full, zero2 or train.engine native",
            ),
            (
                layout.offload == "parameters" and layout.devices == 1 and engine == "native",
                "layout.offload-needs-processes",
                "layout.offload = parameters needs several processes",
                "layout.offload = optimizer",
            ),
        ),
    ]


def _broken(*rules: tuple[bool, str, str, str]) -> list[Violation]:
    """One violation per broken rule. A rule is (is broken, code, message, nearest valid value)."""
    return [Violation(code, message, valid) for is_broken, code, message, valid in rules if is_broken]


def check_layout(model: ModelSpec, layout: Layout, size: JobSize, engine: str = "native") -> None:
    """Raise one error for all violations; its code is that of the first."""
    _refuse(violations(model, layout, size, engine))


def check_degrees(model: ModelSpec, layout: Layout, size: JobSize) -> None:
    """Raise an error for degrees that do not divide the model; no number of devices and no batch can fix these."""
    codes = (
        "layout.tensor-not-divisible",
        "layout.too-many-stages",
        "layout.expert-not-divisible",
        "layout.no-experts",
    )
    _refuse([problem for problem in _model_problems(model, layout, size, "native") if problem.code in codes])


def _refuse(problems: list[Violation]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0].code, problems[0].message, hint=f"nearest valid value: {problems[0].nearest}")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(problems[0].code, f"the layout has {len(problems)} problems:{lines}")


def _model_problems(model: ModelSpec, layout: Layout, size: JobSize, engine: str) -> Iterator[Violation]:
    positions = size.seq_len // layout.context
    for axis in AXES:
        degree = getattr(layout, axis)
        if degree == 1:
            continue
        sizes = model.sizes_divided_by(axis)
        if engine == "deepspeed":
            yield Violation(
                "layout.axis-unsupported",
                f"layout.{axis} ({degree}): the deepspeed engine can only divide the data and the states",
                "1, or train.engine native",
            )
        elif sizes is None:
            kind = "a Hugging Face model" if model.foreign else "one of the model's blocks"
            yield Violation("layout.axis-unsupported", f"layout.{axis} ({degree}) is not supported for {kind}", "1")
        elif axis == "expert" and not sizes:
            yield Violation("layout.no-experts", f"layout.expert ({degree}): the model has no experts to divide", "1")
        for name, value in sizes or ():
            if value % degree:
                common = math.gcd(*(other for _, other in sizes or ()))
                valid = [d for d in divisors(common) if axis != "tensor" or size.devices_per_node % d == 0]
                yield Violation(
                    f"layout.{axis}-not-divisible",
                    f"layout.{axis} ({degree}) does not divide {name} ({value:,})",
                    nearest(degree, valid),
                )
    if model.num_layers < layout.num_stages:
        yield Violation(
            "layout.too-many-stages",
            f"model.layers ({model.num_layers}) is less than the {layout.num_stages} pipeline stages",
            f"at most {model.num_layers // layout.stages_per_rank} pipeline ranks",
        )
    if size.seq_len % layout.context:
        valid = [d for d in divisors(size.seq_len) if d <= 2 * layout.context]
        yield Violation(
            "layout.context-not-divisible",
            f"layout.context ({layout.context}) does not divide data.seq_len ({size.seq_len:,})",
            nearest(layout.context, valid),
        )
    elif positions % layout.tensor:
        valid = [d for d in divisors(size.devices_per_node) if positions % d == 0]
        yield Violation(
            "layout.sequence-not-divisible",
            f"layout.tensor ({layout.tensor}) does not divide the {positions:,} positions of a rank",
            nearest(layout.tensor, valid),
        )


def _device_problems(layout: Layout, size: JobSize) -> Iterator[Violation]:
    """Problems with dividing the devices, and the batch over the devices."""
    group = layout.tensor * layout.pipeline * layout.context
    product = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} = {group}"
    if group > size.devices:
        yield Violation(
            "layout.too-few-devices",
            f"{product} is more than {size.devices} device{'s' * (size.devices > 1)}",
            f"{group} devices ({-(-group // size.devices_per_node)} nodes)",
        )
    elif size.devices % group:
        yield Violation(
            "layout.devices-not-divisible",
            f"{product} does not divide {size.devices} devices",
            nearest(group, divisors(size.devices)),
        )
    if size.devices % group:  # without a whole number of replicas the batch rules would only repeat the problem
        return
    violation = batch_violation(layout.data, layout.micro_batch, size)
    if violation is not None:
        yield violation
    for sequences in size.smaller:
        batches = nearest_batches(layout, replace(size, sequences=sequences))
        if batches != [sequences]:
            unit = layout.data * layout.micro_batch * size.seq_len
            filled = f", and in a pipeline of {layout.pipeline} at least {unit * layout.pipeline:,}"
            yield Violation(
                "layout.batch-not-divisible",
                f"data.batch_ramp: a batch of {sequences * size.seq_len:,} tokens is not a multiple of {unit:,} = "
                f"micro_batch {layout.micro_batch} x seq_len {size.seq_len:,} x {layout.data:,} replica"
                f"{'s' * (layout.data > 1)}{filled * (layout.pipeline > 1)}",
                " or ".join(f"{batch * size.seq_len:,}" for batch in sorted(batches)),
            )
    if layout.accumulation < layout.pipeline:
        fewer = nearest(layout.accumulation + 1, range(1, layout.accumulation + 1))
        yield Violation(
            "layout.pipeline-not-filled",
            f"{layout.accumulation} micro-batches cannot fill {layout.pipeline} pipeline ranks",
            f"pipeline {fewer}, a smaller micro_batch or a larger batch",
        )
    elif layout.schedule == "interleaved" and layout.accumulation % layout.pipeline:
        valid = max(layout.pipeline, layout.accumulation // layout.pipeline * layout.pipeline)
        yield Violation(
            "layout.interleaved-not-divisible",
            f"interleaved: {layout.accumulation} micro-batches are not a multiple of pipeline {layout.pipeline}",
            f"{valid} micro-batches, or schedule 1f1b",
        )
    if layout.replicas % layout.shard_size:
        yield Violation(
            "layout.shard-size-not-divisible",
            f"layout.shard_size ({layout.shard_size}) does not divide {layout.replicas} replicas",
            nearest(layout.shard_size, divisors(layout.replicas)),
        )
    if layout.replicas % layout.expert:
        yield Violation(
            "layout.expert-replicas-not-divisible",
            f"layout.expert ({layout.expert}) does not divide {layout.replicas} replicas "
            f"(data {layout.data} x context {layout.context})",
            nearest(layout.expert, divisors(layout.replicas)),
        )
    elif layout.is_hybrid and layout.shard_size % layout.expert and layout.expert % layout.shard_size:
        inside = [d for d in divisors(layout.replicas) if layout.shard_size % d == 0 or d % layout.shard_size == 0]
        yield Violation(
            "layout.expert-crosses-shards",
            f"layout.expert ({layout.expert}) neither divides layout.shard_size ({layout.shard_size}) nor is a "
            "multiple of it",
            nearest(layout.expert, inside),
        )


def batch_violation(data: int, micro_batch: int, size: JobSize) -> Violation | None:
    """The violation if the global batch does not divide over the replicas and their micro-batches; None if it does."""
    if size.sequences is None:
        return None
    valid = nearest_batches(Layout(data=data, micro_batch=micro_batch), size)
    if valid == [size.sequences]:
        return None
    unit = data * micro_batch * size.seq_len
    return Violation(
        "layout.batch-not-divisible",
        f"data.batch_tokens ({size.sequences * size.seq_len:,}) is not a multiple of {unit:,} = "
        f"micro_batch {micro_batch} x seq_len {size.seq_len:,} x {data:,} replica{'s' * (data > 1)}",
        " or ".join(f"{sequences * size.seq_len:,}" for sequences in sorted(valid)),
    )


def nearest_batches(layout: Layout, size: JobSize) -> list[int]:
    """The valid global batches nearest to the job's own, in sequences, the nearest first. If the job's own is valid, it
    is the only one.

    Every replica gets the same number of micro-batches, and a pipeline at least one per rank."""
    sequences, unit = size.sequences or 0, layout.data * layout.micro_batch
    least = unit * layout.pipeline
    step = least if layout.schedule == "interleaved" else unit
    below = sequences // step * step
    if below == sequences >= least:
        return [sequences]
    # Of two equally near batches the larger comes first.
    return sorted({max(least, below), max(least, below + step)}, key=lambda valid: (abs(valid - sequences), -valid))


def not_ranked(
    model: ModelSpec,
    layout: Layout,
    size: JobSize,
    engine: str = "native",
    *,
    moments: str = "fp32",
    host_memory_bytes: float | None = None,
) -> list[Violation]:
    """Why the planner does not propose a layout that the engine could run."""
    per_node, is_offloaded = size.devices_per_node, layout.offload != "none"
    # DeepSpeed also moves the states of ZeRO-1 and 2 to the host.
    unsharded = ("none",) if engine == "deepspeed" else ("none", "zero1", "zero2", "hybrid_zero2")
    per_parameter = (8.0 if moments == "fp32" else 4.0) + (4.0 if layout.offload == "parameters" else 0.0)
    share = model.params.stored / (layout.tensor * layout.pipeline * layout.shard_size)
    host_bytes, available_bytes = per_parameter * share * per_node, host_memory_bytes or math.inf
    return _broken(
        (
            per_node % layout.tensor != 0,
            "layout.tensor-across-nodes",
            f"layout.tensor ({layout.tensor}) does not divide the {per_node} devices of a node",
            nearest(layout.tensor, divisors(per_node)),
        ),
        (
            layout.context > 1 and not model.prices("context") and not model.foreign,
            "layout.context-not-priced",
            f"layout.context ({layout.context}): the engine runs it for this model, but its cost is not known",
            "1",
        ),
        (
            layout.shard != "none" and layout.replicas == 1,
            "layout.shard-without-replicas",
            f"layout.shard ({layout.shard}) cannot divide anything: there is only one replica",
            "none",
        ),
        (
            layout.is_hybrid and layout.shard_size == 1 and layout.replicas > 1,
            "layout.hybrid-divides-nothing",
            f"{layout.shard} with shard_size 1 divides nothing",
            "shard none",
        ),
        (
            (layout.is_hybrid or layout.shard == "zero2") and layout.pipeline > 1,
            "layout.shard-with-pipeline",
            f"layout.shard {layout.shard} in a pipeline would reduce gradients after every micro-batch",
            "zero1",
        ),
        (
            is_offloaded and layout.shard in unsharded and (layout.devices > 1 or engine != "native"),
            "layout.offload-needs-sharding",
            f"layout.offload ({layout.offload}) needs sharded weights",
            "shard full or hybrid",
        ),
        (
            is_offloaded and host_bytes > available_bytes,
            "layout.host-memory-too-small",
            f"layout.offload ({layout.offload}) puts {host_bytes / 2**30:,.0f} GiB into a node's "
            f"{available_bytes / 2**30:,.0f} GiB of memory",
            f"{-(-host_bytes * (size.devices // per_node) // available_bytes):.0f} nodes",
        ),
    )


def check_step(recipe: Recipe, model: ModelSpec, *, tensor: int) -> None:
    """Raise an error for settings that the model's blocks do not support, before any memory is allocated. `tensor`: the
    tensor-parallel degree."""
    train, lora = recipe.train, None if recipe.tune is None else recipe.tune.lora
    if lora is not None and lora.dropout and tensor > 1:
        raise ConfigError(
            "tune.lora-dropout-divided",
            f"tune.lora.dropout = {lora.dropout} is not possible under tensor parallelism (layout.tensor {tensor})",
            hint="set tune.lora.dropout = 0, or layout.tensor = 1",
        )
    if recipe.data.masks_documents and (model.foreign or not all(b.masks_documents for b in model.blocks)):
        key = "data.mask_documents" if recipe.data.mask_documents else 'data.pack = "documents"'
        raise ConfigError(
            "model.no-document-mask",
            f"{key} is not possible with model.family = {recipe.model.family!r}",
            hint='use family llama, or data.mask_documents = false with data.pack = "stream"',
        )
    if recipe.optim.qk_clip and not model.foreign:
        normed = [b for b in model.blocks if b.kind == "attention" and getattr(b, "qk_norm", "none") != "none"]
        if normed or not any(b.kind == "attention" for b in model.blocks):
            reason = (
                "queries and keys are normalised, which already bounds them"
                if normed
                else "the model has no attention block with such weights"
            )
            raise ConfigError(
                "model.no-qk-clip",
                f"optim.qk_clip = {recipe.optim.qk_clip:g} scales the weights of queries and keys, but {reason}",
                hint="remove optim.qk_clip",
            )
    if not model.foreign:
        return
    settings = {
        f'train.loss = "{train.loss}"': train.loss in ("chunked", "fused"),
        'train.precision = "fp8"': train.precision == "fp8",
        "train.fuse = true": train.fuse,
        'train.attention = "flash3"': train.attention == "flash3",
        "optim.qk_clip": recipe.optim.qk_clip,
    }
    ignored = [setting for setting, is_set in settings.items() if is_set]
    if ignored:
        raise ConfigError(
            "model.setting-needs-own-blocks",
            f"{', '.join(ignored)}: only windlass's own families support this, not model.family = 'hf'",
            hint="remove it, or describe the model as family llama",
        )
