"""The public Python API, for notebooks: `plan(recipe)` and `open_run(path)`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.clusters import load_cluster
from windlass.config import Recipe, load_recipe
from windlass.errors import ConfigError
from windlass.runs import folder
from windlass.runs.metrics import METRICS, last_of_each_step

if TYPE_CHECKING:
    from windlass.planner import Plan
    from windlass.report.collect import RunSummary

MAX_CHARTS = 3
PACKAGES = {"pandas": "pandas", "arrow": "pyarrow"}


def plan(recipe: Recipe | Path | str, *overrides: str, cluster: str | None = None, nodes: int | None = None) -> Plan:
    """The first layout of the ranking for a recipe (a file or a Recipe), with its memory, speed, days and energy.

    `overrides` are `key=value` texts as on the command line; `cluster` and `nodes` replace the recipe's. Raises
    PlanError when nothing fits.
    """
    from windlass.planner import search

    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides).recipe
    elif overrides:
        raise ConfigError(
            "notebook.overrides-need-a-file",
            f"{len(overrides)} overrides for a Recipe that is already loaded",
            hint="give the path of the recipe file, or change the Recipe with model_copy",
        )
    return search.plan(recipe, load_cluster(cluster or recipe.cluster), nodes=nodes).best


def open_run(path: Path | str) -> OpenedRun:
    """A run folder, or the name of one in runs/. Opening changes nothing in it."""
    return OpenedRun(folder.open_run(path).path)


class OpenedRun(folder.Run):
    """A run folder with its metrics as a table and its summary; `events()` yields typed events."""

    def metrics(self, as_: str = "auto") -> Any:
        """The logged steps as a table: a column per key of metrics.jsonl, None (or NaN) where a value is unknown.

        Each step is there once: of steps that were repeated after a fault, the last. `as_`: "pandas" (a DataFrame),
        "arrow" (a pyarrow Table), "dict" (lists by key), or "auto": the first of them that is installed.
        """
        lines = [line.as_dict() for line in last_of_each_step(self.metrics_lines())]
        keys = [*METRICS, *sorted({k for line in lines for k in line} - set(METRICS))]
        columns = {key: [line.get(key) for line in lines] for key in keys}
        table = {key: values for key, values in columns.items() if any(v is not None for v in values)}
        if as_ == "auto":
            as_ = next((kind for kind, name in PACKAGES.items() if importlib.util.find_spec(name)), "dict")
        if as_ == "dict":
            return table
        if as_ not in PACKAGES:
            raise ConfigError(
                "notebook.table-kind-unknown", f"as_={as_!r} is unknown", hint="use auto, pandas, arrow or dict"
            )
        try:
            module = importlib.import_module(PACKAGES[as_])
        except ModuleNotFoundError:
            raise ConfigError(
                "notebook.package-missing",
                f"as_={as_!r} needs {PACKAGES[as_]}, which is not installed",
                hint=f"pip install {PACKAGES[as_]}, or as_='dict'",
            ) from None
        return module.DataFrame(table) if as_ == "pandas" else module.table(table)

    def _repr_html_(self) -> str:
        """What Jupyter shows for a run: the report's key figures and its first charts."""
        from windlass.figures import Chart, fragment
        from windlass.report.collect import collect
        from windlass.report.columns import Columns
        from windlass.report.sections import cards, curves

        columns = Columns(self.metrics_file)
        columns.refresh()
        summary = collect(self, columns=columns)
        items = [item for item in curves(summary, columns) if isinstance(item, Chart)]
        return fragment(f"{summary.name}: {summary.model}", [cards(summary), *items[:MAX_CHARTS]])

    def summary(self) -> RunSummary:
        """The numbers that `windlass report` shows."""
        from windlass.report.collect import collect

        return collect(self)
