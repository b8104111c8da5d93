"""From a running job's tracker to the server's curves, with the real wandb on both sides and a server of our own: each line once, in order."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tests.report.sample_run import make_run
from tests.report.wandb_server import WandbServer
from typer.testing import CliRunner

from windlass.cli import build
from windlass.report import sync
from windlass.runs.folder import Run

pytest.importorskip("wandb")
pytestmark = pytest.mark.multi
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server(monkeypatch, tmp_path):
    made = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", made.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(make_run(tmp_path / "runs" / "live", name="live", finished=False))
    run.metrics_file.write_text("")
    return run


JOB = """
import sys, time
from pathlib import Path
from windlass.runs.folder import Run
from windlass.train import tracking
from windlass.train.trackers.wandb import open_tracker

tracking.REQUEST_POLL_SECONDS, tracking.CLOSE_SECONDS = 0.0, 120.0
run = Run(Path(sys.argv[1]))
exporter = tracking.Exporter(run, run.recipe(), {"wandb": open_tracker}, first_step=0, say=lambda text: print(text, flush=True))
exporter.start()

def log(*steps):
    for step in steps:  # what the training loop does: the record first, then the trackers
        line = {"step": step, "tokens": step * 10, "loss": 5 - step / 10, "time": time.time()}
        run.metric(line)
        exporter.put(line)

def until(path):
    while not path.exists():
        time.sleep(0.05)

log(1, 2, 3, 4, 5)
until(run.requests / "part")
log(6, 7)
until(run.path / "more")
log(8, 9, 10)
exporter.stop()
run.event("finished", step=10, tokens=100, loss=4.0)
"""


def until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never true"
        time.sleep(0.1)


@pytest.fixture
def job(run, server) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen([sys.executable, "-c", JOB, str(run.path)], stdout=subprocess.PIPE, text=True)
    yield made
    made.kill()
    made.wait()


def test_a_running_job_is_followed_and_nothing_is_sent_twice(run, server, job):
    said: list[str] = []
    until(lambda: sync.is_live(run) and sync.parts(run))
    watcher = threading.Thread(target=sync.sync_watch, args=(run, 0.2), kwargs={"say": said.append}, daemon=True)
    watcher.start()
    until(lambda: server.history())  # live, while the job writes its next part
    assert sync.sync_once(run, dry_run=True)[-1]["state"] == "still being written"
    (run.path / "more").touch()
    assert job.communicate(timeout=120)[0] == ""
    watcher.join(120)
    assert [(h["_step"], h["step"], h["tokens"]) for h in server.history()] == [(n, n, 10 * n) for n in range(1, 11)]
    assert server.uploads == 2 and [text.endswith(": sent") for text in said] == [True, True]
    again = CliRunner().invoke(build(), ["sync", str(run.path)])
    assert again.output.count("sent before") == 2 and server.uploads == 2
    assert KEY not in "".join(p.read_text(errors="replace") for p in run.path.rglob("*") if p.is_file())
