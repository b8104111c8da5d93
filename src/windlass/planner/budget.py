"""Which model sizes and token counts fit a budget? Days, node-hours, kWh or euros on so many nodes, at a planned or a given MFU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from windlass.clusters import Cluster, load_device
from windlass.clusters.model import Device
from windlass.config import ModelConfig, Recipe
from windlass.cost.power import EnergyEstimate, allocation_units, energy, node_power
from windlass.errors import ConfigError, PlanError, WindlassError
from windlass.models.presets import model_spec
from windlass.planner.laws import Guess, expected_loss
from windlass.planner.search import plan

SIZES = (1e9, 2e9, 7e9, 13e9, 30e9, 70e9)
TOKENS = (100e9, 200e9, 450e9, 900e9, 1.8e12, 3e12, 6e12, 15e12)
DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be spent; at least one of the limits is given."""

    cluster: Cluster
    nodes: int
    days: float | None = None
    node_hours: float | None = None
    kwh: float | None = None
    """At the meter: with the building's share."""
    euros: float | None = None
    euro_per_kwh: float | None = None
    euro_per_node_hour: float | None = None
    mfu: float | None = None
    """Given, in the 6N convention; None: the planner's own estimate for each size."""
    flops_per_parameter: float = 6.0
    """Per token: 6, or 8 when a full recompute is counted (the given utilisation is then the hardware's)."""
    seq_len: int = 4096
    unique_tokens: float | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.cluster.node.devices


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one model size gets out of the budget."""

    parameters: float
    mfu: float | None
    """6N of the dense bf16 peak; None when nothing fits."""
    tokens_per_second: float | None
    days: float | None
    """How long the budget lasts at this size."""
    bound_by: str
    """Which limit ends it first."""
    tokens: float | None
    flops: float | None
    node_hours: float | None
    energy: EnergyEstimate | None
    units: float | None
    loss: Guess | None
    layout: str
    """The planned layout, or how the MFU came about."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One (N, D): what it takes, and whether the budget allows it."""

    parameters: float
    tokens: float
    days: float | None
    node_hours: float | None
    kwh: float | None
    tco2e: float | None
    fits: bool


@dataclass(frozen=True, kw_only=True)
class BudgetResult:
    budget: Budget
    device: Device
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    best: Row | None
    """The size with the lowest expected loss."""
    warnings: tuple[str, ...]


def budget(question: Budget, sizes: Sequence[float] = SIZES, tokens: Sequence[float] = TOKENS) -> BudgetResult:
    _check(question, sizes)
    device = load_device(question.cluster.device)
    rates = [_rate(question, device, size) for size in sizes]
    rows = tuple(_row(question, device, size, *rate) for size, rate in zip(sizes, rates, strict=True))
    pairs = tuple(_pair(question, device, row, d) for row in rows for d in tokens)
    known = [row for row in rows if row.loss is not None]
    best = min(known, key=lambda row: sum(row.loss.by_law.values()) if row.loss else 0.0, default=None)
    return BudgetResult(
        budget=question,
        device=device,
        rows=rows,
        pairs=pairs,
        best=best,
        warnings=tuple(_warnings(question, device, rows)),
    )


def _check(b: Budget, sizes: Sequence[float]) -> None:
    limits = {"days": b.days, "node_hours": b.node_hours, "kwh": b.kwh, "euros": b.euros}
    if all(value is None for value in limits.values()):
        raise ConfigError(
            "planner.budget-needs-limit", "a budget needs a limit", hint="give --days, --node-hours, --kwh or --euros"
        )
    for name, value in limits.items():
        if value is not None and value <= 0:
            raise ConfigError(
                "planner.budget-buys-nothing",
                f"a budget of {value:g} {name.replace('_', '-')} buys nothing",
                hint="give a number above 0",
            )
    if b.nodes < 1:
        raise ConfigError(
            "planner.nodes-machine-plan",
            f"{b.nodes} nodes is not a machine to plan for",
            hint="the smallest number is 1",
        )
    if b.cluster.nodes is not None and b.nodes > b.cluster.nodes:
        raise ConfigError(
            "planner.nodes",
            f"{b.nodes:,} nodes are more than {b.cluster.name} has ({b.cluster.nodes:,})",
            hint=f"the largest number is {b.cluster.nodes:,}",
        )
    if b.mfu is not None and not 0 < b.mfu <= 1:
        raise ConfigError(
            "planner.mfu-possible",
            f"an MFU of {b.mfu:g} is not possible",
            hint="give a share between 0 and 1; 0.3 to 0.5 is usual",
        )
    if not sizes or min(sizes) <= 0:
        raise ConfigError(
            "planner.sizes-names-model-size", "--sizes names no model size", hint='for example --sizes "1B,7B,30B"'
        )
    if b.euros is not None and b.euro_per_node_hour is None and _kwh_price(b) is None:
        raise ConfigError(
            "planner.budget-euros-needs-price",
            "a budget in euros needs a price",
            hint="give --euro-per-node-hour or --euro-per-kwh (or grid.euro_per_kwh in the cluster file)",
        )
    if load_device(b.cluster.device).bf16_tflops is None:
        raise PlanError(
            "planner.peak-unknown-time-cannot",
            f"the peak of {b.cluster.device} is unknown, so time cannot be planned",
            hint="give bf16_tflops in devices.toml",
        )


def _kwh_price(b: Budget) -> float | None:
    return b.euro_per_kwh if b.euro_per_kwh is not None else b.cluster.grid.euro_per_kwh


def _rate(b: Budget, device: Device, size: float) -> tuple[float | None, float | None, str]:
    """MFU, tokens/s of all devices, and where they come from."""
    assert device.bf16_tflops is not None
    peak = b.devices * device.bf16_tflops * 1e12
    if b.mfu is not None:
        return b.mfu, peak * b.mfu / (b.flops_per_parameter * size), f"given MFU {b.mfu:g} ({b.flops_per_parameter:g}N)"
    try:
        best = plan(_recipe(b, size), b.cluster, nodes=b.nodes).best
    except WindlassError as error:
        return None, None, error.message
    # The planned shape is near this size, not of it: the same work per second makes more tokens of a smaller model.
    rate = best.step.tokens_per_second_per_device * b.devices * model_spec(model_near(size)).params.total / size
    return 6.0 * size * rate / peak, rate, best.candidate.describe()


def _recipe(b: Budget, size: float) -> Recipe:
    """A Llama-like model of this size with a batch of about 4M tokens that the devices divide."""
    model = model_near(size)
    sequences = max(1, round(4 * 2**20 / b.seq_len / b.devices)) * b.devices
    return Recipe.model_validate(
        {
            "name": f"budget-{size / 1e9:g}B", "cluster": b.cluster.name, "nodes": b.nodes,
            "model": model.model_dump(exclude_unset=True),
            "data": {"tokens": 10**12, "seq_len": b.seq_len, "batch_tokens": sequences * b.seq_len},
        }
    )  # fmt: skip


@cache
def model_near(size: float, vocab: int = 128_256, heads_multiple: int = 1) -> ModelConfig:
    """A Llama-3-like model nearest to a parameter count: heads of 128, 8 key/value heads, feed-forward 3.5 times the width.

    `heads_multiple` asks for a number of heads that tensor parallelism can divide.
    """
    if size < 2e9:
        vocab = 32_000
    best, best_distance = None, float("inf")
    for width in (*range(256, 4096, 256), *range(4096, 16_385, 512)):
        heads = width // (64 if width < 2048 else 128)
        kv_heads = next(k for k in (8, 4, 2, 1) if heads % k == 0)
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "ffn": round(3.5 * width / 256) * 256}
        one = model_spec(ModelConfig.model_validate({"layers": 1, "vocab": vocab, **sizes}))
        per_layer = one.groups[0].layer.num_params
        # An even number of layers, so that pipelines divide it.
        layers = round((size - (one.params.total - per_layer)) / per_layer / 2) * 2
        if layers < 4 or heads % heads_multiple:
            continue
        total = one.params.total + (layers - 1) * per_layer
        # Deep and narrow or flat and wide models count as far away: published ones have widths of 60 to 160 per layer.
        distance = abs(total / size - 1) + max(0.0, abs(width / layers - 110) - 50) / 100
        if distance < best_distance:
            best_distance = distance
            best = ModelConfig.model_validate({"layers": layers, "vocab": vocab, **sizes})
    assert best is not None
    return best


def _watts(b: Budget, device: Device, mfu: float | None) -> float | None:
    return node_power(device, b.cluster.node, mfu).node_watts


def lasts(b: Budget, device: Device, mfu: float | None) -> tuple[float | None, str]:
    """Days until the first limit is reached, and which it is."""
    watts = _watts(b, device, mfu)
    per_day = None if watts is None else watts * b.nodes * 24 / 1000 * (b.cluster.grid.pue or 1.0)
    found: dict[str, float] = {}
    if b.days is not None:
        found["days"] = b.days
    if b.node_hours is not None:
        found["node-hours"] = b.node_hours / (24 * b.nodes)
    if b.kwh is not None:
        if per_day is None:
            return None, "kWh, but the device's power is unknown"
        found["kWh"] = b.kwh / per_day
    if b.euros is not None:
        price = _kwh_price(b)
        if b.euro_per_node_hour is None and per_day is None:
            return None, "euros, but the device's power is unknown"
        daily = (
            b.euro_per_node_hour * 24 * b.nodes
            if b.euro_per_node_hour is not None
            else (per_day or 0.0) * (price or 0.0)
        )
        found["euros"] = b.euros / daily
    name = min(found, key=lambda key: found[key])
    return found[name], name


def _row(b: Budget, device: Device, size: float, mfu: float | None, rate: float | None, layout: str) -> Row:
    days, bound = lasts(b, device, mfu) if rate is not None else (None, "nothing fits")
    if rate is None or days is None:
        return Row(
            parameters=size, mfu=mfu, tokens_per_second=rate, days=days, bound_by=bound, tokens=None, flops=None, node_hours=None, energy=None, units=None,
            loss=None, layout=layout,
        )  # fmt: skip
    tokens = rate * days * DAY
    used = energy(node_power(device, b.cluster.node, mfu), b.nodes, days * 24, b.cluster.grid, tokens)
    return Row(
        parameters=size, mfu=mfu, tokens_per_second=rate, days=days, bound_by=bound, tokens=tokens, flops=6.0 * size * tokens, node_hours=days * 24 * b.nodes,
        energy=used, units=allocation_units(b.cluster.billing, b.nodes, days * 24), loss=expected_loss(size, tokens, b.unique_tokens), layout=layout,
    )  # fmt: skip


def _pair(b: Budget, device: Device, row: Row, tokens: float) -> Pair:
    if row.tokens_per_second is None:
        return Pair(
            parameters=row.parameters, tokens=tokens, days=None, node_hours=None, kwh=None, tco2e=None, fits=False
        )
    days = tokens / row.tokens_per_second / DAY
    used = energy(node_power(device, b.cluster.node, row.mfu), b.nodes, days * 24, b.cluster.grid, tokens)
    fits = row.days is not None and days <= row.days * (1 + 1e-9)
    return Pair(
        parameters=row.parameters,
        tokens=tokens,
        days=days,
        node_hours=days * 24 * b.nodes,
        kwh=used.kwh,
        tco2e=used.tco2e,
        fits=fits,
    )


def curve(b: Budget, row: Row, days: Sequence[float]) -> list[float | None]:
    """Tokens after so many days."""
    return [None if row.tokens_per_second is None else row.tokens_per_second * d * DAY for d in days]


def _warnings(b: Budget, device: Device, rows: Sequence[Row]) -> list[str]:
    found = []
    if b.mfu is None:
        found.append(
            "the MFU is the planner's for a Llama-like model of each size with about 4M tokens a batch; give --mfu when you have measured one"
        )
    found += [
        f"{size_words(row.parameters)} fits nowhere on {b.nodes} nodes: {row.layout}"
        for row in rows
        if row.tokens_per_second is None
    ]
    if b.cluster.grid.pue is None:
        found.append("the PUE is unknown: energy is at the nodes, without the building")
    if (b.kwh is not None or b.euros is not None) and device.tdp_watts is None:
        found.append("the device's power is unknown, so a budget in kWh or euros cannot be checked")
    found.append("start-up, checkpoints, failures and queues are not counted: plan with 5 to 15 % less time")
    return found


def size_words(parameters: float) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
