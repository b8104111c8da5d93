"""The real commands: `windlass train --devices 2` loses a worker, is stopped, and `windlass resume` brings it to its end on one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from windlass.cli.resume import resume
from windlass.cli.train import train
from windlass.errors import EXIT_RESUMABLE, CheckpointError, RunError
from windlass.files import read_json
from windlass.runs.folder import Run

RECIPE = """
name = "tiny"
[model]
family = "llama"
layers = 2
width = 32
ffn = 64
heads = 4
kv_heads = 2
vocab = 128
[data]
seq_len = 16
batch_tokens = 128
[train]
precision = "fp32"
steps = 60
[layout]
shard = "full"
[save]
every = 5
[energy]
enabled = false
"""


def until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def windlass(*words: str, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "windlass", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.multi
@pytest.mark.xdist_group("faults")
def test_a_lost_worker_is_replaced_a_stop_is_resumable_and_resume_finishes(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    run = Run(tmp_path / "run")
    command = windlass("train", "tiny.toml", "--run", "run", "--devices", "2", folder=tmp_path)
    until(lambda: (run.last_metrics().step or 0) >= 7)
    os.kill(read_json(run.heartbeat_file(1))["pid"], signal.SIGKILL)
    until(lambda: any(e.event == "resumed" for e in run.events()))
    until(lambda: (run.last_metrics().step or 0) >= 12)
    command.send_signal(signal.SIGTERM)
    output = command.communicate(timeout=60)[0].decode()
    assert command.returncode == EXIT_RESUMABLE, output
    assert "windlass resume run" in output
    kinds = [e.event for e in run.events()]
    fault = next(e for e in run.events() if e.event == "fault")
    assert (fault.rank, fault.kind) == (1, "killed") and kinds.index("fault") < kinds.index("restarted") < kinds.index(
        "resumed"
    ) < kinds.index("stopped")
    resumed = windlass("resume", "run", "--devices", "1", folder=tmp_path)
    output = resumed.communicate(timeout=120)[0].decode()
    assert resumed.returncode == 0, output
    assert [e.step for e in run.events() if e.event == "finished"] == [60]
    with pytest.raises(RunError) as caught:
        resume(run.path)
    assert caught.value.code == "runs.finished" and "step 60" in caught.value.message and caught.value.exit_code == 4


def test_a_purged_run_stops_and_begins_again_only_when_told_to(tmp_path: Path) -> None:

    (tmp_path / "tiny.toml").write_text(RECIPE)
    run = Run(tmp_path / "run")

    def start(**options: bool) -> int:
        with pytest.raises(typer.Exit) as done:
            train(tmp_path / "tiny.toml", ["train.steps=6"], run.path, quiet=True, **options)
        return done.value.exit_code

    assert start() == 0
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError) as caught:
        start()
    assert caught.value.code == "checkpoint.gone" and "step 6 " in caught.value.message
    assert [e.event for e in run.events()].count("started") == 1
    assert start(from_scratch=True) == 0
    kinds = [e.event for e in run.events()]
    assert kinds.count("started") == 2 and kinds.count("checkpoints_lost") == 1 and run.checkpoint(6).is_dir()
