"""The energy of a run and what follows from it, each figure computed here alone."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from windlass.clusters.load import load_cluster
from windlass.config import Recipe
from windlass.energy.carbon import Carbon, carbon
from windlass.energy.ledger import Ledger
from windlass.errors import WindlassError
from windlass.units import print_joules


@dataclass(frozen=True, kw_only=True)
class RunEnergy:
    """The run's energy and what follows from it; None: unknown."""

    basis: str  # measured or modelled
    joules: float | None
    ledger: Ledger
    carbon: Carbon | None
    joules_per_token: float | None
    joules_per_step: float | None
    kwh_per_billion_tokens: float | None
    mean_watts: float | None  # of the measured nodes together
    forecast_kwh: float | None  # the plan's prediction for the whole run, PUE included


def run_energy(
    ledger: Ledger,
    recipe: Recipe | None,
    tokens: float | None,
    step: float | None,
    planned_mwh: float | None = None,
    factors: Mapping[str, float] | None = None,
) -> RunEnergy:
    """`factors`: PUE and intensities instead of those that the run knows; see `carbon`."""
    cluster = None
    with contextlib.suppress(WindlassError):  # a cluster of another site: its PUE and grid are unknown here
        cluster = load_cluster(recipe.cluster) if recipe else None
    joules = ledger.joules if ledger.joules is not None else ledger.modelled_joules
    emitted = None if joules is None else carbon(joules, cluster, recipe.energy if recipe else None, factors)
    kwh = None if emitted is None else emitted.kwh if emitted.kwh is not None else emitted.it_kwh
    return RunEnergy(
        basis=ledger.basis,
        joules=joules,
        ledger=ledger,
        carbon=emitted,
        joules_per_token=joules / tokens if joules is not None and tokens else None,
        joules_per_step=joules / step if joules is not None and step else None,
        kwh_per_billion_tokens=kwh / (tokens / 1e9) if kwh is not None and tokens else None,
        mean_watts=ledger.joules / ledger.wall_seconds
        if ledger.joules is not None and ledger.wall_seconds > 0
        else None,
        forecast_kwh=None if planned_mwh is None else planned_mwh * 1e3,
    )


def print_energy(energy: RunEnergy) -> tuple[str, str]:
    """(value, note): facility energy where the PUE is known."""
    if energy.carbon is None:
        return "not measured", energy.ledger.coverage
    basis, facility = "modelled" if energy.basis == "modelled" else "measured", energy.carbon.kwh
    if facility is None:
        return print_joules(energy.carbon.it_kwh * 3.6e6), f"{basis}; PUE unknown, IT only"
    return print_joules(facility * 3.6e6), f"{basis}; with PUE"


def print_energy_basis(energy: RunEnergy) -> str:
    """`363.61 Wh, measured`: the value of `print_energy` where there is little room."""
    used, note = print_energy(energy)
    return used if energy.carbon is None else f"{used}, {note.split(';')[0]}"
