"""Compares a cluster file with the answers of sinfo, scontrol and sacctmgr on the live machine.

The raw answers are kept, so a probe doubles as test data.
"""

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from windlass.clusters.load import cluster_names, load_cluster
from windlass.clusters.model import Cluster, SlurmLimits
from windlass.clusters.scheduler import command_output
from windlass.errors import LaunchError, WindlassError
from windlass.units import parse_seconds, print_seconds

COMMANDS: dict[str, tuple[str, ...]] = {
    "sinfo": ("sinfo", "-h", "-o", "%R|%l|%D|%G|%c|%m|%a"),
    "partitions": ("scontrol", "-o", "show", "partition"),
    "config": ("scontrol", "show", "config"),
    "qos": ("sacctmgr", "-nP", "show", "qos", "format=name,maxwall,maxtres,mintres"),
    "accounts": ("sacctmgr", "-nP", "show", "assoc", "user=$USER", "format=account,partition,qos"),
}
TOOLS = ("singularity", "apptainer", "ch-run", "enroot", "eacct", "accinfo", "saldo", "lumi-allocations", "bsc_queues",
         "nvidia-smi", "rocm-smi")  # fmt: skip
Ask = Callable[[tuple[str, ...]], str | None]


@dataclass(frozen=True)
class ProbeDifference:
    key: str
    file: str
    machine: str
    verdict: str  # same, differs, "not in the file", "not on the machine" or unknown


@dataclass(frozen=True)
class Probe:
    cluster: str
    host: str
    differences: tuple[ProbeDifference, ...]
    tools: tuple[str, ...]
    raw: Mapping[str, str | None]


def probe(cluster: Cluster | None = None, ask: Ask | None = None) -> Probe:
    """Ask the scheduler of this machine. Without a cluster: the one whose host name patterns match."""
    if ask is None and shutil.which("sinfo") is None:
        raise LaunchError(
            "clusters.no-slurm",
            "there is no SLURM on this machine (sinfo is not on the PATH)",
            hint="run the probe on a login node of the cluster",
        )
    cluster = cluster or recognise()
    ask = ask or (lambda command: command_output([os.path.expandvars(argument) for argument in command]))
    raw = {name: ask(command) for name, command in COMMANDS.items()}
    if raw["sinfo"] is None:
        raise LaunchError(
            "clusters.no-answer",
            "sinfo gave no answer",
            hint="the controller may be unavailable: try again in a few minutes",
        )
    tools = tuple(filter(shutil.which, TOOLS))
    return Probe(cluster.name, socket.gethostname(), tuple(compare(cluster, raw)), tools, raw)


def host_names() -> tuple[str, str]:
    return socket.gethostname(), socket.getfqdn()


def matches_hosts(cluster: Cluster, hosts: Sequence[str]) -> bool:
    return any(fnmatch(host, pattern) for pattern in cluster.hostname_patterns for host in hosts)


def recognise() -> Cluster:
    """The cluster file whose host name patterns match this machine."""
    hosts, names = host_names(), cluster_names()
    for cluster in map(load_cluster, names):
        if matches_hosts(cluster, hosts):
            return cluster
    raise LaunchError(
        "clusters.unknown-host",
        f"no cluster file matches the host {hosts[1]}",
        hint=f"name one: windlass clusters NAME --probe ({', '.join(names)})",
    )


@dataclass(frozen=True)
class LivePartition:
    max_time: float | None
    nodes: int
    cores: int | None
    memory_mb: int | None
    devices: int | None


def read_sinfo(text: str) -> dict[str, LivePartition]:
    """Lines of `%R|%l|%D|%G|%c|%m|%a`; a partition with several kinds of node has several lines."""
    partitions: dict[str, LivePartition] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7:
            name, limit, nodes, gres, *sizes, _ = cells
            total = int(nodes) + (partitions[name].nodes if name in partitions else 0)
            cores, memory_mb = (int(m[0]) if (m := re.match(r"\d+", size)) else None for size in sizes)
            partitions[name] = LivePartition(_limit_seconds(limit), total, cores, memory_mb, gres_devices(gres))
    return partitions


def gres_devices(text: str) -> int | None:
    """`gpu:a100:4(S:0-1)` -> 4; `(null)` -> None."""
    counts = [int(n) for n in re.findall(r"gpu(?::[\w.-]+)?:(\d+)", text)]
    return sum(counts) if counts else None


def _limit_seconds(text: str) -> float | None:
    try:
        return parse_seconds(text)
    except WindlassError:
        return None


def compare(cluster: Cluster, raw: Mapping[str, str | None]) -> Iterator[ProbeDifference]:
    """Every value that both sides have, and what only one of them has."""
    live, limits = read_sinfo(raw.get("sinfo") or ""), cluster.slurm or SlurmLimits()
    max_nodes = dict(re.findall(r"PartitionName=(\S+).*?MaxNodes=(\d+)?", raw.get("partitions") or ""))
    qos_rows = [line.split("|") for line in (raw.get("qos") or "").splitlines()]
    qos_seconds = {cells[0]: _limit_seconds(cells[1]) for cells in qos_rows if len(cells) >= 2}
    for row in limits.partitions:
        key, at = f"partition {row.name}" + (f" qos {row.qos}" if row.qos else ""), live.get(row.name)
        if at is None:
            yield ProbeDifference(key, "listed", "absent", "not on the machine")
            continue
        seconds = [s for s in (at.max_time, qos_seconds.get(row.qos or "")) if s is not None]
        yield _difference(f"{key} max_time", _time(row.max_time), _time(min(seconds, default=None)))
        if row.qos not in qos_seconds:  # a QOS has node limits of its own, in TRES
            nodes = min(int(max_nodes.get(row.name) or at.nodes), at.nodes)
            yield _difference(f"{key} max_nodes", row.max_nodes or "no limit", nodes)
    for name in sorted(set(live) - {row.name for row in limits.partitions}):
        machine = f"{live[name].nodes} nodes, {_time(live[name].max_time)}"
        yield ProbeDifference(f"partition {name}", "absent", machine, "not in the file")
    if limits.partition in live:
        node, live_node = cluster.node, live[limits.partition]
        yield _difference("nodes", cluster.nodes, live_node.nodes)
        yield _difference("node.devices", node.devices, live_node.devices)
        yield _difference("node.cores", node.cores, live_node.cores, also=node.cores_usable)
        if live_node.memory_mb is not None:
            memory, live_bytes = node.memory_usable or node.memory, live_node.memory_mb * 2**20
            is_close = memory is not None and abs(memory / live_bytes - 1) < 0.06
            shown = "unknown" if memory is None else f"{memory / 1e9:.0f} GB"
            yield ProbeDifference("node.memory", shown, f"{live_bytes / 1e9:.0f} GB", "same" if is_close else "differs")
    pairs = (line.partition("=") for line in (raw.get("config") or "").splitlines())
    config = {key.strip(): value.strip() for key, equals, value in pairs if equals}
    if config.get("JobRequeue") in ("0", "1"):
        yield _difference("slurm.requeue_default", limits.requeue_default, config["JobRequeue"] == "1")
    if "MaxArraySize" in config:
        yield _difference("slurm.max_array", limits.max_array, max(0, int(config["MaxArraySize"]) - 1))
    for key in ("SLURM_VERSION", "AcctGatherEnergyType", "PreemptMode", "KillWait"):
        if key in config:
            yield ProbeDifference(key, "", config[key], "unknown")
    if accounts := sorted({line.split("|")[0] for line in (raw.get("accounts") or "").splitlines() if line}):
        yield ProbeDifference("your accounts", "", ", ".join(accounts), "unknown")
    for path in (storage.path for storage in cluster.storage.values()):
        if path.startswith("/") and "$" not in path:
            state, verdict = ("exists", "same") if Path(path).exists() else ("absent", "not on the machine")
            yield ProbeDifference(f"storage {path}", "listed", state, verdict)


def _difference(key: str, file: object, machine: object, also: object = None) -> ProbeDifference:
    """Compare two values; None is unknown. `also`: a second value of the file that is right as well."""
    verdict = "same" if str(machine) in (str(file), str(also)) else "differs"
    if None in (file, machine):
        verdict = "not in the file" if file is None else "unknown"
    file_text, machine_text = ("unknown" if value is None else str(value) for value in (file, machine))
    return ProbeDifference(key, file_text, machine_text, verdict)


def _time(seconds: float | None) -> str:
    return "no limit" if seconds is None else print_seconds(seconds)
