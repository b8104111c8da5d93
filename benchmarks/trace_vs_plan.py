"""Peak memory by the trace and by the planner: every shipped recipe, and the measured H200 rows.

python benchmarks/trace_vs_plan.py                       # writes results/trace_vs_plan.md and .json (about ten minutes of CPU)
python benchmarks/trace_vs_plan.py recipes/gptnl_8b_snellius.toml [--nodes N]    # prints the terms of one recipe
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # instead of this folder, where tokenize.py hides a module of Python's own
GIB = 2**30


def recipe_row(path: Path, nodes: int | None = None, show_terms: bool = False) -> dict[str, Any]:
    from benchmarks.memory_trace.trace import trace

    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.errors import WindlassError
    from windlass.planner import fill_recipe

    recipe = load_recipe(path, []).recipe
    cluster = load_cluster(recipe.cluster)
    if recipe.layout is None:
        recipe, _ = fill_recipe(recipe, cluster, nodes=nodes)
    try:
        traced = trace(recipe, cluster, nodes)
    except WindlassError as error:
        return {"recipe": path.name, "refused": error.message}
    if show_terms:
        print(traced.text())
    layout = recipe.layout.model_dump(exclude_defaults=True)
    return {"recipe": path.name, "layout": layout, "recompute": recipe.train.recompute, **traced.json()}


def measured_rows() -> list[dict[str, Any]]:
    """Configurations of results/gpu_plan.json, traced beside what was measured."""
    import importlib.util

    from benchmarks.memory_trace.trace import trace

    spec = importlib.util.spec_from_file_location("gpu_plan", ROOT / "benchmarks" / "gpu_plan.py")
    assert spec is not None and spec.loader is not None
    plan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan)
    record = json.loads((ROOT / "benchmarks" / "results" / "gpu_plan.json").read_text())
    rows = []
    for row in record["rows"]:
        task, _ = plan.question(row, record["device"])
        traced = trace(task.recipe, task.cluster)
        configuration = ", ".join(f"{k} {row[k]}" for k in plan.KEYS if k in row)
        rows.append({"configuration": configuration, "measured_gib": row["allocated_gib"], **traced.json()})
    return rows


def tables(recipes: list[dict[str, Any]], measured: list[dict[str, Any]]) -> str:
    lines = ["| recipe | layout | ranks | traced GiB | planned GiB | difference % |", "|---|---|---|---|---|---|"]
    for r in recipes:
        if "refused" in r:
            lines.append(f"| {r['recipe']} | {r['refused']} | | | | |")
            continue
        layout = ", ".join(f"{k} {v}" for k, v in r["layout"].items()) + (
            f", recompute {r['recompute']}" if r["recompute"] != "none" else ""
        )
        lines.append(
            f"| {r['recipe']} | {layout} | {r['world_size']:,} | {r['peak_gib']:.2f} | {r['predicted_gib']:.2f} | {r['difference_pct']:+.1f} |"
        )
    if measured:
        lines += ["", "| one H200 | measured GiB | traced GiB | error % | planned GiB |", "|---|---|---|---|---|"]
    for r in measured:
        error = 100 * (r["peak_gib"] / r["measured_gib"] - 1)
        lines.append(
            f"| {r['configuration']} | {r['measured_gib']:.2f} | {r['peak_gib']:.2f} | {error:+.1f} | {r['predicted_gib']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--nodes", type=int, help="number of nodes instead of the recipe's")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks" / "results")))
    args = parser.parse_args()
    recipes = []
    for path in args.recipes or sorted(p for p in (ROOT / "recipes").glob("*.toml") if not p.stem.endswith("_data")):
        recipes.append(recipe_row(path, args.nodes, show_terms=bool(args.recipes)))
        print(json.dumps(recipes[-1]), flush=True)
    measured = [] if args.recipes else measured_rows()
    text = tables(recipes, measured)
    print(text)
    if not args.recipes:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"date": time.strftime("%Y-%m-%d"), "recipes": recipes, "measured": measured}
        (args.out / "trace_vs_plan.json").write_text(json.dumps(record, indent=1))
        (args.out / "trace_vs_plan.md").write_text(text)


if __name__ == "__main__":
    main()
