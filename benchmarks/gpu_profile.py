"""Where does the time go on one GPU? Traces of our own engine: Llama eager and compiled, RetNet parallel and chunkwise.

    python -P benchmarks/gpu_profile.py --out traces          # four runs, a trace of three steps each, and summary.json
    python -P benchmarks/gpu_profile.py --out traces --tiny   # small shapes, also on a CPU: does it run at all?

Every run is a whole `windlass` run with `profile.steps` in its recipe, in a process of its own. Traces are kept under 1.5 MB
each, so that they can be test data: where one is larger, arrows and arguments that no table uses are taken out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

WARM, STEPS = 6, 3
LIMIT_BYTES = 1_500_000
KEPT = ("External id", "external id", "correlation", "device", "stream", "blocks per SM", "est. achieved occupancy %")
LLAMA = {"family": "llama", "layers": 12, "width": 1024, "ffn": 2816, "heads": 16, "kv_heads": 4, "vocab": 32000}
RETNET = {"family": "retnet", "layers": 16, "width": 1024, "ffn": 1728, "heads": 4, "vocab": 50304, "chunk": 256}
ROWS: dict[str, dict[str, Any]] = {
    "llama-eager": {"model": LLAMA, "train": {"compile": False}, "seq": 2048, "micro_batch": 8},
    "llama-compiled": {"model": LLAMA, "train": {"compile": True}, "seq": 2048, "micro_batch": 8},
    "retnet-parallel": {
        "model": {**RETNET, "retention": "parallel"},
        "train": {"compile": False},
        "seq": 4096,
        "micro_batch": 4,
    },
    "retnet-chunkwise": {
        "model": {**RETNET, "retention": "chunkwise"},
        "train": {"compile": False},
        "seq": 4096,
        "micro_batch": 4,
    },
}
PAIRS = (("llama-eager", "llama-compiled"), ("retnet-parallel", "retnet-chunkwise"))


def recipe_of(name: str, tiny: bool) -> Any:
    from windlass.config import Recipe

    row = ROWS[name]
    model, seq, micro = dict(row["model"]), row["seq"], row["micro_batch"]
    train = {"precision": "bf16", "steps": WARM + STEPS + 1, **row["train"]}
    if tiny:
        model |= {"layers": 2, "width": 64, "ffn": 96, "heads": 4, "vocab": 512, "chunk": 16}
        seq, micro = 64, 2
        train |= {"precision": "fp32", "compile": False}
    return Recipe.model_validate({
        "name": name, "model": model, "train": train, "data": {"seq_len": seq, "batch_tokens": seq * micro}, "layout": {"micro_batch": micro},
        "energy": {"enabled": not tiny}, "save": {"at_end": False, "every": 10**9},
        "profile": {"steps": f"{WARM + 1}:{WARM + 1 + STEPS}"},
    })  # fmt: skip


def capture(name: str, folder: Path, tiny: bool) -> None:
    """One run in this process."""
    from benchmarks.one_process import ONE_PROCESS, start_of

    from windlass.files import write_json
    from windlass.runs.folder import Run
    from windlass.train import loop
    from windlass.train.profiler import Profiler

    recipe = recipe_of(name, tiny)
    run = Run(folder)
    for path in (run.path, run.ranks, run.checkpoints, run.logs):
        path.mkdir(parents=True, exist_ok=True)
    write_json(run.config_file, recipe.model_dump(mode="json"))
    code = loop.run(recipe, run, start_of(recipe), ONE_PROCESS, [Profiler()], print)
    if code:
        sys.exit(code)


def slim(path: Path) -> None:
    """Without arrows, counters and unused arguments: half the size, the same tables."""
    value = json.loads(gzip.decompress(path.read_bytes()))
    events = [
        e
        for e in value["traceEvents"]
        if e.get("ph") == "X" or (e.get("ph") == "M" and e.get("name") == "process_name")
    ]
    for event in events:
        event["args"] = {k: v for k, v in event.get("args", {}).items() if k in KEPT or event["ph"] == "M"}
    path.write_bytes(
        gzip.compress(json.dumps({**value, "traceEvents": events}, separators=(",", ":")).encode(), 9, mtime=0)
    )


def repack(source: Path, target: Path) -> int:
    target.write_bytes(gzip.compress(gzip.decompress(source.read_bytes()), 9, mtime=0))
    if target.stat().st_size > LIMIT_BYTES:
        slim(target)
    return target.stat().st_size


def summary(out: Path, names: list[str]) -> dict[str, Any]:
    from windlass.profile.compare import diff_operators
    from windlass.profile.job_profile import profile_traces
    from windlass.runs.manifest import commit

    jobs = {name: profile_traces([out / f"{name}.json.gz"], label=name) for name in names}
    pairs = [(a, b) for a, b in PAIRS if a in jobs and b in jobs]
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "device": next(iter(jobs.values())).ranks[0].device_name,
        "profiles": {name: job.to_json(tables=False) for name, job in jobs.items()},
        "speedup": {f"{a} -> {b}": jobs[a].step_us / jobs[b].step_us for a, b in pairs},
        "operators": {
            f"{a} -> {b}": [
                o.to_json() for o in diff_operators(jobs[a].ranks[0].operators, jobs[b].ranks[0].operators)[:10]
            ]
            for a, b in pairs
        },
    }


def pictures(out: Path, names: list[str]) -> None:
    """Stacked step-time bars of each pair, for the docs."""
    from windlass.figures import save_picture
    from windlass.profile.job_profile import profile_traces
    from windlass.profile.view import step_bars

    for pair in PAIRS:
        if set(pair) <= set(names):
            jobs = [profile_traces([out / f"{name}.json.gz"], label=name) for name in pair]
            save_picture(step_bars(jobs), out / f"{pair[0].split('-')[0]}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("traces"))
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--capture", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.capture:
        capture(args.capture, args.folder, args.tiny)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    done = []
    with tempfile.TemporaryDirectory() as work:
        for name in args.rows:
            folder = Path(work) / name
            command = [
                sys.executable,
                "-P",
                __file__,
                "--capture",
                name,
                "--folder",
                str(folder),
                *(["--tiny"] if args.tiny else []),
            ]
            if subprocess.run(command, check=False).returncode:
                print(f"{name}: failed", flush=True)
                continue
            trace = next(folder.glob("profile/step-*/rank-00000.json.gz"))
            size = repack(trace, args.out / f"{name}.json.gz")
            shutil.copy(folder / "metrics.jsonl", args.out / f"{name}.metrics.jsonl")
            print(f"{name}: {size:,} bytes", flush=True)
            done.append(name)
    if not done:
        sys.exit("no run was traced")
    value = summary(args.out, done)
    pictures(args.out, done)
    (args.out / "summary.json").write_text(json.dumps(value, indent=2) + "\n")
    print(
        json.dumps(
            {
                "device": value["device"],
                "step_us": {k: v["step_us"] for k, v in value["profiles"].items()},
                "speedup": value["speedup"],
            }
        )
    )


if __name__ == "__main__":
    main()
