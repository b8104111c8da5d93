"""fp32 matrix products of a training step on one core of a CPU: torch's own (MKL) and oneDNN's, in GFLOP/s.

python benchmarks/cpu_products.py
"""

from __future__ import annotations

import time

import torch

from windlass.blocks.cpu_products import _product
from windlass.runs.manifest import cpu_name

SHAPES = [
    (1024, 768, 768),
    (1024, 768, 3072),
    (1024, 3072, 768),
    (512, 256, 1024),
    (128, 256, 256),
    (64, 128, 256),
    (64, 64, 64),
]


def rate(a: torch.Tensor, b: torch.Tensor, product: object) -> float:
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        product(a, b)  # type: ignore[operator]
        times.append(time.perf_counter() - begin)
    return 2 * a.numel() * b.shape[1] / min(times) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    print(f"{cpu_name()}, torch {torch.__version__}, one core, best of 30; GFLOP/s by MKL and by oneDNN\n")
    print("| tokens | inputs | outputs | forward | gradient of the input | gradient of the weight |")
    print("| --- | --- | --- | --- | --- | --- |")
    for tokens, inputs, outputs in SHAPES:
        x, weight, slope = (torch.randn(s) for s in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        pairs = ((x, weight.t()), (slope, weight), (slope.t(), x))
        cells = [f"{rate(*pair, torch.mm):.0f}, {rate(*pair, _product):.0f}" for pair in pairs]
        print(f"| {tokens} | {inputs} | {outputs} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
