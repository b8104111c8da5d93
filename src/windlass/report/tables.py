"""A run's numbers as texts and table rows, so that terminal, browser and report print the same."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from windlass.energy.carbon import print_carbon
from windlass.energy.totals import RunEnergy
from windlass.figures import DataTable
from windlass.report.collect import RunSummary
from windlass.units import (
    counted,
    print_bytes,
    print_figure,
    print_joules,
    print_kwh,
    print_node_hours,
    print_rate,
    print_seconds,
    print_share,
    print_tokens,
    print_watts,
)

# The first second of a year with five digits: a later time comes from a damaged line.
MAX_TIME = 253_402_300_800.0
# Below this share of the energy its resolution is not printed.
NEGLIGIBLE = 0.001


def silence(summary: RunSummary, now: float | None = None) -> float | None:
    """Seconds without a new line, if a run that should be training has written none for too long."""
    if summary.status != "running" or summary.updated_at is None:
        return None
    quiet = (time.time() if now is None else now) - summary.updated_at
    return quiet if quiet > summary.silent_after_seconds else None


def state(summary: RunSummary, now: float | None = None) -> str:
    """finished, running, stopped, failed, imported, unknown; or silent: it should be running and writes nothing."""
    return summary.status if silence(summary, now) is None else "silent"


def number(value: float | None, digits: int = 4, unknown: str = "not measured") -> str:
    return unknown if value is None else print_figure(value, digits)


def count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


# Every figure of a run: where `windlass report RUN --json` has it, and how all views print it.
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step": ("step", count),
    "tokens": ("tokens", print_tokens),
    "planned tokens": ("target_tokens", print_tokens),
    "training loss": ("loss", number),
    "validation loss": ("val_loss", number),
    "throughput": ("tokens_per_second", print_rate),
    "throughput per device": ("tokens_per_second_per_device", print_rate),
    "MFU": ("mfu", print_share),
    "step time": ("step_seconds", print_seconds),
    "memory, highest device": ("memory_bytes", print_bytes),
    "parameters": ("parameters", count),
    "devices": ("world_size", count),
    "goodput": ("life.goodput", print_share),
    "goodput without waits": ("life.goodput_active", print_share),
    "wall time": ("life.wall_seconds", print_seconds),
    "node-hours": ("node_hours", print_node_hours),
    "lost steps": ("life.lost_steps", count),
    "IT energy": ("energy.carbon.it_kwh", print_kwh),
    "energy with PUE": ("energy.carbon.kwh", print_kwh),
    "CO2e, location-based": ("energy.carbon.location_kg", print_carbon),
    "CO2e, market-based": ("energy.carbon.market_kg", print_carbon),
    "energy per billion tokens": ("energy.kwh_per_billion_tokens", print_kwh),
    "energy per token": ("energy.joules_per_token", print_joules),
    "energy per step": ("energy.joules_per_step", print_joules),
    "mean power": ("energy.mean_watts", print_watts),
}


def figure(summary: RunSummary, name: str) -> str:
    """The text of one of FIGURES."""
    path, show = FIGURES[name]
    value: Any = summary
    for part in path.split("."):
        value = getattr(value, part, None)
    return show(value)


def progress(summary: RunSummary) -> str:
    """`39.32M of 40M`."""
    planned = f" of {figure(summary, 'planned tokens')}" if summary.target_tokens else ""
    return figure(summary, "tokens") + planned


def period(summary: RunSummary) -> str:
    """From the first to the last sign of life."""
    if summary.started_at is None and summary.updated_at is None:
        return "dates unknown"
    return f"{when(summary.started_at)} to {when(summary.updated_at)}"


def when(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < MAX_TIME:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def energy_rows(summary: RunSummary) -> list[tuple[str, str, str]]:
    """The energy table below its sources: (what, value, source)."""
    e, tag = summary.energy, " (modelled)" if summary.energy.basis == "modelled" else ""
    if e.carbon is None:
        return [("energy", "not measured", e.ledger.coverage)]
    c, ledger = e.carbon, e.ledger
    basis, step = ledger.coverage, ledger.resolution_joules
    if step is not None and ledger.joules and step >= NEGLIGIBLE * ledger.joules:
        basis += f"; ± {print_joules(step)} ({100 * step / ledger.joules:.2g} %): counter resolution"

    def factor(value: float | None, source: str) -> str:
        return source if value is None else f"{value:g} g/kWh, {source}"

    is_facility = c.kwh is not None
    rows = [
        (f"IT energy{tag}", figure(summary, "IT energy"), basis),
        ("PUE", number(c.pue.value, 3, "unknown"), c.pue.source),
        (f"with PUE{tag}", figure(summary, "energy with PUE"), "IT energy x PUE" if is_facility else "PUE unknown"),
        (f"CO2e, location-based{tag}", figure(summary, "CO2e, location-based"), factor(c.grid.value, c.grid.source)),
        (
            f"CO2e, location-based, IT only{tag}",
            print_carbon(c.location_it_only_kg),
            "without PUE, for comparison with reports that omit it",
        ),
        (f"CO2e, market-based{tag}", figure(summary, "CO2e, market-based"), factor(c.market.value, c.market.source)),
        (
            f"per billion tokens{tag}",
            figure(summary, "energy per billion tokens"),
            "with PUE" if is_facility else "IT only",
        ),
        (f"per token{tag}", figure(summary, "energy per token"), "IT energy"),
        (f"per step{tag}", figure(summary, "energy per step"), "IT energy, start-up and repeated steps included"),
    ]
    if e.mean_watts is not None:
        over = f"{counted(ledger.nodes_measured, 'node')}, over {print_seconds(ledger.wall_seconds)} measured"
        rows.append(("mean power", figure(summary, "mean power"), over))
    if ledger.startup_joules is not None:
        rows.append(("before the first steps", print_joules(ledger.startup_joules), "imports, compilation, loading"))
    forecast = "plan.json has no energy" if e.forecast_kwh is None else "whole run, with PUE"
    rows += [("predicted by the plan", print_kwh(e.forecast_kwh), forecast), ("equivalent to", "", c.equivalent)]
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
        ("goodput (productive / wall time)", figure(summary, "goodput")),
        ("goodput without waits between jobs", figure(summary, "goodput without waits")),
        ("wall time", figure(summary, "wall time")),
        ("node-hours used", figure(summary, "node-hours")),
        ("time with processes running", print_seconds(h.active_seconds)),
        ("productive time", print_seconds(h.useful_seconds)),
        ("faults, resumes", f"{h.faults}, {h.resumes}"),
        ("steps lost to faults", f"{figure(summary, 'lost steps')} steps{tokens}"),
        ("saves", f"{h.saves}" + (f", {h.failed_saves} failed" if h.failed_saves else "")),
        ("training waited for saves",
         f"{print_seconds(h.stall_seconds)}, median {print_seconds(h.median_stall_seconds)}"),
    ]  # fmt: skip


def segment_table(summary: RunSummary) -> DataTable:
    """One row per process group: a job of a chain, a restart, a requeue."""
    columns = ("attempt", "start", "duration", "outcome", "devices", "steps", "steps lost", "start-up", "loading")
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
    caption = "An interruption ends an attempt, and a resume begins the next. Start-up includes loading."
    return DataTable(columns, rows, right=(2, 4, 5, 6, 7, 8), unbroken=(1,), caption=caption)


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
    "tokens/s": lambda value: print_rate(value, unit=""),
    "MFU": lambda value: print_share(value, "not measured"),
    "bytes": print_bytes,
    "kWh": lambda value: print_kwh(value, "not measured"),
    "node-hours": print_node_hours,
    "s": lambda value: "not measured" if value is None else print_seconds(value),
}


def plan_table(rows: Sequence[tuple[str, float | None, float | None]], heading: str = "") -> DataTable:
    """A row's name has its unit after a comma, or is one itself."""
    texts = []
    for title, predicted, measured in rows:
        error = f"{100 * (measured / predicted - 1):+.1f} %" if predicted and measured is not None else ""
        name, _, unit = title.partition(", ")
        show = PLAN_UNITS.get(unit or title, number)
        texts.append((name, show(predicted), show(measured), error))
    return DataTable((heading, "predicted", "measured", "error"), texts, right=(1, 2, 3))
