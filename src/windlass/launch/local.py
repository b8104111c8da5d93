"""Jobs on a machine without a scheduler: a detached process with a pid file beside its log."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.clusters.scheduler import LOCAL_JOB
from windlass.errors import LaunchError
from windlass.files import read_json, write_json
from windlass.launch.executor import JobState

# Keeps the exit code, which no process waits for once the launching shell is gone.
WRAPPER = 'bash "$1"; code=$?; echo $code > "$2.part"; mv "$2.part" "$2"; exit $code'


class LocalExecutor:
    name = "local"

    def __init__(self, run_dir: Path) -> None:
        self._logs = run_dir / "logs"

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None) -> str:
        if after:
            raise LaunchError(
                "launch.no-scheduler-for-dependency",
                "there is no scheduler on this machine to wait for another job",
                hint="run the commands one after the other",
            )
        self._logs.mkdir(parents=True, exist_ok=True)
        job = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        with (self._logs / f"{job}.out").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", WRAPPER, "windlass", str(script), str(self._logs / f"{job}.rc")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, LOCAL_JOB: job},
            )
        record = {"pid": process.pid, "ticks": start_ticks(process.pid), "started_at": time.time(), "run": str(run_dir)}
        write_json(self._logs / f"{job}.pid", record)
        return job

    def states(self, jobs: Sequence[str]) -> Mapping[str, JobState]:
        return {job: state for job in jobs if (state := self._state(job)) is not None}

    def _state(self, job: str) -> JobState | None:
        record = read_json(self._logs / f"{job}.pid")
        if record is None:
            return None
        state, code, ended_at, elapsed_seconds = "CANCELLED", None, None, None
        started_at, result = float(record["started_at"]), self._logs / f"{job}.rc"
        if result.is_file():
            code, ended_at = int(result.read_text().strip() or 1), result.stat().st_mtime
            state, elapsed_seconds = "COMPLETED" if code == 0 else "FAILED", ended_at - started_at
        elif start_ticks(int(record["pid"])) == record["ticks"]:
            state, elapsed_seconds = "RUNNING", time.time() - started_at
        return JobState(
            job=job,
            state=state,
            nodes=1,
            exit_code=code,
            started_at=started_at,
            ended_at=ended_at,
            elapsed_seconds=elapsed_seconds,
            evidence="process",
        )

    def cancel(self, jobs: Sequence[str]) -> None:
        for record in (read_json(self._logs / f"{job}.pid") for job in jobs):
            # The start time tells our job from another process that was given the same pid.
            if record and start_ticks(int(record["pid"])) == record["ticks"]:
                os.killpg(int(record["pid"]), signal.SIGTERM)


def start_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None when it is gone (a zombie is gone too)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
