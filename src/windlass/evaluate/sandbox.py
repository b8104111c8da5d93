"""Runs generated programs in a separate process with few rights. docs/guides/generation-tasks.md lists the protections.

The limits protect the machine and the files of the person who evaluates from the mistakes of a model. They do not
defend against code that was written to forge its own result.
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import ConfigError
from windlass.processes import usable_cores

MIB = 2**20
CHILD = Path(__file__).with_name("sandbox_child.py")
PASSED = "passed"


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    cpu_seconds: int = 5
    memory_bytes: int = 1024 * MIB  # of address space
    file_bytes: int = 16 * MIB  # of one file
    folder_bytes: int = 64 * MIB  # of the working folder; looked at ten times a second
    output_bytes: int = MIB  # printed

    @property
    def wall_seconds(self) -> float:
        """Wall-time limit: a sleeping program uses no CPU time, and on a busy machine a program gets little of it."""
        return 3.0 * self.cpu_seconds + 5


@dataclass(frozen=True)
class Execution:
    reason: str  # "passed", the name of an exception, "time", "memory", "output", "files", "killed by SIGSEGV" ...
    message: str = ""
    missing: tuple[str, ...] = ()  # protections that this kernel does not have

    @property
    def passed(self) -> bool:
        return self.reason == PASSED


def run_program(program: str, tests: str, limits: SandboxLimits, *, weak: bool = False) -> Execution:
    """Run a program and then its tests. It passes if the tests end without an exception.

    `weak`: also where the kernel lacks a protection, which is then named in the result.
    """
    token = secrets.token_hex(16)  # a program that only exits with 0 has not passed
    read_end, write_end = os.pipe()
    with _work_folder() as folder, tempfile.TemporaryFile("w+") as job:
        texts = {"program": program, "tests": tests, "token": token, "folder": folder, "weak": weak}
        json.dump({**vars(limits), **texts}, job)
        job.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), str(write_end)],
            stdin=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # One thread of a numerical library needs little address space.
            env={"LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        try:
            exceeded, report = _watch(process, read_end, Path(folder), limits)
        finally:  # also on Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            os.close(read_end)
    missing = tuple(report.get("missing", ()))
    if exceeded is not None:
        return Execution(exceeded, missing=missing)
    if report:
        reason = "memory" if report["reason"] == "MemoryError" else report["reason"]
        if reason == PASSED and report.get("token") != token:
            reason = "ended before its tests"
        return Execution(reason, report.get("message", ""), missing)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Execution("time")  # the hard limit of CPU time kills
    if process.returncode < 0:
        return Execution(f"killed by {signal.Signals(-process.returncode).name}")
    return Execution("ended before its tests")


def _watch(
    process: "subprocess.Popen[bytes]", report_from: int, folder: Path, limits: SandboxLimits
) -> tuple[str | None, dict[str, Any]]:
    """Wait for the end of a program; the limit that it exceeded, and its report."""
    next_look = time.monotonic()
    deadline = next_look + limits.wall_seconds
    printed, report = 0, b""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(report_from, selectors.EVENT_READ)
        selector.register(process.stdout.fileno(), selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(timeout=0.1):
                content = os.read(key.fd, 65_536)
                if not content:
                    selector.unregister(key.fd)
                elif key.fd == report_from:
                    report += content[: 65_536 - len(report)]
                else:
                    printed += len(content)
            if printed > limits.output_bytes:
                return "output", {}
            now = time.monotonic()
            if now > deadline:
                return "time", {}
            if now >= next_look:
                if _is_larger(folder, limits.folder_bytes):
                    return "files", {}
                next_look = now + 0.1
    process.wait()
    with suppress(ValueError):
        value = json.loads(report or b"{}")
        return None, value if isinstance(value, dict) else {}
    return None, {}


@contextmanager
def _work_folder() -> Iterator[str]:
    folder = tempfile.TemporaryDirectory(prefix="windlass-code-", ignore_cleanup_errors=True)
    try:
        yield folder.name
    finally:
        try:
            folder.cleanup()
        except RecursionError:  # a program nested its folders too deep for Python
            subprocess.run(["rm", "-rf", "--", folder.name], check=False)


def _is_larger(folder: Path, limit: int) -> bool:
    """Whether all files, and a block for each file and folder, take more than `limit` bytes."""
    total, folders = 0, [str(folder)]
    while folders and total <= limit:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # removed meanwhile
            for entry in entries:
                total += 4096
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total > limit


def check_sandbox(*, weak: bool) -> tuple[str, ...]:
    """Protections that this machine lacks; without `weak` they are an error, before any code is generated."""
    missing = run_program("", "", SandboxLimits(), weak=True).missing
    if missing and not weak:
        raise ConfigError(
            "evaluate.sandbox-incomplete",
            f"this kernel does not protect {' or '.join(missing)} from generated code",
            hint="network and processes need seccomp (x86-64 or ARM), files need Landlock (Linux 5.13 or later); "
            "in a disposable container, --weak-sandbox runs the code with its other limits",
        )
    return missing


def run_programs(
    programs: Sequence[tuple[str, str]],
    limits: SandboxLimits,
    *,
    weak: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Execution]:
    """Run (program, tests) pairs, one per core at a time."""
    executions = []
    pool = ThreadPoolExecutor(usable_cores())
    try:
        jobs = [pool.submit(run_program, *pair, limits, weak=weak) for pair in programs]
        for done, job in enumerate(jobs, start=1):
            executions.append(job.result())
            progress(done, len(programs))
    finally:
        pool.shutdown(cancel_futures=True)
    return executions
