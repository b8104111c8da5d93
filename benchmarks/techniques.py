"""What does each technique of the Ultra-Scale Playbook bring? Each is switched off and on, on a few CPU processes joined by gloo.

    python benchmarks/techniques.py [--processes 2] [--link 1Gb/s] [--quick] [--only overlap,loss] [--out FOLDER]

Writes techniques.json and techniques.md into FOLDER (benchmarks/results). A CPU is not a GPU: loopback is the network, and the cores that
send are the cores that compute. So the reductions are measured twice, as they are and over a link of a stated speed: each reduction then
ends when its bytes would have crossed that link. Memory is the process's own peak, states and losses are exact.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# In place of this folder, whose files have names of the standard library.
TOP = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TOP / "src"), str(TOP)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Freed blocks go back to the system at once, so that a later peak is not hidden in an earlier one's room.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._composable.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from benchmarks.one_process import open_training, stepping  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from windlass.clusters.scheduler import Place  # noqa: E402
from windlass.config import Recipe  # noqa: E402
from windlass.models.build import build_model  # noqa: E402

SMALL_BUCKET, BUCKET = 1e-6, 4.0
"""MiB of a bucket: none (each parameter by itself), and a fifth of the model's gradients."""


def recipe(quick: bool, *, layers: int = 4, seq_len: int = 128, micro_batch: int = 2, accumulate: int = 1, processes: int = 1,
           vocab: int = 4096, train: dict[str, Any] | None = None, layout: dict[str, Any] | None = None) -> Recipe:  # fmt: skip
    width = 64 if quick else 256
    return Recipe.model_validate({
        "name": "techniques", "model": {"layers": layers, "width": width, "ffn": 11 * width // 4, "heads": 4, "kv_heads": 2, "vocab": vocab},
        "data": {"seq_len": seq_len, "batch_tokens": seq_len * micro_batch * accumulate * processes},
        "train": {"steps": 100, "precision": "fp32", **(train or {})}, "layout": {"micro_batch": micro_batch, **(layout or {})},
        "energy": {"enabled": False}, "save": {"at_end": False, "every": 10**6},
    })  # fmt: skip


# -- processes ------------------------------------------------------------------------------------------------------------


def _worker(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(function(*args)))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def spawn(function: Callable[..., Any], world: int, *args: Any) -> Any:
    """What rank 0 of `world` forked processes returned."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, args=(world, folder, function, args), nprocs=world, start_method="fork")
        return pickle.loads(Path(folder, "0.pkl").read_bytes())


def here() -> Place:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Place(rank, world, rank, world, 0, 1, None, None, "benchmark")


def fastest(times: list[float]) -> float:
    """Milliseconds of the fastest step: on a shared machine the others measure the neighbours."""
    return min(times) * 1e3


# -- data parallelism: overlap and buckets ----------------------------------------------------------------------------------


class Link:
    """Reductions that take as long as their bytes would on a link of `bits` per second (None: as long as they take)."""

    def __init__(self, bits: float | None) -> None:
        self.bits, self.calls = bits, 0

    def wait(self, count: int) -> None:
        if self.bits:
            # A ring sends and receives each byte twice, less the own share.
            world = dist.get_world_size()
            time.sleep(2 * (world - 1) / world * count * 8 / self.bits)

    def reduce(self, tensor: torch.Tensor) -> None:
        self.calls += 1
        dist.all_reduce(tensor)
        self.wait(tensor.nbytes)

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        """For DDP: the reduction starts while the backward pass goes on; the link carries one at a time."""
        tensor = bucket.buffer()
        self.calls += 1
        done = dist.all_reduce(tensor, async_op=True).get_future()

        def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
            self.wait(tensor.nbytes)
            return future.value()[0].div_(dist.get_world_size())

        return done.then(arrived)


def data_parallel(value: Recipe, kind: str, bits: float | None, steps: int) -> dict[str, Any]:
    """One way to reduce gradients, on torch's own DDP, because its switches are the playbook's."""
    model = build_model(value.model, seq_len=value.data.seq_len)
    model.init_weights(0)
    link, tokens = Link(bits), torch.randint(0, value.model.vocab, (value.layout.micro_batch, value.data.seq_len + 1))
    if kind == "naive":
        module: Any = model
    else:
        size = SMALL_BUCKET if kind == "overlap" else BUCKET
        module = DistributedDataParallel(model, bucket_cap_mb=size, gradient_as_bucket_view=True)
        module.register_comm_hook(None, link.hook)

    def step() -> None:
        model.zero_grad(set_to_none=kind == "naive")
        module(tokens[:, :-1], tokens[:, 1:])[0].div(tokens[:, 1:].numel()).backward()
        if kind == "naive":
            for parameter in model.parameters():
                link.reduce(parameter.grad)

    times = timed(step, steps, lambda: setattr(link, "calls", 0))
    gradients = sum(p.nbytes for p in model.parameters()) / 2**20
    return {"step_ms": fastest(times), "reductions": link.calls // steps, "sent_mib": gradients}


def timed(step: Callable[[], None], steps: int, reset: Callable[[], None] = lambda: None) -> list[float]:
    """Seconds of each step after two to warm up (DDP settles its buckets in the first)."""
    for _ in range(2):
        step()
    reset()
    times = []
    for _ in range(steps):
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return times


# -- our own engine -------------------------------------------------------------------------------------------------------


def engine(value: Recipe, steps: int) -> dict[str, Any]:
    """Whole steps of windlass: time, peak memory above what the process had before, bytes of states, the last loss."""
    before = resident()
    training, losses = open_training(value, Path("/nonexistent"), place=here()), []
    with stepping(training) as next_step:

        def step() -> None:
            losses.append(next_step(1e-3).values[0].item())

        collectives = count_collectives()
        times = timed(step, steps, collectives.clear)
    whole = dist.is_initialized() and value.layout.shard == "none"
    return {
        "step_ms": fastest(times),
        "reductions": len(collectives) // steps if whole else None,
        "sent_mib": sum(collectives) / steps / 2**20 if whole else None,
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20,
        "states_mib": states(training) / 2**20,
        "loss": losses[-1],
    }


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def count_collectives() -> list[int]:
    """Bytes of each all-reduce of gradients from now on (whole copies: shard = none)."""
    seen: list[int] = []
    inner = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 16:  # not the few numbers of loss and norm
            seen.append(tensor.nbytes)
        return inner(tensor, *args, **kwargs)

    dist.all_reduce = counted
    return seen


def states(training: Any) -> int:
    """Bytes of weights and moments that this rank holds."""
    held = [t for slot in training.optimizer.slots for t in (slot.weights, *slot.moments.values())]
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in held)


# -- the table --------------------------------------------------------------------------------------------------------------


Row = dict[str, Any]


def overlap_rows(quick: bool, processes: int, bits: float) -> list[Row]:
    value, steps = recipe(quick, micro_batch=2, seq_len=64 if quick else 128), 3 if quick else 20
    names = {
        "naive": "off: after the backward pass, one reduction per tensor",
        "overlap": "overlap: each tensor during the backward pass",
        "buckets": "overlap and buckets of 4 MiB",
    }
    rows = []
    for speed in (None, bits):
        for kind, name in names.items():
            found = spawn(data_parallel, processes, value, kind, speed, steps)
            rows.append({"technique": "data parallelism", "variant": name, "link": speed, **found})
    return rows


def engine_rows(technique: str, variants: dict[str, Recipe], processes: int, steps: int) -> list[Row]:
    return [
        {"technique": technique, "variant": name, **spawn(engine, processes, value, steps)}
        for name, value in variants.items()
    ]


def all_rows(quick: bool, processes: int, bits: float, only: list[str]) -> list[Row]:
    steps = 2 if quick else 12
    short = 64 if quick else 128
    vocab = 8192 if quick else 32768
    accumulate = {
        f"gradients are reduced {words}": recipe(
            quick, seq_len=short, accumulate=4, processes=processes, layout={"shard": "none", "sync": sync}
        )
        for sync, words in (("every", "after each of 4 micro-batches"), ("last", "once per step"))
    }
    recompute = {
        f"recompute {kind}": recipe(
            quick, layers=4 if quick else 8, seq_len=256, micro_batch=4, train={"recompute": kind}
        )
        for kind in ("none", "selective", "full")
    }
    loss = {
        words: recipe(quick, layers=1, seq_len=256, micro_batch=4, vocab=vocab, train={"loss": kind, "loss_chunk": 128})
        for kind, words in (("plain", "full logits"), ("chunked", "logits in chunks of 128 tokens"))
    }
    shard = {
        f"shard = {kind}": recipe(quick, seq_len=short, processes=processes, layout={"shard": kind})
        for kind in ("none", "zero1", "zero2", "full")
    }
    # A layer has 2.9 MB of gradients (0.2 MB with --quick); the name is that of the key layout.bucket.
    buckets = {
        f"shard = {kind}, {f'bucket = {size}' if size else 'one bucket per layer'}": recipe(
            quick, layers=8, seq_len=short, processes=processes, layout={"shard": kind, "bucket": size}
        )
        for kind in ("none", "full")
        for size in (None, "6 MB", "25 MB")
    }
    groups: dict[str, Callable[[], list[Row]]] = {
        "overlap": lambda: overlap_rows(quick, processes, bits),
        "buckets": lambda: engine_rows("buckets", buckets, processes, steps),
        "accumulation": lambda: engine_rows("accumulation", accumulate, processes, steps),
        "recompute": lambda: engine_rows("recompute", recompute, 1, steps),
        "loss": lambda: engine_rows("loss", loss, 1, steps),
        "sharding": lambda: engine_rows("sharding", shard, processes, steps),
    }
    unknown = sorted(set(only) - set(groups))
    if unknown:
        raise SystemExit(f"--only {','.join(unknown)}: there are {', '.join(groups)}")
    return [row for name in only or groups for row in groups[name]()]


def about(given: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(TOP), "describe", "--always", "--dirty=+"], capture_output=True, text=True
    )
    model = next(
        (r.split(":")[1].strip() for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")),
        "CPU",
    )
    return {
        "command": f"python benchmarks/techniques.py --processes {given.processes} --link {given.link}{' --quick' if given.quick else ''}{' --only ' + ','.join(given.only) if given.only else ''}",
        "commit": commit.stdout.strip(), "torch": torch.__version__, "python": platform.python_version(),
        "hardware": f"{len(os.sched_getaffinity(0))} cores of {model}, one thread per process",
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "load": round(os.getloadavg()[0], 1), "cores": len(os.sched_getaffinity(0)), "processes": given.processes, "link_bits": link_bits(given.link),
    }  # fmt: skip


def link_bits(text: str) -> float:
    number = text.removesuffix("Gb/s")
    if number == text:
        raise SystemExit(f"--link {text}: write it as 1Gb/s")
    return float(number) * 1e9


def markdown(found: dict[str, Any]) -> str:
    """The same table as a page; scripts/make_tables.py takes its own from the JSON."""
    cells = [
        "technique",
        "variant",
        "link",
        "step_ms",
        "reductions",
        "sent_mib",
        "peak_mib",
        "states_mib",
        "loss",
    ]
    head = ["# Techniques off and on, on CPU processes", "", f"`{found['about']['command']}`, {found['about']['hardware']}, torch {found['about']['torch']}, "
            f"commit {found['about']['commit']}, {found['about']['time']}. Empty: not measured for that row.", ""]  # fmt: skip
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    for row in found["rows"]:
        shown = [row.get(c) for c in cells]
        lines.append(
            "| " + " | ".join("" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in shown) + " |"
        )
    return "\n".join([*head, *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--link", default="1Gb/s", help="speed of the link that slows reductions down in the second half"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes and few steps: the machinery, not the figures"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        help="overlap,buckets,accumulation,recompute,loss,sharding",
    )
    parser.add_argument("--out", type=Path, default=TOP / "benchmarks" / "results")
    given = parser.parse_args()
    found = {"about": about(given), "rows": all_rows(given.quick, given.processes, link_bits(given.link), given.only)}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "techniques.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "techniques.md").write_text(markdown(found))
    print(markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
