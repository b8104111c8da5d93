"""A run folder for tests that break things."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from windlass.runs.folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    for folder in (made.checkpoints, made.ranks, made.logs, made.requests):
        folder.mkdir(parents=True)
    return made
