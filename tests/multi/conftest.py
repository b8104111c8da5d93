"""Several CPU processes for one test: forked from this one, which has torch imported already, and joined through a file."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.multiprocessing as mp


def _worker(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        value = function(*args)
        Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(value))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def spawn(function: Callable[..., Any], world: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """Run `function(*args)` on `world` ranks; what each returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _worker, args=(world, folder, function, args), nprocs=world, join=False, start_method="fork"
        )
        end = time.monotonic() + timeout
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError(f"{world} processes were not done after {timeout:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world)]


@pytest.fixture(name="spawn")
def spawn_fixture() -> Callable[..., list[Any]]:
    return spawn
