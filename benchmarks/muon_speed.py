"""Time to orthogonalise batches of matrices, by how many of Muon's iterations are combined.

python benchmarks/muon_speed.py            on a GPU: the matrices of 22 layers of a 1.1B model
python benchmarks/muon_speed.py --tiny     small matrices, also on a CPU: does it run at all?
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1] / "src")]

import torch  # noqa: E402

from windlass.train.optimizers.muon import update  # noqa: E402

SHAPES = ((22, 2048, 2048), (22, 5632, 2048), (22, 2048, 5632), (22, 256, 2048))
TINY = ((2, 32, 32), (2, 32, 96))
GROUPS = ((1, 1, 1, 1, 1), (2, 3), (5,))


def milliseconds(matrices: torch.Tensor, repeats: int = 5) -> float:
    """Median; the first call, which chooses kernels, does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        update.orthogonalise(matrices)
        if matrices.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    shapes = TINY if parser.parse_args().tiny else SHAPES
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| shape |", " | ".join(", ".join(map(str, groups)) for groups in GROUPS), "|")
    for shape in shapes:
        matrices = torch.randn(shape, device=device, dtype=torch.bfloat16)
        row = []
        for groups in GROUPS:
            update.grouped_iterations = lambda short, long, groups=groups: groups
            row.append(f"{milliseconds(matrices):.2f}")
        print(f"| {shape[1]:,} x {shape[2]:,} |", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
