"""Measures one device and its links; one process per device, started by `doctor`, leaves `rank-NNNNN.json`.

torch is imported here, inside a process of its own, so that the launching side never needs it.
"""

import importlib
import itertools
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from windlass.clusters import Place, place
from windlass.files import write_json
from windlass.processes import usable_cores
from windlass.runs.manifest import cpu_name


def main(out: Path, *, full: bool = False, paths: tuple[Path, ...] = ()) -> None:
    torch, at = importlib.import_module("torch"), place()
    if at.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // at.local_world_size))
    device, name, memory_bytes = torch.device("cpu"), cpu_name() or "cpu", None
    if torch.cuda.is_available():
        index = at.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        device, name = torch.device("cuda", index), torch.cuda.get_device_name(index)
        memory_bytes = int(torch.cuda.mem_get_info(device)[1])
    files = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
    versions = [file.read_text().splitlines()[0].strip() for file in files if file.is_file()]
    # The median rate of a large square product: bf16 on a GPU, fp32 on a CPU.
    gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if gpu else (1024 if full else 512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul_seconds = _median_seconds(torch, device, lambda: a @ b, 3, 30 if gpu else 8)
    record: dict[str, Any] = {
        "rank": at.rank,
        "local_rank": at.local_rank,
        "host": socket.gethostname(),
        "device": name,
        "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip,
        "driver": versions[0] if versions and gpu else None,
        "memory_bytes": memory_bytes,
        "matmul_tflops": 2 * size**3 / matmul_seconds / 1e12,
        "matmul_dtype": str(dtype).removeprefix("torch."),
    }
    if at.world_size > 1:
        record |= _measure_collectives(torch, at, device, full)
    if at.local_rank == 0 and paths:
        from windlass.launch.doctor import host_checks

        record["host_checks"] = [asdict(check) for check in host_checks(paths)]
    write_json(out / f"rank-{at.rank:05d}.json", record)


def _median_seconds(torch: Any, device: Any, action: Callable[[], Any], warm_up: int, count: int) -> float:
    times = []
    for _ in range(warm_up + count + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())
        action()
    return statistics.median(end - start for start, end in itertools.pairwise(times[warm_up:]))


def _measure_collectives(torch: Any, at: Place, device: Any, full: bool) -> dict[str, Any]:
    """Bus bandwidths of an all-reduce (2 (n - 1) / n times the bytes over the median time), and the clock."""
    dist = importlib.import_module("torch.distributed")
    backend = "nccl" if device.type == "cuda" else "gloo"
    address, timeout = f"tcp://{at.master_addr}:{at.master_port}", timedelta(seconds=180)
    dist.init_process_group(backend, init_method=address, rank=at.rank, world_size=at.world_size, timeout=timeout)
    size_bytes = (256 if full else 64) << 20 if device.type == "cuda" else (16 if full else 4) << 20
    data = torch.zeros(size_bytes // 4, device=device)

    def bandwidth_gbs(group: Any, ranks: int) -> float:
        seconds = _median_seconds(torch, device, lambda: dist.all_reduce(data, group=group), 2, 5)
        return 2 * (ranks - 1) / ranks * size_bytes / seconds / 1e9

    record: dict[str, Any] = {"backend": backend}
    local = at.local_world_size
    if local > 1:
        # Every rank must take part in making every group.
        groups = [dist.new_group(list(range(node * local, (node + 1) * local))) for node in range(at.nodes)]
        record["intra_busbw_gbs"] = bandwidth_gbs(groups[at.rank // local], local)
    if at.nodes > 1:
        record["inter_busbw_gbs"] = bandwidth_gbs(None, at.world_size)
    dist.barrier()
    record["clock"] = time.time()
    dist.barrier()
    dist.destroy_process_group()
    return record


if __name__ == "__main__":
    folders = tuple(Path(argument) for argument in sys.argv[2:] if not argument.startswith("--"))
    main(Path(sys.argv[1]), full="--full" in sys.argv, paths=folders)
