"""Facility energy (PUE) and CO2 of a run, with the source of every factor, and an everyday equivalent."""

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.clusters.model import Cluster
from windlass.config.observe import EnergyConfig
from windlass.units import print_figure

JOULES_PER_KWH = 3.6e6
# (from how many kWh, kWh of one, singular, plural); the texts contain the assumption.
EQUIVALENTS = (
    (3_000.0, 3_000.0, "year of electricity of a household (3,000 kWh each)",
     "years of electricity of a household (3,000 kWh each)"),
    (8.2, 3_000.0 / 365, "day of electricity of a household (3,000 kWh a year)",
     "days of electricity of a household (3,000 kWh a year)"),
    (0.1, 0.1, "litre of water brought to the boil (0.1 kWh each)",
     "litres of water brought to the boil (0.1 kWh each)"),
    (0.01, 0.01, "hour of a 10 W lamp", "hours of a 10 W lamp"),
    (0.0, 0.01 / 60, "minute of a 10 W lamp", "minutes of a 10 W lamp"),
)  # fmt: skip
# GPT-NL's comparison (talk of December 2024): 14 t of CO2 are 40,000 km by car.
CAR_KG_PER_KM = 0.35


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A conversion factor and its source; None is unknown."""

    value: float | None
    source: str

    def kg(self, kwh: float) -> float | None:
        """Emissions of an energy, for factors in g per kWh."""
        return None if self.value is None else kwh * self.value / 1e3


@dataclass(frozen=True, kw_only=True)
class Carbon:
    """IT and facility energy, and the emissions of the facility energy (of the IT energy where the PUE is unknown)."""

    it_kwh: float
    pue: Factor
    kwh: float | None  # including facility overhead; None when the PUE is unknown
    grid: Factor  # location-based, g per kWh
    market: Factor  # market-based, g per kWh
    location_kg: float | None
    location_it_only_kg: float | None
    market_kg: float | None
    equivalent: str  # of the energy
    co2_equivalent: str | None  # of the location-based emissions; None when they are unknown


def carbon(
    joules: float,
    cluster: Cluster | None,
    config: EnergyConfig | None = None,
    overrides: Mapping[str, float] | None = None,
) -> Carbon:
    """`overrides` (`pue`, `grid_g_per_kwh`, `market_g_per_kwh`) win over the recipe, which wins over the file."""
    config, overrides = config or EnergyConfig(), overrides or {}

    def factor(name: str, cluster_key: str) -> Factor:
        if name in overrides:
            return Factor(value=overrides[name], source="given on the command line, for this table only")
        if (in_recipe := getattr(config, name)) is not None:
            return Factor(value=in_recipe, source=f"recipe (energy.{name})")
        if cluster is None or (in_cluster := getattr(cluster.grid, cluster_key)) is None:
            reason = "unknown" if cluster is None else f"not in the cluster file {cluster.name}"
            return Factor(value=None, source=f"{reason}; energy.{name} in the recipe sets it")
        fact = cluster.sources.get(f"grid.{cluster_key}") or cluster.sources.get("grid")
        if fact is None:
            return Factor(value=in_cluster, source=f"cluster file {cluster.name}")
        date = f", {fact.on}" if fact.on and fact.on not in fact.source else ""
        status = "" if fact.status == "documented" else f" ({fact.status})"
        return Factor(value=in_cluster, source=f"{fact.source}{date}{status}")

    pue, grid = factor("pue", "pue"), factor("grid_g_per_kwh", "g_per_kwh")
    market = factor("market_g_per_kwh", "market_g_per_kwh")
    it_kwh = joules / JOULES_PER_KWH
    kwh = None if pue.value is None else it_kwh * pue.value
    emitting_kwh = it_kwh if kwh is None else kwh
    location_kg = grid.kg(emitting_kwh)
    return Carbon(
        it_kwh=it_kwh,
        pue=pue,
        kwh=kwh,
        grid=grid,
        market=market,
        location_kg=location_kg,
        location_it_only_kg=grid.kg(it_kwh),
        market_kg=market.kg(emitting_kwh),
        equivalent=equivalent(emitting_kwh),
        co2_equivalent=None if location_kg is None else car_equivalent(location_kg),
    )


def equivalent(kwh: float) -> str:
    """`24 litres of water brought to the boil (0.1 kWh each)`."""
    each_kwh, singular, plural = next((row[1:] for row in EQUIVALENTS if kwh >= row[0]), EQUIVALENTS[-1][1:])
    count = kwh / each_kwh
    text = f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
    return f"{text} {singular if text == '1' else plural}"


def car_equivalent(kg: float) -> str:
    """`40,000 km by car (350 g CO2e per km, GPT-NL's comparison)`."""
    km = kg / CAR_KG_PER_KM
    distance = f"{km:,.{0 if km >= 10 else 1}f} km" if km >= 0.1 else f"{print_figure(1e3 * km, 2)} m"
    return f"{distance} by car (350 g CO2e per km, GPT-NL's comparison)"


def print_carbon(kg: float | None, unit: str = " CO2e") -> str:
    """`14.2 t CO2e`, `380 kg CO2e`, `1.2 g CO2e`; None is unknown. `unit` is empty in a column of that name."""
    if kg is None:
        return "unknown"
    for scale, mass in ((1e3, "t"), (1.0, "kg")):
        if abs(kg) >= 0.9995 * scale:
            return f"{print_figure(kg / scale)} {mass}{unit}"
    return f"{print_figure(kg * 1e3)} g{unit}"
