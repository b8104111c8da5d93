"""A sweep that is stopped by Ctrl-C or killed outright goes on with what is missing, and nothing of the old try lives on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.launch.sweep.execute import end_group

SWEEP = """
name = "naps"
command = '''bash -c "echo begun >> {folder}/log; touch ../begun-{n}; while [ -e ../wait-{n} ]; do sleep 0.05; done; (echo n; echo {n}) > {folder}/m.csv"'''
results = "m.csv"
rank_by = "n"
[matrix]
n = [1, 2, 3]
"""
"""SweepPoint n tells that it runs, and waits as long as ../wait-n is there."""


def start(folder: Path) -> subprocess.Popen:
    argv = [sys.executable, "-m", "windlass", "sweep", "naps.toml", "--run", "sweep"]
    return subprocess.Popen(
        argv, cwd=folder / "here", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )  # fmt: skip


def heed_ctrl_c() -> None:
    """As in a terminal: a shell starts what runs in its background with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)


def outcomes(folder: Path) -> list[tuple[str, str]]:
    text = (folder / "here" / "sweep" / "outcomes.jsonl").read_text()
    return [(line["point"], line["outcome"]) for line in map(json.loads, text.splitlines())]


def alive(mark: str) -> list[str]:
    result = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes():
                result.append(entry.parent.name)
        except OSError:
            continue
    return result


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "naps.toml").write_text(SWEEP)
    (tmp_path / "wait-2").touch()
    return tmp_path


def finish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "wait-2").unlink()
    monkeypatch.chdir(folder / "here")
    done = CliRunner().invoke(build("sweep"), ["sweep", "naps.toml", "--run", "sweep"])
    assert done.exit_code == 0, done.output
    assert outcomes(folder) == [("n-1", "ok"), ("n-2", "ok"), ("n-3", "ok")]  # the first was not run again


@pytest.mark.multi
def test_after_ctrl_c_the_same_command_goes_on(folder, monkeypatch):
    sweep = start(folder)
    wait_for(folder / "begun-2")
    sweep.send_signal(signal.SIGINT)
    output, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130 and "1 of 3" in output
    assert not alive(f"WINDLASS_POINT={folder}")
    finish(folder, monkeypatch)


@pytest.mark.multi
def test_after_a_kill_the_next_start_ends_what_was_left_and_keeps_the_old_try(folder, monkeypatch):
    sweep = start(folder)
    wait_for(folder / "begun-2")
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.communicate(timeout=60)
    # The point's own shell, which the kernel does not end with the sweep.
    lost = subprocess.Popen(
        ["sleep", "300"], env={**os.environ, "WINDLASS_POINT": str(folder / "here/sweep/points/n-2")}
    )
    stranger = subprocess.Popen(["sleep", "300"], env={**os.environ, "WINDLASS_POINT": str(folder / "here/sweep/points/n-22")})  # fmt: skip
    try:
        finish(folder, monkeypatch)
        assert lost.wait(timeout=10) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for process in (lost, stranger):
            process.kill()
            process.wait()
    old = folder / "here" / "sweep" / "earlier" / "n-2" / "1" / "log"
    assert old.read_text() == "begun\n"


class Interrupted(subprocess.Popen):
    """Ctrl-C comes again while this is asked to end."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return super().wait()


def test_a_second_ctrl_c_kills_a_point_that_ignores_the_first() -> None:
    program = "trap '' TERM; echo ready; read"
    point = Interrupted(
        ["bash", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert point.stdout is not None and point.stdout.readline() == "ready\n"
        with pytest.raises(KeyboardInterrupt):
            end_group(point)
        assert point.wait() == -signal.SIGKILL
    finally:
        point.kill()
