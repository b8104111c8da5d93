"""Fills tables of the documentation with figures of the planner, the benchmarks and recorded traces.

python scripts/make_tables.py            # write them
python scripts/make_tables.py --check    # report which are out of date

A page holds a table between two comments: <!-- table: NAME (made by scripts/make_tables.py) --> and <!-- end -->.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
DOCS = TOP / "docs"
RESULTS = TOP / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- table: ([\w-]+) \(made by scripts/make_tables\.py\) -->\n)(.*?)(<!-- end -->)", re.S)
NOT_YET = "*Not measured yet.*"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    texts = [[str(c) for c in row] for row in rows]
    lines = ["| " + " | ".join(head) + " |", rule([[row[i] for row in texts] for i in range(len(head))])]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in texts)])


FIGURE = re.compile(r"[+-]?[\d,]+(?:\.\d+)?(?: ?[%x])?|")


def rule(columns: Sequence[Sequence[str]]) -> str:
    """The line below the heading: columns of figures are aligned to the right."""
    return "|" + "".join("---:|" if any(c) and all(map(FIGURE.fullmatch, c)) else "---|" for c in columns)


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return "" if value is None else f"{value:,.{digits}f}{unit}"


@cache
def ask(*arguments: str) -> Any:
    """JSON output of a windlass command, called in this process, because starting another one takes longer than the command."""
    from typer.testing import CliRunner

    from windlass.cli import build

    with contextlib.chdir(TOP):
        done = CliRunner().invoke(build(arguments[0]), [*arguments, "--json"])
    if done.exit_code != 0:
        raise RuntimeError(f"windlass {' '.join(arguments)}: {done.exception or done.output}")
    return json.loads(done.stdout)


def best(recipe: str, *arguments: str) -> Any:
    return ask("plan", f"recipes/{recipe}.toml", *arguments)["plans"][0]


def layout_text(plan: Any) -> str:
    layout = plan["layout"]
    parts = [
        layout["shard"],
        *(f"{axis} {layout[axis]}" for axis in ("tensor", "pipeline", "context") if layout[axis] > 1),
    ]
    return ", ".join([*parts, *([f"recompute {plan['recompute']}"] if plan["recompute"] != "none" else [])])


def results(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


# -- Italia --------------------------------------------------------------------------------------------------------------


def italia() -> str:
    why = ask("plan", "recipes/italia_9b_leonardo.toml", "--why", "shard=none,micro_batch=1")["why"]
    terms = why["plan"]["memory_terms_gib"]
    gb = {k: v * 2**30 / 1e9 for k, v in terms.items()}
    from_recipe = next(p for p in ask("plan", "recipes/italia_9b_leonardo.toml")["plans"] if p["given"])
    first = ("--pretokenize", "recipes/italia_data.toml", "--array", "32")
    dry = ask(
        "launch", "recipes/italia_9b_leonardo.toml", "--dry-run", "launch.account=EUHPC_A01", "--chain", "4", *first
    )
    checks = {c["rule"]: c["message"] for c in dry["checks"]}
    from windlass.clusters import load_cluster

    modules, partition = (
        load_cluster("leonardo-booster").modules,
        re.search(r"# partition (.*)", dry["pretokenize"]["array"])[1],
    )
    rows = [
        ["fp32 parameters of 9B", "36 GB", f"{gb['weights']:.0f} GB, and {gb['16-bit copy']:.0f} GB of 16-bit copy (9.1B)"],
        ["gradients and two moments", "3 x 36 GB", f"{gb['gradients'] + gb['optimizer states']:.0f} GB"],
        ["strategy", "FSDP hybrid: full inside a node, copies across", f"the same, marked (recipe): {from_recipe['memory_gib']:.0f} GiB, MFU {from_recipe['mfu']:.0%}, {from_recipe['days']:.0f} days"],
        ["data", "1.2T tokens, 90 % Italian; about 4 TB on disk", f"`recipes/italia_data.toml`; 2 bytes per token: {checks['staging']}"],
        ["tokenize in a CPU job", "a job of its own", f"32 tasks of 8 cores: {partition}"],
        ["start-up", "1 h, from the fast partition 20 minutes", f"not measured on Leonardo; {checks['quota']}"],
        ["modules", "python/3.11.6, cuda/12.1", ", ".join(modules) + ' with `environment = "module"`'],
        ["job limit", "submit the same job again, as a dependency", f"a chain: about {dry['cost']['expected_links']:.0f} jobs of {dry['seconds'] / 3600:.0f} h"],
    ]  # fmt: skip
    small = (results("stories") or {}).get("italia")
    if small:
        step, loss = min(small["validation"], key=lambda pair: pair[1])
        rows += [
            ["when to save", "every 3 to 5 times the init phase", f"small run: {small['interval']}"],
            ["fewer checkpoints, by a metric", "metric-based checkpoints", f"small run: kept steps {', '.join(map(str, small['kept']))}; step {step} has the lowest validation loss ({loss:.2f})"],
            ["after a failure", "restart from the last checkpoint", f"small run: killed, resumed at step {small['resumed_at']}, finished {small['steps']}"],
        ]  # fmt: skip
    return table(["", "slide", "windlass"], rows)


# -- GPT-NL --------------------------------------------------------------------------------------------------------------


def gptnl() -> str:
    budget = ask("budget", "--cluster", "snellius-h100", "--nodes", "22", "--days", "34", "--mfu", "0.32", "--sizes", "30B", "--tokens", "450B")  # fmt: skip
    pair = next(p for p in budget["pairs"] if p["tokens"] == 450e9)
    own = best("gptnl_30b_snellius")
    rows = [
        ["days for 450B tokens", 34, number(pair["days"], 1), f"about {own['days']:.0f}"],
        ["tonnes of CO2", 14, f"{pair['tco2e']:.0f} (location-based)", f"about {own['tco2e']:.0f}"],
        ["MFU", "0.32 (derived)", "0.32 (given)", number(own["mfu"], 2)],
    ]
    return table(["", "published", "windlass at MFU 0.32", "windlass plan"], rows)


def predicted(sweep: str, profile: str | None = None) -> list[Any]:
    """Points of a shipped sweep with the planner's predictions; `profile`: for an engine of 2024 in place of ours."""
    options = [] if profile is None else ["--engine-profile", profile]
    return ask("sweep", f"recipes/sweeps/{sweep}.toml", "--dry-run", *options)["points"]


SPREAD = 0.18
"""90 % of 499 published runs lie within this of the predicted throughput (benchmarks/results/planner_accuracy.md)."""
AXES = {"8B": (4500, 7500), "30B": (1200, 1800)}
"""Tokens/s per device at the ends of the axes of GPT-NL's chart by strategy and batch: bounds, not measurements."""
FRAMEWORKS = {
    "PT + FSDP": ("native", "torch"),
    "HF + DS": ("deepspeed", "torch"),
    "Megatron DS": ("native", "megatron"),
}
"""Name in the charts -> `train.engine` of the sweep's point, and --engine-profile."""


def fitting(points: list[Any], size: str, is_deepspeed: bool) -> list[Any]:
    """Points of the grid with flash attention that are predicted to fit."""
    return [
        p
        for p in points
        if p["values"]["size"] == size
        and p["values"]["train.attention"] == "flash"
        and p["values"]["strategy"].startswith("Zero") == is_deepspeed
        and p["expected"]["verdict"] == "fits"
    ]


def gptnl_sharding() -> str:
    def interval(points: list[Any]) -> str:
        speeds = [p["expected"]["tokens_per_second_per_device"] for p in points]
        return f"{min(speeds):,.0f} to {max(speeds):,.0f}"

    own, other = predicted("gptnl_grid"), predicted("gptnl_grid", "torch")
    rows = []
    for size, (low, high) in AXES.items():
        for title, is_deepspeed in (("PyTorch FSDP", False), ("DeepSpeed Zero", True)):
            points = fitting(other, size, is_deepspeed)
            fastest = max(points, key=lambda p: p["expected"]["tokens_per_second_per_device"])
            values = fastest["values"]
            best_rate = fastest["expected"]["tokens_per_second_per_device"]
            rows.append([
                f"{size}, {title}", f"{low:,} to {high:,}", interval(points),
                f"{values['strategy']}, batch {values['layout.micro_batch']}: {best_rate:,.0f} ({best_rate * (1 - SPREAD):,.0f} to {best_rate * (1 + SPREAD):,.0f})",
                interval(fitting(own, size, is_deepspeed)),
            ])  # fmt: skip
    return table(["", "published axis", "engine of 2024", "its fastest that fits", "windlass"], rows)


def gptnl_best() -> str:
    rows = [["axis of the published chart ends at", "7,000", "0.40", "0.40", "7,000", "0.40", "0.40"]]
    for name, (engine, profile) in {**FRAMEWORKS, "windlass": ("native", None)}.items():
        cells = []
        for size in AXES:
            wanted = {"size": size, "train.engine": engine}
            e = next(p["expected"] for p in predicted("gptnl_best", profile) if p["values"] == wanted)
            cells += [number(e["tokens_per_second_per_device"]), number(e["mfu"], 2), number(e["kwh_at_nodes"] / e["steps"], 2)]  # fmt: skip
        rows.append([name, *cells])
    return table(["", *(f"{size}: {what}" for size in AXES for what in ("tokens/s", "MFU", "kWh per step"))], rows)


def gptnl_scaling() -> str:
    points = predicted("gptnl_scaling", "torch")
    series = list(dict.fromkeys((p["values"]["series"], p["values"]["train.engine"]) for p in points))
    rows = []
    for nodes in dict.fromkeys(p["values"]["nodes"] for p in points):
        own = {(p["values"]["series"], p["values"]["train.engine"]): p for p in points if p["values"]["nodes"] == nodes}
        first = own[series[0]]
        batch = f"{first['batch_tokens'] // 2048:,}" + ("" if first["wanted_batch_tokens"] is None else " (nearest)")
        rates = [own[key]["expected"] for key in series]
        cells = [f"{e['tokens_per_second']:,.0f}" if e["verdict"] == "fits" else "OOM" for e in rates]
        rows.append([nodes, batch, *cells])
    names = [f"{'DS' if engine == 'deepspeed' else 'FSDP'} {name}" for name, engine in series]
    return table(["nodes", "sequences", *names], rows)


def gptnl_days() -> str:
    """The prediction from the assumptions that were written down first, and one change at a time."""
    made = results("gptnl_34_days")
    if not made:
        return NOT_YET

    def row(name: str, result: Any) -> list[str]:
        if result is None:
            return [name, "", "", "does not fit", "", ""]
        error = f"{result['days_error']:+.0%}".replace("%", " %")
        return [name, str(result["batch"]), number(result["mfu"], 2), number(result["days"], 1), error, number(result["tonnes"], 1)]  # fmt: skip

    rows = [row("**as assumed**", made["assumed"]), *(row(name, result) for name, result in made["changes"].items())]
    return table(["changed", "batch per device", "MFU", "days", "error against 34", "t of CO2 (14)"], rows)


def gptnl_grid() -> str:
    story = (results("stories") or {}).get("gptnl")
    if not story:
        return NOT_YET
    rows = [
        [
            r["point"],
            r["outcome"],
            number(r["tokens_per_second"]),
            number(_mib(r["memory_bytes"])),
            number(r["loss"], 4),
        ]
        for r in story["grid"]
    ]
    return table(["point", "outcome", "tokens/s", "MiB per process", "loss after 6 steps"], rows)


def _mib(value: float | None) -> float | None:
    return None if value is None else value / 2**20


# -- LUMI ----------------------------------------------------------------------------------------------------------------

CARBON = [
    ("Gopher-280B", "TPU v3", "node, hours x 283 W", 1066, 1.08, 0.330, 380), ("BLOOM-176B", "A100-80GB", "GPU, hours x 400 W", 433, 1.2, 0.057, 30),
    ("OPT-175B", "A100-80GB", "GPU, hours x 400 W", 324, 1.1, 0.231, 82), ("T5-11B", "TPU v3", "node, measured", 77, 1.12, 0.545, 47),
    ("LLaMA-7B", "A100-80GB", "GPU, hours x 400 W", 33, 1.1, 0.385, 14), ("LLaMA2-7B", "A100-80GB", "GPU, hours x 400 W", 74, 1.1, 0.385, 31),
    ("OLMo-7B", "MI250X", "GPU, measured", 135, 1.1, 0.0, 0),
]  # fmt: skip
"""Groeneveld et al., OLMo (arXiv 2402.00838), the table on the slide: MWh, PUE, kg/kWh, tonnes. The scopes are those of the sources: TPU figures are
mean system power with hosts (Patterson et al. 2021; 283 W is the mean of its TPU v3 runs), A100 figures hours times the limit of the GPU."""


def lumi_carbon() -> str:
    rows = [[name, device, scope, f"{mwh:,}", pue, f"{kg:.3f}", tonnes, f"{mwh * pue * kg:,.0f}"] for name, device, scope, mwh, pue, kg, tonnes in CARBON]  # fmt: skip
    own = best("olmo_7b_lumi")
    for scope, mwh in (("GPU, planned", own["mwh_of_devices"]), ("node, planned", own["mwh_at_nodes"])):
        for kind, tonnes in (("grid", own["tco2e"]), ("contract", own["tco2e_market"])):
            kg = tonnes / own["mwh"]
            result = [scope, f"{mwh:.0f}", number(own["pue"], 2), f"{kg:.3f}", "", f"{mwh * own['pue'] * kg:.0f}"]
            rows.append([f"**OLMo-7B by `windlass plan`**, {kind}", "MI250X", *result])
    return table(
        ["model", "device", "scope", "MWh", "PUE", "kg CO2e/kWh", "t published", "t = MWh x PUE x kg/kWh"], rows
    )


def lumi_scaling() -> str:
    rows = []
    for name, title in (("viking_33b_lumi", "Viking 33B"), ("study_140b_lumi", "140B")):
        base = None
        for nodes in (32, 64, 128, 256):
            plan = best(name, "--nodes", str(nodes))
            rate = plan["tokens_per_second"]
            base = base or rate / nodes
            rows.append(
                [
                    title,
                    f"{nodes * 8:,}",
                    layout_text(plan),
                    f"{rate:,.0f}",
                    f"{rate / nodes / base:.0%}",
                    f"{plan['mfu']:.0%}",
                ]
            )
    return table(["model", "GCDs", "first layout", "tokens/s", "efficiency", "MFU"], rows)


LANGUAGES = {"en": "English", "it": "Italian", "nl": "Dutch", "fi": "Finnish", "sv": "Swedish", "pl": "Polish"}


def lumi_languages() -> str:
    story = (results("stories") or {}).get("lumi")
    if not story:
        return NOT_YET
    ranked = sorted(story["languages"].items(), key=lambda item: item[1][0])
    rows = [
        [
            LANGUAGES[code],
            "yes" if code in ("fi", "sv", "en") else "no",
            f"{value:.2f}",
            f"{low:.2f} to {high:.2f}",
            count,
        ]
        for code, (value, low, high, count) in ranked
    ]
    return table(["language", "in the mix", "bits per byte", "95 %", "held-out documents"], rows)


# -- the hackathon -------------------------------------------------------------------------------------------------------

SLIDES = {
    "AMD, 1 node, 1 GPU": (502_881, 448_876, 0, 45_121, 8_884), "AMD, 1 node, 4 GPUs": (564_770, 468_972, 1_046, 85_340, 9_412),
    "AMD, 2 nodes, 16 GPUs": (696_563, 452_455, 978, 56_189, 186_940), "NVIDIA A40, 1 node, 1 GPU": (747_560, 723_056, 0, 10_749, 13_136),
    "NVIDIA A40, 1 node, 4 GPUs": (759_516, 733_888, 365, 11_786, 12_840),
}  # fmt: skip
"""The slides' "Execution Summary": average step, kernel, communication, CPU exec, other, in us. Runtime and data loader are 0 everywhere."""
TRACES = ("llama-eager", "llama-compiled", "retnet-parallel", "retnet-chunkwise")
PARTS = ("Kernel", "Communication", "CPU Exec", "Other")


def hackathon() -> str:
    rows, first = [], {}
    for label, (step, *parts) in SLIDES.items():
        base = first.setdefault(label.split(",")[0], (step, parts))
        lost = {name: own - before for name, own, before in zip(PARTS, parts, base[1], strict=True)}
        worst = max(lost, key=lambda name: lost[name])
        rows.append(
            [
                label,
                "slide",
                f"{step / 1e3:,.1f}",
                *(f"{p / step:.1%}" for p in parts),
                f"{base[0] / step:.0%}",
                worst if step != base[0] else "",
            ]
        )
    for name in TRACES:
        summary = ask("profile", f"tests/profile/data/{name}.json.gz")
        parts = [summary["categories_us"][p] for p in PARTS]
        rows.append(
            [
                f"H200, {name}",
                "recorded",
                f"{summary['step_us'] / 1e3:,.1f}",
                *(f"{p / summary['step_us']:.1%}" for p in parts),
                "",
                "",
            ]
        )
    return table(
        [
            "run",
            "source",
            "step, ms",
            *(p.lower() if p != "CPU Exec" else "CPU" for p in PARTS),
            "efficiency",
            "largest loss",
        ],
        rows,
    )


def hackathon_matrix() -> str:
    story = (results("stories") or {}).get("hackathon")
    if not story:
        return NOT_YET
    rows = [
        [
            1,
            r["devices"],
            r["outcome"],
            number(r["accuracy"], 3),
            number(r["macro_f1"], 3),
        ]
        for r in story["matrix"]
    ]
    return table(["nodes", "processes", "outcome", "accuracy", "macro F1"], rows)


# -- techniques ----------------------------------------------------------------------------------------------------------


def techniques_cpu() -> str:
    record = results("techniques")
    if not record:
        return NOT_YET
    named: list[str] = []
    rows = [
        [_once(named, r["technique"] + ("" if not r.get("link") else f", link of {r['link'] / 1e9:g} Gb/s")), r["variant"], number(r["step_ms"]), r.get("reductions") or "",
         number(r.get("sent_mib"), 1), number(r.get("peak_mib")), number(r.get("states_mib"), 1)]
        for r in record["rows"]
    ]  # fmt: skip
    about = record["about"]
    # The load is read at the end, so it includes our own processes.
    busy = (
        ""
        if (about.get("load") or 1e9) <= about.get("cores", 0) + about.get("processes", 0)
        else (" **The machine was busy with other work**: counts and bytes are exact, times are not.")
    )
    source = f"`{about['command']}` on {about['hardware']}, torch {about['torch']}, commit {about['commit']}, {about['time']}. Empty: not measured in that row."
    return (
        table(["technique", "variant", "step, ms", "reductions", "MiB reduced", "peak MiB", "states MiB"], rows)
        + f"\n\n{source}{busy}"
    )


def _once(named: list[str], name: str) -> str:
    """The name in the first of its rows, empty in the others."""
    named.append(name)
    return "" if named[-2:-1] == [name] else name


def buckets() -> str:
    """Predicted: data-parallel traffic that no compute hides, by the size of a bucket; one sequence per device and step."""
    places = {"NVLink, 4 H100": ("snellius-h100", 1, 4), "Slingshot, 1,024 GCDs": ("lumi-g", 128, 1024)}
    sizes = {"one layer": "", "1 GB": ",bucket=1 GB", "all layers": ",bucket=16 GB"}
    rows = []
    for place, (cluster, nodes, devices) in places.items():
        for shard in ("none", "full"):
            batch = f"data.batch_tokens={devices * 4096}"
            recipe = ("recipes/gptnl_1b_snellius.toml", f"cluster={cluster}", f"nodes={nodes}", batch)
            plans = [
                ask("plan", *recipe, "--why", f"shard={shard},micro_batch=1{size}")["why"]["plan"]
                for size in sizes.values()
            ]
            milliseconds = [
                f"{1e3 * plan['step_terms_seconds'].get('data-parallel traffic', 0.0):,.1f}" for plan in plans
            ]
            rows.append([place, f"`{shard}`", *milliseconds, f"{1e3 * plans[0]['step_seconds']:,.0f}"])
    return table(["network", "`layout.shard`", *(f"{name}: ms exposed" for name in sizes), "step, ms"], rows)


CHANGES = {
    "no-compile": "not compiled", "flash2": "flash attention 2 instead of the automatic choice", "plain-loss": "full logits instead of chunks",
    "fuse": "fused projections", "no-fuse": "separate projections", "recompute-full": "full recompute", "recompute-selective": "selective recompute",
    "bf16-moments": "moments in bf16", "pure": "everything in bf16, stochastic rounding", "no-overlap": "no overlap",
}  # fmt: skip


def gpu_rows() -> list[dict[str, Any]]:
    """Every row of the H200 measurements with its commit; the newest where a row was measured several times."""
    record = results("gpu_train") or {"runs": []}
    newest: dict[str, dict[str, Any]] = {}
    for run in record.get("runs", [record]):
        for row in run["rows"]:
            if row.get("tokens_per_second") or row.get("error"):
                newest[row["row"]] = {**row, "about": run.get("about", {})}
    return list(newest.values())


def techniques_gpu() -> str:
    rows, out = gpu_rows(), []
    by_name = {r["row"]: r for r in rows}
    for shape in ("1.1b", "8b-half", "8b"):
        base = by_name.get(f"windlass-{shape}")
        tests = [
            r
            for r in rows
            if r["row"].startswith(f"ablation-{shape}-")
            or r["row"] in (f"windlass-{shape}-fp8", f"windlass-{shape}-fused")
        ]
        if base is None or not tests:
            continue
        out.append([f"**{shape}**, baseline", *_gpu_cells(base, None)])
        out += [[_change_text(r["row"], shape), *_gpu_cells(r, base)] for r in tests]
    if not out:
        return NOT_YET
    return table(["shape and change", "tokens/s", "speed", "GiB", "memory", "mJ/token"], out)


def _change_text(row: str, shape: str) -> str:
    name = row.removeprefix(f"ablation-{shape}-").removeprefix(f"windlass-{shape}-")
    if name.startswith("chunk-"):
        return f"loss in chunks of {int(name.removeprefix('chunk-')):,} tokens"
    return CHANGES.get(name, {"fp8": "FP8", "fused": "fused projections"}.get(name, name.replace("-", " ")))


def _gpu_cells(row: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    rate, memory = row.get("tokens_per_second"), row.get("peak_gib")
    if rate is None:
        return [str(row.get("error", "failed"))[:60], "", "", "", ""]
    ratio = "" if base is None else f"{rate / base['tokens_per_second'] - 1:+.1%}"
    more = "" if base is None or memory is None else f"{memory - base['peak_gib']:+.1f}"
    return [number(rate), ratio, number(memory, 1), more, number(row.get("mj_per_token"), 2)]


PEERS = {
    "windlass": "windlass",
    "titan": "torchtitan, compiled",
    "hf": "Hugging Face, compiled loop",
    "floor": "floor: matrix products, attention and optimizer traffic alone",
}


def gpu_peers() -> str:
    """Speeds of windlass and other tools on the same shape, measured in one session."""
    by_name = {r["row"]: r for r in gpu_rows()}
    rows = []
    for shape in ("1.1b", "8b-half"):
        rows_of_shape = [(label, by_name.get(f"{kind}-{shape}")) for kind, label in PEERS.items()]
        rows += [[shape, f"{label}{_noted(r)}", number(r["tokens_per_second"]), number(r["mfu"] and 100 * r["mfu"], 1, " %"), number(r["peak_gib"], 1), number(r["mj_per_token"], 2)]
                 for label, r in rows_of_shape if r and r.get("tokens_per_second")]  # fmt: skip
    return table(["shape", "", "tokens/s", "MFU", "GiB", "mJ/token"], rows) if rows else NOT_YET


def _noted(row: dict[str, Any]) -> str:
    return f" ({row['note']})" if row.get("note") else ""


def techniques_pairs() -> str:
    """RetNet in its parallel and its chunkwise form, which have no common baseline."""
    by_name = {r["row"]: r for r in gpu_rows()}
    rows = []
    for length in (2048, 8192):
        pair = [by_name.get(f"windlass-retnet-{length}-{form}") for form in ("parallel", "chunkwise")]
        if all(pair):
            slow, fast = pair
            rows.append([f"RetNet 300M, {length:,} tokens: chunkwise instead of parallel", number(slow["tokens_per_second"]), number(fast["tokens_per_second"]),
                         f"{fast['tokens_per_second'] / slow['tokens_per_second']:.2f} x", f"{fast['peak_gib'] - slow['peak_gib']:+.1f}"])  # fmt: skip
    return table(["", "parallel: tokens/s", "chunkwise: tokens/s", "speed", "GiB"], rows) if rows else NOT_YET


def fits() -> str:
    """The smallest number of nodes of each cluster on which some layout fits."""
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.errors import WindlassError
    from windlass.planner import plan

    clusters = ("leonardo-booster", "snellius-h100", "lumi-g", "marenostrum5-acc", "jupiter-booster")
    models = {
        "gptnl_1b_snellius": "1.1B",
        "gptnl_8b_snellius": "8B",
        "gptnl_30b_snellius": "30B",
        "llama_70b_jupiter": "70B",
        "study_140b_lumi": "140B",
    }

    def fewest(recipe: str, cluster: str) -> str:
        for nodes in (1, 2, 4, 8, 16, 32):
            overrides = [f"nodes={nodes}", "data.batch_tokens=4Mi", f"cluster={cluster}"]
            loaded = load_recipe(TOP / "recipes" / f"{recipe}.toml", overrides).recipe.model_copy(
                update={"layout": None}
            )
            try:
                plans = plan(loaded, load_cluster(cluster))
            except WindlassError:
                continue
            if plans.plans and plans.best.fits:
                return str(nodes)
        return "more than 32"

    rows = [[title, *(fewest(recipe, cluster) for cluster in clusters)] for recipe, title in models.items()]
    return table(["smallest number of nodes for", *clusters], rows)


def nothing_fits() -> str:
    """What helps where 8B does not fit: one H200 and a batch of 512Ki tokens."""
    from windlass.clusters.model import Cluster, Links, Node
    from windlass.config import load_recipe
    from windlass.planner import changes, search

    machine = Cluster(
        name="one-h200", title="one H200", device="h200", node=Node(devices=1, cores=16, memory=2**40), links=Links(intra_gbs=450)
    )  # fmt: skip
    path = TOP / "recipes" / "gptnl_8b_snellius.toml"
    recipe = load_recipe(path, ["nodes=1", "data.batch_tokens=512Ki"]).recipe
    rows = [
        [
            f"`{' '.join(change.overrides)}`",
            change.plan.candidate.describe(micro_batch=False),
            number(change.plan.memory.needed / 2**30, 1),
            number(change.plan.step.tokens_per_second_per_device),
        ]
        for change in changes.ways_to_fit(search.plan(recipe, machine))
    ]
    return table(["change", "layout", "GiB", "tokens/s"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "italia": italia, "gptnl": gptnl, "gptnl-grid": gptnl_grid, "gptnl-sharding": gptnl_sharding, "gptnl-best": gptnl_best,
    "gptnl-scaling": gptnl_scaling, "lumi-carbon": lumi_carbon, "lumi-scaling": lumi_scaling, "lumi-languages": lumi_languages,
    "gptnl-days": gptnl_days,
    "hackathon": hackathon, "hackathon-matrix": hackathon_matrix, "techniques-cpu": techniques_cpu, "techniques-gpu": techniques_gpu,
    "techniques-pairs": techniques_pairs, "buckets": buckets, "gpu-peers": gpu_peers, "fits": fits, "nothing-fits": nothing_fits,
}  # fmt: skip
FROM_PLANNER = {
    "italia",
    "gptnl",
    "gptnl-sharding",
    "gptnl-best",
    "gptnl-scaling",
    "lumi-carbon",
    "lumi-scaling",
    "fits",
    "nothing-fits",
    "buckets",
}
"""Tables whose figures change a little with the planner: within 10 % they count as up to date."""


def filled(text: str) -> str:
    """The page with current tables."""
    return PLACE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[4]}", text)


def pages() -> list[Path]:
    return sorted(p for p in DOCS.rglob("*.md") if PLACE.search(p.read_text()))


def stale(page: Path) -> list[str]:
    return [
        m[2] for m in PLACE.finditer(page.read_text()) if not _same(m[3].strip(), TABLES[m[2]](), m[2] in FROM_PLANNER)
    ]


def _same(old: str, new: str, about: bool) -> bool:
    if old == new or not about:
        return old == new
    figure = re.compile(r"\d[\d,]*(?:\.\d+)?")
    pairs = zip(figure.findall(old), figure.findall(new), strict=False)
    values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    close = all(abs(a - b) <= max(0.1 * abs(b), 1.0) for a, b in values)
    # Layouts that tie may change places; the shape of the table and its figures may not.
    return close and len(figure.findall(old)) == len(figure.findall(new)) and old.count("\n") == new.count("\n")


def main() -> int:
    if "--check" in sys.argv:
        outdated = {p.relative_to(TOP).as_posix(): s for p in pages() if (s := stale(p))}
        print(
            "\n".join(f"{page}: {', '.join(names)}" for page, names in outdated.items()) or "all tables are up to date"
        )
        return int(bool(outdated))
    for page in pages():
        page.write_text(filled(page.read_text()))
        print(f"filled {page.relative_to(TOP)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
