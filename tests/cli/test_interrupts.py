"""Ctrl-C and SIGTERM end a command with one message and the exit code of a shell, also when they come twice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The command sends itself the signal in the middle of its work, and again while the message is printed.
PROGRAM = """
import os, signal, sys
import rich.console
from windlass import cli
from windlass.launch import staging

number, print_text = int(sys.argv.pop(1)), rich.console.Console.print
signal.signal(signal.SIGINT, signal.default_int_handler)

def stage(*args):
    try:
        os.kill(os.getpid(), number)
    finally:
        print("cleaned up")

def print_slowly(self, *args, **options):
    os.kill(os.getpid(), number)
    print_text(self, *args, **options)

staging.stage, rich.console.Console.print = stage, print_slowly
cli.main()
"""


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_a_signal_ends_a_command_with_a_message(number: int, name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    argv = [sys.executable, "-c", PROGRAM, str(int(number)), "stage", str(tmp_path), "--store", str(tmp_path / "fast")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=os.environ)
    assert (done.returncode, done.stdout) == (code, "cleaned up\n")
    assert f"stopped by {name}" in done.stderr and "Traceback" not in done.stderr


def test_a_signal_after_the_command_has_said_how_it_ended_leaves_no_traceback(tmp_path: Path) -> None:
    """Python's own clean-up takes a while once torch is imported."""
    program = """
import atexit, os, signal, time
import typer
from windlass import cli
from windlass.launch import staging

def stage(*args):
    raise typer.Exit(130)

atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(10)))
staging.stage = stage
cli.main()
"""
    (tmp_path / "config.json").write_text("{}")
    argv = [sys.executable, "-c", program, "stage", str(tmp_path), "--store", str(tmp_path / "fast")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == -signal.SIGTERM and done.stderr == ""
