from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.sample_run import make_run

from windlass.runs.folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A finished run with a crash, a resume, a node without sensor and torn lines."""
    return Run(make_run(tmp_path / "runs" / "sample"))
