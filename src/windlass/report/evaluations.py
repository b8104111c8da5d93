"""How good is the model, and on what? The validation passes of the loop by source and language, and what `windlass eval` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.figures import Chart, DataTable, Item, Note, Section, line
from windlass.report.collect import RunSummary, figure
from windlass.report.redact import redact_text
from windlass.report.words import number

EVAL_COLUMNS = ("task", "group", "metric", "value", "95 % interval", "items", "step")


def evaluation(s: RunSummary) -> Section:
    items: list[Item] = []
    if s.val_loss is not None:
        items.append(Note(f"Validation loss {number(s.val_loss)} nats per token."))
    items += in_loop([e for e in s.events if e["event"] == "evaluated"])
    if s.evaluations:
        caption = "by `windlass eval`; the newest of each"
        items.append(DataTable(EVAL_COLUMNS, eval_rows(s.evaluations), right=(3, 4, 5, 6), caption=caption))
    return Section(
        "Evaluation", tuple(items) or (Note("None recorded; `windlass eval RUN` writes eval.jsonl."),), id="evaluation"
    )


def in_loop(passes: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Curves by source, and the last pass as a table; nothing where only one source is held out."""
    passes = [e for e in passes if e.get("sources") and e.get("step") is not None]
    if not passes or len(passes[-1]["sources"]) < 2:
        return []
    last = passes[-1]
    rows = [("all", last.get("val_loss"), last.get("bits_per_byte"))]
    for word in ("source", "language"):
        found = last.get(f"{word}s")
        rows += [(f"{word} {k}", v["loss"], figure(v.get("bits_per_byte"))) for k, v in (found or {}).items()]
    table = DataTable(
        ("text", "loss", "bits per byte"),
        [(redact_text(name), number(loss), number(bits)) for name, loss, bits in rows],
        right=(1, 2),
        caption=f"the last validation pass, after step {last.get('step')}",
    )
    return [*([_curves(passes)] if len(passes) > 1 else []), table]


def _curves(passes: Sequence[Mapping[str, Any]]) -> Chart:
    names = dict.fromkeys(name for e in passes for name in e["sources"])
    series = []
    for name in names:
        found = [(e["step"], e["sources"][name]["loss"]) for e in passes if name in e["sources"]]
        series.append(line(name, [step for step, _ in found], [loss for _, loss in found]))
    return Chart(title="Validation loss by source", series=tuple(series), x_title="step", y_title="nats per token")


def eval_rows(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row per task, group and metric: the newest, because a run is evaluated again as it goes on."""
    newest = {tuple(str(e.get(key)) for key in ("task", "group", "metric")): e for e in lines}
    return [
        (
            *(redact_text(str(e.get(key, ""))) for key in ("task", "group", "metric")),
            number(figure(e.get("value"))),
            "unknown"
            if figure(e.get("low")) is None
            else f"{number(figure(e['low']))} to {number(figure(e.get('high')))}",
            number(figure(e.get("count")), 12, unknown=""),
            number(figure(e.get("step")), 12, unknown=""),
        )
        for e in newest.values()
    ]
