"""Tables of the planner's errors on published runs: on the terminal, and as the Markdown record of the left-out fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.cli.output import console, table

MOST_REASONS = 8
OUTSIDE = Path(__file__).resolve().parents[1] / "outside_runs.csv"
"""Runs of other publications, entered by hand with their sources; no constant was fitted to them."""
PEERS = {
    "memory (allocator readings)": "llm-analysis 14 / 103 on these rows, 30 / 81 held out; Megatron-LM's formula 29 / 47; cookbook 71 and more",
    "throughput": "llm-analysis at efficiency 0.5: 20 / 80; tuned per GPU on these very rows 15 / 68, held out 17 / 60; constant MFU per GPU 17 / 64",
    "out-of-memory rows caught": "llm-analysis 14 of 35 (held out)",
}
"""Published comparison on the same rows (median / p90 of the absolute error in %)."""


def print_score(score: dict[str, Any], path: Path) -> None:
    """The summary of `Score.as_dict` as tables."""

    def percent(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.1f} %"

    def row(name: str, part: dict[str, Any]) -> tuple[object, ...]:
        return name, part["rows"], part["covered"], percent(part["median_pct"]), percent(part["p90_pct"])

    out, readings, fit = console(), score["all_readings"], score["fit"]
    rows = [
        row("peak memory", score["memory"]),
        row("throughput", score["throughput"]),
        row("peak memory, all rows", readings["memory"]),
        row("throughput, all rows", readings["throughput"]),
    ]
    columns = ("", "rows", "covered", "median error", "p90 error")
    out.print(table(f"Predicted vs. measured: {path}", columns, rows, right=(1, 2, 3, 4)))
    outcomes = [
        ("out of memory", fit["oom_rows"], fit["oom_caught"]),
        ("worked", fit["working_rows"], fit["working_kept"]),
    ]
    out.print(table("Fit", ("published outcome", "rows", "predicted correctly"), outcomes, right=(1, 2)))
    sources = [
        (
            name,
            *(
                value
                for kind in ("memory", "throughput")
                for value in (part[kind]["rows"], percent(part[kind]["median_pct"]))
            ),
        )
        for name, part in score["by_source"].items()
    ]
    columns = ("source", "memory rows", "median", "throughput rows", "median")
    out.print(table("By source", columns, sources, right=(1, 2, 3, 4)))
    if experts := score.get("experts"):
        out.print(table("Models with experts, median / p90 error in % (rows)", EXPERT_COLUMNS, expert_rows(experts)))
    out.print("memory: torch allocator readings; throughput: 16 bits on A100, H100, H200, MI250; layout fully stated.")
    out.print(
        "all rows: every row with a value, including driver readings, other devices and precisions, and blank cells."
    )
    refused: dict[str, int] = score["refused"]
    if refused:
        out.print(f"not predicted, or without a time ({sum(refused.values()):,} rows):")
        for reason, count in list(refused.items())[:MOST_REASONS]:
            out.print(f"  {count:,} x {reason}")
        if len(refused) > MOST_REASONS:
            out.print(f"  and {len(refused) - MOST_REASONS} other reasons (see --rows-out FILE)")
    defaults = Counter[str]()
    for text, count in score["assumed"].items():
        defaults[text if " (not " in text else text.partition("=")[0]] += count
    if defaults:
        columns_used = ", ".join(f"{name} {count:,}" for name, count in defaults.most_common())
        out.print(f"rows with a blank cell that got a default (see --rows-out FILE): {columns_used}")


def expert_rows(experts: dict[str, Any]) -> list[tuple[str, ...]]:
    """Lines of a table of models with experts: size, throughput in 16 bits and narrower, memory, fit."""

    def cell(part: dict[str, Any]) -> str:
        if part["median_pct"] is None:
            return "not measured"
        return f"{part['median_pct']:.1f} / {part['p90_pct']:.1f} ({part['covered']})"

    return [
        (
            name,
            *(cell(part[kind]) for kind in ("throughput_16_bit", "throughput_narrow", "throughput", "memory")),
            f"{part['fit']['oom_caught']} of {part['fit']['oom_rows']}",
            f"{part['fit']['working_kept']} of {part['fit']['working_rows']}",
        )
        for name, part in experts.items()
    ]


EXPERT_COLUMNS = ("size", "16 bits", "8 and 4 bits", "throughput", "memory", "out of memory caught", "working kept")


def expert_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Models with experts",
        "",
        f"{result['rows']} rows of `{result['file']}`: every row with a value that is not flagged, all devices. Median / 90th percentile of the "
        "absolute error in % (rows). Sizes: small under 20B parameters, 30B-A3B under 60B, 235B-A22B under 500B, DeepSeek-V3 above. A naive planner "
        "(constant MFU per device and precision; states plus tuned activations) has 21 / 112 and 12 / 45 on these rows.",
    ]
    parts = {
        "shipped constants": "shipped",
        "left out by source": "left_out",
        "left out by publisher": "publisher_left_out",
    }
    for title, key in parts.items():
        lines += ["", f"| {title} | {' | '.join(EXPERT_COLUMNS[1:])} |", "|---" * len(EXPERT_COLUMNS) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in expert_rows(result[key]["experts"])]
    refused = "; ".join(f"{count} x {reason}" for reason, count in result["shipped"]["refused"].items())
    lines += [
        "",
        f"Not predicted: {refused or 'none'}.",
        "",
        "| constant | shipped | range over the left-out fits |",
        "|---|---|---|",
    ]
    ranges = result["ranges"].items()
    return [*lines, *(f"| {name} | {value:.4g} | {low:.4g} to {high:.4g} |" for name, (value, low, high) in ranges)]


def leave_out_table(result: dict[str, Any]) -> str:
    def cell(part: dict[str, Any]) -> str:
        if part["median_pct"] is None:
            return "not measured"
        return f"{part['median_pct']:.1f} / {part['p90_pct']:.1f} ({part['covered']} of {part['rows']})"

    out, left = result["shipped"], result["left_out"]
    lines = [
        "# Planner accuracy",
        "",
        f"Command: `{result['command']}`; commit {result['commit']}; {result['date']}; Python {result['python']}; {result['rows']} rows.",
        "",
        "Median / 90th percentile of the absolute error in %, rows covered of rows in the set.",
        "",
        "| | left out | shipped constants | goal | peers |",
        "|---|---|---|---|---|",
        f"| memory, allocator readings | {cell(left['memory'])} | {cell(out['memory'])} | 8 / 25 | {PEERS['memory (allocator readings)']} |",
        f"| throughput, stated bf16 and fp16 | {cell(left['throughput'])} | {cell(out['throughput'])} | 10 / 30 | {PEERS['throughput']} |",
        f"| out-of-memory rows caught | {left['fit']['oom_caught']} of {left['fit']['oom_rows']} | {out['fit']['oom_caught']} of {out['fit']['oom_rows']} | 90 % | {PEERS['out-of-memory rows caught']} |",
        f"| working rows kept | {left['fit']['working_kept']} of {left['fit']['working_rows']} | {out['fit']['working_kept']} of {out['fit']['working_rows']} | 97 % | |",
        "",
        "The rows divided in other ways: "
        + "; ".join(
            f"{name}: memory {cell(part['memory'])}, throughput {cell(part['throughput'])}"
            for name, part in result["splits"].items()
        )
        + ".",
        "",
        *outside_lines(result["outside"], cell),
        "## By source (left out)",
        "",
        "| source | memory | throughput | out of memory caught | working kept |",
        "|---|---|---|---|---|",
    ]
    for name, part in left["by_source"].items():
        fit = part["fit"]
        lines.append(
            f"| {name} | {cell(part['memory'])} | {cell(part['throughput'])} | {fit['oom_caught']} of {fit['oom_rows']} | {fit['working_kept']} of {fit['working_rows']} |"
        )
    lines += [
        "",
        "## Throughput error by term",
        "",
        "Rows in which a term is large (upper quarter), left-out predictions.",
        "",
    ]
    lines += ["| term | rows | its mean share % | median error % | bias % |", "|---|---|---|---|---|"]
    lines += [
        f"| {n} | {t['rows']} | {t['mean_share_pct']} | {t['median_error_pct']} | {t['bias_pct']:+} |"
        for n, t in result["terms"].items()
    ]
    eight = result["eight_bit"]
    if eight["median_pct"] is not None:
        lines += [
            "",
            f"8-bit rows (outside the goal): {eight['median_pct']:.1f} / {eight['p90_pct']:.1f} over {eight['rows']} rows.",
        ]
    lines += ["", "## Constants", "", "| constant | shipped | range over the left-out fits |", "|---|---|---|"]
    lines += [
        f"| {n} | {v:.4g} | {result['ranges'][n][0]:.4g} to {result['ranges'][n][1]:.4g} |"
        for n, v in result["constants"].items()
    ]
    slacks = list(result["slack"]["left_out"].values())
    span = f"{min(slacks):.4g} to {max(slacks):.4g}" if slacks else "no reserved readings"
    lines.append(f"| slack of memory under full sharding | {result['slack']['shipped']:.4g} | {span} |")
    lines += expert_lines(result["experts"]) if "experts" in result else []
    return "\n".join(lines) + "\n"


def outside_lines(outside: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> list[str]:
    by_source = "; ".join(f"{name} {cell(part['throughput'])}" for name, part in outside["by_source"].items())
    fit = outside["fit"]
    return [
        f"Runs of other publications (`benchmarks/{OUTSIDE.name}`, copied by hand, not used in any fit): throughput "
        f"{cell(outside['throughput'])}, predicted to fit {fit['working_kept']} of {fit['working_rows']}; {by_source}.",
        "",
    ]
