"""What does an energy mean outside the machine room? PUE, grid and contract intensity, and an equivalent a person understands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.clusters.model import Cluster, Source
from windlass.config.observe import EnergyConfig
from windlass.units import print_figure

J_PER_KWH = 3.6e6
# (least kWh, kWh of one, singular and plural text); the figure stands in the text, so that nobody must look it up.
EQUIVALENTS = (
    (
        50_000.0,
        3_000.0,
        "year of electricity of a household (3,000 kWh each)",
        "years of electricity of a household (3,000 kWh each)",
    ),
    (30.0, 0.18, "km in an electric car (18 kWh per 100 km)", "km in an electric car (18 kWh per 100 km)"),
    (
        0.1,
        0.1,
        "litre of water brought to the boil (0.1 kWh each)",
        "litres of water brought to the boil (0.1 kWh each)",
    ),
    (0.01, 0.01, "hour of a 10 W lamp", "hours of a 10 W lamp"),
    (0.0, 0.01 / 60, "minute of a 10 W lamp", "minutes of a 10 W lamp"),
)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A number and where it came from; None is unknown."""

    value: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Carbon:
    """Energy at the nodes and at the building's meter, and the emissions of the latter (of the former where PUE is unknown)."""

    it_kwh: float
    pue: Factor
    kwh: float | None
    """With PUE; None when the PUE is unknown."""
    grid: Factor
    """Location-based, g per kWh."""
    market: Factor
    """Market-based, g per kWh."""
    location_kg: float | None
    location_it_only_kg: float | None
    market_kg: float | None
    equivalent: str


def carbon(
    joules: float, cluster: Cluster | None, config: EnergyConfig | None = None, given: Mapping[str, float] | None = None
) -> Carbon:
    """What is given for this once (`pue`, `grid_g_per_kwh`, `market_g_per_kwh`) wins over the recipe, the recipe over the cluster file."""
    config, given = config or EnergyConfig(), given or {}

    def factor(name: str, key: str) -> Factor:
        if name in given:
            return Factor(value=given[name], source="given on the command line, for this table only")
        return _factor(getattr(config, name), cluster, key, f"energy.{name}")

    pue, grid = factor("pue", "pue"), factor("grid_g_per_kwh", "g_per_kwh")
    market = factor("market_g_per_kwh", "market_g_per_kwh")
    it_kwh = joules / J_PER_KWH
    kwh = None if pue.value is None else it_kwh * pue.value
    used = it_kwh if kwh is None else kwh
    return Carbon(
        it_kwh=it_kwh, pue=pue, kwh=kwh, grid=grid, market=market,
        location_kg=_kg(used, grid), location_it_only_kg=_kg(it_kwh, grid), market_kg=_kg(used, market), equivalent=equivalent(used),
    )  # fmt: skip


def _kg(kwh: float, factor: Factor) -> float | None:
    return None if factor.value is None else kwh * factor.value / 1e3


def _factor(override: float | None, cluster: Cluster | None, key: str, name: str) -> Factor:
    if override is not None:
        return Factor(value=override, source=f"recipe ({name})")
    value = getattr(cluster.grid, key) if cluster is not None else None
    if value is None or cluster is None:
        where = "unknown" if cluster is None else f"not in the file of {cluster.name}"
        return Factor(value=None, source=f"{where}; {name} in the recipe sets it")
    return Factor(value=value, source=_cited(cluster, key))


def _cited(cluster: Cluster, key: str) -> str:
    for where in (f"grid.{key}", "grid"):
        found: Source | None = cluster.sources.get(where)
        if found is not None:
            extra = f", {found.on}" if found.on and found.on not in found.source else ""
            return f"{found.source}{extra}" + ("" if found.status == "documented" else f" ({found.status})")
    return f"cluster file {cluster.name}"


def equivalent(kwh: float) -> str:
    """`as much as 24 litres of water brought to the boil (0.1 kWh each)`."""
    for least, each, one, many in EQUIVALENTS:
        if kwh >= least:
            count = kwh / each
            shown = f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
            return f"as much as {shown} {one if shown == '1' else many}"
    return ""


def print_carbon(kg: float | None) -> str:
    """`14.2 tCO2e`, `380 kgCO2e`, `1.2 gCO2e`; None is unknown."""
    if kg is None:
        return "unknown"
    for scale, unit in ((1e3, "tCO2e"), (1.0, "kgCO2e")):
        if abs(kg) >= 0.9995 * scale:
            return f"{print_figure(kg / scale)} {unit}"
    return f"{print_figure(kg * 1e3)} gCO2e"
