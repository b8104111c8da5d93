"""`windlass link` answers job scripts by its exit code, and launching needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from windlass.cli.launch import link
from windlass.errors import ConfigError
from windlass.files import write_json
from windlass.runs import Run
from windlass.runs.events import Finished, Saved


def test_link_answers_by_its_exit_code(tmp_path):
    write_json(tmp_path / "config.json", {"name": "x", "train": {"steps": 10}, "data": {}})
    run = Run(tmp_path)

    def exit_code(action: str, **options) -> int:
        with pytest.raises(typer.Exit) as caught:
            link(action, tmp_path, **options)
        return caught.value.exit_code

    assert exit_code("before") == 0
    run.record(Saved(step=5))
    assert exit_code("after", code=75) == 75
    run.record(Finished(step=10))
    # Once as job scripts do it: the exit code must reach the shell.
    argv = [sys.executable, "-m", "windlass", "link", "before", str(tmp_path)]
    assert subprocess.run(argv, capture_output=True).returncode == 10
    with pytest.raises(ConfigError) as caught:
        link("during", tmp_path)
    assert caught.value.code == "launch.link-action"


def test_launching_and_the_doctor_need_no_torch(tmp_path):
    code = """
import sys
import windlass.launch.submit, windlass.launch.array, windlass.launch.ledger, windlass.launch.logs, windlass.cli.sweep
import windlass.planner.search, windlass.launch.sweep.pack, windlass.launch.sweep.dvc
sys.argv = ["windlass", "doctor", "--no-devices", "--megabytes", "1", "--json"]
import windlass.cli
try:
    windlass.cli.main()
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and '"verdict"' in done.stdout, done.stderr
