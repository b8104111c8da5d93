"""How long does training wait for a save, how large is it, and how fast is it read back? One device, a state of the given size.

    python -m benchmarks.checkpoint_speed --params 1.1e9 --step-seconds 0.46    on a GPU: the 1.1B shape, fp32 weights and moments
    python -m benchmarks.checkpoint_speed --params 2e7 --folder DIR             anywhere

The state has the tensors of a Llama of about that many parameters (weights and two moments in fp32), made on the device. On a GPU a
loop of matrix products runs on while the checkpoint is written, so that the stall and any slowing of the steps are those of a busy
device. Reading is compared with a plain read of the same files in blocks by one thread: both cold (the page cache was told to forget
the files, and what it kept is reported) and both warm. Results are written after every stage; a stage for which `--seconds` leaves no
time is named under "skipped".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.load import find_latest, restore
from windlass.checkpoint.save import Saver
from windlass.checkpoint.stage import state_bytes
from windlass.config.save import SaveConfig
from windlass.files import write_json
from windlass.runs.folder import Run
from windlass.units import print_bytes, print_seconds

STEPS_PER_SAVE = 100
ODD = bytes(value & 1 for value in range(256))
"""mincore says "present" in the lowest bit of a byte; translating is fast over millions of pages."""


def plain_write_speed(folder: Path, size: int = 2**28) -> float:
    """Bytes per second of a plain sequential write with sync, for comparison with a save."""
    block, path = os.urandom(2**22), folder / ".speed"
    started = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(size // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        return size / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


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
    """Random numbers: a disk that compresses gains nothing by them."""
    generator = torch.Generator(device=device).manual_seed(0)

    def made() -> dict[str, torch.Tensor]:
        sizes = enumerate(shapes(params))
        return {f"t{i}": torch.empty(size, device=device).normal_(generator=generator) for i, size in sizes}

    return {"model": made(), "optim": {"first": made(), "second": made()}}


# -- the disk by itself ---------------------------------------------------------------------------------------------------


def forget(folder: Path) -> float | None:
    """Ask the kernel to drop these files from its cache, so that reading means the disk; the share that is still there."""
    still = []
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            still.append((path.stat().st_size, resident(file.fileno())))
    if any(share is None for _, share in still):
        return None
    return sum(size * (share or 0.0) for size, share in still) / max(1, sum(size for size, _ in still))


def resident(handle: int) -> float | None:
    """Share of a file's pages in the page cache, by mincore; None where that cannot be asked."""
    size = os.fstat(handle).st_size
    if size == 0:
        return 0.0
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, handle, ctypes.c_long(0))
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    answer = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return None if answer else bytes(pages).translate(ODD).count(1) / len(pages)


def plain_read(folder: Path, at_most_seconds: float) -> tuple[int, float]:
    """(bytes, seconds) of one thread that reads in blocks of 16 MiB, stopped after some seconds."""
    begin, buffer, done = time.perf_counter(), bytearray(2**24), 0
    for path in sorted(folder.glob("*.distcp")):
        with path.open("rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and time.perf_counter() - begin < at_most_seconds:
                done += count
    return done, time.perf_counter() - begin


class Work:
    """Steps of matrix products that keep a GPU busy."""

    def __init__(self, device: torch.device) -> None:
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


# -- stages ---------------------------------------------------------------------------------------------------------------


class Bench:
    """The stages in order; each adds to `found`, which is written after it."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.began = given, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.run = Run(folder)
        self.run.checkpoints.mkdir(parents=True)
        self.saver = Saver(self.run, SaveConfig(keep_last=1))
        self.found: dict[str, Any] = about(given, self.device)
        self.path = Path()

    def left(self) -> float:
        return self.given.seconds - (time.perf_counter() - self.began)

    def stage(self, name: str, do: Callable[[], dict[str, Any]], need: float | None = None) -> None:
        if need is not None and self.left() < need:
            self.found.setdefault("skipped", {})[name] = f"about {need:.0f} s, {self.left():.0f} s left"
            self.tell(f"{name}: skipped, {self.found['skipped'][name]}")
            return
        begin = time.perf_counter()
        added = do()
        self.found |= added
        self.found.setdefault("stage_seconds", {})[name] = time.perf_counter() - begin
        self.tell(f"{name} ({time.perf_counter() - begin:.1f} s): {json.dumps(added)}")
        if self.given.out:
            write_json(self.given.out, self.found)

    def tell(self, line: str) -> None:
        print(f"{time.perf_counter() - self.began:6.1f} s  {line}", file=sys.stderr, flush=True)

    def all(self) -> dict[str, Any]:
        self.stage("disk", self.disk)
        self.stage("state", self.make)
        self.stage("memory", self.prepare)
        self.stage("copy", self.copies)
        self.stage("save", self.save)
        reading = self.size / self.found["plain_write_bytes_per_second"]
        self.stage("plain read, cold", lambda: self.plain("cold"))
        self.stage("load, cold", lambda: self.load("cold"), 0.5 * reading)
        self.stage("plain read, warm", lambda: self.plain("warm"), 0.2 * reading)
        self.stage("load, warm", lambda: self.load("warm"), 0.5 * reading)
        self.stage("verify", self.verify, 0.2 * reading)
        for number in range(2, self.given.saves + 1):
            self.stage(f"save {number}", self.save, 1.3 * self.found["write_seconds"][-1])
        self.saver.close()
        return self.found

    def disk(self) -> dict[str, Any]:
        size = int(min(2**30, max(2**26, 12 * self.given.params / 4)))
        return {"plain_write_bytes_per_second": plain_write_speed(self.run.checkpoints, size)}

    def make(self) -> dict[str, Any]:
        self.state, self.work = state_of(self.given.params, self.device), Work(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        weights = sum(t.numel() for t in self.state["model"].values())
        expected = 12 * weights / self.found["plain_write_bytes_per_second"]
        whole = 1.3 * expected < 0.5 * self.given.seconds
        self.stored = self.state if whole else {"model": self.state["model"]}
        return {
            "params": weights, "state_bytes": 12 * weights, "arithmetic_bytes": (12 if whole else 4) * weights,
            "stored": "weights and two moments" if whole else f"weights alone: all would take about {expected:.0f} s to write",
        }  # fmt: skip

    def prepare(self) -> dict[str, Any]:
        """The memory of the copy is made ready in the background of a real run; here it is waited for."""
        begin = time.perf_counter()
        sentence = self.saver.prepare(self.state)
        if (warming := self.saver._stager._warming) is not None:
            warming.join()
        return {
            "prepare_seconds": time.perf_counter() - begin,
            "page_locked": self.saver._stager._pinned,
            "how": sentence,
        }

    def copies(self) -> dict[str, Any]:
        """The copy alone, as `save` does it, while the device is idle."""
        if self.saver._stager._slab is None:  # too little host memory: training would wait for the whole save
            return {"copy_seconds": None}
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            self.saver._stager.stage(self.state)
            seconds.append(time.perf_counter() - begin)
        return {
            "copy_seconds": seconds,
            "copy_bytes_per_second": state_bytes(self.state) / statistics.median(seconds),
        }

    def save(self) -> dict[str, Any]:
        for _ in range(3):
            self.work.step()
        quiet = statistics.median(self.work.step() for _ in range(10))
        during, step = [], len(self.found.get("stall_seconds", ())) + 1
        self.saver.save(step, self.stored, {"tokens": step})
        self.tell(f"save {step}: the copy is made, writing goes on")
        while self.saver.busy:
            during.append(self.work.step())
        outcome = self.saver.finish() or self.saver.last
        if outcome is None or not outcome.ok or outcome.path is None:
            raise SystemExit(f"the save failed: {outcome}")
        self.path = outcome.path
        return self.saved(outcome, quiet, during)

    def saved(self, outcome: Any, quiet: float, during: list[float]) -> dict[str, Any]:
        stalls = [*self.found.get("stall_seconds", []), outcome.stall_seconds]
        slower = max(0.0, sum(during) - quiet * len(during))
        made = {
            "bytes": outcome.bytes, "size_error": outcome.bytes / self.found["arithmetic_bytes"] - 1, "stall_seconds": stalls,
            "write_seconds": [*self.found.get("write_seconds", []), outcome.write_seconds],
            "write_bytes_per_second": outcome.bytes / outcome.write_seconds,
            "step_seconds_quiet": quiet, "step_seconds_while_writing": statistics.median(during) if during else None,
            "slowed_seconds": slower,
        }  # fmt: skip
        if self.given.step_seconds:
            hundred = STEPS_PER_SAVE * self.given.step_seconds
            waited = max(stalls) if self.stored is self.state else max(self.found["copy_seconds"])
            made |= {"stall_share": waited / hundred, "stall_and_slowing_share": (waited + slower) / hundred}
        return made

    @property
    def size(self) -> int:
        return int(self.found["bytes"])

    def plain(self, cache: str) -> dict[str, Any]:
        kept = forget(self.path) if cache == "cold" else None
        done, seconds = plain_read(self.path, max(5.0, self.left() / 4))
        return {f"{cache}_plain_read_bytes_per_second": done / seconds} | (
            {"cached_after_forgetting": kept} if cache == "cold" else {}
        )

    def load(self, cache: str) -> dict[str, Any]:
        """As a resuming run does it, and the numbers must be those that were saved."""
        expected = {k: v.clone() for k, v in list(self.state["model"].items())[:4]}
        for tensor in self.state["model"].values():
            tensor.zero_()
        found = find_latest(self.run, verify=False)
        assert found is not None
        if cache == "cold":
            forget(self.path)
        begin = time.perf_counter()
        restore(found, self.stored)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        speed = self.size / (time.perf_counter() - begin)
        assert all(torch.equal(self.state["model"][k], v) for k, v in expected.items()), (
            "what was read is not what was saved"
        )
        return {
            f"{cache}_load_bytes_per_second": speed,
            f"{cache}_load_share": speed / self.found[f"{cache}_plain_read_bytes_per_second"],
        }

    def verify(self) -> dict[str, Any]:
        """The checksums of every file, which a resume reads before it loads."""
        begin = time.perf_counter()
        assert find_latest(self.run) is not None
        return {"verify_seconds": time.perf_counter() - begin}


def about(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    from windlass.runs.manifest import commit

    return {
        "command": " ".join(["python -m benchmarks.checkpoint_speed", *sys.argv[1:]]), "commit": os.environ.get("WINDLASS_COMMIT") or commit(), "torch": torch.__version__,
        "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "given_step_seconds": given.step_seconds,
    }  # fmt: skip


def sentence(found: dict[str, Any]) -> str:
    share = found.get("stall_share")
    return (
        f"{print_bytes(found['bytes'])} ({found['size_error']:+.2%} of the arithmetic), stall {print_seconds(max(found['stall_seconds']))}"
        + (f" ({share:.2%} of {STEPS_PER_SAVE} steps)" if share is not None else "")
        + f", written in {print_seconds(found['write_seconds'][-1])}"
        + "".join(
            f", loaded {cache} at {found[f'{cache}_load_share']:.0%} of a plain read"
            for cache in ("cold", "warm")
            if f"{cache}_load_share" in found
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1.1e9)
    parser.add_argument("--saves", type=int, default=2, help="saves, as far as the time allows")
    parser.add_argument("--step-seconds", type=float, help="measured time of a training step of this shape")
    parser.add_argument("--seconds", type=float, default=85, help="begin no stage that would not end in this time")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="a JSON file for the result, or a folder for it")
    given = parser.parse_args()
    if given.out and given.out.suffix != ".json":
        given.out = given.out / "checkpoint_speed.json"
    folder = Path(tempfile.mkdtemp(prefix="windlass-speed-", dir=given.folder))
    try:
        found = Bench(given, folder / "run").all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=2))
    print(sentence(found), file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
