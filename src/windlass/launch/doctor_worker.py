"""What can this device and its links do? One process per device; leaves `rank-NNNNN.json` and is started by `doctor`.

torch is imported here, inside a process of its own, so that the launching side never needs it.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from windlass.clusters import Place, place


def main(out: Path, *, full: bool = False, paths: tuple[Path, ...] = ()) -> None:
    torch = importlib.import_module("torch")
    where = place()
    if where.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // where.local_world_size))
    device, name = _device(torch, where)
    record: dict[str, Any] = {
        "rank": where.rank, "local_rank": where.local_rank, "host": socket.gethostname(), "device": name, "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip, "driver": _driver(torch), "memory_bytes": _memory(torch, device),
    }  # fmt: skip
    record |= _matmul(torch, device, full)
    if where.world_size > 1:
        record |= _collectives(torch, where, device, full)
    if where.local_rank == 0 and paths:
        from windlass.launch.doctor import host_checks

        record["host_checks"] = [asdict(check) for check in host_checks(paths)]
    target = out / f"rank-{where.rank:05d}.json"
    beside = target.with_suffix(".tmp")
    beside.write_text(json.dumps(record))
    beside.replace(target)


def _device(torch: Any, where: Place) -> tuple[Any, str]:
    if torch.cuda.is_available():
        index = where.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index), torch.cuda.get_device_name(index)
    from windlass.runs.manifest import cpu_name

    return torch.device("cpu"), cpu_name() or "cpu"


def _driver(torch: Any) -> str | None:
    if not torch.cuda.is_available():
        return None
    for file in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        if Path(file).is_file():
            return Path(file).read_text().splitlines()[0].strip()
    return None


def _memory(torch: Any, device: Any) -> int | None:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def _matmul(torch: Any, device: Any, full: bool) -> dict[str, Any]:
    """Median rate of a large square product: bf16 on a GPU, fp32 on a CPU."""
    gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if gpu else (1024 if full else 512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    times = []
    for _ in range(30 if gpu else 8):
        _wait(torch, device)
        began = time.perf_counter()
        a @ b
        _wait(torch, device)
        times.append(time.perf_counter() - began)
    return {
        "matmul_tflops": 2 * size**3 / statistics.median(times) / 1e12,
        "matmul_dtype": str(dtype).removeprefix("torch."),
    }


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collectives(torch: Any, where: Place, device: Any, full: bool) -> dict[str, Any]:
    dist = importlib.import_module("torch.distributed")
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = f"tcp://{where.master_addr}:{where.master_port}"
    dist.init_process_group(
        backend, init_method=address, rank=where.rank, world_size=where.world_size, timeout=timedelta(seconds=180)
    )
    size = (256 if full else 64) << 20 if device.type == "cuda" else (16 if full else 4) << 20
    found: dict[str, Any] = {"backend": backend}
    inside = None
    if where.local_world_size > 1:
        for node in range(where.nodes):  # every rank must take part in making every group
            ranks = list(range(node * where.local_world_size, (node + 1) * where.local_world_size))
            group = dist.new_group(ranks)
            inside = group if where.rank in ranks else inside
        found["intra_busbw_gbs"] = _all_reduce(torch, dist, device, size, inside, where.local_world_size)
    if where.nodes > 1:
        found["inter_busbw_gbs"] = _all_reduce(torch, dist, device, size, None, where.world_size)
    dist.barrier()
    found["clock"] = time.time()
    dist.barrier()
    dist.destroy_process_group()
    return found


def _all_reduce(torch: Any, dist: Any, device: Any, size: int, group: Any, ranks: int) -> float:
    """Bus bandwidth: 2 (n - 1) / n times the bytes over the median time."""
    data = torch.zeros(size // 4, device=device)
    times = []
    for turn in range(7):
        _wait(torch, device)
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        _wait(torch, device)
        if turn > 1:
            times.append(time.perf_counter() - began)
    return 2 * (ranks - 1) / ranks * size / statistics.median(times) / 1e9


if __name__ == "__main__":
    words = [w for w in sys.argv[2:] if not w.startswith("--")]
    main(Path(sys.argv[1]), full="--full" in sys.argv, paths=tuple(Path(w) for w in words))
