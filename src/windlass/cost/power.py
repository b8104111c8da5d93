"""Energy, carbon and allocation units of a run, from device power by share of busy time to the meter of the
building."""

import math
from dataclasses import dataclass, replace

from windlass.clusters.model import Billing, Device, Grid, Links, Node
from windlass.cost.step import Machine, StepEstimate, estimate_step
from windlass.errors import PlanError
from windlass.layout.types import Layout, StepSpec
from windlass.models.spec import ModelSpec

# Idle power as a share of the limit where it was not measured: 70 to 73 W of 700 W (H100), 62 to 66 of 400 W (A100).
IDLE_SHARE = 0.12
# Highest MFU of a step in FP8 (bf16 peak) that was measured: an 8B model on an H200, benchmarks/results/gpu_train.json.
BEST_FP8_MFU = 0.86
# MFU without waiting where neither the model nor the device's rates are known: that of 1B to 30B models on an H100.
USUAL_COMPUTE_MFU = 0.53


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerConstants:
    """A device draws nearly its limit while kernels run, whatever their MFU, and little while it waits for other
    devices. The rest of a node draws the same power whatever the devices do."""

    # Shares of the range from idle to the limit, while kernels run and while a device waits.
    busy: float = 0.98
    waiting: float = 0.05
    # CPUs, memory, network cards, fans and conversion, in watts per device, where the node's figures are unknown:
    # nodes of up to four devices, and larger ones.
    host_small: float = 124.0
    host_large: float = 208.0


POWER = PowerConstants()
POWER_SOURCES = {
    "busy": "23 training steps on one H200 at 36 to 86 % MFU, bf16 and FP8, compiled and not: 670 to 705 of 700 W, "
    "median 688 (benchmarks/results/gpu_train.json)",
    "waiting": "fitted to published measurements of whole runs (Luciole, MLPerf v4.0, Olmo 3, flopmetrics)",
    "host_small": "Luciole on Jean Zay, four H100 per node: SLURM's energy of nodes less that of GPUs, median of 6 jobs",
    "host_large": "MLPerf v4.0, LoRA on eight H100 at their limit: 896 W per device at the node's meter less 688 W",
}


@dataclass(frozen=True, slots=True)
class PowerEstimate:
    device_watts: float | None
    # One node with all its devices, CPUs and the rest.
    node_watts: float | None
    # Figures that were unknown and assumed.
    assumed: tuple[str, ...]
    # Share of the node's power that its devices draw.
    device_share: float | None = None


@dataclass(frozen=True, slots=True)
class EnergyEstimate:
    # At the nodes.
    it_kwh: float | None
    # With the building: times PUE.
    kwh: float | None
    pue: float
    # Location-based: the grid's average.
    tco2e: float | None
    # Market-based: what the site's contract says; None when unknown.
    market_tco2e: float | None
    kwh_per_billion_tokens: float | None
    euros: float | None
    assumed: tuple[str, ...]
    # Of the devices alone, as many publications count; inside `it_kwh`.
    device_kwh: float | None = None


def busy_share(step: StepEstimate) -> float:
    """Share of a planned step in which kernels run: all but waiting for other devices and pipeline bubbles."""
    return max(0.0, 1.0 - (step.exposed_communication + step.bubble) / step.seconds)


def compute_mfu(model: ModelSpec, device: Device, seq_len: int, precision: str = "bf16") -> float:
    """MFU of the model on one device that never waits: usual code (FlashAttention 2, not compiled) and micro-batches of
    at least 4,096 tokens.

    A measured MFU divided by it is the share of time in which kernels ran. Small models have a low one, because they
    are limited by memory and launches, so they draw more power than their MFU suggests."""
    layout = Layout(micro_batch=max(1, 4096 // seq_len), accumulation=64)
    step = StepSpec(
        seq_len=seq_len, precision=precision, engine="torch", attention="flash", compile=False, loss="compiled"
    )
    try:
        value = estimate_step(model, step, layout, Machine(device, Links(), 1)).mfu
    except PlanError:  # the device's bandwidth or peak is unknown
        value = None
    return min(value or USUAL_COMPUTE_MFU, BEST_FP8_MFU)


def device_watts(device: Device, busy: float, constants: PowerConstants = POWER) -> float | None:
    """Mean power of one device that computes for the share `busy` of the time and waits otherwise."""
    if device.tdp_watts is None:
        return None
    idle = device.idle_watts if device.idle_watts is not None else IDLE_SHARE * device.tdp_watts
    busy = min(1.0, busy)
    return idle + (device.tdp_watts - idle) * (constants.busy * busy + constants.waiting * (1 - busy))


def node_power(device: Device, node: Node, busy: float, constants: PowerConstants = POWER) -> PowerEstimate:
    watts = device_watts(device, busy, constants)
    if watts is None or device.tdp_watts is None:
        return PowerEstimate(None, None, ("the device's power limit is unknown",))
    cpu_watts, other_watts = node.cpu_watts, node.other_watts
    host = 0.5 * (cpu_watts or 0.0) + (other_watts or 0.0)  # training keeps the CPUs about half busy
    assumed: tuple[str, ...] = ()
    if cpu_watts is None and other_watts is None:
        # The rest of a node with small devices (L4, CPU cores) is small too.
        each = min(constants.host_small if node.devices <= 4 else constants.host_large, device.tdp_watts)
        host, assumed = each * node.devices, (f"{each:g} W per device assumed for the other parts of the node",)
    elif cpu_watts is None or other_watts is None:
        assumed = ("part of the node's power is unknown and not included",)
    node_watts = min(watts * node.devices + host, node.ceiling_watts or math.inf)
    return PowerEstimate(watts, node_watts, assumed, min(1.0, watts * node.devices / node_watts))


def energy(power: PowerEstimate, nodes: float, hours: float, grid: Grid, tokens: float | None = None) -> EnergyEstimate:
    """Energy and carbon of `nodes` for `hours`."""
    if power.node_watts is None:
        return EnergyEstimate(None, None, grid.pue or 1.0, None, None, None, None, power.assumed)
    it_kwh = power.node_watts * nodes * hours / 1000.0
    device_kwh = None if power.device_share is None else it_kwh * power.device_share
    return replace(energy_of(it_kwh, grid, tokens, power.assumed), device_kwh=device_kwh)


def energy_of(it_kwh: float, grid: Grid, tokens: float | None = None, assumed: tuple[str, ...] = ()) -> EnergyEstimate:
    """Carbon of an energy measured or planned at the nodes."""
    if grid.pue is None:
        assumed = (*assumed, "PUE unknown: 1.0 assumed, so facility overhead is not included")
    pue = grid.pue if grid.pue is not None else 1.0
    kwh = it_kwh * pue
    return EnergyEstimate(
        it_kwh=it_kwh,
        kwh=kwh,
        pue=pue,
        tco2e=kwh * grid.g_per_kwh / 1e6 if grid.g_per_kwh is not None else None,
        market_tco2e=kwh * grid.market_g_per_kwh / 1e6 if grid.market_g_per_kwh is not None else None,
        kwh_per_billion_tokens=kwh / (tokens / 1e9) if tokens else None,
        euros=kwh * grid.euro_per_kwh if grid.euro_per_kwh is not None else None,
        assumed=assumed,
    )


def allocation_units(billing: Billing, nodes: float, hours: float) -> float | None:
    """What the run is charged, in the site's own unit (GPU-hours, SBU, core-hours); None when the site's rule is
    unknown."""
    return None if billing.per_node_hour is None else billing.per_node_hour * nodes * hours
