"""The tables of the report's first page, for those who paid: project, compute, energy, emissions, outcome, incidents
and plan. It prints on one A4 page, so that every text and list has a largest length; what is not known is "unknown"."""

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.config.secret import redact_text
from windlass.energy.carbon import Factor
from windlass.energy.totals import print_energy
from windlass.figures import DataTable, Item, Note
from windlass.report.collect import RunSummary
from windlass.report.model_card import LANGUAGES, base_model, data_sources, stated
from windlass.report.tables import figure, number, period, plan_table, progress
from windlass.runs.events import Evaluated, known_float
from windlass.units import counted, print_node_hours, print_seconds, print_share, print_tokens

# In characters: at most three lines of the summary, two of a language.
MAX_VALUE, MAX_DETAILS, MAX_NAME, MAX_SCORES = 60, 180, 24, 130
MAX_LANGUAGES = 8
SCOPE = (
    "electricity of the computing centre (Scope 2 of the centre, Scope 3 of the project); without hardware and travel"
)
# Keys of [project] beside the title, and how they are called on the page.
PROJECT_KEYS = {"id": "project", "grant": "grant", "funder": "funder"}


def funder_items(s: RunSummary) -> list[Item]:
    """Of one run."""
    attempts = counted(len(s.life.segments), "attempt") if s.life and s.life.segments else "attempts unknown"
    begins_from = base_model(s)
    origin = f"continued from {begins_from}" if begins_from else "from random weights" if s.recipe else "unknown"
    languages = ", ".join(stated(data_sources(s), *LANGUAGES)) or "unknown"
    incidents = ("incidents", "unknown", "the run has no record of a start")
    if (h := s.life) is not None:
        lost, waits = print_seconds(sum(part.lost_seconds for part in h.segments)), "waits unknown"
        if h.wall_seconds is not None and h.active_seconds is not None:
            waits = f"{print_seconds(h.wall_seconds - h.active_seconds)} between attempts"
        repeated = f"{figure(s, 'lost steps')} steps ({lost}) repeated, {waits}"
        incidents = (
            "incidents",
            f"{counted(h.faults, 'fault')}, goodput {figure(s, 'goodput')}",
            f"{repeated}; {figure(s, 'wall time')} from start to end",
        )
    summary = _table(
        _project_row([s]),
        ("trained", s.name, f"{s.model}; {figure(s, 'parameters')} parameters, {origin}"),
        ("data", f"{progress(s)} tokens", f"languages: {languages}"),
        ("where and when", f"{s.cluster}, {counted(s.nodes, 'node')}", period(s)),
        _compute_row([s], s.node_hours, attempts),
        *_energy_rows(s),
        incidents,
    )
    plan = plan_table(s.plan_rows, "predicted by the plan") if s.plan_rows else Note("Plan: unknown (no plan.json).")
    return [summary, *_by_language(s), plan]


def joint_items(runs: Sequence[RunSummary], sums: Mapping[str, float | int | None]) -> list[Item]:
    """Of several runs, whose sums are given: project and allocation where all runs state the same."""
    count, tokens = counted(int(sums["runs"] or 0), "run"), f"{print_tokens(sums['tokens'])} tokens"
    return [_table(_project_row(runs), ("trained", tokens, count), _compute_row(runs, sums["node_hours"], count))]


def clip(text: str, length: int) -> str:
    text = redact_text(text)
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _table(*rows: tuple[str, str, str]) -> DataTable:
    texts = [(title, clip(value, MAX_VALUE), clip(details, MAX_DETAILS)) for title, value, details in rows]
    return DataTable(("summary", "", "basis and details"), texts, unbroken=(0,))


def _stated(runs: Sequence[RunSummary], table: str, key: str) -> Any:
    """What all runs state under this key of their recipes; None where they differ or say nothing."""
    values = [(run.recipe.get(table) or {}).get(key) for run in runs]
    return values[0] if values and all(value == values[0] for value in values) else None


def _project_row(runs: Sequence[RunSummary]) -> tuple[str, str, str]:
    numbers = [(name, _stated(runs, "project", key)) for key, name in PROJECT_KEYS.items()]
    numbers.append(("account", _stated(runs, "launch", "account")))
    listed = "; ".join(f"{name} {value}" for name, value in numbers if value)
    title = _stated(runs, "project", "title") or "unknown"
    return ("project", str(title), listed or "grant and project numbers unknown")


def _compute_row(runs: Sequence[RunSummary], node_hours: float | None, parts: str) -> tuple[str, str, str]:
    allocation, share = known_float(_stated(runs, "launch", "budget_node_hours")), ""
    if not allocation:
        return ("compute", print_node_hours(node_hours), f"allocation unknown; {parts}")
    if node_hours is not None:
        share = f" ({print_share(node_hours / allocation)})"
    return ("compute", print_node_hours(node_hours), f"of {print_node_hours(allocation)} allocated{share}; {parts}")


def _energy_rows(s: RunSummary) -> list[tuple[str, str, str]]:
    c, (used, basis) = s.energy.carbon, print_energy(s.energy)
    if c is None:
        return [(name, "unknown", "energy was not measured") for name in ("energy", "CO2e")]
    pue = f"PUE {number(c.pue.value, 3)} ({c.pue.source})" if c.pue.value is not None else "PUE unknown"

    def method(factor: Factor) -> str:
        if factor.value is None:
            return f"grid intensity unknown: {factor.source}"
        return f"{basis.split(';')[0]} energy x {factor.value:g} g/kWh: {factor.source}"

    return [
        ("energy", used, f"{basis.split(';')[0]}: {s.energy.ledger.coverage}; {pue}"),
        ("CO2e, location-based", figure(s, "CO2e, location-based"), method(c.grid)),
        ("CO2e, market-based", figure(s, "CO2e, market-based"), method(c.market)),
        ("scope of the CO2e", "operation only", SCOPE),
    ]


def _by_language(s: RunSummary) -> list[Item]:
    """Validation loss and evaluations of each language, the newest of each."""
    evaluated = [e for e in reversed(s.events) if isinstance(e, Evaluated)]
    last = next((e for e in evaluated if e.languages), None)
    languages: dict[str, list[str]] = {}
    for name, part in (last.languages if last else {}).items():
        texts = (known_float(part.get(key)) if isinstance(part, dict) else None for key in ("loss", "bits_per_byte"))
        languages[str(name)] = [number(value, unknown="unknown") for value in texts]
    scores: dict[str, dict[tuple[str, str], str]] = {}
    for line in s.evaluations:
        group = str(line.get("group"))
        if group.startswith("language "):
            name = group.removeprefix("language ")
            key = (str(line.get("task")), str(line.get("metric")).replace("_", " "))
            scores.setdefault(name, {})[key] = number(known_float(line.get("value")), unknown="unknown")
    if not languages and not scores:
        outcome = "unknown" if s.val_loss is None else f"validation loss {figure(s, 'validation loss')} over all"
        return [Note(f"Outcome by language: {outcome}.")]
    if not languages and evaluated:  # of sources that state no language
        values = evaluated[0].val_loss, evaluated[0].bits_per_byte
        languages = {"all": [number(value, unknown="unknown") for value in values]}
    rows = []
    for name in [*languages, *(name for name in scores if name not in languages)]:
        own = scores.get(name, {}).items()
        tasks = "; ".join(f"{task if task == metric else f'{task} {metric}'} {value}" for (task, metric), value in own)
        rows.append((clip(name, MAX_NAME), *languages.get(name, ["unknown"] * 2), clip(tasks or "none", MAX_SCORES)))
    left_out = len(rows) - MAX_LANGUAGES
    caption = f"{counted(left_out, 'more language')} below, under Evaluation." if left_out > 0 else ""
    columns = ("outcome by language", "validation loss", "bits per byte", "evaluations")
    return [DataTable(columns, rows[:MAX_LANGUAGES], right=(1, 2), caption=caption)]
