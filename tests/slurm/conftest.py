"""A real SLURM for the tests of this folder: brought up once, taken down at the end, on one worker.

Without SLURM or root the tests are skipped, unless CI=true: there a missing scheduler is a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from windlass.launch.executor import RUNNING

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "scripts" / "slurm-dev-cluster"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def scheduler(request):
    """The running dev cluster: four nodes of eight claimed cores and eight fake devices."""
    here = [item for item in request.session.items if HERE in item.path.parents]
    if "PYTEST_XDIST_WORKER" in os.environ and not all(item.nodeid.endswith("@slurm") for item in here):
        pytest.fail("xdist would spread the SLURM tests over its workers: use --dist loadgroup with pytest 8")
    tools = [
        shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        for tool in ("sbatch", "slurmctld", "slurmd", "munged")
    ]
    if not all(tools) or os.geteuid() != 0:
        reason = "SLURM is not installed here, or this is not root (scripts/slurm-dev-cluster install)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    up = subprocess.run([str(SCRIPT), "up", "--fresh"], capture_output=True, text=True)
    assert up.returncode == 0, up.stdout + up.stderr
    yield SCRIPT
    down = subprocess.run([str(SCRIPT), "down"], capture_output=True, text=True)
    assert down.returncode == 0, down.stdout + down.stderr


@dataclass
class Site:
    """A login node: a folder of one's own, the command line, and the scheduler's own tools."""

    folder: Path
    script: Path
    standin: Path

    def windlass(self, *argv: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(BIN / "windlass"), *map(str, argv)], cwd=self.folder, capture_output=True, text=True, timeout=120
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def json(self, *argv: Any) -> Any:
        return json.loads(self.windlass(*argv, "--json").stdout)

    def launch(self, recipe: Path, *argv: Any) -> list[str]:
        return self.json("launch", recipe, *argv)["jobs"]

    def states(self, run: str) -> list[str]:
        """As `windlass jobs` has them, asked in this process: a command line a second would be most of the load."""
        from windlass.launch.ledger import entries
        from windlass.launch.submit import executors
        from windlass.runs import Run

        result = Run(self.folder / "runs" / run)
        return [entry.state.state for entry in entries(result, executors(result))]

    def tool(self, *argv: str) -> str:
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def recipe(self, name: str, **changes: Any) -> Path:
        return write_recipe(self.folder / f"{name}.toml", name, **changes)

    def log(self, run: str) -> str:
        return "".join(p.read_text() for p in sorted((self.folder / "runs" / run / "logs").glob("*.out")))

    def records(self, run: str, file: str = "jobs.jsonl") -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, run: str, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.records(run, "events.jsonl") if e["event"] == kind]

    def wait(self, goal: str, ready: Callable[[], Any], seconds: float = 150.0) -> Any:
        end = time.monotonic() + seconds
        while not (result := ready()):
            assert time.monotonic() < end, f"{goal}: not within {seconds:.0f} s\n{self.tool('squeue', '-t', 'all')}"
            time.sleep(0.3)
        return result

    def wait_over(self, run: str, seconds: float = 150.0) -> list[str]:
        """Until no job of the run waits or runs; their states."""

        def over() -> list[str] | None:
            states = self.states(run)
            if not states or any(state in ("PENDING", "CONFIGURING", *RUNNING) for state in states):
                return None
            time.sleep(1.0)  # a job that is about to be requeued has ended for a moment
            return states if self.states(run) == states else None

        return self.wait(f"end of {run}", over, seconds)


def write_recipe(path: Path, name: str, *, launch: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A tiny model on synthetic tokens; `launch` and dotted keys such as train__steps change it."""
    values: dict[str, dict[str, Any]] = {
        "": {"name": name, "cluster": "dev", "nodes": 2},
        "model": {"layers": 2, "width": 64, "ffn": 128, "heads": 2, "vocab": 512, "tied": True},
        "data": {"seq_len": 64, "batch_tokens": 512},
        "optim": {"lr": 1e-3},
        "train": {"steps": 20, "precision": "fp32"},
        "layout": {"shard": "none", "micro_batch": 2},
        "save": {"every": 10},
        "energy": {"enabled": False},
        "launch": {"time": "10m", **(launch or {})},
    }
    for key, value in changes.items():
        table, _, inner = key.rpartition("__")
        values[table][inner] = value
    lines = []
    for table, content in values.items():
        lines += [f"[{table}]"] if table else []
        lines += [f"{key} = {_toml(value)}" for key, value in content.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{k}" = {_toml(v)}' for k, v in value.items()) + " }"
    return json.dumps(value)


@contextlib.contextmanager
def login(scheduler: Path, folder: Path) -> Iterator[Site]:
    """A fresh login folder on the dev cluster; jobs that are left in the queue are cancelled."""
    config, home = folder / "config", folder / "home"
    (config / "windlass" / "clusters").mkdir(parents=True)
    home.mkdir()
    shutil.copy(HERE / "dev.toml", config / "windlass" / "clusters" / "dev.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(config))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in [n for n in os.environ if n.startswith("SLURM_")]:
            patch.delenv(name)
        yield Site(home, scheduler, make_standin(folder / "standin"))
        subprocess.run(["scancel", "--user=root"], capture_output=True)


@pytest.fixture
def site(scheduler, tmp_path):
    with login(scheduler, tmp_path) as site:
        yield site


def make_standin(folder: Path) -> Path:
    """A virtual environment whose training worker is standin.py: the scheduler's side without waiting for torch."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").write_text(f'export PATH="{folder}/bin:{BIN}:$PATH"\n')
    shim = folder / "bin" / "python"
    is_worker = '[ "$2" = windlass.train.worker ]'
    shim.write_text(
        f'#!/bin/bash\nif {is_worker}; then exec {sys.executable} {HERE}/standin.py "${{@:3}}"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    shim.chmod(0o755)
    return folder
