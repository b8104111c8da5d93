"""What does the engine add to a step? CPU time of windlass's step beside a bare PyTorch loop over the same model and batches.

    OMP_NUM_THREADS=1 python benchmarks/cpu_step.py [--steps 60] [--json]

Both loops alternate, so that a busy machine slows them alike; the figure is process time, not wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# In place of this folder, whose files have names of the standard library.
sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")

import torch  # noqa: E402

from windlass.clusters.scheduler import Place  # noqa: E402
from windlass.config import Recipe  # noqa: E402
from windlass.models import build  # noqa: E402
from windlass.runs.folder import Run  # noqa: E402
from windlass.train import loop  # noqa: E402
from windlass.train.metrics import Recorder  # noqa: E402


def recipe(steps: int) -> Recipe:
    return Recipe.model_validate({
        "name": "bench", "model": {"layers": 4, "width": 256, "ffn": 704, "heads": 4, "kv_heads": 2, "vocab": 4096},
        "data": {"seq_len": 256, "batch_tokens": 2048}, "train": {"steps": steps, "precision": "fp32"}, "layout": {"micro_batch": 8},
        "energy": {"enabled": False}, "save": {"at_end": False},
    })  # fmt: skip


def bare(value: Recipe) -> Any:
    """The loop everybody writes first."""
    model = build(value.model, seq_len=value.data.seq_len)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    value = recipe(args.steps + 5)
    run = Run(Path(tempfile.mkdtemp(prefix="windlass-bench-")))
    job = loop.build(value, run, Place(0, 1, 0, 1, 0, 1, None, None, "single"), [], lambda text: None, announced=False)
    recorder = Recorder()
    recorder.on_start(job)
    batches, plain = loop.open_batches(job), bare(value)
    times: dict[str, list[float]] = {"windlass": [], "bare": []}
    for _ in range(args.steps):
        begin = time.process_time()
        tokens, documents = next(batches)
        result = job.stepper.step(tokens, documents, 3e-4)
        loop.advance(job)
        recorder.on_step_end(job, result)
        middle = time.process_time()
        plain(tokens)
        times["windlass"].append(middle - begin)
        times["bare"].append(time.process_time() - middle)
    batches.close()
    found = {name: statistics.median(values[5:]) * 1e3 for name, values in times.items()}
    found["ratio"] = found["windlass"] / found["bare"]
    print(
        json.dumps(found)
        if args.json
        else f"windlass {found['windlass']:.1f} ms, bare loop {found['bare']:.1f} ms of CPU time a step: {found['ratio']:.3f} x"
    )


if __name__ == "__main__":
    main()
