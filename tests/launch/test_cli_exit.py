"""Do exit codes reach the shell? Chains live by them."""

from __future__ import annotations

import subprocess
import sys

from windlass.files import write_json
from windlass.runs import Run
from windlass.runs.events import Finished, Saved


def test_link_answers_by_its_exit_code(tmp_path):
    write_json(tmp_path / "config.json", {"name": "x", "train": {"steps": 10}, "data": {}})
    run = Run(tmp_path)
    ask = [sys.executable, "-m", "windlass", "link", "before", str(tmp_path)]
    assert subprocess.run(ask, capture_output=True).returncode == 0
    after = [sys.executable, "-m", "windlass", "link", "after", str(tmp_path), "--code", "75"]
    run.record(Saved(step=5))
    assert subprocess.run(after, capture_output=True).returncode == 75
    run.record(Finished(step=10))
    assert subprocess.run(ask, capture_output=True).returncode == 10


def test_no_torch_for_launching(tmp_path):
    code = "import sys, windlass.launch.submit, windlass.launch.array, windlass.launch.logs, windlass.planner.search; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
