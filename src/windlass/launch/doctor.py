"""Checks whether this machine, or a set of nodes, is fit for the real job.

The command itself needs no torch. What needs it (devices, matrix rate, all-reduce) runs in worker processes, one per
device, here or as a short job (`doctor_worker.py`); each leaves a JSON record, and `examine` turns records into checks.
"""

import itertools
import math
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass.clusters import Cluster, device_by_driver_name, load_cluster
from windlass.clusters.scheduler import default_account
from windlass.errors import LaunchError, WindlassError
from windlass.files import read_json
from windlass.launch.checks import check_request, refuse
from windlass.launch.cpu import active_venv
from windlass.launch.job import BatchJob, find_partition, plain_environment
from windlass.launch.slurm import SlurmScheduler
from windlass.launch.submit import submit_job
from windlass.processes import usable_cores
from windlass.units import print_bytes, print_seconds, print_share

SLOW_SHARE = 0.85  # a device slower than this share of the median is named: the whole job waits for it
SLOW_LINK_SHARE = 0.6  # the same for the all-reduce inside a node
CLASS_SHARE = 0.6  # a device is suspect below this share of the best rate measured on such devices
MAX_SKEW_SECONDS = 1.0
MIN_OPEN_FILES = 4096
MIN_SHARED_BYTES = 2**30
WORKER_SECONDS = 300.0
JOB_SECONDS = 900.0
RECORD_SECONDS = 10.0  # a parallel file system may show the records some seconds after the job has ended
# Environment variables that cause problems: the harmful values (None: any), and why.
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the one before it"),
    "NCCL_P2P_DISABLE": (("1",), "devices of a node communicate through the host"),
    "NCCL_IB_DISABLE": (("1",), "nodes communicate over TCP, many times slower"),
    "NCCL_SHM_DISABLE": (("1",), "shared memory between ranks of a node is off"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked twice"),
    "NCCL_DEBUG": (("TRACE",), "the log grows by gigabytes"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor asks the driver for memory"),
    "AMD_SERIALIZE_KERNEL": (("1", "2", "3"), "kernels run one at a time"),
    "HSA_ENABLE_SDMA": (("0",), "copies use compute units"),
    "PYTHONPROFILEIMPORTTIME": (("1",), "every import is timed and printed"),
    "LD_PRELOAD": (None, "a preloaded library can break wheels (XALT does)"),
    "SINGULARITY_BIND": (None, "comes from the submitting shell, and breaks the job if the path is missing there"),
    "APPTAINER_BIND": (None, "comes from the submitting shell, and breaks the job if the path is missing there"),
}  # fmt: skip
# What one worker measured (`doctor_worker.py`).
RankRecord = Mapping[str, Any]


@dataclass(frozen=True)
class DoctorCheck:
    topic: str
    where: str
    level: str  # ok, note, warn or fail
    text: str
    hint: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    checks: tuple[DoctorCheck, ...]

    @property
    def verdict(self) -> str:
        levels = {check.level for check in self.checks}
        return "unfit" if "fail" in levels else "fit, with warnings" if "warn" in levels else "fit"

    @property
    def exit_code(self) -> int:
        return LaunchError.exit_code if self.verdict == "unfit" else 0

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "checks": [asdict(check) for check in self.checks]}


def _limit_check(
    topic: str, where: str, ok: bool, text: str, hint: str, values: Mapping[str, Any], bad: str = "warn"
) -> DoctorCheck:
    """A check whose hint is shown only when it is not ok."""
    return DoctorCheck(topic, where, "ok" if ok else bad, text, None if ok else hint, values)


# -- this host, without torch -----------------------------------------------------------------------------------------


def host_checks(
    paths: Sequence[Path], *, env: Mapping[str, str] = os.environ, megabytes: int = 64
) -> list[DoctorCheck]:
    host = socket.gethostname()
    disks = (disk(host, path, megabytes) for path in paths)
    return [*limits(host), *environment(host, env), *network(host, env), *disks]


def limits(host: str) -> Iterator[DoctorCheck]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _limit_check(
        "open files",
        host,
        soft >= MIN_OPEN_FILES,
        f"{soft:,} (up to {hard:,})",
        f"run `ulimit -n {min(hard, 65536)}` in the job script: shards, workers and sockets need many files",
        {"soft": soft, "hard": hard},
    )
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        yield _limit_check(
            "shared memory",
            host,
            free >= MIN_SHARED_BYTES,
            f"{print_bytes(free)} free in /dev/shm",
            "ask the site for a larger one: data-loader workers and NCCL use it",
            {"free_bytes": free},
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < 2**30 and Path("/sys/class/infiniband").is_dir():
        yield DoctorCheck(
            "locked memory",
            host,
            "warn",
            print_bytes(locked),
            "run `ulimit -l unlimited` in the job script: RDMA pins memory",
            {"bytes": locked},
        )


def environment(host: str, env: Mapping[str, str]) -> list[DoctorCheck]:
    threads, cores = env.get("OMP_NUM_THREADS", ""), usable_cores()
    harmful: list[tuple[bool, str, str, dict[str, str]]] = [
        *(
            (
                bool(env.get(name)) and (values is None or env[name].upper() in values),
                f"{name}={env.get(name)}: {why}",
                f"unset {name}",
                {"name": name, "value": env.get(name, "")},
            )
            for name, (values, why) in HARMFUL.items()
        ),
        (
            threads.isdigit() and int(threads) > cores,
            f"OMP_NUM_THREADS={threads} on {cores} cores: threads compete for cores",
            f"set OMP_NUM_THREADS to {cores} or less",
            {},
        ),
        (
            bool(env.get("ROCR_VISIBLE_DEVICES") and env.get("HIP_VISIBLE_DEVICES")),
            "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are both set: devices are chosen twice",
            "unset one of them",
            {},
        ),
    ]
    checks = [
        DoctorCheck("environment", host, "warn", text, hint, values) for holds, text, hint, values in harmful if holds
    ]
    return checks or [DoctorCheck("environment", host, "ok", "no known problematic variables")]


def network(host: str, env: Mapping[str, str]) -> Iterator[DoctorCheck]:
    started_at = time.perf_counter()
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError as error:
        yield DoctorCheck(
            "name service",
            host,
            "fail",
            f"{host} has no address: {error}",
            "ranks find each other by host name: ask the site, or set MASTER_ADDR to an IP address",
        )
    else:
        seconds = time.perf_counter() - started_at
        yield _limit_check(
            "name service",
            host,
            seconds <= 1.0,
            f"{host} is {address} ({print_seconds(seconds)})",
            "a slow name service delays every start",
            {"seconds": seconds},
        )
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = [w.lstrip("=") for w in env.get(variable, "").split(",") if w and not w.startswith("^")]
        missing = ", ".join(w for w in wanted if not any(name.startswith(w) for name in interfaces))
        if wanted:
            yield _limit_check(
                "interface",
                host,
                not missing,
                (f"{variable}={env[variable]}" + (f", but there is no {missing}" if missing else "")),
                f"interfaces here: {', '.join(sorted(interfaces))}",
                {},
                bad="fail",
            )


def disk(host: str, path: Path, megabytes: int) -> DoctorCheck:
    """Write and read in MB/s, and small-file latency, in a temporary folder there.

    The write ends with fsync. The read asks the kernel to drop the pages first, which it may not do."""
    block, times = os.urandom(1 << 20), [time.perf_counter()]
    try:
        with tempfile.TemporaryDirectory(prefix=".windlass-doctor-", dir=path) as folder:
            with Path(folder, "block").open("w+b") as file:
                for _ in range(megabytes):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                times.append(time.perf_counter())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                while file.read(1 << 20):
                    pass
            times.append(time.perf_counter())
            small = Path(folder, "small")
            for _ in range(10):
                small.write_bytes(b"x")
                small.unlink()
                times.append(time.perf_counter())
    except OSError as error:
        hint = "choose a folder that exists and that you may write to"
        return DoctorCheck("disk", host, "fail", f"{path}: {error.strerror or error}", hint)
    write_seconds, read_seconds, *small_seconds = (end - start for start, end in itertools.pairwise(times))
    write_mbs, read_mbs = megabytes / write_seconds, megabytes / read_seconds
    latency_ms, free = 1e3 * statistics.median(small_seconds), shutil.disk_usage(path).free
    rates = f"write {write_mbs:,.0f} MB/s, read {read_mbs:,.0f} MB/s, small file {latency_ms:.1f} ms"
    return _limit_check(
        "disk",
        host,
        write_mbs >= 50 and latency_ms <= 100,
        f"{path}: {rates}, {print_bytes(free)} free",
        "checkpoints and small files will be slow here",
        {"write_mbs": write_mbs, "read_mbs": read_mbs, "latency_ms": latency_ms, "free_bytes": free},
    )


def data_checks(store: str | None, tokenizer: str | None) -> Iterator[DoctorCheck]:
    host = socket.gethostname()
    if store is not None:
        from windlass.data.store import open_store

        try:
            sources = open_store(store).sources
            yield DoctorCheck(
                "token store",
                host,
                "ok",
                f"{store}: {len(sources)} sources, {sum(s.tokens for s in sources.values()):,} tokens",
            )
        except WindlassError as error:
            yield DoctorCheck("token store", host, "fail", error.message, error.hint)
    if tokenizer is not None:
        readable = os.access(tokenizer, os.R_OK)
        yield DoctorCheck(
            "tokenizer",
            host,
            "ok" if readable else "fail",
            f"{tokenizer} {'can be read' if readable else 'is missing or cannot be read'}",
        )


# -- workers, here or as a job ----------------------------------------------------------------------------------------


def count_devices() -> int:
    """Accelerators of this machine by their device files; without any, two CPU processes."""
    nvidia = [p for p in Path("/dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()]
    amd = list(Path("/dev/dri").glob("renderD*")) if Path("/dev/kfd").exists() else []
    return len(nvidia) or len(amd) or 2


def run_workers(out: Path, count: int, *, full: bool = False) -> list[RankRecord]:
    """One worker per device on this machine; their records. A worker that dies leaves none, and that is a finding."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    argv = [sys.executable, "-m", "windlass.launch.doctor_worker", str(out), *(["--full"] if full else [])]
    workers = []
    for rank in range(count):
        env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (out / f"worker-{rank:05d}.log").open("wb") as log:
            workers.append(subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + WORKER_SECONDS
    try:
        with suppress(subprocess.TimeoutExpired):  # the missing record is the finding
            for worker in workers:
                worker.wait(timeout=max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return read_records(out)


def read_records(out: Path) -> list[RankRecord]:
    return [record for path in sorted(out.glob("rank-*.json")) if (record := read_json(path)) is not None]


def doctor_job(
    cluster: Cluster, nodes: int, folder: Path, arguments: Sequence[str], *, account: str | None, partition: str | None
) -> BatchJob:
    slurm, devices = cluster.slurm, cluster.node.devices
    if slurm is None:
        raise LaunchError(
            "launch.cluster-without-slurm",
            f"{cluster.name} has no SLURM to run the doctor on {nodes} nodes",
            hint="run `windlass doctor` without --cluster and --nodes",
        )
    queue = find_partition(cluster, partition or slurm.partition, slurm.qos)
    return BatchJob(
        name="windlass-doctor",
        kind="doctor",
        run_dir=str(folder),
        workdir=str(Path.cwd()),
        command=("python", "-m", "windlass.launch.doctor_worker", *arguments),
        nodes=nodes,
        tasks_per_node=devices,
        devices_per_node=devices,
        cpus_per_task=slurm.cpus_per_task,
        partition=partition or slurm.partition,
        qos=slurm.qos if partition in (None, slurm.partition) else queue.qos if queue else None,
        account=account or default_account(slurm.account),
        mem=None if slurm.mem_forbidden else slurm.mem,
        seconds=min(JOB_SECONDS, queue.max_time if queue and queue.max_time else JOB_SECONDS),
        environment=plain_environment(cluster, active_venv()),
        about=("a short check before the real job",),
    )


def run_doctor_job(
    cluster_name: str,
    nodes: int,
    paths: Sequence[Path],
    *,
    full: bool = False,
    account: str | None = None,
    partition: str | None = None,
    wait_seconds: float = 1800.0,
) -> list[DoctorCheck]:
    """Submit, wait, read the records. The request is checked before it is submitted."""
    cluster, scheduler = load_cluster(cluster_name), SlurmScheduler()
    folder, devices = (Path("runs") / f"doctor-{time.strftime('%Y%m%d-%H%M%S')}").absolute(), cluster.node.devices
    arguments = [str(folder), *(["--full"] if full else []), *(str(path.absolute()) for path in paths)]
    job = doctor_job(cluster, nodes, folder, arguments, account=account, partition=partition)
    refuse(check_request(job, cluster), force=False)
    job_id = submit_job(job, cluster, scheduler)
    state = scheduler.wait(job_id, wait_seconds)
    if state is None or not state.over:
        scheduler.cancel([job_id])
        now = state.state.lower() if state else "unknown to SLURM"
        raise LaunchError(
            "launch.doctor-job-timeout",
            f"the doctor's job {job_id} is {now} after {wait_seconds:.0f} s and was cancelled",
            hint="wait longer with --wait, or use a partition for short jobs (--partition)",
        )
    ranks, deadline = nodes * devices, time.monotonic() + RECORD_SECONDS
    while len(rank_records := read_records(folder)) < ranks and time.monotonic() < deadline:
        time.sleep(0.5)
    checks, log = examine(rank_records, ranks), folder / "logs" / f"{job_id}.out"
    if state.state != "COMPLETED" and log.is_file():
        checks.append(DoctorCheck("job", "all", "fail", f"job {job_id} ended {state.state}", f"see its log: {log}"))
    return checks


# -- what the records say ---------------------------------------------------------------------------------------------


def examine(rank_records: Sequence[RankRecord], ranks: int, out: Path | None = None) -> list[DoctorCheck]:
    """Checks from the workers' records. Pure, except for reading the log of a worker that left no record."""
    nodes = len({record["host"] for record in rank_records})
    presence = DoctorCheck(
        "ranks", "all", "ok", f"{len(rank_records)} ranks on {nodes} node{'s' if nodes > 1 else ''} answered"
    )
    if len(rank_records) < ranks:
        lost = sorted(set(range(ranks)) - {int(record["rank"]) for record in rank_records})
        log = out / f"worker-{lost[0]:05d}.log" if out else None
        lines = log.read_text(errors="replace").strip().splitlines() if log and log.is_file() else []
        reason = f" ({lines[-1]})" if lines else ""
        presence = DoctorCheck(
            "ranks",
            "all",
            "fail",
            f"{len(lost)} of {ranks} ranks left no record: {', '.join(map(str, lost[:8]))}{reason}",
            "see their logs, and check that torch is installed in this environment",
        )
    if not rank_records:
        return [presence]
    measured = [*_same_everywhere(rank_records), *_matrix_rates(rank_records), *_all_reduce_rates(rank_records)]
    # All ranks read their clocks as they leave one barrier; the difference is skew plus the barrier's own spread.
    clocks = {str(r["host"]): float(r["clock"]) for r in reversed(rank_records) if r.get("clock") is not None}
    skew = max(clocks.values(), default=0.0) - min(clocks.values(), default=0.0)
    clock_check = _limit_check(
        "clocks",
        "all",
        skew <= MAX_SKEW_SECONDS,
        f"{print_seconds(skew)} apart on {len(clocks)} nodes",
        "ask the site to synchronise the clocks: logs and energy windows of the nodes will not match",
        {"skew_seconds": skew},
    )
    on_hosts = [DoctorCheck(**check) for record in rank_records for check in record.get("host_checks", ())]
    return [presence, *measured, *([clock_check] if len(clocks) > 1 else []), *on_hosts]


def _same_everywhere(rank_records: Sequence[RankRecord]) -> Iterator[DoctorCheck]:
    for key, topic in (("device", "devices"), ("torch", "torch"), ("driver", "driver"), ("runtime", "runtime")):
        groups: dict[str, list[str]] = {}
        for record in rank_records:
            groups.setdefault(str(record.get(key)), []).append(f"{record['host']}:{record['local_rank']}")
        if len(groups) > 1:
            parts = (f"{v} on {', '.join(at[:4])}{' ...' if len(at) > 4 else ''}" for v, at in groups.items())
            yield DoctorCheck(
                topic,
                "all",
                "warn" if key == "driver" else "fail",
                f"different: {'; '.join(parts)}",
                "use nodes of one kind: the slowest determines the speed, if training works at all",
            )
        elif "None" not in groups:
            yield DoctorCheck(topic, "all", "ok", f"{next(iter(groups))} on all {len(rank_records)} ranks")


def _matrix_rates(rank_records: Sequence[RankRecord]) -> Iterator[DoctorCheck]:
    rates = {
        (str(record["host"]), int(record["local_rank"])): float(record["matmul_tflops"])
        for record in rank_records
        if record.get("matmul_tflops")
    }
    if not rates:
        yield DoctorCheck("matrix rate", "all", "note", "not measured")
        return
    median = statistics.median(rates.values())
    device = device_by_driver_name(str(rank_records[0].get("device")))
    best = device.matmul_tflops if device else None
    share = (
        f", {print_share(median / best, digits=0)} of the {best:g} that such a device has reached"
        if best
        else ", best rate of this device unknown"
    )
    yield DoctorCheck(
        "matrix rate",
        "all",
        "warn" if best and median < CLASS_SHARE * best else "ok",
        f"median {median:.3g} TFLOP/s ({rank_records[0].get('matmul_dtype')}){share}"
        f"; slowest {min(rates.values()):.3g}",
        None,
        {"median_tflops": median, "ranks": len(rates)},
    )
    for (host, local_rank), rate in sorted(rates.items(), key=lambda item: item[1]):
        if rate < SLOW_SHARE * median:
            yield DoctorCheck(
                "matrix rate",
                f"{host}:{local_rank}",
                "warn",
                f"{rate:.3g} TFLOP/s, {print_share(rate / median, digits=0)} of the median: the whole job waits for this device",
                f"exclude the node: launch.sbatch.exclude={host}",
                {"tflops": rate},
            )


def _all_reduce_rates(rank_records: Sequence[RankRecord]) -> Iterator[DoctorCheck]:
    for key, topic in (("intra_busbw_gbs", "all-reduce in a node"), ("inter_busbw_gbs", "all-reduce over all")):
        rates: dict[str, float] = {}  # of the slowest rank of each node
        for record in (record for record in rank_records if record.get(key) is not None):
            rates[str(record["host"])] = min(float(record[key]), rates.get(str(record["host"]), math.inf))
        if not rates:
            continue
        median = statistics.median(rates.values())
        yield DoctorCheck(
            topic,
            "all",
            "ok",
            f"{median:.3g} GB/s bus bandwidth over {rank_records[0].get('backend')}",
            None,
            {"busbw_gbs": median},
        )
        for host, rate in rates.items():
            if key == "intra_busbw_gbs" and rate < SLOW_LINK_SHARE * median:
                yield DoctorCheck(
                    topic,
                    host,
                    "warn",
                    f"{rate:.3g} GB/s, {print_share(rate / median, digits=0)} of the median",
                    f"a link of this node may be faulty: launch.sbatch.exclude={host}",
                )
