"""Energy, carbon and allocation units of a run, from device power by utilisation to the meter of the building."""

import math
from dataclasses import dataclass

from windlass.clusters.model import Billing, Device, Grid, Node

# Idle power as a share of the limit where it was not measured: 80 to 90 W of 700 W (H100, H200), 55 of 400 W (A100).
IDLE_SHARE = 0.12
# Power above idle that a device draws as soon as it computes at all: clocks, memory and spinning collectives; the
# rest follows the MFU.
BUSY_SHARE = 0.40
# MFU at which a device reaches its power limit: an H200 draws 690 of 700 W in compiled loops from 40 % MFU on.
FULL_AT = 0.45
# CPUs, memory, network cards and fans relative to device power, where the node's figures are unknown.
NODE_OVERHEAD = 0.25


@dataclass(frozen=True, slots=True)
class PowerEstimate:
    device_watts: float | None
    # One node with all its devices, CPUs and the rest.
    node_watts: float | None
    # Figures that were unknown and assumed.
    assumed: tuple[str, ...]


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


def device_watts(device: Device, mfu: float | None) -> float | None:
    """Mean power of one device while training at an MFU (dense peak): idle, plus a step for being busy, plus a part
    that follows the work."""
    if device.tdp_watts is None:
        return None
    idle = device.idle_watts if device.idle_watts is not None else IDLE_SHARE * device.tdp_watts
    if mfu is None or mfu <= 0:
        return idle
    share = BUSY_SHARE + (1 - BUSY_SHARE) * min(1.0, mfu / FULL_AT)
    return idle + (device.tdp_watts - idle) * share


def node_power(device: Device, node: Node, mfu: float | None) -> PowerEstimate:
    watts = device_watts(device, mfu)
    if watts is None:
        return PowerEstimate(None, None, ("the device's power limit is unknown",))
    devices, cpu_watts, other_watts = watts * node.devices, node.cpu_watts, node.other_watts
    others = 0.5 * (cpu_watts or 0.0) + (other_watts or 0.0)  # training keeps the CPUs about half busy
    assumed: tuple[str, ...] = ()
    if cpu_watts is None and other_watts is None:
        others, assumed = NODE_OVERHEAD * devices, (f"node overhead {NODE_OVERHEAD:.0%} of device power",)
    elif cpu_watts is None or other_watts is None:
        assumed = ("part of the node's power is unknown and left out",)
    return PowerEstimate(watts, min(devices + others, node.ceiling_watts or math.inf), assumed)


def energy(power: PowerEstimate, nodes: float, hours: float, grid: Grid, tokens: float | None = None) -> EnergyEstimate:
    """Energy and carbon of `nodes` for `hours`."""
    if power.node_watts is None:
        return EnergyEstimate(None, None, grid.pue or 1.0, None, None, None, None, power.assumed)
    return energy_of(power.node_watts * nodes * hours / 1000.0, grid, tokens, power.assumed)


def energy_of(it_kwh: float, grid: Grid, tokens: float | None = None, assumed: tuple[str, ...] = ()) -> EnergyEstimate:
    """Carbon of an energy measured or planned at the nodes."""
    if grid.pue is None:
        assumed = (*assumed, "PUE unknown: 1.0 taken, so the building's share is missing")
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
