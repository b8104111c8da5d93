"""`windlass train` as a command: one process, two, and a world that the batch does not divide."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
name = "cmd"
[model]
layers = 2
width = 32
ffn = 48
heads = 2
vocab = 100
[data]
seq_len = 16
batch_tokens = 128
[train]
steps = 6
precision = "fp32"
[layout]
micro_batch = 4
[energy]
enabled = false
"""


def windlass(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "windlass", "train", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip


def losses(run: Path) -> list[Any]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.multi
def test_one_and_two_devices_write_the_same_curve(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    one = windlass(tmp_path, "r.toml")
    assert one.returncode == 0, one.stderr
    assert "step 6: finished" in one.stderr
    events = (tmp_path / "runs" / "cmd" / "events.jsonl").read_text()
    again = windlass(tmp_path, "r.toml")
    assert again.returncode == 0 and "step 6, 768 tokens" in again.stdout, again.stdout
    assert (tmp_path / "runs" / "cmd" / "events.jsonl").read_text() == events
    two = windlass(tmp_path, "r.toml", "layout.shard=full", "--devices", "2", "--run", "two")
    assert two.returncode == 0, two.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "runs" / "cmd"), rel=3e-6)
    line = json.loads((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["spread_seconds"] >= 0 and line["slowest_rank"] in (0, 1)
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["world_size"] == 2


@pytest.mark.multi
def test_ctrl_c_while_the_workers_start_leaves_no_traceback_and_no_run(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    argv = [sys.executable, "-m", "windlass", "train", "r.toml", "--devices", "2", "--run", "run"]
    # A shell without job control starts what it puts into the background with SIGINT ignored; a terminal does not.
    default = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = subprocess.Popen(argv, cwd=tmp_path, preexec_fn=default, **pipes)
    log, deadline = tmp_path / "run" / "logs" / "rank-00001.log", time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)  # the interpreters of the workers import their first modules
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 75 and "Traceback" not in err and "windlass resume" not in out, out + err
    assert not (tmp_path / "run").exists()


@pytest.mark.multi
def test_a_batch_that_the_devices_do_not_divide_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    done = windlass(tmp_path, "r.toml", "layout.micro_batch=8", "--devices", "2", "--run", "x")
    assert done.returncode == 2
    assert done.stderr.count("128") == 1 and "256" in done.stderr, done.stderr
    assert not list((tmp_path / "x" / "ranks").glob("error-*")), "refused before a worker starts"
    adjusted = windlass(tmp_path, "r.toml", "layout.micro_batch=8", "--devices", "2", "--run", "y", "--adjust")
    assert adjusted.returncode == 0, adjusted.stderr
    assert "128 -> 256" in adjusted.stdout + adjusted.stderr
    assert json.loads((tmp_path / "y" / "config.json").read_text())["data"]["batch_tokens"] == 256
    assert len(losses(tmp_path / "y")) == 6
