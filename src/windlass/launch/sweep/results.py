"""What did every point give? One row each: settings, outcome, speed, memory predicted and measured, energy, spread. CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.files import read_json_lines, write_atomic, write_json
from windlass.launch.sweep.expect import Expectation
from windlass.launch.sweep.points import Point
from windlass.runs.events import Started
from windlass.runs.folder import Run

if TYPE_CHECKING:
    from windlass.launch.sweep.local import Work

COLUMNS = (
    "point", "outcome", "evidence", "detail", "engine", "layout", "shard", "micro_batch", "tensor", "pipeline", "context", "offload", "recompute",
    "attention", "precision", "compile", "nodes", "devices", "seq_len", "batch_tokens", "steps", "tokens_per_second", "tokens_per_second_per_device",
    "predicted_tokens_per_second_per_device", "mfu", "predicted_mfu", "memory_bytes", "predicted_memory_bytes", "needed_memory_bytes", "memory_limit_bytes", "oom_chance",
    "step_seconds", "predicted_step_seconds", "step_spread", "joules_per_token", "kwh_per_step", "energy_joules", "loss", "seconds",
)  # fmt: skip
"""Of a sweep over recipes, after the sweep's own axes. `step_spread` is (90th - 10th percentile) / median of the step times;
predicted memory is what the run would show as its peak, needed memory what must fit below the limit."""
COMMAND_COLUMNS = ("point", "outcome", "evidence", "detail", "devices", "seconds")
SKIP_LINES = 2
"""First metric lines that are left out: compilation and caches settle there."""
Row = dict[str, Any]


def collect_rows(work: Work) -> list[Row]:
    """A row for every point, in the sweep's order; what has not run yet has no outcome."""
    outcomes = work.folder.outcomes()
    return [_row(work, point, expected, outcomes.get(point.name, {})) for point, expected in zip(work.points, work.expected, strict=True)]  # fmt: skip


def _row(work: Work, point: Point, expected: Expectation, outcome: Mapping[str, Any]) -> Row:
    """What was asked for and how it ended wins over a number of the same name that a command left."""
    run = work.folder.point(point.name)
    told: Row = {"point": point.name, **{key: outcome.get(key) for key in ("outcome", "evidence", "detail")}}
    asked = {column_of(key): value for key, value in point.values.items()}
    ok, seconds = outcome.get("outcome") == "ok", {"seconds": outcome.get("seconds")}
    if point.recipe is None:
        found = _command_numbers(work, point, run) if ok else {}
        return {**told, **found, **asked, **_command_place(point), **seconds}
    settings, predicted = _settings(point.recipe, run, expected), _predicted(expected)
    return {**told, **settings, **predicted, **asked, **(measured(run) if ok else {}), **seconds}


def column_of(axis: str) -> str:
    """The axis `devices` counts those of a node; the column `devices` all that took part."""
    return "devices_per_node" if axis == "devices" else axis


def _command_place(point: Point) -> Row:
    each, nodes = point.devices, point.settings.get("nodes")
    place = {} if nodes is None else {"nodes": nodes}
    return {**place, "devices": each * nodes if each is not None and isinstance(nodes, int) else each}


def _settings(recipe: Recipe, run: Run, expected: Expectation) -> Row:
    layout = dict(expected.layout or (recipe.layout.model_dump(mode="json") if recipe.layout else {}))
    train = recipe.train
    begun = next(run.events(Started), Started())
    devices = begun.world_size or expected.devices
    return {
        "engine": train.engine, "layout": layout_words(layout), **{k: layout.get(k) for k in ("shard", "micro_batch", "tensor", "pipeline", "context", "offload")},
        "recompute": train.recompute, "attention": train.attention, "precision": train.precision, "compile": train.compile,
        "nodes": begun.nodes or expected.nodes, "devices": devices, "seq_len": recipe.data.seq_len,
        "batch_tokens": recipe.data.batch_tokens or _least_batch(recipe, layout, devices), "steps": train.steps,
    }  # fmt: skip


def _least_batch(recipe: Recipe, layout: Mapping[str, Any], devices: int | None) -> int | None:
    """Without `batch_tokens` a step is one micro-batch on every replica."""
    inside = math.prod(int(layout.get(axis) or 1) for axis in ("tensor", "pipeline", "context"))
    if devices is None or not layout.get("micro_batch"):
        return None
    return int(layout["micro_batch"]) * recipe.data.seq_len * max(1, devices // inside)


def layout_words(layout: Mapping[str, Any]) -> str:
    """`full, tensor 2, offload optimizer`: only what differs from the plainest layout; the micro-batch has a column."""
    if not layout:
        return ""
    parts = [str(layout.get("shard"))]
    parts += [f"{axis} {layout[axis]}" for axis in ("tensor", "pipeline", "context") if (layout.get(axis) or 1) > 1]
    parts += [f"offload {layout['offload']}"] if layout.get("offload", "none") != "none" else []
    return ", ".join(parts)


def _predicted(expected: Expectation) -> Row:
    return {
        "predicted_tokens_per_second_per_device": expected.tokens_per_second_per_device, "predicted_mfu": expected.mfu,
        "predicted_memory_bytes": expected.peak_bytes, "needed_memory_bytes": expected.memory_bytes, "memory_limit_bytes": expected.memory_limit_bytes, "oom_chance": expected.oom_chance,
        "predicted_step_seconds": expected.step_seconds,
    }  # fmt: skip


def measured(run: Run) -> Row:
    """From the run folder: medians after the first steps."""
    lines = [line.as_dict() for line in run.metrics_lines()]
    kept = lines[SKIP_LINES:] if len(lines) > SKIP_LINES + 2 else lines
    steps = _numbers(kept, "step_seconds")
    energy = _energy(kept)
    return {
        **{key: _median(_numbers(kept, key)) for key in ("tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds")},
        "memory_bytes": max(_numbers(lines, "memory_bytes"), default=None), "step_spread": _spread(steps),
        "joules_per_token": energy and energy["joules_per_token"], "kwh_per_step": energy and energy["kwh_per_step"],
        "energy_joules": next((float(m["energy_joules"]) for m in reversed(lines) if _is_number(m.get("energy_joules"))), None),
        "loss": next((float(m["loss"]) for m in reversed(lines) if _is_number(m.get("loss"))), None),
    }  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(m[key]) for m in lines if _is_number(m.get(key))]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _spread(steps: Sequence[float]) -> float | None:
    if len(steps) < 4:
        return None
    deciles = quantiles(steps, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / median(steps)


def _energy(lines: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Energy of the kept steps: what the counter rose by over them. None when it was not measured."""
    known = [m for m in lines if _is_number(m.get("energy_joules"))]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    joules = float(last["energy_joules"]) - float(first["energy_joules"])
    tokens, steps = float(last["tokens"]) - float(first["tokens"]), float(last["step"]) - float(first["step"])
    if joules <= 0 or tokens <= 0 or steps <= 0:
        return None
    return {"joules_per_token": joules / tokens, "kwh_per_step": joules / steps / 3.6e6}


# -- results of any command -----------------------------------------------------------------------------------------------------


def _command_numbers(work: Work, point: Point, run: Run) -> Row:
    if work.sweep.results is None:
        return {}
    try:
        found = read_results(point.results_file(run.path, work.sweep.results))
    except ConfigError:
        return {}
    return found | {ours: found.get(theirs) for ours, theirs in work.sweep.metrics.items()}


def read_results(path: Path) -> Row:
    """The numbers a command left: a JSON object, JSON lines (the last counts) or a CSV (its last row). Nested keys are dotted."""
    if not path.is_file():
        raise ConfigError(
            "launch.results-file-missing",
            f"the results file {path} is missing",
            hint="`results` names the file relative to {folder}",
        )
    if path.suffix == ".jsonl":
        lines = list(read_json_lines(path))
        return _flat(lines[-1]) if lines else _invalid(path, "it has no line that is a JSON object")
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        if not rows or None in rows[-1] or any(v is None for v in rows[-1].values()):
            return _invalid(path, "it has no whole row below its header")
        return {key: _cell(_number(value)) for key, value in rows[-1].items()}
    try:
        value = json.loads(text)
    except ValueError as error:
        return _invalid(path, f"it is not valid JSON ({error})")
    return _flat(value) if isinstance(value, dict) else _invalid(path, f"it holds a {type(value).__name__}, not an object")  # fmt: skip


def _invalid(path: Path, why: str) -> Row:
    raise ConfigError(
        "launch.results-file-valid",
        f"the results file {path} is not valid: {why}",
        hint="JSON object, JSON lines or CSV",
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> Row:
    row: Row = {}
    for key, item in value.items():
        row |= _flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": _cell(item)}
    return row


def _cell(value: Any) -> Any:
    """What CSV, JSON and Parquet can all hold: a list as text, and no number where there is none (NaN, infinity)."""
    if isinstance(value, (list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


# -- writing --------------------------------------------------------------------------------------------------------------------


def columns_of(work: Work, rows: Sequence[Row]) -> list[str]:
    """The sweep's axes first, then the common columns, then whatever the results files add."""
    axes = list(dict.fromkeys(column_of(key) for point in work.points for key in point.values))
    common = COLUMNS if work.sweep.command is None else COMMAND_COLUMNS
    head = [*common[:4], *axes, *common[4:]]
    return list(dict.fromkeys([*head, *(key for row in rows for key in row)]))


def write_tables(work: Work, rows: Sequence[Row]) -> list[Path]:
    """results.csv, results.json and, where pyarrow is there, results.parquet."""
    names = columns_of(work, rows)
    whole = [{name: row.get(name) for name in names} for row in rows]
    paths = [work.folder.table("csv"), work.folder.table("json")]
    write_atomic(paths[0], _csv(names, whole))
    write_json(paths[1], {"sweep": work.sweep.name, "rank_by": work.sweep.rank_by, "columns": names, "rows": whole})
    return paths + _parquet(work.folder.table("parquet"), names, whole)


def _csv(names: Sequence[str], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parquet(path: Path, names: Sequence[str], rows: Sequence[Row]) -> list[Path]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return []
    columns = {name: _one_type([row[name] for row in rows]) for name in names}
    beside = path.with_suffix(".part")
    parquet.write_table(pyarrow.table(columns), beside)
    beside.replace(path)
    return [path]


def _one_type(values: Sequence[Any]) -> list[Any]:
    """A Parquet column holds one type: numbers stay numbers only where all are."""
    known = [v for v in values if v is not None]
    if all(isinstance(v, bool) for v in known) or all(isinstance(v, str) for v in known):
        return list(values)
    if all(_is_number(v) for v in known):
        whole = all(isinstance(v, int) for v in known)
        return [v if v is None or whole else float(v) for v in values]
    return [None if v is None else str(v) for v in values]
