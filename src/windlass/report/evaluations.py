"""The evaluation section: validation passes by source and language, and the results of `windlass eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.figures import Chart, DataTable, Item, Note, Section, line
from windlass.report.collect import RunSummary
from windlass.report.redact import redact_text
from windlass.report.tables import number
from windlass.runs.events import Evaluated, known_float


def evaluation(s: RunSummary) -> Section:
    items: list[Item] = []
    if s.val_loss is not None:
        items.append(Note(f"Validation loss {number(s.val_loss)} nats per token."))
    items += _by_source([e for e in s.events if isinstance(e, Evaluated)])
    if s.evaluations:
        columns = ("task", "group", "metric", "value", "95 % interval", "items", "step")
        caption = "Written by `windlass eval`; the newest of each."
        items.append(DataTable(columns, eval_rows(s.evaluations), right=(3, 4, 5, 6), caption=caption))
    nothing = Note("None recorded; `windlass eval RUN` writes eval.jsonl.")
    return Section("Evaluation", tuple(items) or (nothing,), id="evaluation")


def _by_source(passes: Sequence[Evaluated]) -> list[Item]:
    """Curves by source, and the last pass as a table; nothing where only one source is held out."""
    passes = [e for e in passes if e.sources and e.step is not None]
    if not passes or len(passes[-1].sources) < 2:
        return []
    last = passes[-1]
    rows = [("all", last.val_loss, last.bits_per_byte)]
    for kind, parts in (("source", last.sources), ("language", last.languages)):
        rows += [(f"{kind} {k}", known_float(v["loss"]), known_float(v.get("bits_per_byte"))) for k, v in parts.items()]
    table = DataTable(
        ("text", "loss", "bits per byte"),
        [(redact_text(name), number(loss), number(bits)) for name, loss, bits in rows],
        right=(1, 2),
        caption=f"Last validation pass, after step {last.step}.",
    )
    if len(passes) < 2:
        return [table]
    series = []
    for name in dict.fromkeys(name for e in passes for name in e.sources):
        losses = [(e.step or 0, e.sources[name]["loss"]) for e in passes if name in e.sources]
        series.append(line(name, [step for step, _ in losses], [loss for _, loss in losses]))
    return [Chart(title="Validation loss by source", series=series, x_title="step", y_title="nats per token"), table]


def eval_rows(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row per task, group and metric: the newest, because a run is evaluated again as it goes on."""
    newest = {tuple(str(e.get(key)) for key in ("task", "group", "metric")): e for e in lines}
    rows = []
    for e in newest.values():
        value, low, high, count, step = (known_float(e.get(k)) for k in ("value", "low", "high", "count", "step"))
        names = (redact_text(str(e.get(key, ""))) for key in ("task", "group", "metric"))
        interval = "unknown" if low is None else f"{number(low)} to {number(high)}"
        rows.append((*names, number(value), interval, number(count, 12, ""), number(step, 12, "")))
    return rows
