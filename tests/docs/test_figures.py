"""Figures that README and pages state are those of benchmarks/results."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
RESULTS = TOP / "benchmarks" / "results"


def record(name):
    return (RESULTS / name).read_text()


def page(name):
    """The page as one line, so that line breaks do not matter."""
    return " ".join((TOP / name).read_text().split())


def cells(text, row):
    """The cells after `row` in the first row of a Markdown table that begins with it."""
    line = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.M)
    assert line, f"no row {row}"
    return [c.strip() for c in line.group(1).split("|")]


def missing(name, *phrases):
    text = page(name)
    return [phrase for phrase in phrases if phrase not in text]


def errors(row):
    """Median and 90th percentile of the planner's errors on sources outside the fit."""
    match = re.match(r"([\d.]+) / ([\d.]+)", cells(record("planner_accuracy.md"), row)[0])
    return float(match.group(1)), float(match.group(2))


def rounded_percent(value):
    """Halves are rounded up."""
    return int(value + 0.5)


def test_the_planners_errors():
    memory, speed = errors("memory, allocator readings"), errors("throughput, stated bf16 and fp16")
    caught, kept = (
        cells(record("planner_accuracy.md"), r)[0] for r in ("out-of-memory rows caught", "working rows kept")
    )
    good, of = map(int, kept.split(" of "))
    rows = re.search(r"(\d+) rows\.$", record("planner_accuracy.md"), re.M).group(1)
    assert not missing(
        "docs/evidence.md",
        f"{rows} published runs", f"memory {memory[0]} % median error", f"p90 {rounded_percent(memory[1])} %", f"tokens/s {speed[0]} % (p90 {rounded_percent(speed[1])} %)",
        f"{caught} out-of-memory rows", f"{100 * good / of:.1f} % of working rows",
    )  # fmt: skip
    shipped = json.loads(record("planner_accuracy.json"))["shipped"]
    own = " and ".join(f"{shipped[kind]['median_pct']:.1f}" for kind in ("memory", "throughput"))
    assert not missing(
        "README.md", f"{rows} published runs", f"memory {memory[0]} % median error, tokens/s {speed[0]} %", f"as shipped {own} %"
    )  # fmt: skip
    assert not missing("docs/evidence.md", f"as shipped {own} %")
    assert not missing(
        "docs/concepts/predictions.md", f"**{memory[0]} % / {memory[1]} %**", f"**{speed[0]} % / {speed[1]} %**", f"**{caught}**", f"**{kept}**"
    )  # fmt: skip


def test_the_planners_largest_errors():
    text = record("planner_accuracy.md")
    bits = re.search(r"8-bit rows .*: ([\d.]+) / ([\d.]+) over (\d+) rows", text)
    median, worst, rows = float(bits.group(1)), float(bits.group(2)), bits.group(3)
    assert not missing("docs/lab.md", f"{median} / {worst:.0f} %")
    assert not missing("docs/concepts/predictions.md", f"{median} % / {worst:.0f} % on {rows} rows")
    medians = [float(cells(text, row)[2]) for row in ("pipeline traffic", "tensor-parallel traffic", "pipeline bubble")]
    span = f"{min(medians):.0f} to {max(medians):.0f} %"
    assert not missing("docs/lab.md", span) and not missing("docs/concepts/predictions.md", span)


def test_runs_outside_every_fit():
    outside = json.loads(record("planner_accuracy.json"))["outside"]
    speed, fit = outside["throughput"], outside["fit"]
    assert fit["working_kept"] == fit["working_rows"] == speed["rows"]
    median, worst = f"{speed['median_pct']:.1f} %", f"{speed['p90_pct']:.1f} %"
    assert not missing("docs/concepts/predictions.md", f"holds {speed['rows']} runs", f"off by {median} / {worst}")
    assert not missing("CHANGELOG.md", f"On {speed['rows']} published runs", f"{median} (median) and {worst}")


def test_tokenizing():
    text = record("tokenize.md")
    section = text.split("\n## ", 2)[1]
    speed = float(re.search(r"^\| windlass \| 16 \|(?:[^|]*\|){4} ([\d.]+)", section, re.M).group(1))
    megatron, floor = (
        float(re.search(rf"^- {name}: windlass takes ([\d.]+) of its CPU time", section, re.M).group(1))
        for name in ("megatron-fast", "floor-gigatoken")
    )
    assert not missing(
        "docs/evidence.md",
        f"{speed:.1f} M tokens per CPU-second",
        f"{100 * (1 - megatron):.0f} % less CPU time than an early version of Megatron's fast script",
        f"{100 * (1 - floor):.0f} % less than a bare gigatoken loop",
    )
    goals = {0: "all goals met", 1: "one goal not met"}[section.count("**not met**")]
    assert not missing("docs/comparison.md", f"{goals} on 86 million tokens")


def test_the_chunkwise_form_of_retnet():
    short, long = (
        float(cells(record("gpu_train.md"), f"RetNet at {length} tokens, chunkwise against parallel")[0])
        for length in ("2,048", "8,192")
    )
    assert not missing(
        "docs/guides/profile-examples.md",
        f"{short:.1f} times as fast as the parallel one at 2,048 tokens and {long:.1f} times at 8,192",
    )


def rounded(value):
    return f"{round(value / 100) * 100:,}"


def test_speed_on_one_gpu():
    text = record("gpu_train.md")
    rate = {row: float(cells(text, row)[0].replace(",", "")) for row in ("windlass-1.1b", "titan-1.1b", "hf-1.1b", "windlass-8b-half", "titan-8b-half", "windlass-8b", "windlass-1.1b-fp8", "windlass-8b-half-fp8", "floor-1.1b")}  # fmt: skip
    energy = [float(cells(text, row)[4]) for row in ("windlass-1.1b", "titan-1.1b")]
    assert not missing(
        "docs/evidence.md",
        f"1.1B {rounded(rate['windlass-1.1b'])} tok/s (torchtitan {rounded(rate['titan-1.1b'])}", f"Hugging Face loop {rounded(rate['hf-1.1b'])}",
        f"{100 * rate['windlass-1.1b'] / rate['floor-1.1b']:.0f} % of the rate of its matrix products",
        f"{rounded(rate['windlass-8b-half'])} (torchtitan {rounded(rate['titan-8b-half'])})", f"8B on one card {rounded(rate['windlass-8b'])}",
        f"FP8 {rate['windlass-1.1b-fp8'] / rate['windlass-1.1b']:.2f} and {rate['windlass-8b-half-fp8'] / rate['windlass-8b-half']:.2f} x faster",
        f"{energy[0]:.1f} mJ per token (torchtitan {energy[1]:.1f})",
    )  # fmt: skip
    assert not missing(
        "README.md",
        f"1.1B {rounded(rate['windlass-1.1b'])} tok/s (torchtitan {rounded(rate['titan-1.1b'])}", f"Hugging Face loop {rounded(rate['hf-1.1b'])})",
        f"{rounded(rate['windlass-8b-half'])} (torchtitan {rounded(rate['titan-8b-half'])})",
    )  # fmt: skip


def test_fine_tuning_beside_its_peers():
    text = record("finetune_speed.md")
    ours, trainer, ratio = cells(text, "passes and updates as CUDA graphs, one for each width (0.7.0)")
    packed, trl = (float(cells(text, row)[1]) for row in ("windlass, packed", "TRL's SFTTrainer, 16 passes a step"))
    assert not missing("docs/evidence.md", f"{ours} samples/s, transformers' Trainer {trainer}", f"{packed:.0f} conversations/s, TRL's SFTTrainer {trl:.0f}")  # fmt: skip
    for name in ("README.md", "docs/guides/finetune.md"):
        assert not missing(name, f"{float(ratio):.1f} times the speed of transformers' Trainer", f"{packed / trl:.1f} times that of TRL")  # fmt: skip


def test_the_grid_on_one_gpu():
    text = record("gpu_sweep.md")
    everything = text.split("All 27 points:", 1)[1]
    (time, worst_time), (memory, worst_memory) = re.findall(r"median error ([\d.]+)%, worst ([\d.]+)%", everything)[:2]
    out_of_memory = re.search(r"\((\d+) ran out of memory\)", everything).group(1)
    assert not missing(
        "docs/evidence.md",
        "27 points on one H200",
        f"({out_of_memory} ran out of memory)",
        f"step time within {time} % (median; worst {float(worst_time):.0f} %)",
        f"memory within {memory} % (median; worst {worst_memory} %)",
    )
    minutes = {4: "four", 5: "five"}[round(int(re.search(r"(\d+) s for all points", text).group(1)) / 60)]
    assert not missing("docs/guides/sweep.md", f"27 points in {minutes} minutes")


def test_the_dots_of_the_scatter_plots_are_the_rows_of_the_table():
    rows = list(csv.DictReader(io.StringIO(record("planner_rows.csv"))))
    shipped = json.loads(record("planner_accuracy.json"))["shipped"]
    for key, name, picture in (
        ("memory_gib", "memory", "memory"),
        ("tokens_per_second_per_device", "throughput", "throughput"),
    ):
        pairs = [(float(r[f"measured_{key}"]), float(r[f"predicted_{key}"])) for r in rows if r[f"measured_{key}"]]
        errors = sorted(100 * abs(predicted / measured - 1) for measured, predicted in pairs)
        assert len(errors) == shipped[name]["rows"]
        assert errors[len(errors) // 2] == pytest.approx(shipped[name]["median_pct"], abs=0.05)
        title = f"{len(errors)} runs, median error {errors[len(errors) // 2]:.1f} %"
        assert title in page(f"docs/pictures/predicted-{picture}.svg"), "run scripts/make_pictures.py"


def test_our_own_engine_on_an_h200():
    (memory, worst_memory), (time, worst_time) = re.findall(
        r"^[a-z ]+: median ([\d.]+) %, worst ([\d.]+) % over 31", record("gpu_plan.md"), re.M
    )
    assert not missing(
        "docs/concepts/predictions-engine.md",
        f"**{memory} %** | **{worst_memory} %**",
        f"| step time | **{time} %** | {float(worst_time):.0f} %",
    )


def test_trace_and_plan():
    rows = [r for r in json.loads(record("trace_vs_plan.json"))["recipes"] if "refused" not in r]
    worst = max(abs(r["difference_pct"]) for r in rows if r["recipe"] != "tiny_cpu.toml")
    phrase = f"Trace and plan agree within {worst:.0f} % on those {len(rows)}, with one exception"
    assert not missing("docs/concepts/predictions-engine.md", phrase)


def test_kills():
    kills = re.search(r"^- kills: (\d+)$", record("faults.md"), re.M).group(1)
    assert not missing("README.md", f"{kills} kills") and not missing("docs/evidence.md", f"{kills} kills")


def test_what_a_small_change_of_gptnls_recipe_gains():
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.planner import plan
    from windlass.planner.changes import small_changes

    cluster = load_cluster("snellius-h100")
    recipe = load_recipe(TOP / "recipes" / "gptnl_8b_snellius.toml").recipe
    gains = {tuple(c.values): c.gain for c in small_changes(plan(recipe, cluster, nodes=22))}
    batch, nodes = (f"+{100 * gains[(key,)]:.0f} %" for key in ("data.batch_tokens", "nodes"))
    assert not missing("docs/guides/plan-options.md", f"3.1 % more, {batch} tokens/s", f"fewer nodes (20, {nodes})")


def test_the_picture_of_a_plan_shows_todays_best_layout():
    import html

    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.planner import plan, plan_json

    shown = html.unescape((TOP / "docs" / "pictures" / "plan.svg").read_text()).replace("\xa0", " ")
    first = re.search(r">\s1\s+(\S.*?)\s{2,}\d+ x \d+ x \d+\s+([\d.]+)\s+([\d,]+)", shown)
    loaded = load_recipe(TOP / "recipes" / "gptnl_8b_snellius.toml").recipe
    plans = plan(loaded, load_cluster(loaded.cluster), top=1)
    best = plan_json(plans.best, plans.task)
    assert first and first.group(1).startswith(best["layout"]["shard"]), "run scripts/make_pictures.py plan"
    rate = float(first.group(3).replace(",", ""))
    assert abs(rate / best["tokens_per_second_per_device"] - 1) < 0.1, "run scripts/make_pictures.py plan"
