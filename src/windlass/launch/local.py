"""How does a machine without a scheduler run the same job? A detached process, a pid file beside its log, the same interface."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.clusters.model import Cluster
from windlass.clusters.scheduler import LOCAL_JOB
from windlass.errors import LaunchError
from windlass.files import read_json, write_json
from windlass.launch.executor import State
from windlass.launch.job import Job
from windlass.launch.script import LINK_AGAIN, LINK_STOP, _environment, _variables, header, inside


def render_local(job: Job, cluster: Cluster) -> str:
    """The same steps as under SLURM, without directives: links follow each other in one process."""
    limit = (
        f"timeout --signal=USR1 --kill-after={int(job.lead_seconds)} {int(job.seconds - job.lead_seconds)} "
        if job.seconds != float("inf")
        else ""
    )
    command = (*job.command, "--devices", str(job.devices_per_node))
    lines = [
        header(job, cluster),
        "set -o pipefail",
        *_environment(job.environment),
        *_variables(job, cluster),
        f"cd {job.workdir!r} || exit 1",
        f"for link in $(seq {job.links if job.chain != 'self' else 1000}); do",
        f"    {inside(job, cluster, ('windlass', 'link', 'before', job.run_dir))}",
        "    answer=$?",
        f'    if [ "$answer" -eq {LINK_STOP} ]; then exit 0; fi',
        '    if [ "$answer" -ne 0 ]; then exit "$answer"; fi',
        f"    {limit}{inside(job, cluster, command)}",
        "    code=$?",
        f"    {inside(job, cluster, ('windlass', 'link', 'after', job.run_dir, '--code', '$code'))}",
        f"    [ $? -eq {LINK_AGAIN} ] || break",
        "done",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


class Local:
    """Processes of this machine."""

    name = "local"

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None, options: Sequence[str] = ()) -> str:
        if after:
            raise LaunchError(
                "launch.scheduler-here-wait-another",
                "there is no scheduler here to wait for another job",
                hint="run the commands one after the other",
            )
        logs = run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        job = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        # The wrapper keeps the exit code, which nobody waits for once the launching shell is gone.
        wrapper = 'bash "$1"; code=$?; echo $code > "$2.part"; mv "$2.part" "$2"; exit $code'
        with (logs / f"{job}.out").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", wrapper, "windlass", str(script), str(logs / f"{job}.rc")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, LOCAL_JOB: job},
            )  # fmt: skip
        write_json(
            logs / f"{job}.pid",
            {"pid": process.pid, "ticks": start_ticks(process.pid), "started_at": time.time(), "run": str(run_dir)},
        )
        self._remember(job, logs)
        return job

    def __init__(self, run_dir: Path | None = None) -> None:
        self._logs = run_dir / "logs" if run_dir else None
        self._known: dict[str, Path] = {}

    def _remember(self, job: str, logs: Path) -> None:
        self._known[job] = logs

    def _folder(self, job: str) -> Path | None:
        return self._known.get(job) or self._logs

    def states(self, jobs: Sequence[str]) -> Mapping[str, State]:
        return {job: state for job in jobs if (state := self._state(job)) is not None}

    def _state(self, job: str) -> State | None:
        logs = self._folder(job)
        record = read_json(logs / f"{job}.pid") if logs else None
        if logs is None or record is None:
            return None
        started, result = float(record["started_at"]), logs / f"{job}.rc"
        if result.is_file():
            code, ended = int(result.read_text().strip() or 1), result.stat().st_mtime
            return State(job=job, state="COMPLETED" if code == 0 else "FAILED", nodes=1, exit_code=code, started_at=started, ended_at=ended,
                         elapsed_seconds=ended - started, evidence="process")  # fmt: skip
        if start_ticks(int(record["pid"])) == record["ticks"]:
            return State(
                job=job,
                state="RUNNING",
                nodes=1,
                started_at=started,
                elapsed_seconds=time.time() - started,
                evidence="process",
            )
        return State(job=job, state="CANCELLED", nodes=1, started_at=started, evidence="process")

    def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            logs = self._folder(job)
            record = read_json(logs / f"{job}.pid") if logs else None
            # The start time tells a live job from a stranger who was given the same pid.
            if record and start_ticks(int(record["pid"])) == record["ticks"]:
                os.killpg(int(record["pid"]), signal.SIGTERM)


def start_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None when it is gone (a zombie is gone too)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
