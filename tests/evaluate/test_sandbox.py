"""Generated programs: limited, confined, and failed with the reason."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from windlass.errors import ConfigError
from windlass.evaluate import sandbox
from windlass.evaluate.sandbox import Execution, SandboxLimits, check_sandbox, run_program, run_programs


class Limits(SandboxLimits):
    wall_seconds = 4.0  # type: ignore[assignment]


LIMITS = Limits(cpu_seconds=1, memory_bytes=256 * 2**20, file_bytes=4 * 2**20, folder_bytes=8 * 2**20)
CASES = [
    ("x = 1", "assert x == 1", "passed"),
    ("x = 1", "assert x == 2", "AssertionError"),
    ("x =", "", "SyntaxError"),
    ("import sys; sys.exit(0)", "assert False", "ended before its tests"),
    ("import os; os._exit(0)", "assert False", "ended before its tests"),
    ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "", "time"),
    ("parts = []\nwhile True: parts.append(bytes(10**7))", "", "memory"),
    ("import os\nos.fork()", "", "PermissionError"),
    ("import subprocess\nsubprocess.run(['true'])", "", "PermissionError"),
    ("import os\nos.execv('/bin/true', ['true'])", "", "PermissionError"),
    ("import os\nos.kill(os.getppid(), 9)", "", "PermissionError"),
    ("while True: print('x' * 10000)", "", "output"),
    ("open('big', 'wb').write(bytes(2 * 10**7))", "", "OSError"),
    ("n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').write(bytes(10**6))", "", "files"),
    ("open('here', 'w').write('x')", "assert open('here').read() == 'x'", "passed"),
    ("import ctypes; ctypes.string_at(0)", "", "killed by SIGSEGV"),
    ("def f(n): return f(n + 1)", "f(0)", "RecursionError"),
    ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", "", "passed"),
    ("input()", "", "EOFError"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][:40])
def test_how_a_program_ends(case: tuple[str, str, str]) -> None:
    program, tests, reason = case
    started = time.monotonic()
    assert run_program(program, tests, LIMITS).reason == reason
    assert time.monotonic() - started < 30  # a busy machine; without limits it never ends


def test_a_program_that_sleeps_ends_by_the_clock() -> None:
    limits = Limits(cpu_seconds=1)
    assert run_program("import time; time.sleep(600)", "", limits).reason == "time"


def test_nothing_outside_its_folder_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("kept")
    before = file.stat()
    actions = [
        f"open({str(file)!r}, 'w')",
        f"open({str(file)!r}, 'a').write('x')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.remove({str(file)!r})",
        f"os.rename({str(file)!r}, 'taken')",
        f"os.link({str(file)!r}, 'linked')",
        f"os.mkdir({str(tmp_path / 'folder')!r})",
        f"os.chmod({str(file)!r}, 0)",
        f"os.truncate({str(file)!r}, 0)",
        f"os.utime({str(file)!r}, (0, 0))",
        f"os.setxattr({str(file)!r}, 'user.x', b'1')",
    ]
    program = f"""
import os
done = []
for action in {actions!r}:
    try:
        exec(action)
        done.append(action)
    except OSError:
        pass
"""
    assert run_program(program, "assert len(done) == 0, done", LIMITS) == Execution("passed")
    after = file.stat()
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]
    assert (before.st_mode, before.st_mtime, before.st_nlink) == (after.st_mode, after.st_mtime, after.st_nlink)


def test_no_network_no_secrets_and_nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        assert run_program(connect, "", LIMITS).reason == "PermissionError"
    inside = "import os\nassert 'SECRET_TOKEN' not in os.environ and os.listdir() == []"
    assert run_program(inside, "", LIMITS).passed
    spy = f"open('/proc/{os.getpid()}/environ').read()"  # Landlock: no look into processes outside
    assert run_program(spy, "", LIMITS).reason == "PermissionError"
    nested = "import os\nfor _ in range(1050):\n    os.mkdir('d')\n    os.chdir('d')\nos.mkdir('closed', 0)"
    assert run_program(nested, "", LIMITS).reason in ("passed", "time")
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_without_protection_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child of a kernel without Landlock and without a seccomp filter for its processor."""
    child = tmp_path / "child.py"
    text = sandbox.CHILD.read_text().replace("version = libc.syscall(444, None, 0, 1)", "version = -1")
    child.write_text(text.replace('MACHINES = {"x86_64"', 'MACHINES = {"other"').replace('"aarch64"', '"another"'))
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(ConfigError) as error:
        check_sandbox(weak=False)
    assert error.value.code == "evaluate.sandbox-incomplete"
    assert "files" in error.value.message and "network" in error.value.message
    assert check_sandbox(weak=True) == ("files", "network and processes")
    assert run_program("x = 1", "", LIMITS).reason == "not run"
    assert run_program("x = 1", "assert x == 1", LIMITS, weak=True).passed
    assert run_program("while True: pass", "", LIMITS, weak=True).reason == "time"


def test_many_programs_keep_their_order() -> None:
    calls: list[tuple[int, int]] = []
    programs = [(f"x = {n}", f"assert {n} % 2") for n in range(5)]
    executions = run_programs(programs, LIMITS, progress=lambda done, total: calls.append((done, total)))
    assert [one.passed for one in executions] == [False, True, False, True, False]
    assert calls[-1] == (5, 5) and executions[1] == Execution("passed")
