"""What does the engine add to a step? CPU time of windlass's step beside a bare PyTorch loop over the same model and batches.

    OMP_NUM_THREADS=1 python benchmarks/cpu_step.py [--steps 60] [--repeats 5] [--out benchmarks/results/cpu_step] [--json]

The two loops alternate step by step and take turns in going first, so that a busy machine slows them alike; the figure is process
time, not wall time. windlass's side reads the batch (the loader's thread counts too), checks for non-finite numbers, clips, and
writes a metrics line for every step; the bare loop gets its batch for nothing and keeps no record.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# In place of this folder, whose files have names of the standard library.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from benchmarks.one_process import open_training  # noqa: E402

from windlass.config import Recipe  # noqa: E402
from windlass.models.build import build_model  # noqa: E402
from windlass.runs import manifest  # noqa: E402
from windlass.train import loop  # noqa: E402
from windlass.train.metrics import Recorder  # noqa: E402

SHAPES = {
    "tiny": {"layers": 4, "width": 128, "ffn": 352, "heads": 4, "kv_heads": 2, "vocab": 2048},
    "small": {"layers": 4, "width": 256, "ffn": 704, "heads": 4, "kv_heads": 2, "vocab": 4096},
}
WARM = 5
GOAL = 1.10


def recipe(shape: str, steps: int) -> Recipe:
    return Recipe.model_validate({
        "name": "bench", "model": SHAPES[shape], "data": {"seq_len": 256, "batch_tokens": 2048},
        "train": {"steps": steps, "precision": "fp32"}, "layout": {"micro_batch": 8},
        "energy": {"enabled": False}, "save": {"at_end": False},
    })  # fmt: skip


def bare(value: Recipe) -> Callable[[torch.Tensor], float]:
    """The loop everybody writes first."""
    model = build_model(value.model, seq_len=value.data.seq_len)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)

    def step(tokens: torch.Tensor) -> float:
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ours(value: Recipe, folder: Path) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """One step as `windlass train` does it, returning its batch; and how to end."""
    training = open_training(value, folder)
    recorder = Recorder()
    recorder.on_start(training)
    batches = loop.open_batches(training)

    def step() -> torch.Tensor:
        batch = next(batches)
        result = training.stepper.step(batch, 3e-4)
        training.progress.advance(training.plan)
        recorder.on_step_end(training, result)
        return batch.tokens

    return step, batches.close


def one_repeat(shape: str, steps: int) -> dict[str, float]:
    """Median milliseconds of CPU time a step of both loops, and their ratio."""
    value = recipe(shape, steps + WARM + 1)
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
        step, close = ours(value, Path(folder))
        plain = bare(value)
        tokens = step()
        times: dict[str, list[float]] = {"windlass": [], "bare": []}
        for number in range(steps + WARM):
            for name in ("windlass", "bare") if number % 2 else ("bare", "windlass"):
                begin = time.process_time()
                if name == "windlass":
                    tokens = step()
                else:
                    plain(tokens)
                times[name].append(time.process_time() - begin)
        close()
    found = {name: statistics.median(values[WARM:]) * 1e3 for name, values in times.items()}
    return {**found, "ratio": found["windlass"] / found["bare"]}


def measure(steps: int, repeats: int) -> dict[str, Any]:
    rows = {shape: [one_repeat(shape, steps) for _ in range(repeats)] for shape in SHAPES}
    return {
        "command": " ".join(["OMP_NUM_THREADS=1 python benchmarks/cpu_step.py", *sys.argv[1:]]),
        "commit": manifest.commit(), "date": time.strftime("%Y-%m-%d"), "cpu": manifest.cpu_name(), "python": platform.python_version(),
        "torch": torch.__version__, "steps": steps, "repeats": repeats, "goal": GOAL, "shapes": SHAPES, "rows": rows,
        "ratio": {shape: statistics.median(r["ratio"] for r in found) for shape, found in rows.items()},
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    lines = [
        "# What the engine adds to a step, on a CPU", "",
        f"`{found['command']}`, commit {found['commit']}, {found['date']}, {found['cpu']}, one thread, torch {found['torch']}, Python {found['python']}.",
        f"Median CPU time of {found['steps']} steps, {found['repeats']} repeats; goal: at most {found['goal']:.2f} times the bare loop.", "",
        "| model | parameters | windlass ms | bare loop ms | ratio (median) | lowest | highest |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for shape, rows in found["rows"].items():
        mine, other, ratios = ([r[k] for r in rows] for k in ("windlass", "bare", "ratio"))
        config = recipe(shape, 1).model
        size = sum(p.numel() for p in build_model(config, seq_len=8).parameters()) / 1e6
        lines.append(
            f"| {config.layers} x {config.width}, vocab {config.vocab} | {size:.1f} M | {statistics.median(mine):.1f} | {statistics.median(other):.1f} "
            f"| {found['ratio'][shape]:.3f} | {min(ratios):.3f} | {max(ratios):.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write NAME.json and NAME.md")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.steps, args.repeats)
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(found))
    print(json.dumps(found) if args.json else table(found))


if __name__ == "__main__":
    main()
