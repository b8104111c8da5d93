"""A run's numbers as texts and table rows, so that terminal, browser and report print the same."""

import time
from collections.abc import Callable, Sequence

from windlass.energy.carbon import print_carbon
from windlass.figures import DataTable
from windlass.report.collect import RunEnergy, RunSummary
from windlass.units import print_bytes, print_figure, print_joules, print_seconds, print_tokens

# The first second of a year with five digits: a later time comes from a damaged line.
MAX_TIME = 253_402_300_800.0
# Below this share of the energy its resolution is not printed.
NEGLIGIBLE = 0.001


def silence(summary: RunSummary, now: float | None = None) -> float | None:
    """Seconds without a line, when a run that should be going has written none for too long."""
    if summary.status != "running" or summary.updated_at is None:
        return None
    quiet = (time.time() if now is None else now) - summary.updated_at
    return quiet if quiet > summary.silent_after_seconds else None


def state(summary: RunSummary, now: float | None = None) -> str:
    """finished, running, stopped, failed, unknown; or silent: it should be running and writes nothing."""
    return summary.status if silence(summary, now) is None else "silent"


def number(value: float | None, digits: int = 4, unknown: str = "not measured") -> str:
    return unknown if value is None else print_figure(value, digits)


def percent(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else f"{100 * value:.1f} %"


def counted(count: int | None, word: str) -> str:
    """`1 node`, `2 nodes`, `? nodes`."""
    return f"{'?' if count is None else count} {word}" + ("" if count == 1 else "s")


def rate(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{print_tokens(value) if value >= 1e5 else format(value, ',.0f')} tokens/s"


def watts(value: float | None) -> str:
    if value is None:
        return "not measured"
    for scale, unit in ((1e6, "MW"), (1e3, "kW")):
        if value >= 0.9995 * scale:
            return f"{print_figure(value / scale)} {unit}"
    return f"{value:.0f} W"


def when(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < MAX_TIME:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def kwh(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else print_joules(value * 3.6e6)


def energy_card(energy: RunEnergy) -> tuple[str, str]:
    """(value, note): facility energy where the PUE is known."""
    if energy.carbon is None:
        return "not measured", energy.ledger.coverage
    basis, facility = "modelled" if energy.basis == "modelled" else "measured", energy.carbon.kwh
    if facility is None:
        return kwh(energy.carbon.it_kwh), f"{basis}; PUE unknown, IT only"
    return kwh(facility), f"{basis}; with PUE"


def energy_rows(summary: RunSummary) -> list[tuple[str, str, str]]:
    """The energy table below its sources: (what, value, source)."""
    e, tag = summary.energy, " (modelled)" if summary.energy.basis == "modelled" else ""
    if e.carbon is None:
        return [("energy", "not measured", e.ledger.coverage)]
    c, ledger = e.carbon, e.ledger
    basis, step = ledger.coverage, ledger.resolution_joules
    if step is not None and ledger.joules and step >= NEGLIGIBLE * ledger.joules:
        basis += f"; ± {print_joules(step)} ({100 * step / ledger.joules:.2g} %): counters move in steps"

    def factor(value: float | None, source: str) -> str:
        return source if value is None else f"{value:g} g/kWh, {source}"

    def joules(value: float | None) -> str:
        return "unknown" if value is None else print_joules(value)

    is_facility = c.kwh is not None
    rows = [
        (f"IT energy{tag}", kwh(c.it_kwh), basis),
        ("PUE", number(c.pue.value, 3, "unknown"), c.pue.source),
        (f"with PUE{tag}", kwh(c.kwh), "IT energy x PUE" if is_facility else "PUE unknown"),
        (f"CO2, location-based{tag}", print_carbon(c.location_kg), factor(c.grid.value, c.grid.source)),
        (
            f"CO2, location-based, IT only{tag}",
            print_carbon(c.location_it_only_kg),
            "without PUE, for comparison with reports that leave it out",
        ),
        (f"CO2, market-based{tag}", print_carbon(c.market_kg), factor(c.market.value, c.market.source)),
        (f"per billion tokens{tag}", kwh(e.kwh_per_billion_tokens), "with PUE" if is_facility else "IT only"),
        (f"per token{tag}", joules(e.joules_per_token), "IT energy"),
        (f"per step{tag}", joules(e.joules_per_step), "IT energy, start-up and repeated steps included"),
    ]
    if e.mean_watts is not None:
        over = f"{counted(ledger.nodes_measured, 'node')}, over {print_seconds(ledger.wall_seconds)} measured"
        rows.append(("mean power", watts(e.mean_watts), over))
    if ledger.startup_joules is not None:
        rows.append(("before the first steps", joules(ledger.startup_joules), "imports, compilation, loading"))
    forecast = "no plan.json with energy" if e.forecast_kwh is None else "whole run, with PUE"
    rows += [("predicted by the plan", kwh(e.forecast_kwh), forecast), ("equivalent to", "", c.equivalent)]
    return [*rows, ("", "", c.co2_equivalent)] if c.co2_equivalent else rows


def source_table(energy: RunEnergy) -> DataTable:
    rows = []
    for s in energy.ledger.sources:
        in_total = "yes" if s.counted else "no (estimate)" if s.method == "modelled" else "no (inside another)"
        note = "; ".join(filter(None, (s.note, f"{s.resets} counter resets" if s.resets else "")))
        rows.append((s.source, s.scope, s.method, print_joules(s.joules), str(s.nodes or "all"), in_total, note))
    return DataTable(
        ("source", "scope", "method", "energy", "nodes", "in total", "note"),
        rows,
        right=(3, 4),
        strong=[i for i, s in enumerate(energy.ledger.sources) if s.counted],
    )


def life_rows(summary: RunSummary) -> list[tuple[str, str]]:
    h = summary.life
    if h is None:
        return []
    tokens = f", {print_tokens(h.lost_tokens)} tokens" if h.lost_tokens is not None else ""
    return [
        ("goodput (productive / wall time)", percent(h.goodput)),
        ("goodput without waits between jobs", percent(h.goodput_active)),
        ("wall time", print_seconds(h.wall_seconds)),
        ("time with processes running", print_seconds(h.active_seconds)),
        ("productive time", print_seconds(h.useful_seconds)),
        ("faults, resumes", f"{h.faults}, {h.resumes}"),
        ("steps lost to faults", f"{h.lost_steps:,} steps{tokens}"),
        ("saves", f"{h.saves}" + (f", {h.failed_saves} failed" if h.failed_saves else "")),
        ("training waited for saves",
         f"{print_seconds(h.stall_seconds)}, median {print_seconds(h.median_stall_seconds)}"),
    ]  # fmt: skip


def segment_table(summary: RunSummary) -> DataTable:
    """One row per process group: a job of a chain, a restart, a requeue."""
    columns = ("attempt", "start", "duration", "outcome", "devices", "steps", "lost", "start-up", "of it loading")
    rows = [
        (
            str(index),
            when(part.began_at),
            print_seconds(part.ended_at - part.began_at),
            part.end,
            str(part.world_size or "?"),
            f"{part.first_step:,} to {part.last_step:,}",
            f"{part.last_step - part.kept_step:,}" if part.last_step > part.kept_step else "",
            print_seconds(part.startup_seconds),
            print_seconds(part.load_seconds) if part.load_seconds is not None else "",
        )
        for index, part in enumerate(summary.life.segments if summary.life else (), 1)
    ]
    caption = "Each attempt is one group of processes; an interruption ends one, a resume begins the next."
    return DataTable(columns, rows, right=(2, 4, 5, 6, 7, 8), caption=caption)


def goodput(summary: RunSummary) -> float | None:
    return summary.life.goodput if summary.life else None


def checkpoint_table(summary: RunSummary) -> DataTable:
    rows = [
        (
            f"{c['step']:,}",
            print_tokens(c.get("tokens")),
            print_bytes(c.get("bytes")),
            print_seconds(c.get("stall_seconds")),
            print_seconds(c.get("write_seconds")),
            str(c["state"]),
        )
        for c in summary.checkpoints
    ]
    columns = ("step", "tokens", "size", "training waited", "written in", "state")
    return DataTable(columns, rows, right=(0, 1, 2, 3, 4))


PLAN_UNITS: dict[str, Callable[[float | None], str]] = {
    "bytes": print_bytes,
    "kWh": lambda value: kwh(value, "not measured"),
    "s": lambda value: "not measured" if value is None else print_seconds(value),
}


def plan_table(rows: Sequence[tuple[str, float | None, float | None]]) -> DataTable:
    """Each row's name carries its unit after a comma."""
    texts = []
    for title, predicted, measured in rows:
        error = f"{100 * (measured / predicted - 1):+.1f} %" if predicted and measured is not None else ""
        name, _, unit = title.partition(", ")
        show = PLAN_UNITS.get(unit, number)
        texts.append((name, show(predicted), show(measured), error))
    return DataTable(("", "predicted", "measured", "error"), texts, right=(1, 2, 3))
