"""How does the doctor visit compute nodes? As a short job with one task per device; the records come back through a shared folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from windlass.clusters import Cluster, load_cluster
from windlass.errors import LaunchError
from windlass.files import append_line, write_atomic
from windlass.launch.checks import check_request, refuse
from windlass.launch.doctor import Check, examine, read_records
from windlass.launch.job import Environment, Job, find_partition
from windlass.launch.script import render
from windlass.launch.slurm import Slurm, wait
from windlass.launch.submit import active_venv, submission_record

DOCTOR_SECONDS = 900.0


def count_devices() -> int:
    """Accelerators of this machine by their device files; without any, two CPU processes."""
    nvidia = [p for p in Path("/dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()]
    amd = list(Path("/dev/dri").glob("renderD*")) if Path("/dev/kfd").exists() else []
    return len(nvidia) or len(amd) or 2


def doctor_job(
    cluster: Cluster,
    nodes: int,
    folder: Path,
    paths: tuple[Path, ...],
    *,
    full: bool,
    account: str | None,
    partition: str | None,
) -> Job:
    slurm = cluster.slurm
    if slurm is None:
        raise LaunchError(
            "launch.slurm-run-doctor-nodes",
            f"{cluster.name} has no SLURM to run the doctor on {nodes} nodes",
            hint="run `windlass doctor` without --cluster and --nodes",
        )
    name = partition or slurm.partition
    queue = find_partition(cluster, name, slurm.qos)
    venv = active_venv()
    command = (
        "python",
        "-m",
        "windlass.launch.doctor_worker",
        str(folder),
        *(("--full",) if full else ()),
        *(str(p.absolute()) for p in paths),
    )
    return Job(
        name="windlass-doctor", kind="doctor", run_dir=str(folder), workdir=str(Path.cwd()), command=command, nodes=nodes, tasks_per_node=cluster.node.devices,
        devices_per_node=cluster.node.devices, cpus_per_task=slurm.cpus_per_task, partition=name, qos=slurm.qos if name == slurm.partition else queue.qos if queue else None,
        account=account or os.environ.get("SBATCH_ACCOUNT"), mem=None if slurm.mem_forbidden else slurm.mem,
        seconds=min(DOCTOR_SECONDS, queue.max_time if queue and queue.max_time else DOCTOR_SECONDS),
        environment=Environment(kind="venv" if venv else "module", modules=tuple(cluster.modules), venv=venv), about=("a short check before the real job",),
    )  # fmt: skip


def run_job(
    name: str, nodes: int, paths: tuple[Path, ...], *, full: bool = False, account: str | None = None, partition: str | None = None, wait_seconds: float = 1800.0,
    folder: Path | None = None,
) -> list[Check]:  # fmt: skip
    """Submit, wait, read the records. What the queue refuses is told before it is asked."""
    cluster, slurm = load_cluster(name), Slurm()
    folder = (folder or Path("runs") / f"doctor-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    job = doctor_job(cluster, nodes, folder, paths, full=full, account=account, partition=partition)
    refuse(check_request(job, cluster), force=False)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    script = Path(job.job_file)
    write_atomic(script, render(job, cluster))
    job_id = slurm.submit(script, run_dir=folder)
    append_line(folder / "jobs.jsonl", submission_record(job, cluster, "slurm", job_id))
    state = wait(slurm, job_id, wait_seconds)
    if state is None or not state.over:
        word = state.state.lower() if state else "unknown to SLURM"
        slurm.cancel([job_id])
        raise LaunchError(
            "launch.doctor-s-job-after",
            f"the doctor's job {job_id} is {word} after {wait_seconds:.0f} s and was cancelled",
            hint="wait longer with --wait, or use a partition for short jobs (--partition)",
        )
    log = folder / "logs" / f"{job_id}.out"
    found = examine(_late_records(folder, job.tasks), job.tasks)
    if state.state != "COMPLETED" and log.is_file():
        found.append(Check("job", "all", "fail", f"job {job_id} ended {state.state}", f"its log: {log}"))
    return found


def _late_records(folder: Path, expected: int, patience_seconds: float = 10.0) -> list[dict[str, object]]:
    """A parallel file system may show the records some seconds after the job has ended."""
    end = time.monotonic() + patience_seconds
    while len(found := read_records(folder)) < expected and time.monotonic() < end:
        time.sleep(0.5)
    return found
