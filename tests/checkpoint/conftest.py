"""A small model and a run folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

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
