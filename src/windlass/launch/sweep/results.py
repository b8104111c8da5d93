"""One row per point: settings, outcome, speed, memory, energy. Written as CSV, JSON, Parquet, one page and a recipe."""

import contextlib
import copy
import csv
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from windlass.config import Recipe, validate
from windlass.config.toml_text import to_toml
from windlass.energy.ledger import read_ledger
from windlass.errors import ConfigError, RunError
from windlass.figures import Chart, Heat, Section, page, save_page, save_picture
from windlass.figures.leaderboard import leaderboard, leaderboard_sections
from windlass.figures.sweep import sweep_sections
from windlass.files import parse_json, read_json_lines, write_atomic, write_json
from windlass.launch.sweep.expect import Expectation
from windlass.launch.sweep.folder import SweepRun
from windlass.launch.sweep.points import SweepPoint
from windlass.layout.types import AXES, REPLICA_AXES
from windlass.runs.events import Started
from windlass.runs.folder import Run
from windlass.runs.measured import columns_of, measure

# Of a sweep over recipes, with the sweep's axes after the first four. `step_spread` is (90th - 10th percentile) /
# median of the step times; predicted memory is what the run would show as its peak, needed memory what must fit
# below the limit.
RECIPE_COLUMNS = (
    "point", "outcome", "evidence", "detail", "engine", "layout", "shard", "micro_batch", "tensor", "pipeline",
    "context", "expert", "offload", "recompute", "attention", "precision", "compile", "nodes", "devices", "seq_len",
    "batch_tokens", "steps", "tokens_per_second", "tokens_per_second_per_device", "predicted_tokens_per_second_per_device",
    "mfu", "predicted_mfu", "memory_bytes", "predicted_memory_bytes", "needed_memory_bytes", "memory_limit_bytes",
    "oom_chance", "step_seconds", "predicted_step_seconds", "step_spread", "joules_per_token", "kwh_per_step",
    "energy_joules", "modelled_joules", "loss", "seconds",
)  # fmt: skip
COMMAND_COLUMNS = ("point", "outcome", "evidence", "detail", "devices", "seconds")
LAYOUT_COLUMNS = ("shard", "micro_batch", "tensor", "pipeline", "context", "expert", "offload")
FIGURES = ("tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds", "memory_bytes", "loss")
SKIP_LINES = 2  # first metric lines that are left out: compilation and caches settle there
Row = dict[str, Any]


def collect_rows(sweep_run: SweepRun) -> list[Row]:
    """A row for every point, in the sweep's order; a point that has not run yet has no outcome."""
    outcomes = sweep_run.folder.outcomes()
    return [_row(sweep_run, point, outcomes.get(point.name, {})) for point in sweep_run.points]


def _row(sweep_run: SweepRun, point: SweepPoint, outcome: Mapping[str, Any]) -> Row:
    """The settings and the outcome win over a number of the same name that a command left."""
    run, ok, sweep = sweep_run.folder.point(point.name), outcome.get("outcome") == "ok", sweep_run.sweep
    head: Row = {"point": point.name, **{key: outcome.get(key) for key in ("outcome", "evidence", "detail")}}
    axes = {_column(key): value for key, value in point.values.items()}
    seconds = {"seconds": outcome.get("seconds")}
    if point.recipe is not None:
        columns = _recipe_columns(point.recipe, run, sweep_run.expectations[point.name])
        if point.wanted_batch_tokens is not None:
            columns["wanted_batch_tokens"] = point.wanted_batch_tokens
        return {**head, **columns, **axes, **(measured(run) if ok else {}), **seconds}
    numbers: Row = {}
    with contextlib.suppress(ConfigError):
        if ok and sweep.results is not None:
            numbers = read_results(point.results_file(run.path, sweep.results))
            numbers |= {ours: numbers.get(theirs) for ours, theirs in sweep.metrics.items()}
    place: Row = {"devices": point.devices}
    if (nodes := point.settings.get("nodes")) is not None:
        total = point.devices * nodes if point.devices is not None and isinstance(nodes, int) else point.devices
        place = {"nodes": nodes, "devices": total}
    return {**head, **numbers, **axes, **place, **seconds}


def _column(axis: str) -> str:
    """The axis `devices` counts those of a node; the column `devices` all that took part."""
    return "devices_per_node" if axis == "devices" else axis


def _recipe_columns(recipe: Recipe, run: Run, expected: Expectation) -> Row:
    layout = dict(expected.layout or (recipe.layout.model_dump(mode="json") if recipe.layout else {}))
    train, data, started = recipe.train, recipe.data, next(run.events(Started), Started())
    degrees = {axis: int(layout.get(axis) or 1) for axis in AXES}
    devices, batch_tokens = started.world_size or expected.devices, data.batch_tokens
    if batch_tokens is None and devices is not None and layout.get("micro_batch"):
        # Without `batch_tokens` a step is one micro-batch on every replica.
        replicas = max(1, devices // math.prod(degrees[axis] for axis in REPLICA_AXES))
        batch_tokens = int(layout["micro_batch"]) * data.seq_len * replicas
    # `full, tensor 2, offload optimizer`: only what differs from the plainest layout; the micro-batch has a column.
    parts = [str(layout.get("shard")), *(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)]
    parts += [f"offload {layout['offload']}"] if layout.get("offload", "none") != "none" else []
    return {
        "engine": train.engine,
        "layout": ", ".join(parts) if layout else "",
        **{key: layout.get(key) for key in LAYOUT_COLUMNS},
        "recompute": train.recompute,
        "attention": train.attention,
        "precision": train.precision,
        "compile": train.compile,
        "nodes": started.nodes or expected.nodes,
        "devices": devices,
        "seq_len": data.seq_len,
        "batch_tokens": batch_tokens,
        "steps": train.steps,
        "predicted_tokens_per_second_per_device": expected.tokens_per_second_per_device,
        "predicted_mfu": expected.mfu,
        "predicted_memory_bytes": expected.peak_bytes,
        "needed_memory_bytes": expected.memory_bytes,
        "memory_limit_bytes": expected.memory_limit_bytes,
        "oom_chance": expected.oom_chance,
        "predicted_step_seconds": expected.step_seconds,
    }


def measured(run: Run) -> Row:
    """From the run folder, as its report has them; energy per token and per step without the start. None: not
    measured."""
    logged = list(run.metrics_lines())
    figures = measure(columns_of(logged), next(run.events(Started), Started()).world_size)
    ledger = read_ledger(run)
    lines = [line.as_dict() for line in logged]
    kept = lines[SKIP_LINES:] if len(lines) > SKIP_LINES + 2 else lines
    steps = [float(line["step_seconds"]) for line in kept if _is_number(line.get("step_seconds"))]
    deciles = quantiles(steps, n=10, method="inclusive") if len(steps) >= 4 else None
    metered = [m for m in kept if _is_number(m.get("energy_joules"))]
    joules, tokens, count = (
        float(metered[-1][key]) - float(metered[0][key]) if len(metered) > 1 else 0.0
        for key in ("energy_joules", "tokens", "step")
    )  # what the counter rose by over the kept steps
    energy = joules if joules > 0 and tokens > 0 and count > 0 else None
    return {
        **{key: getattr(figures, key) for key in FIGURES},
        "step_spread": (deciles[-1] - deciles[0]) / median(steps) if deciles else None,
        "joules_per_token": None if energy is None else energy / tokens,
        "kwh_per_step": None if energy is None else energy / count / 3.6e6,
        "energy_joules": ledger.joules,
        "modelled_joules": ledger.modelled_joules,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# -- results of any command -------------------------------------------------------------------------------------------


def read_results(path: Path) -> Row:
    """The numbers of a command: a JSON object, the last of JSON lines, or the last row of a CSV. Keys are dotted."""
    if not path.is_file():
        raise ConfigError(
            "sweep.results-missing",
            f"the results file {path} is missing",
            hint="let the command write it, or correct `results`, which is relative to {folder}",
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        value, fault = next(reversed(list(read_json_lines(path))), None), "it has no line that is a JSON object"
    elif path.suffix == ".csv":
        last: Row = next(reversed(list(csv.DictReader(io.StringIO(text)))), {})
        is_complete = last and None not in last and None not in last.values()
        value = {key: _number(cell) for key, cell in last.items()} if is_complete else None
        fault = "it has no complete row below its header"
    else:
        try:
            value = parse_json(path.read_bytes())
            fault = f"it holds a {type(value).__name__}, not an object"
        except ValueError as error:
            value, fault = None, f"it is not valid JSON ({error})"
    if not isinstance(value, dict):
        raise ConfigError(
            "sweep.results-invalid",
            f"the results file {path} is not valid: {fault}",
            hint="the command must write one JSON object, JSON lines or CSV",
        )
    return _flat(value)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _flat(value: Mapping[str, Any], prefix: str = "") -> Row:
    """Dotted keys; cells as CSV, JSON and Parquet can all hold them: a list as text, None for NaN and infinity."""
    row: Row = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            row |= _flat(item, f"{prefix}{key}.")
        elif isinstance(item, (list, tuple)):
            row[f"{prefix}{key}"] = json.dumps(item, ensure_ascii=False, default=str)
        else:
            row[f"{prefix}{key}"] = None if isinstance(item, float) and not math.isfinite(item) else item
    return row


# -- writing ----------------------------------------------------------------------------------------------------------


def write_tables(sweep_run: SweepRun, rows: Sequence[Row]) -> list[Path]:
    """results.csv, results.json and, where pyarrow is installed, results.parquet; the axes come first."""
    sweep, folder = sweep_run.sweep, sweep_run.folder
    axes = [_column(key) for point in sweep_run.points for key in point.values]
    common = RECIPE_COLUMNS if sweep.command is None else COMMAND_COLUMNS
    columns = list(dict.fromkeys([*common[:4], *axes, *common[4:], *(key for row in rows for key in row)]))
    full = [{column: row.get(column) for column in columns} for row in rows]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *(row.values() for row in full)])
    paths = [folder.table("csv"), folder.table("json")]
    write_atomic(paths[0], text.getvalue())
    write_json(paths[1], {"sweep": sweep.name, "rank_by": sweep.rank_by, "columns": columns, "rows": full})
    if find_spec("pyarrow") is None:
        return paths
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({name: _one_type([row[name] for row in full]) for name in columns}), buffer)
    write_atomic(folder.table("parquet"), buffer.getvalue())
    return [*paths, folder.table("parquet")]


def _one_type(values: Sequence[Any]) -> list[Any]:
    """A Parquet column holds one type: numbers stay numbers only where all are."""
    present = [v for v in values if v is not None]
    if len(set(map(type, present))) <= 1:
        return list(values)
    convert = float if all(map(_is_number, present)) else str
    return [None if v is None else convert(v) for v in values]


def write_page(sweep_run: SweepRun, rows: Sequence[Row], rank_by: str) -> Path:
    """report.html, and its heat map and bars as pictures where matplotlib is installed."""
    sweep, folder = sweep_run.sweep, sweep_run.folder
    sections = page_sections(sweep_run, rows, rank_by)
    save_page(
        folder.page,
        page(
            sweep.title or sweep.name,
            sections,
            subtitle=sweep.notes,
            footer=f"windlass sweep {sweep_run.loaded.path.name}",
        ),
    )
    for section in sections if find_spec("matplotlib") else ():
        for index, chart in enumerate([item for item in section.items if isinstance(item, (Chart, Heat))]):
            folder.pictures.mkdir(exist_ok=True)
            save_picture(chart, folder.pictures / f"{section.id}{index or ''}.png")
    return folder.page


def write_leaderboard(sweep_run: SweepRun, rows: Sequence[Row], path: Path | None = None) -> list[Row]:
    """leaderboard.csv and .html in the sweep's folder, and the page also at `path`; its rows, none without a table."""
    sweep, folder, board = sweep_run.sweep, sweep_run.folder.path, sweep_run.sweep.leaderboard
    if board is None:
        return []
    entries = leaderboard(board, rows)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([list(entries[0]), *(entry.values() for entry in entries)])
    write_atomic(folder / "leaderboard.csv", text.getvalue())
    content = page(sweep.title or sweep.name, leaderboard_sections(board, entries), subtitle=sweep.notes,
                   footer=f"windlass sweep {sweep_run.loaded.path.name}")  # fmt: skip
    for target in (folder / "leaderboard.html", *([path] if path is not None else [])):
        save_page(target, content)
    return entries


def check_leaderboard(sweep_run: SweepRun) -> None:
    """What can be refused before hours of points have run."""
    if sweep_run.sweep.leaderboard is None:
        raise ConfigError(
            "sweep.no-leaderboard",
            f"{sweep_run.loaded.path} has no [leaderboard] table",
            hint='write rows = "model" and columns = "dataset" into it, or the axes of this sweep',
        )


def page_sections(sweep_run: SweepRun, rows: Sequence[Row], rank_by: str) -> list[Section]:
    return sweep_sections(sweep_run.sweep, rows, rank_by, {p.name for p in sweep_run.points if p.in_grid})


# -- the winner --------------------------------------------------------------------------------------------------------


def check_pick(sweep_run: SweepRun, path: Path) -> None:
    """What can be refused before hours of points have run."""
    if sweep_run.loaded.base is None:
        raise ConfigError(
            "sweep.pick-needs-recipe",
            "--pick writes a recipe, and this sweep runs a command",
            hint="results.csv has the ranking",
        )
    if path.exists():
        raise RunError("sweep.file-exists", f"{path} already exists", hint="choose another file name for --pick")


def write_pick(sweep_run: SweepRun, ranked: Sequence[dict[str, Any]], rank_by: str, path: Path) -> None:
    """The best point's recipe; refuses to overwrite a file, and a sweep without a winner."""
    check_pick(sweep_run, path)
    if not ranked:
        raise RunError(
            "sweep.no-winner",
            f"no point succeeded with a number for {rank_by}",
            hint="look at results.csv, or repeat points with --only oom,fail",
        )
    point, source = sweep_run.point(ranked[0]["point"]), sweep_run.loaded
    comment = [
        f"Picked by `windlass sweep {source.path.name}` on {time.strftime('%Y-%m-%d', time.gmtime())}:",
        f"point {point.name},",
        f"the best of {len(ranked)} that succeeded, by {rank_by} ({ranked[0][rank_by]:.6g}).",
        *(f"Next: {row['point']} ({row[rank_by]:.6g})." for row in ranked[1:2]),
        *([f"It ran with `windlass train FILE --devices {point.devices}`."] if point.devices is not None else []),
    ]
    raw = copy.deepcopy(point.raw or {}) | {"name": (source.base or {}).get("name", sweep_run.sweep.name)}
    validate(Recipe, raw, str(path))
    write_atomic(path, to_toml(raw, "\n".join(comment)))
