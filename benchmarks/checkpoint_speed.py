"""How long does training wait for a save, how large is it, and how fast is it read back? One device, a state of the given size.

    python -m benchmarks.checkpoint_speed --params 1.1e9                on a GPU: the 1.1B shape with fp32 weights and moments
    python -m benchmarks.checkpoint_speed --params 2e7 --folder DIR     anywhere

The state has the tensors of a Llama of about that many parameters (weights and two moments in fp32). On a GPU a loop of matrix
products runs on while the checkpoint is written, so that the stall and any slowing of the steps are those of a busy device. The
plain read reads the same files in blocks, both after the page cache was told to forget them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.load import find_latest, restore
from windlass.checkpoint.save import Saver
from windlass.config.save import SaveConfig
from windlass.runs.folder import Run
from windlass.units import print_bytes, print_seconds


def shapes(params: float) -> list[tuple[int, ...]]:
    """Tensors of a Llama with about this many parameters: width from the size, 2.7 widths of feed-forward, a vocabulary of 32,000."""
    layers = max(2, round((params / 1e9) ** (1 / 3) * 20))
    width = 64
    while _count(layers, width + 64) <= params:
        width += 64
    ffn = 8 * width // 3 // 64 * 64
    block = [(width, width)] * 2 + [(width // 4, width)] * 2 + [(ffn, width)] * 2 + [(width, ffn)] + [(width,)] * 2
    return [(32_000, width)] * 2 + block * layers + [(width,)]


def _count(layers: int, width: int) -> float:
    return layers * (2.5 * width * width + 8 * width * width) + 64_000 * width


def state_of(params: float, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device=device).manual_seed(0)
    made = {f"t{i}": torch.randn(shape, generator=generator, device=device) for i, shape in enumerate(shapes(params))}
    return {"model": made, "optim": {name: {k: v.clone() for k, v in made.items()} for name in ("first", "second")}}


def forget(folder: Path) -> None:
    """Ask the kernel to drop these files from its cache, so that reading means the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(folder: Path) -> float:
    begin, buffer = time.perf_counter(), bytearray(2**24)
    for path in folder.glob("*.distcp"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


class Work:
    """Steps of matrix products that keep a GPU busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) if device.type == "cuda" else None

    def step(self) -> float:
        begin = time.perf_counter()
        if self.a is None:
            time.sleep(0.05)
        else:
            for _ in range(200):
                self.a = (self.a @ self.a).clamp_(-1, 1)
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state, work = state_of(given.params, device), Work(device)
    arithmetic = 3 * sum(t.numel() * 4 for t in state["model"].values())
    run = Run(folder)
    run.checkpoints.mkdir(parents=True)
    saver = Saver(run, SaveConfig(keep_last=1))
    saver.prepare(state)
    quiet = sorted(work.step() for _ in range(10))
    stalls, writes, during = [], [], []
    for number in range(1, given.saves + 1):
        saver.save(number, state, {"tokens": number})
        while saver.busy:
            during.append(work.step())
        outcome = saver.finish()
        assert outcome is not None and outcome.ok, outcome
        stalls.append(outcome.stall_seconds)
        writes.append(outcome.write_seconds)
    saver.close()
    path, size = outcome.path, outcome.bytes
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "params": sum(t.numel() for t in state["model"].values()), "bytes": size, "arithmetic_bytes": arithmetic,
        "size_error": size / arithmetic - 1, "stall_seconds": stalls, "write_seconds": writes,
        "step_seconds_quiet": quiet[len(quiet) // 2], "step_seconds_while_writing": sorted(during)[len(during) // 2] if during else None,
        **reading(run, path, state),
    }  # fmt: skip


def reading(run: Run, path: Path, state: dict[str, Any]) -> dict[str, Any]:
    size = sum(p.stat().st_size for p in path.glob("*.distcp"))
    expected = {k: v.clone() for k, v in list(state["model"].items())[:4]}
    for tensor in state["model"].values():
        tensor.zero_()
    forget(path)
    plain = plain_read(path)
    forget(path)
    begin = time.perf_counter()
    found = find_latest(run)
    verified = time.perf_counter() - begin
    assert found is not None
    forget(path)
    begin = time.perf_counter()
    restore(found, state)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    loaded = time.perf_counter() - begin
    assert all(torch.equal(state["model"][k], v) for k, v in expected.items()), "what was read is not what was saved"
    return {
        "plain_read_seconds": plain, "plain_read_bytes_per_second": size / plain, "verify_seconds": verified, "load_seconds": loaded,
        "load_share_of_plain": plain / loaded,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1.1e9)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when left out")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="windlass-speed-", dir=given.folder))
    try:
        found = measure(given, folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    from windlass.runs.manifest import commit

    found |= {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(found, indent=2))
    print(
        f"{print_bytes(found['bytes'])} ({found['size_error']:+.2%} of the arithmetic), stall {print_seconds(found['stall_seconds'][0])} first and "
        f"{print_seconds(min(found['stall_seconds'][1:] or found['stall_seconds']))} later, written in {print_seconds(found['write_seconds'][-1])}, "
        f"read at {found['load_share_of_plain']:.0%} of the plain speed, verified in {print_seconds(found['verify_seconds'])}",
        file=sys.stderr,
    )
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
