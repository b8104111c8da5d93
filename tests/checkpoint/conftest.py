"""A small model with its optimizer, a run folder, and several forked processes with a process group."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from windlass.runs.folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    for folder in (made.checkpoints, made.ranks, made.logs):
        folder.mkdir(parents=True)
    return made


class Net(torch.nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 4 * width)
        self.second = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def net() -> Callable[..., torch.nn.Module]:
    def make(seed: int = 0, width: int = 16) -> torch.nn.Module:
        torch.manual_seed(seed)
        return Net(width)

    return make


def _child(
    rank: int, world: int, rendezvous: str, body: Callable[..., Any], results: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        results.put((rank, "ok", body(rank, world, *args)))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, "error", traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.fixture
def spread(tmp_path: Path) -> Callable[..., list[Any]]:
    """`spread(4, body, *args)` runs body(rank, world, *args) in forked processes and returns their answers by rank."""

    def go(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        rendezvous = str(tmp_path / f"rendezvous-{os.urandom(4).hex()}")
        children = [
            context.Process(target=_child, args=(r, world, rendezvous, body, results, args)) for r in range(world)
        ]
        for child in children:
            child.start()
        answers = {rank: (kind, value) for rank, kind, value in (results.get(timeout=120) for _ in children)}
        for child in children:
            child.join(timeout=20)
        failed = [f"rank {r}:\n{v}" for r, (kind, v) in sorted(answers.items()) if kind == "error"]
        assert not failed, "\n".join(failed)
        return [answers[r][1] for r in range(world)]

    return go
