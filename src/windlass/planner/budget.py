"""Model sizes and token counts that fit a budget of days, node-hours, kWh or euros, at a planned or a given MFU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from windlass.clusters import Cluster, load_device
from windlass.clusters.model import Device
from windlass.config import ModelConfig, Recipe
from windlass.cost.power import EnergyEstimate, allocation_units, busy_share, compute_mfu, energy, node_power
from windlass.errors import ConfigError, PlanError, WindlassError
from windlass.models.presets import model_spec
from windlass.planner.laws import ExpectedLoss, expected_loss
from windlass.planner.measured import mfu_beyond, tokens_beyond
from windlass.planner.search import plan
from windlass.planner.task import check_nodes
from windlass.units import DAY

MODEL_SIZES = (1e9, 2e9, 7e9, 13e9, 30e9, 70e9)
TOKENS = (100e9, 200e9, 450e9, 900e9, 1.8e12, 3e12, 6e12, 15e12)
# Parameters for which `model_near` has a shape: with fewer, the embeddings leave nothing for layers.
SHAPED_SIZES = (20e6, 10e12)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a run; at least one is set."""

    cluster: Cluster
    nodes: int
    days: float | None = None
    node_hours: float | None = None
    # At the meter: including facility overhead.
    kwh: float | None = None
    euros: float | None = None
    euro_per_kwh: float | None = None
    euro_per_node_hour: float | None = None
    # In the 6N convention; None: the planner's prediction for each size.
    mfu: float | None = None
    # Per token: 6, or 8 with full recompute (`mfu` is then the hardware utilisation).
    flops_per_parameter: float = 6.0
    seq_len: int = 4096
    unique_tokens: float | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.cluster.node.devices


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """What one model size gets out of the budget. None: nothing fits, or the device's power is unknown."""

    parameters: float
    # 6N of the dense bf16 peak.
    mfu: float | None
    # Share of the time in which devices compute; they wait for each other in the rest.
    busy: float | None
    tokens_per_second: float | None
    # How long the budget lasts.
    days: float | None
    # The limit that is reached first.
    bound_by: str
    # The planned layout, or where the MFU comes from.
    layout: str
    tokens: float | None = None
    flops: float | None = None
    node_hours: float | None = None
    energy: EnergyEstimate | None = None
    units: float | None = None
    loss: ExpectedLoss | None = None
    # Sentences about figures above the highest that was ever published.
    outside_measured: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SizeTokensPair:
    """Cost of one model size on one token count, and whether the budget allows it."""

    parameters: float
    tokens: float
    days: float | None = None
    node_hours: float | None = None
    kwh: float | None = None
    tco2e: float | None = None
    fits: bool = False


@dataclass(frozen=True, kw_only=True)
class BudgetResult:
    budget: Budget
    device: Device
    rows: tuple[SizeResult, ...]
    pairs: tuple[SizeTokensPair, ...]
    # The size with the lowest expected loss.
    best: SizeResult | None
    warnings: tuple[str, ...]


def budget(question: Budget, sizes: Sequence[float] = MODEL_SIZES, tokens: Sequence[float] = TOKENS) -> BudgetResult:
    _check(question, sizes)
    device, b = load_device(question.cluster.device), question
    rows = tuple(_size_result(b, device, size) for size in sizes)
    pairs = []
    for row, count in product(rows, tokens):
        pair = SizeTokensPair(parameters=row.parameters, tokens=count)
        if row.tokens_per_second is not None and row.busy is not None:
            days, power = count / row.tokens_per_second / DAY, node_power(device, b.cluster.node, row.busy)
            used = energy(power, b.nodes, days * 24, b.cluster.grid, count)
            pair = replace(
                pair,
                days=days,
                node_hours=days * 24 * b.nodes,
                kwh=used.kwh,
                tco2e=used.tco2e,
                fits=row.days is not None and days <= row.days * (1 + 1e-9),
            )
        pairs.append(pair)
    warnings = {
        "the MFU is predicted for a Llama-like model of each size with a batch of about 4M tokens; "
        "use --mfu if you have measured one": b.mfu is None,
        **{
            f"{size_text(row.parameters)} does not fit on {b.nodes} nodes: {row.layout}": row.tokens_per_second is None
            for row in rows
        },
        **{
            f"! marks sizes outside the measured range; {size_text(row.parameters)}: "
            f"{'; '.join(row.outside_measured)}": True
            for row in [row for row in rows if row.outside_measured][:1]
        },
        "the PUE is unknown: the energy is that of the nodes, without facility overhead": b.cluster.grid.pue is None,
        "the device's power is unknown, so a budget in kWh or euros cannot be checked": (
            (b.kwh is not None or b.euros is not None) and device.tdp_watts is None
        ),
        "start-up, checkpoints, failures and queues are not counted: plan with 5 to 15 % less time": True,
    }
    return BudgetResult(
        budget=b,
        device=device,
        rows=rows,
        pairs=tuple(pairs),
        best=min(
            (row for row in rows if row.loss is not None),
            key=lambda row: sum(row.loss.by_law.values()) if row.loss else 0.0,
            default=None,
        ),
        warnings=tuple(text for text, applies in warnings.items() if applies),
    )


def _check(b: Budget, sizes: Sequence[float]) -> None:
    limits = {"days": b.days, "node_hours": b.node_hours, "kwh": b.kwh, "euros": b.euros}
    if all(value is None for value in limits.values()):
        raise ConfigError(
            "planner.budget-without-limit", "a budget needs a limit", hint="give --days, --node-hours, --kwh or --euros"
        )
    for name, value in limits.items():
        if value is not None and value <= 0:
            raise ConfigError(
                "planner.budget-not-positive",
                f"the budget must be more than 0, not {value:g} {name.replace('_', '-')}",
                hint="give a number above 0",
            )
    check_nodes(b.nodes, b.cluster)
    if b.mfu is not None and not 0 < b.mfu <= 1:
        raise ConfigError(
            "planner.mfu-out-of-range",
            f"an MFU of {b.mfu:g} is not possible",
            hint="give a share between 0 and 1; 0.3 to 0.5 is usual",
        )
    if not sizes or min(sizes) <= 0:
        raise ConfigError(
            "planner.no-model-size", "--sizes has no model size above 0", hint='write for example --sizes "1B,7B,30B"'
        )
    if b.euros is not None and b.euro_per_node_hour is None and _kwh_price(b) is None:
        raise ConfigError(
            "planner.price-missing",
            "a budget in euros needs a price",
            hint="give --euro-per-node-hour or --euro-per-kwh (or grid.euro_per_kwh in the cluster file)",
        )
    if load_device(b.cluster.device).bf16_tflops is None:
        raise PlanError(
            "planner.peak-unknown",
            f"the peak of {b.cluster.device} is unknown, so time cannot be predicted",
            hint="set bf16_tflops in devices.toml",
        )


def _kwh_price(b: Budget) -> float | None:
    return b.euro_per_kwh if b.euro_per_kwh is not None else b.cluster.grid.euro_per_kwh


def _rate(b: Budget, device: Device, size: float) -> tuple[float | None, float | None, float | None, str]:
    """MFU, busy share, tokens/s of all devices, and the layout or source of the MFU."""
    assert device.bf16_tflops is not None
    peak = b.devices * device.bf16_tflops * 1e12
    model = model_near(size)
    if b.mfu is not None:
        busy = min(1.0, b.mfu / compute_mfu(model_spec(model), device, b.seq_len))
        rate = peak * b.mfu / (b.flops_per_parameter * size)
        return b.mfu, busy, rate, f"given MFU {b.mfu:g} ({b.flops_per_parameter:g}N)"
    # A Llama-like model of this size with a batch of about 4M tokens that is a multiple of the devices.
    sequences = max(1, round(4 * 2**20 / b.seq_len / b.devices)) * b.devices
    values = {
        "name": f"budget-{size / 1e9:g}B",
        "cluster": b.cluster.name,
        "nodes": b.nodes,
        "model": model.model_dump(exclude_unset=True),
        "data": {"tokens": 10**12, "seq_len": b.seq_len, "batch_tokens": sequences * b.seq_len},
    }
    try:
        best = plan(Recipe.model_validate(values), b.cluster, nodes=b.nodes).best
    except WindlassError as error:
        return None, None, None, error.message
    # The planned shape has nearly this size: the same FLOP/s give more tokens/s for a smaller model.
    rate = best.step.tokens_per_second_per_device * b.devices * model_spec(model).params.total / size
    return 6.0 * size * rate / peak, busy_share(best.step), rate, best.candidate.describe()


def shape_of_width(width: int) -> dict[str, int]:
    heads = max(1, width // (64 if width < 2048 else 128))
    kv_heads = next(k for k in (8, 4, 2, 1) if heads % k == 0)
    return {"width": width, "heads": heads, "kv_heads": kv_heads, "ffn": max(1, round(3.5 * width / 256)) * 256}


@cache
def model_near(size: float, vocab: int = 128_256, heads_multiple: int = 1) -> ModelConfig:
    """A Llama-3-like model with the nearest parameter count: heads of 128, 8 key/value heads, feed-forward 3.5 times
    the width.

    The number of heads is a multiple of `heads_multiple`, so that tensor parallelism can divide it.
    """
    smallest, largest = SHAPED_SIZES
    if not smallest <= size <= largest:
        raise ConfigError(
            "planner.size-out-of-range",
            f"the planner proposes shapes for {size_text(smallest)} to {size_text(largest)} parameters, not for "
            f"{size:,.0f}",
            hint="write a recipe with the layers and width of this size",
        )
    if size < 2e9:
        vocab = 32_000
    shapes: list[tuple[float, dict[str, int]]] = []
    for width in (*range(256, 4096, 256), *range(4096, 16_385, 512)):
        shape = {"vocab": vocab, **shape_of_width(width)}
        heads = shape["heads"]
        one = model_spec(ModelConfig.model_validate({"layers": 1, **shape}))
        per_layer = one.groups[0].layer.num_params
        # An even number of layers, so that pipelines divide it.
        layers = round((size - (one.params.total - per_layer)) / per_layer / 2) * 2
        if layers >= 4 and heads % heads_multiple == 0:
            total = one.params.total + (layers - 1) * per_layer
            # Very deep or very wide models are penalized: published ones have a width of 60 to 160 per layer.
            distance = abs(total / size - 1) + max(0.0, abs(width / layers - 110) - 50) / 100
            shapes.append((distance, {"layers": layers, **shape}))
    return ModelConfig.model_validate(min(shapes, key=lambda candidate: candidate[0])[1])


def budget_days(b: Budget, device: Device, busy: float) -> tuple[float | None, str]:
    """Days until the first limit is reached, and which limit it is."""
    watts = node_power(device, b.cluster.node, busy).node_watts
    kwh_per_day = None if watts is None else watts * b.nodes * 24 / 1000 * (b.cluster.grid.pue or 1.0)
    euros_per_day = None if kwh_per_day is None else kwh_per_day * (_kwh_price(b) or 0.0)
    if b.euro_per_node_hour is not None:
        euros_per_day = b.euro_per_node_hour * 24 * b.nodes
    limits = {
        "days": (b.days, 1.0),
        "node-hours": (b.node_hours, 24.0 * b.nodes),
        "kWh": (b.kwh, kwh_per_day),
        "euros": (b.euros, euros_per_day),
    }
    unknown = [name for name, (limit, per_day) in limits.items() if limit is not None and per_day is None]
    if unknown:
        return None, f"{unknown[0]}, but the device's power is unknown"
    return min((limit / per_day, name) for name, (limit, per_day) in limits.items() if limit and per_day)


def _size_result(b: Budget, device: Device, size: float) -> SizeResult:
    mfu, busy, rate, layout = _rate(b, device, size)
    days, bound = (None, "nothing fits") if busy is None else budget_days(b, device, busy)
    result = SizeResult(
        parameters=size, mfu=mfu, busy=busy, tokens_per_second=rate, days=days, bound_by=bound, layout=layout
    )
    if rate is None or days is None or busy is None:
        return result
    hours, tokens = days * 24, rate * days * DAY
    return replace(
        result,
        tokens=tokens,
        flops=6.0 * size * tokens,
        node_hours=hours * b.nodes,
        energy=energy(node_power(device, b.cluster.node, busy), b.nodes, hours, b.cluster.grid, tokens),
        units=allocation_units(b.cluster.billing, b.nodes, hours),
        loss=expected_loss(size, tokens, b.unique_tokens),
        outside_measured=(*mfu_beyond(mfu, device, "bf16"), *tokens_beyond(tokens, size)),
    )


def size_text(parameters: float) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
