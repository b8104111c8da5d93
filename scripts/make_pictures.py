"""Writes docs/pictures/NAME.svg for README, pages and stories, from the output of commands, the planner or benchmarks/results.

python scripts/make_pictures.py plan          # without a name: all of them

scripts/stories.py writes those of the small runs.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
PICTURES = TOP / "docs" / "pictures"
RESULTS = TOP / "benchmarks" / "results"
COMMANDS = {
    "plan": (["plan", "recipes/gptnl_8b_snellius.toml", "--top", "5"], 26, 160),
    "clusters": (["clusters"], 20, 150),
}


def record(arguments: list[str], lines: int, width: int) -> str:
    """The output of a command as an SVG of `width` columns, cut after `lines`."""
    from rich.console import Console
    from rich.text import Text

    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *arguments], capture_output=True, text=True, cwd=TOP, env=env, check=True
    )
    shown = [line.rstrip() for line in done.stdout.splitlines()]
    if len(shown) > lines:
        shown = [*shown[:lines], "..."]
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text(f"$ windlass {' '.join(arguments)}", style="bold green"))
    console.print(Text.from_ansi("\n".join(shown)))
    svg = console.export_svg(title="windlass")
    # The image must open without a network: no fonts from other sites.
    return re.sub(r"@font-face\s*\{[^}]*\}", "", svg)


# -- charts of the stories -------------------------------------------------------------------------------------------------


def budget_curves(target: Path) -> None:
    """GPT-NL's slide: six sizes, 88 H100 at an MFU of 0.4."""
    options = [
        "--cluster",
        "snellius-h100",
        "--nodes",
        "22",
        "--days",
        "120",
        "--mfu",
        "0.4",
        "--sizes",
        "1B,2B,7B,13B,30B,70B",
    ]
    subprocess.run(
        [sys.executable, "-m", "windlass", "budget", *options, "--png", str(target)],
        cwd=TOP,
        check=True,
        capture_output=True,
    )


def strong_scaling(target: Path, title: str, recipes: dict[str, str], counts: list[int]) -> None:
    """Predicted tokens/s over devices, with linear scaling from each model's first size."""
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.figures import Chart, line, save_picture
    from windlass.planner.scaling import scaling

    series = []
    for index, (name, label) in enumerate(recipes.items()):
        recipe = load_recipe(TOP / "recipes" / f"{name}.toml").recipe
        plans = scaling(recipe.model_copy(update={"layout": None}), load_cluster(recipe.cluster), counts)
        devices, rates = [p.devices for p in plans], [p.tokens_per_second() or 0.0 for p in plans]
        series.append(line(label, devices, rates, colour=index))
        series.append(
            line(f"{label}, linear", devices, [rates[0] / devices[0] * d for d in devices], dashed=True, colour=index)
        )
    caption = "Predicted; the best layout at each size, the same batch throughout."
    chart = Chart(
        title=title,
        series=tuple(series),
        x_title="devices",
        y_title="tokens/s",
        log_x=True,
        log_y=True,
        caption=caption,
    )
    save_picture(chart, target)


def sharding_by_batch(target: Path, size: str) -> None:
    """GPT-NL's chart by strategy and batch: an engine of 2024 predicted, what fits; the ends of the published axis."""
    from make_tables import AXES, fitting, predicted

    from windlass.figures import Chart, Mark, line, save_picture

    points = predicted("gptnl_grid", "torch")
    chosen = [*fitting(points, size, is_deepspeed=False), *fitting(points, size, is_deepspeed=True)]
    series = []
    for strategy in dict.fromkeys(p["values"]["strategy"] for p in chosen):
        own = [p for p in chosen if p["values"]["strategy"] == strategy]
        rates = [p["expected"]["tokens_per_second_per_device"] for p in own]
        batches = [p["values"]["layout.micro_batch"] for p in own]
        series.append(line(strategy, batches, rates, dashed=strategy.startswith("Zero"), colour=len(series)))
    low, high = AXES[size]
    marks = [Mark(axis="y", at=float(low), label="published axis begins"), Mark(axis="y", at=float(high), label="ends")]
    save_picture(
        Chart(
            title=f"{size} on four nodes of four H100, engines of 2024, predicted",
            series=series,
            x_title="batch per device, sequences of 2,048 tokens",
            y_title="tokens/s per device",
            marks=marks,
            caption="Flash attention 2; points that are predicted to run out of memory are left out.",
        ),
        target,
    )


def best_runs(target: Path) -> None:
    """GPT-NL's bars of the best runs on 20 nodes: three code bases of 2024 and ours, predicted."""
    from make_tables import AXES, FRAMEWORKS, predicted

    from windlass.figures import Chart, bars, save_picture

    series = []
    for name, (engine, profile) in {**FRAMEWORKS, "windlass": ("native", None)}.items():
        by_size = {p["values"]["size"]: p for p in predicted("gptnl_best", profile) if p["values"]["train.engine"] == engine}  # fmt: skip
        series.append(bars(name, list(AXES), [by_size[s]["expected"]["tokens_per_second_per_device"] for s in AXES]))
    title = "Best layout of each code base on 20 nodes of four H100, predicted"
    save_picture(Chart(title=title, series=series, y_title="tokens/s per device", from_zero=True), target)


def scaling_to_21(target: Path) -> None:
    """GPT-NL's strong-scaling chart: FSDP and DeepSpeed of 2024, predicted, with the nearest batch where none divides."""
    from make_tables import predicted

    from windlass.figures import Chart, line, save_picture

    by_series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for p in predicted("gptnl_scaling", "torch"):
        if p["expected"]["verdict"] == "fits":
            key = (p["values"]["series"], "DS" if p["values"]["train.engine"] == "deepspeed" else "FSDP")
            by_series.setdefault(key, []).append((p["values"]["nodes"], p["expected"]["tokens_per_second"]))
    colours = {name: index for index, name in enumerate(dict.fromkeys(name for name, _ in by_series))}
    series = []
    for (name, engine), curve in by_series.items():
        nodes, rates = zip(*curve, strict=True)
        series.append(line(f"{engine} {name}", nodes, rates, dashed=engine == "DS", colour=colours[name]))
        if engine == "FSDP":
            perfect = [rates[0] / nodes[0] * n for n in nodes]
            series.append(line(f"{name}, perfect", nodes, perfect, colour=7, quiet=True))
    caption = "Predicted for engines of 2024. 1,680 sequences per step, or the nearest number that divides (4 to 16 nodes)."  # fmt: skip
    chart = Chart(
        title="Snellius, four H100 per node: strong scaling",
        series=series,
        x_title="nodes",
        y_title="tokens/s",
        log_x=True,
        log_y=True,
        caption=caption,
    )
    save_picture(chart, target)


def oom_map(target: Path) -> None:
    """8B on four nodes of four H100: tokens/s per device for each sharding and recomputation, or OOM."""
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.figures import Heat, save_picture
    from windlass.planner import plan
    from windlass.planner.explain import explain_layout

    overrides = ["nodes=4", "data.batch_tokens=4Mi", "data.seq_len=4096"]
    recipe = load_recipe(TOP / "recipes" / "gptnl_8b_snellius.toml", overrides).recipe.model_copy(
        update={"layout": None}
    )
    plans = plan(recipe, load_cluster(recipe.cluster))
    batches = [1, 2, 4, 8, 16]
    rows = [
        (shard, recompute)
        for shard in ("none", "zero1", "zero2", "hybrid", "full")
        for recompute in ("none", "selective", "full")
    ]

    def cell(shard: str, recompute: str, batch: int) -> tuple[float | None, str]:
        plan_of_cell = explain_layout(plans, f"shard={shard},micro_batch={batch},recompute={recompute}").plan
        if plan_of_cell is None or not plan_of_cell.fits:
            return None, "OOM"
        rate = plan_of_cell.step.tokens_per_second_per_device
        return rate, f"{rate:,.0f}"

    cells = [[cell(*row, batch) for batch in batches] for row in rows]
    heat = Heat(
        title="8B on four nodes of four H100: tokens/s per device, or OOM (predicted)", x=tuple(map(str, batches)), x_title="micro-batch, sequences of 4,096 tokens",
        y=tuple(f"{shard}, recompute {recompute}" for shard, recompute in rows), values=tuple(tuple(v for v, _ in r) for r in cells),
        labels=tuple(tuple(w for _, w in r) for r in cells), unit="tokens/s", height=560,
    )  # fmt: skip
    save_picture(heat, target)


# -- measured on an H200, and predictions --------------------------------------------------------------------------------


def h200_run(target: Path) -> None:
    from windlass.figures import Chart, line, save_picture

    record = json.loads((RESULTS / "retnet_vs_llama.json").read_text())
    run, about = record["train"]["llama"], record["about"]
    figures = (
        f"{run['tokens_per_second']:,.0f} tokens/s, {1e3 * run['joules_per_token']:.1f} mJ per token, "
        f"{run['memory_bytes'] / 2**30:.0f} GiB"
    )
    tokens = [(step + 1) * about["batch"] * about["sequence"] / 1e6 for step in range(len(run["losses"]))]
    chart = Chart(
        title=f"{run['parameters'] / 1e6:.0f}M Llama on one {about['device'].removeprefix('NVIDIA ')}: {figures}",
        series=(line("training loss", tokens, run["losses"]),),
        x_title="million tokens",
        y_title="loss",
        height=320,
    )
    save_picture(chart, target)


def h200_speed(target: Path) -> None:
    """Three engines, one session on one device."""
    from windlass.figures import Chart, bars, save_picture

    rows = {row["row"]: row for row in json.loads((RESULTS / "gpu_train.json").read_text())["runs"][0]["rows"]}
    models = {"1.1b": "1.1B", "8b-half": "8B, half the layers"}
    engines = {"windlass": "windlass", "titan": "torchtitan", "hf": "Hugging Face loop, compiled"}
    chart = Chart(
        title="Tokens per second on one H200, measured in one session (bf16)",
        series=tuple(
            bars(label, models.values(), [rows[f"{engine}-{model}"]["tokens_per_second"] for model in models])
            for engine, label in engines.items()
        ),
        y_title="tokens/s",
        from_zero=True,
        height=320,
    )
    save_picture(chart, target)


def scatter(target: Path, title: str, unit: str, pairs: dict[str, list[tuple[float, float]]]) -> None:
    """Predicted over measured, both axes logarithmic; `pairs`: name -> (measured, predicted)."""
    from windlass.figures import Chart, line, points, save_picture

    ranked = sorted(pairs.items(), key=lambda item: -len(item[1]))
    shown = dict(ranked[:5]) | ({"others": [p for _, group in ranked[5:] for p in group]} if ranked[5:] else {})
    series = [points(f"{name} ({len(g)})", [m for m, _ in g], [p for _, p in g]) for name, g in shown.items()]
    measured = [m for group in pairs.values() for m, _ in group]
    ends = (min(measured) * 0.9, max(measured) * 1.1)
    errors = sorted(abs(p / m - 1) for group in pairs.values() for m, p in group)
    series.append(line("equal", ends, ends, colour=7, quiet=True))
    limits = ([share * end for end in ends] for share in (0.8, 1.2))
    series += [line("20 % off", ends, limit, colour=7, dashed=True, quiet=True) for limit in limits]
    chart = Chart(
        title=f"{title}: {len(errors)} runs, median error {100 * errors[len(errors) // 2]:.1f} %",
        series=tuple(series),
        x_title=f"measured, {unit} (dashed: 20 % off)",
        y_title=f"predicted, {unit}",
        log_x=True,
        log_y=True,
        height=480,
    )
    save_picture(chart, target)


def published(target: Path, title: str, unit: str, key: str) -> None:
    """Rows of `python benchmarks/planner_accuracy.py --rows FILE.csv --rows-out OUT.csv` that the errors are stated for."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    with (RESULTS / "planner_rows.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row[f"measured_{key}"]:
                pairs.setdefault(row["source"], []).append(
                    (float(row[f"measured_{key}"]), float(row[f"predicted_{key}"]))
                )
    scatter(target, title, unit, pairs)


def own_sweep(target: Path) -> None:
    pairs: dict[str, list[tuple[float, float]]] = {}
    with (RESULTS / "gpu_sweep.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["outcome"] == "ok":
                rates = (float(row[f"{kind}tokens_per_second_per_device"]) for kind in ("", "predicted_"))
                pairs.setdefault(row["variant"], []).append((next(rates), next(rates)))
    scatter(target, "Our engine on one H200, tokens/s", "tokens/s", pairs)


CHARTS: dict[str, Callable[[Path], None]] = {
    "story-gptnl-budget": budget_curves,
    "story-gptnl-sharding-8b": lambda target: sharding_by_batch(target, "8B"), "story-gptnl-sharding-30b": lambda target: sharding_by_batch(target, "30B"),
    "story-gptnl-best-runs": best_runs, "story-gptnl-scaling": scaling_to_21,
    "story-lumi-scaling": lambda target: strong_scaling(
        target, "LUMI, eight GCDs per node", {"viking_33b_lumi": "Viking 33B", "study_140b_lumi": "140B"}, [16, 32, 64, 128, 256]),
    "story-ultrascale-oom": oom_map,
    "h200-run": h200_run,
    "h200-speed": h200_speed,
    "predicted-throughput": lambda target: published(
        target, "Published runs, tokens/s", "tokens/s per device", "tokens_per_second_per_device"),
    "predicted-memory": lambda target: published(target, "Published runs, peak memory", "GiB", "memory_gib"),
    "predicted-h200": own_sweep,
}  # fmt: skip


def main() -> int:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or [*COMMANDS, *CHARTS]:
        target = PICTURES / f"{name}.svg"
        if name in CHARTS:
            CHARTS[name](target)
        else:
            target.write_text(record(*COMMANDS[name]))
        print(f"wrote docs/pictures/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
