"""How far are the planner's memory and step time from what our own engine does on one GPU?

    python benchmarks/gpu_plan.py --measure                  # on the GPU: writes gpu_plan.json (about four minutes)
    python benchmarks/gpu_plan.py --compare                  # anywhere: predicted beside measured, writes gpu_plan.md
    python benchmarks/gpu_plan.py --fit                      # the engine's own constants, and the error of sizes left out of the fit

The configurations vary size (0.1B to 8B), micro-batch, sequence, recompute, precision and compile; each is measured in the same
process after the one before was freed, three steps to warm up and five timed. Running out of memory is a result.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Instead of this folder, where tokenize.py hides a module of Python's own.
sys.path[:1] = [str(ROOT / "src"), str(ROOT)]

SIZES: dict[str, dict[str, int]] = {
    "0.1b": {"layers": 12, "width": 768, "ffn": 2048, "heads": 12, "kv_heads": 12, "vocab": 32000},
    "0.4b": {"layers": 24, "width": 1024, "ffn": 2816, "heads": 16, "kv_heads": 8, "vocab": 32000},
    "1.1b": {"layers": 22, "width": 2048, "ffn": 5632, "heads": 32, "kv_heads": 4, "vocab": 32000},
    "3b": {"layers": 28, "width": 3072, "ffn": 8192, "heads": 24, "kv_heads": 8, "vocab": 128256},
    "8b-half": {"layers": 16, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "8b": {"layers": 32, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "retnet-0.3b": {"layers": 16, "width": 1024, "ffn": 1728, "value_width": 1728, "heads": 4, "vocab": 50304},
}
KEYS = (
    "size",
    "seq",
    "micro_batch",
    "recompute",
    "precision",
    "fp8_scaling",
    "moments",
    "compile",
    "fuse",
    "retention",
    "chunk",
)
"""What a row says of its configuration; all else is the recipe's default."""


def configurations() -> list[dict[str, Any]]:
    """(size, sequence, micro-batch, and what differs from bf16, compiled, no recompute, fp32 moments)."""
    table: list[tuple[str, int, int, dict[str, Any]]] = [
        ("0.1b", 1024, 8, {"compile": False}),
        ("0.1b", 2048, 32, {"compile": False}),
        ("0.1b", 2048, 16, {}),
        ("0.1b", 2048, 64, {}),
        ("0.4b", 2048, 8, {"compile": False}),
        ("0.4b", 2048, 8, {}),
        ("0.4b", 2048, 32, {}),
        ("0.4b", 8192, 4, {}),
        ("0.4b", 2048, 32, {"recompute": "full"}),
        ("0.4b", 2048, 32, {"recompute": "selective"}),
        ("0.4b", 2048, 32, {"precision": "fp8"}),
        ("1.1b", 4096, 1, {"compile": False}),
        ("1.1b", 4096, 4, {"compile": False}),
        ("1.1b", 4096, 2, {}),
        ("1.1b", 4096, 8, {}),
        ("1.1b", 4096, 8, {"recompute": "full"}),
        ("1.1b", 4096, 8, {"recompute": "selective"}),
        ("1.1b", 4096, 8, {"moments": "bf16"}),
        ("1.1b", 4096, 4, {"precision": "bf16_pure", "moments": "bf16"}),
        ("1.1b", 16384, 1, {}),
        ("1.1b", 4096, 8, {"precision": "fp8"}),
        ("3b", 4096, 2, {}),
        ("3b", 4096, 8, {"recompute": "full"}),
        ("8b-half", 8192, 1, {}),
        ("8b-half", 8192, 2, {}),
        ("8b-half", 8192, 2, {"recompute": "selective"}),
        ("8b-half", 8192, 4, {"recompute": "full"}),
        ("8b", 8192, 1, {"moments": "bf16"}),
        ("8b", 4096, 1, {"moments": "bf16", "recompute": "full"}),
        ("8b", 8192, 2, {"moments": "bf16"}),
    ]
    table += [
        ("retnet-0.3b", seq, batch, {"retention": form, **({"chunk": 256} if form == "chunkwise" else {})})
        for seq, batch in ((2048, 16), (8192, 4))
        for form in ("parallel", "chunkwise")
    ]
    return [{"size": s, "seq": q, "micro_batch": m, **extra} for s, q, m, extra in table]


def recipe_of(c: dict[str, Any]) -> Any:
    from windlass.config import Recipe

    train = {k: c[k] for k in ("compile", "recompute", "precision", "fp8_scaling", "fuse") if k in c}
    family = "retnet" if c["size"].startswith("retnet") else "llama"
    model = {"family": family, **SIZES[c["size"]], **{k: c[k] for k in ("retention", "chunk") if k in c}}
    return Recipe.model_validate({
        "name": "plan-check", "cluster": "workstation", "model": model,
        "data": {"seq_len": c["seq"], "batch_tokens": c["seq"] * c["micro_batch"]},
        "optim": {"moments": c.get("moments", "fp32"), "warmup": c["seq"] * c["micro_batch"] * 100},
        "train": {"steps": 20, **train}, "layout": {"micro_batch": c["micro_batch"]},
        "energy": {"enabled": False}, "save": {"at_end": False, "every": 10**9},
    })  # fmt: skip


def measure_one(c: dict[str, Any], warm: int = 3, timed: int = 5) -> dict[str, Any]:
    import torch
    from benchmarks.one_process import open_training, stepping

    torch._dynamo.reset()  # each configuration compiles anew; otherwise the recompile limit is hit
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    marks = []
    with stepping(open_training(recipe_of(c))) as step:
        for index in range(warm + timed + 1):
            if index >= warm:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            if index == warm + timed:
                break
            step(1e-4)
        torch.cuda.synchronize()
    seconds = statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))
    return {
        "step_seconds": seconds, "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }  # fmt: skip


def measure(out: Path, budget_seconds: float) -> None:
    import torch

    began, rows = time.monotonic(), []
    for c in configurations():
        if time.monotonic() - began > budget_seconds:
            print("out of time; the rest is not measured", flush=True)
            break
        start = time.monotonic()
        try:
            result: dict[str, Any] = {"outcome": "ok", **measure_one(c)}
        except torch.OutOfMemoryError:
            result = {"outcome": "oom"}
        except Exception as error:  # a row that fails is a row; the others still count
            result = {"outcome": "error", "error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        rows.append({**c, **result, "took_seconds": round(time.monotonic() - start, 1)})
        print(json.dumps(rows[-1]), flush=True)
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu_plan.json").write_text(json.dumps({**facts, "rows": rows}, indent=1))


def question(c: dict[str, Any], device_name: str) -> tuple[Any, Any]:
    """One configuration on one such device: the planner's task and its candidate."""
    from windlass.clusters import device_by_driver_name
    from windlass.clusters.model import Cluster, Links, Node
    from windlass.planner.candidates import candidate_of
    from windlass.planner.task import make_task

    device = device_by_driver_name(device_name)
    assert device is not None, f"{device_name} is not in devices.toml"
    node, links = Node(devices=1, cores=16), Links(intra_gbs=100, inter_gbs_per_node=10)
    cluster = Cluster(name="one", title="one device", device=device.name, node=node, links=links)
    recipe = recipe_of(c)
    task = make_task(recipe, cluster)
    return task, candidate_of(recipe.layout, recipe.train.recompute, task)


def predict(c: dict[str, Any], device_name: str) -> Any:
    """What `windlass plan` says of the same recipe on one such device."""
    from windlass.planner.search import estimate_plan

    return estimate_plan(*question(c, device_name))


FITTED = {"own_edge": (60.0, 180.0), "own_narrow": (1.0, 1.4), "own_eager": (2.0, 4.5), "own_fixed_ms": (0.2, 6.0)}
"""Constants of step time that these rows decide, and where they may lie. Of memory, workspaces and one layer's backward pass were read off."""


def fit(rows: list[dict[str, Any]], device: str) -> Any:
    """Constants with the least mean absolute error: one after the other on a grid, three rounds."""
    from dataclasses import replace

    from windlass.cost.step import DEFAULTS

    best = DEFAULTS
    for _ in range(3):
        for name, (low, high) in FITTED.items():
            tried = [replace(best, **{name: low + (high - low) * i / 24}) for i in range(25)]
            best = min(tried, key=lambda c: statistics.fmean(abs(time_error(r, device, c)) for r in rows))
    return best


def time_error(row: dict[str, Any], device: str, constants: Any) -> float:
    from windlass.cost.step import estimate_step

    task, candidate = question(row, device)
    estimate = estimate_step(task.model, candidate.step(task), candidate.layout, task.machine, constants=constants)
    return error_pct(estimate.seconds, row["step_seconds"])


def leave_out(out: Path) -> None:
    """Fit without each size in turn and score that size: what the constants owe to the rows they are judged by."""
    record = json.loads((out / "gpu_plan.json").read_text())
    rows, device = [r for r in record["rows"] if r["outcome"] == "ok"], record["device"]
    errors = []
    for size in dict.fromkeys(r["size"] for r in rows):
        found = fit([r for r in rows if r["size"] != size], device)
        mine = [abs(time_error(r, device, found)) for r in rows if r["size"] == size]
        errors += mine
        words = ", ".join(f"{k} {getattr(found, k):.3g}" for k in FITTED)
        print(f"without {size}: {words}; its {len(mine)} rows: median {statistics.median(mine):.1f} %", flush=True)
    print(f"left out: median {statistics.median(errors):.1f} %, worst {max(errors):.1f} % over {len(errors)}")
    found = fit(rows, device)
    print("all rows: " + ", ".join(f"{k} {getattr(found, k):.3g}" for k in FITTED))


def error_pct(predicted: float, measured: float) -> float:
    return 100 * (predicted - measured) / measured


def compare(out: Path) -> None:
    """One row per configuration; the last lines say median and worst."""
    record = json.loads((out / "gpu_plan.json").read_text())
    lines = [
        f"Measured on {record['device']}, torch {record['torch']}, {record['date']}; predicted by `windlass plan`'s arithmetic.", "",
        "| configuration | GiB measured | GiB predicted | error % | step s measured | step s predicted | error % |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    memory, steps, verdicts = [], [], []
    for row in record["rows"]:
        words = ", ".join(f"{k} {v}" for k, v in row.items() if k in KEYS)
        if row["outcome"] == "error":
            continue
        p = predict(row, record["device"])
        verdicts.append(p.fits == (row["outcome"] == "ok"))
        if row["outcome"] == "oom":
            lines.append(
                f"| {words} | out of memory | {p.memory.allocated / 2**30:.1f} ({'fits' if p.fits else 'does not fit'}) | | | | |"
            )
            continue
        gib, seconds = p.memory.allocated / 2**30, p.step.seconds
        memory.append(error_pct(gib, row["allocated_gib"]))
        steps.append(error_pct(seconds, row["step_seconds"]))
        lines.append(
            f"| {words} | {row['allocated_gib']:.2f} | {gib:.2f} | {memory[-1]:+.1f} | {row['step_seconds']:.4f} | {seconds:.4f} | {steps[-1]:+.1f} |"
        )
    for name, errors in (("memory", memory), ("step time", steps)):
        sizes = sorted(abs(e) for e in errors)
        lines += [
            "",
            f"{name}: median {statistics.median(sizes):.1f} %, worst {sizes[-1]:.1f} % over {len(sizes)} configurations",
        ]
    lines += ["", f"fit or out of memory: {sum(verdicts)} of {len(verdicts)} right"]
    (out / "gpu_plan.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks" / "results")))
    args = parser.parse_args()
    if args.measure:
        measure(args.out, args.seconds)
    if args.compare:
        compare(args.out)
    if args.fit:
        leave_out(args.out)


if __name__ == "__main__":
    main()
