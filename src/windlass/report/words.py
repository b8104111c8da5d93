"""How are a run's numbers written for people? One place, so that terminal, browser and report say the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windlass.energy.carbon import print_carbon
from windlass.report.collect import Energy, RunSummary
from windlass.runs.events import parse_event
from windlass.units import print_bytes, print_figure, print_joules, print_seconds, print_tokens

Row = tuple[str, str, str]


def event_text(event: Mapping[str, Any]) -> str:
    """One event as a sentence."""
    return parse_event(event).describe()


def silence(summary: RunSummary, now: float | None = None) -> float | None:
    """Seconds without a line, when a run that should be going has written none for too long."""
    if summary.status != "running" or summary.updated_at is None:
        return None
    quiet = (time.time() if now is None else now) - summary.updated_at
    return quiet if quiet > summary.silent_after_seconds else None


def state(summary: RunSummary, now: float | None = None) -> str:
    """finished, running, stopped, failed, unknown; or silent: it should be running, and nobody has heard of it."""
    return summary.status if silence(summary, now) is None else "silent"


def number(value: float | None, digits: int = 4, unknown: str = "not measured") -> str:
    return unknown if value is None else print_figure(value, digits)


def percent(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else f"{100 * value:.1f} %"


def rate(value: float | None) -> str:
    return (
        "not measured"
        if value is None
        else f"{print_tokens(value)} tokens/s"
        if value >= 1e5
        else f"{value:,.0f} tokens/s"
    )


def watts(value: float | None) -> str:
    if value is None:
        return "not measured"
    for scale, unit in ((1e6, "MW"), (1e3, "kW")):
        if value >= 0.9995 * scale:
            return f"{print_figure(value / scale)} {unit}"
    return f"{value:.0f} W"


LAST_YEAR = 253_402_300_800.0
"""Of four digits, in seconds: a later time comes from a damaged line."""


def when(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < LAST_YEAR:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def kwh(value: float | None) -> str:
    return "unknown" if value is None else print_joules(value * 3.6e6)


def energy_card(energy: Energy) -> tuple[str, str]:
    """(value, note) of the energy for a card: facility energy where the PUE is known."""
    if energy.carbon is None:
        return "not measured", energy.ledger.coverage
    value = energy.carbon.kwh if energy.carbon.kwh is not None else energy.carbon.it_kwh
    label = "modelled" if energy.basis == "modelled" else "measured"
    return kwh(value), f"{label}; " + ("with PUE" if energy.carbon.kwh is not None else "PUE unknown, IT only")


def energy_rows(summary: RunSummary) -> list[Row]:
    """The energy table below its sources: (what, value, how we know)."""
    e, tag = summary.energy, " (modelled)" if summary.energy.basis == "modelled" else ""
    if e.carbon is None:
        return [("energy", "not measured", e.ledger.coverage)]
    c = e.carbon
    rows: list[Row] = [
        (f"IT energy{tag}", kwh(c.it_kwh), "; ".join(filter(None, (e.ledger.coverage, resolution(e))))),
        ("PUE", number(c.pue.value, 3, "unknown"), c.pue.source),
        (f"with PUE{tag}", kwh(c.kwh), "IT energy x PUE" if c.kwh is not None else "PUE unknown"),
        (f"CO2, location-based{tag}", print_carbon(c.location_kg), _factor(c.grid.value, c.grid.source)),
        (
            f"CO2, location-based, IT only{tag}",
            print_carbon(c.location_it_only_kg),
            "without PUE, for comparison with reports that leave it out",
        ),
        (f"CO2, market-based{tag}", print_carbon(c.market_kg), _factor(c.market.value, c.market.source)),
        (f"per billion tokens{tag}", kwh(e.kwh_per_billion_tokens), "with PUE" if c.kwh is not None else "IT only"),
        (f"per token{tag}", "unknown" if e.joules_per_token is None else print_joules(e.joules_per_token), "IT energy"),
        (
            f"per step{tag}",
            "unknown" if e.joules_per_step is None else print_joules(e.joules_per_step),
            "IT energy, start-up and repeated steps included",
        ),
    ]
    if e.mean_watts is not None:
        count = e.ledger.nodes_measured
        where = f"{count} node" + ("" if count == 1 else "s")
        rows.append(
            ("mean power", watts(e.mean_watts), f"{where}, over {print_seconds(e.ledger.wall_seconds)} measured")
        )
    if e.ledger.startup_joules is not None:
        rows.append(
            ("of it before the first steps", print_joules(e.ledger.startup_joules), "imports, compilation, loading")
        )
    rows.append(
        (
            "forecast of the plan",
            kwh(e.forecast_kwh),
            "whole run, with PUE" if e.forecast_kwh is not None else "no plan.json with energy",
        )
    )
    rows.append(("in other words", "", c.equivalent))
    return rows


SURE = 0.001
"""Below this share of the figure nobody need be told how far the counters' steps may put it off."""


def resolution(energy: Energy) -> str:
    """`± 3.3 % (a counter's step)`: what the steps of the counters may make of a short run; nothing where it does not matter."""
    step, joules = energy.ledger.resolution_joules, energy.ledger.joules
    if step is None or not joules or step < SURE * joules:
        return ""
    return f"± {print_joules(step)} ({100 * step / joules:.2g} %): counters move in steps"


def _factor(value: float | None, source: str) -> str:
    return source if value is None else f"{value:g} g/kWh, {source}"


SOURCE_COLUMNS = ("source", "scope", "method", "energy", "nodes", "in total", "note")


def source_rows(energy: Energy) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for s in energy.ledger.sources:
        used = "yes" if s.counted else "no, a model" if s.method == "modelled" else "no, inside another"
        note = s.note + (f"; {s.resets} counter resets" if s.resets else "")
        rows.append(
            (
                s.source,
                s.scope,
                s.method,
                print_joules(s.joules),
                "all" if s.nodes == 0 else str(s.nodes),
                used,
                note.removeprefix("; "),
            )
        )
    return rows


def missing_rows(energy: Energy) -> list[tuple[str, str]]:
    return sorted(energy.ledger.missing.items())


def life_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Goodput and where the time went."""
    v = summary.life
    if v is None:
        return []
    lost = f"{v['lost_steps']:,} steps" + (
        f", {print_tokens(v['lost_tokens'])} tokens" if v["lost_tokens"] is not None else ""
    )
    return [
        ("goodput (useful / wall time)", percent(v["goodput"])),
        ("goodput without waits between jobs", percent(v["goodput_active"])),
        ("wall time", print_seconds(v["wall_seconds"])),
        ("with processes running", print_seconds(v["active_seconds"])),
        ("in steps that count", print_seconds(v["useful_seconds"])),
        ("faults, resumes", f"{v['faults']}, {v['resumes']}"),
        ("trained and lost", lost),
        ("saves", f"{v['saves']}" + (f", {v['failed_saves']} failed" if v["failed_saves"] else "")),
        (
            "training waited for saves",
            f"{print_seconds(v['stall_seconds'])}, median {print_seconds(v['median_stall_seconds'])}",
        ),
    ]


SEGMENT_COLUMNS = ("part", "began", "lasted", "ended as", "devices", "steps", "lost", "start-up")


def segment_rows(summary: RunSummary) -> list[tuple[str, ...]]:
    """One row per process group: a chain link, a restart, a requeue."""
    rows: list[tuple[str, ...]] = []
    for index, part in enumerate((summary.life or {}).get("segments", [])):
        lost = max(0, part["last_step"] - part["kept_step"])
        rows.append((
            str(index + 1), when(part["began_at"]), print_seconds(part["ended_at"] - part["began_at"]), part["end"], str(part["world_size"] or "?"),
            f"{part['first_step']:,} to {part['last_step']:,}", f"{lost:,}" if lost else "", print_seconds(part["startup_seconds"]),
        ))  # fmt: skip
    return rows


def goodput(summary: RunSummary) -> float | None:
    value = (summary.life or {}).get("goodput")
    return float(value) if isinstance(value, (int, float)) else None


def checkpoint_rows(summary: RunSummary) -> list[tuple[str, ...]]:
    return [
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


CHECKPOINT_COLUMNS = ("step", "tokens", "size", "training waited", "written in", "state")


def plan_rows(rows: Sequence[tuple[str, float | None, float | None]]) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = []
    for what, planned, measured in rows:
        off = "" if planned is None or measured is None or not planned else f"{100 * (measured / planned - 1):+.1f} %"
        name, _, unit = what.partition(", ")
        show = PLAN_UNITS.get(unit, number)
        made.append((name, show(planned), show(measured), off))
    return made


PLAN_UNITS: dict[str, Callable[[float | None], str]] = {
    "bytes": print_bytes,
    "kWh": lambda value: "not measured" if value is None else kwh(value),
    "s": lambda value: "not measured" if value is None else print_seconds(value),
}
PLAN_COLUMNS = ("", "planned", "measured", "off by")
