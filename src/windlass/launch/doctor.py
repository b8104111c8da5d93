"""Is this machine, or this set of nodes, fit for the real job? Measured before the job, told as a table with a verdict.

The command itself needs no torch. What needs it (devices, matrix rate, all-reduce) runs in worker processes, one per device,
here or as a short job (`doctor_worker.py`); each leaves a JSON record, and `examine` turns records into findings.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass.clusters import device_by_driver_name
from windlass.errors import LaunchError, WindlassError
from windlass.files import read_json
from windlass.units import print_bytes, print_seconds

SLOW_SHARE = 0.85
"""A device slower than this share of the median of all is named: the whole job waits for it."""
CLASS_SHARE = 0.6
"""Below this share of what its class has reached elsewhere a device is suspect."""
SKEW_SECONDS = 1.0
FILES_NEEDED = 4096
SHM_NEEDED = 2**30
HURTFUL = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the one before it"),
    "NCCL_P2P_DISABLE": (("1",), "devices of a node talk through the host"),
    "NCCL_IB_DISABLE": (("1",), "nodes talk over TCP, many times slower"),
    "NCCL_SHM_DISABLE": (("1",), "shared memory between ranks of a node is off"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked twice"),
    "NCCL_DEBUG": (("TRACE",), "the log grows by gigabytes"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor asks the driver for memory"),
    "AMD_SERIALIZE_KERNEL": (("1", "2", "3"), "kernels run one at a time"),
    "HSA_ENABLE_SDMA": (("0",), "copies use compute units"),
    "PYTHONPROFILEIMPORTTIME": (("1",), "every import is timed and printed"),
    "LD_PRELOAD": (None, "a preloaded library can break wheels (XALT does)"),
    "SINGULARITY_BIND": (None, "travels with a job from the submitting shell and breaks it where the path is missing"),
    "APPTAINER_BIND": (None, "travels with a job from the submitting shell and breaks it where the path is missing"),
}  # fmt: skip
"""Variables that hurt: the values at fault (None: any), and why."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    topic: str
    where: str
    level: str
    """ok, note, warn or fail."""
    text: str
    hint: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        levels = {check.level for check in self.checks}
        return "unfit" if "fail" in levels else "fit, with warnings" if "warn" in levels else "fit"

    @property
    def exit_code(self) -> int:
        return LaunchError.exit_code if self.verdict == "unfit" else 0

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "checks": [asdict(check) for check in self.checks]}


# -- this host, without torch ------------------------------------------------------------------------------------------------


def host_checks(paths: Sequence[Path], *, env: Mapping[str, str] | None = None, megabytes: int = 64) -> list[Check]:
    """Limits, environment, network names and disks of the node this runs on."""
    env = os.environ if env is None else env
    host = socket.gethostname()
    found = [*limits(host), *environment(host, env), *network(host, env)]
    for path in paths:
        found += disk(host, path, megabytes)
    return found


def limits(host: str) -> Iterable[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = "ok" if soft >= FILES_NEEDED else "warn"
    yield Check("open files", host, level, f"{soft:,} (up to {hard:,})", None if level == "ok" else f"ulimit -n {min(hard, 65536)} in the job script: shards, workers and sockets need many", {"soft": soft, "hard": hard})  # fmt: skip
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        level = "ok" if free >= SHM_NEEDED else "warn"
        yield Check(
            "shared memory",
            host,
            level,
            f"{print_bytes(free)} free in /dev/shm",
            None if level == "ok" else "data-loader workers and NCCL use it; ask for a larger one",
            {"free_bytes": free},
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < 2**30 and Path("/sys/class/infiniband").is_dir():
        yield Check(
            "locked memory",
            host,
            "warn",
            f"{print_bytes(locked)}",
            "RDMA pins memory: ulimit -l unlimited",
            {"bytes": locked},
        )


def environment(host: str, env: Mapping[str, str]) -> Iterable[Check]:
    bad = [
        Check(
            "environment",
            host,
            "warn",
            f"{name}={env[name]}: {why}",
            f"unset {name}",
            {"name": name, "value": env[name]},
        )
        for name, (values, why) in HURTFUL.items()
        if env.get(name) and (values is None or env[name].upper() in values)
    ]
    threads, cores = env.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    if threads.isdigit() and int(threads) > cores:
        bad.append(
            Check(
                "environment",
                host,
                "warn",
                f"OMP_NUM_THREADS={threads} on {cores} cores: threads fight for cores",
                f"OMP_NUM_THREADS={cores} or less",
            )
        )
    if env.get("ROCR_VISIBLE_DEVICES") and env.get("HIP_VISIBLE_DEVICES"):
        bad.append(
            Check(
                "environment",
                host,
                "warn",
                "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are both set: devices are chosen twice",
                "keep one of them",
            )
        )
    yield from bad or [Check("environment", host, "ok", "no variable that is known to hurt")]


def network(host: str, env: Mapping[str, str]) -> Iterable[Check]:
    began = time.perf_counter()
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError as error:
        yield Check(
            "name service",
            host,
            "fail",
            f"{host} has no address: {error}",
            "ranks meet by host name: ask the site, or set MASTER_ADDR to an address",
        )
    else:
        seconds = time.perf_counter() - began
        level = "warn" if seconds > 1.0 else "ok"
        yield Check(
            "name service",
            host,
            level,
            f"{host} is {address} ({print_seconds(seconds)})",
            None if level == "ok" else "a slow name service delays every start",
            {"seconds": seconds},
        )
    present = sorted(p.name for p in Path("/sys/class/net").iterdir()) if Path("/sys/class/net").is_dir() else []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = [w.lstrip("^=") for w in env.get(variable, "").split(",") if w and not w.startswith("^")]
        missing = [w for w in wanted if not any(name == w or name.startswith(w) for name in present)]
        if missing:
            yield Check(
                "interface",
                host,
                "fail",
                f"{variable}={env[variable]}, but there is no {', '.join(missing)}",
                f"interfaces here: {', '.join(present)}",
            )
        elif wanted:
            yield Check("interface", host, "ok", f"{variable}={env[variable]}")


def disk(host: str, path: Path, megabytes: int) -> Iterable[Check]:
    """Write, read back and small-file latency in a folder of our own there."""
    try:
        with tempfile.TemporaryDirectory(prefix=".windlass-doctor-", dir=path) as folder:
            values = measure_disk(Path(folder), megabytes)
    except OSError as error:
        yield Check(
            "disk",
            host,
            "fail",
            f"{path}: {error.strerror or error}",
            "choose a folder that exists and that you may write to",
        )
        return
    values["free_bytes"] = shutil.disk_usage(path).free
    text = f"{path}: write {values['write_mbs']:,.0f} MB/s, read {values['read_mbs']:,.0f} MB/s, small file {values['latency_ms']:.1f} ms, {print_bytes(values['free_bytes'])} free"
    slow = values["write_mbs"] < 50 or values["latency_ms"] > 100
    yield Check(
        "disk",
        host,
        "warn" if slow else "ok",
        text,
        "checkpoints and small files will be slow here" if slow else None,
        values,
    )


def measure_disk(folder: Path, megabytes: int) -> dict[str, float]:
    """Megabytes per second with fsync; the read asks the kernel to forget the pages first, which it may not do."""
    block, file = os.urandom(1 << 20), folder / "block"
    began = time.perf_counter()
    with file.open("wb") as out:
        for _ in range(megabytes):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    wrote = time.perf_counter() - began
    with file.open("rb") as back:
        os.posix_fadvise(back.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while back.read(1 << 20):
            pass
    read = time.perf_counter() - began
    times = []
    for number in range(10):
        began = time.perf_counter()
        small = folder / f"small-{number}"
        small.write_bytes(b"x")
        small.unlink()
        times.append(time.perf_counter() - began)
    return {"write_mbs": megabytes / wrote, "read_mbs": megabytes / read, "latency_ms": 1e3 * statistics.median(times)}


def data_checks(store: str | None, tokenizer: str | None) -> list[Check]:
    """Can the token store and the tokenizer be read from here?"""
    host, found = socket.gethostname(), []
    if store is not None:
        from windlass.data.store import open_store

        try:
            opened = open_store(store)
            tokens = sum(info.tokens for info in opened.sources.values())
            found.append(Check("token store", host, "ok", f"{store}: {len(opened.sources)} sources, {tokens:,} tokens"))
        except WindlassError as error:
            found.append(Check("token store", host, "fail", error.message, error.hint))
    if tokenizer is not None:
        path = Path(tokenizer)
        readable = path.exists() and os.access(path, os.R_OK)
        found.append(
            Check(
                "tokenizer",
                host,
                "ok" if readable else "fail",
                f"{path} {'can be read' if readable else 'is missing or cannot be read'}",
            )
        )
    return found


# -- workers -----------------------------------------------------------------------------------------------------------------


def run_workers(out: Path, count: int, *, seconds: float = 300.0, full: bool = False) -> list[dict[str, Any]]:
    """One worker per device on this machine; their records. A worker that dies leaves none, and that is a finding."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    words = [sys.executable, "-m", "windlass.launch.doctor_worker", str(out), *(["--full"] if full else [])]
    workers = []
    for rank in range(count):
        log = (out / f"worker-{rank:05d}.log").open("wb")
        workers.append(
            subprocess.Popen(
                words, env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
            )
        )
    end = time.monotonic() + seconds
    try:
        for worker in workers:
            worker.wait(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # the missing record tells
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    return read_records(out)


def read_records(out: Path) -> list[dict[str, Any]]:
    found = (read_json(p) for p in sorted(out.glob("rank-*.json")))
    return [value for value in found if value is not None]


# -- judging -----------------------------------------------------------------------------------------------------------------


def examine(records: Sequence[Mapping[str, Any]], expected: int, out: Path | None = None) -> list[Check]:
    """Findings from the workers' records. Pure, but for the log of a worker that left none."""
    found = list(_presence(records, expected, out))
    if not records:
        return found
    for checks in (_alike, _rates, _links, _clocks):
        found += checks(records)
    for record in records:
        found += [Check(**check) for check in record.get("host_checks", [])]
    return found


def _presence(records: Sequence[Mapping[str, Any]], expected: int, out: Path | None) -> Iterable[Check]:
    if len(records) >= expected:
        nodes = len({r["host"] for r in records})
        yield Check("ranks", "all", "ok", f"{len(records)} ranks on {nodes} node{'s' if nodes > 1 else ''} answered")
        return
    lost = sorted(set(range(expected)) - {int(r["rank"]) for r in records})
    said = _last_words(out, lost[0]) if out else ""
    yield Check(
        "ranks",
        "all",
        "fail",
        f"{len(lost)} of {expected} ranks left no record: {', '.join(map(str, lost[:8]))}{said}",
        "see their logs; is torch installed in this environment?",
    )


def _last_words(out: Path, rank: int) -> str:
    log = out / f"worker-{rank:05d}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f" ({lines[-1]})" if lines else ""


def _alike(records: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    for key, topic in (("device", "devices"), ("torch", "torch"), ("driver", "driver"), ("runtime", "runtime")):
        groups: dict[str, list[str]] = {}
        for r in records:
            groups.setdefault(str(r.get(key)), []).append(f"{r['host']}:{r['local_rank']}")
        if len(groups) == 1:
            only = next(iter(groups))
            if only != "None":
                yield Check(topic, "all", "ok", f"{only} on all {len(records)} ranks")
            continue
        parts = "; ".join(
            f"{name} on {', '.join(where[:4])}{' ...' if len(where) > 4 else ''}" for name, where in groups.items()
        )
        yield Check(
            topic,
            "all",
            "fail" if key != "driver" else "warn",
            f"not alike: {parts}",
            "mixed machines train at the slowest one's pace, if at all",
        )


def _rates(records: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    rates = {
        (str(r["host"]), int(r["local_rank"])): float(r["matmul_tflops"]) for r in records if r.get("matmul_tflops")
    }
    if not rates:
        yield Check("matrix rate", "all", "note", "not measured")
        return
    median = statistics.median(rates.values())
    slow = {place: rate for place, rate in rates.items() if rate < SLOW_SHARE * median}
    kind = device_by_driver_name(str(records[0].get("device")))
    best = kind.matmul_tflops if kind else None
    share = f", {median / best:.0%} of the {best:g} that such a device has reached" if best else ", class unknown"
    precision = records[0].get("matmul_dtype")
    yield Check("matrix rate", "all", "warn" if best and median < CLASS_SHARE * best else "ok", f"median {median:.3g} TFLOP/s ({precision}){share}; slowest {min(rates.values()):.3g}", None, {"median_tflops": median, "ranks": len(rates)})  # fmt: skip
    for (host, local), rate in sorted(slow.items(), key=lambda item: item[1]):
        yield Check(
            "matrix rate",
            f"{host}:{local}",
            "warn",
            f"{rate:.3g} TFLOP/s, {rate / median:.0%} of the median: the whole job waits for this device",
            f"exclude the node: launch.sbatch.exclude={host}",
            {"tflops": rate},
        )


def _links(records: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    for key, topic in (("intra_busbw_gbs", "all-reduce in a node"), ("inter_busbw_gbs", "all-reduce over all")):
        by_host: dict[str, float] = {}
        for r in records:
            if r.get(key) is not None:
                by_host[str(r["host"])] = min(by_host.get(str(r["host"]), 1e18), float(r[key]))
        if not by_host:
            continue
        median = statistics.median(by_host.values())
        yield Check(
            topic,
            "all",
            "ok",
            f"{median:.3g} GB/s bus bandwidth over {records[0].get('backend')}",
            None,
            {"busbw_gbs": median},
        )
        for host, rate in by_host.items():
            if topic.endswith("node") and rate < SLOW_SHARE * 0.7 * median:
                yield Check(
                    topic,
                    host,
                    "warn",
                    f"{rate:.3g} GB/s, {rate / median:.0%} of the median",
                    f"a link of this node may be at fault: launch.sbatch.exclude={host}",
                )


def _clocks(records: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    """All ranks read their clocks as they leave one barrier; what is left between hosts is skew plus the barrier's own spread."""
    by_host: dict[str, float] = {}
    for r in records:
        if r.get("clock") is not None:
            by_host.setdefault(str(r["host"]), float(r["clock"]))
    if len(by_host) < 2:
        return
    skew = max(by_host.values()) - min(by_host.values())
    level = "warn" if skew > SKEW_SECONDS else "ok"
    yield Check(
        "clocks",
        "all",
        level,
        f"{print_seconds(skew)} apart over {len(by_host)} nodes",
        "logs and energy windows of the nodes will not fit together" if level == "warn" else None,
        {"skew_seconds": skew},
    )
