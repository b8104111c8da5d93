"""Where is a cluster file out of date? What sinfo, scontrol and sacctmgr say on the live machine, beside what the file says.

Reading is one function (`ask`), everything else is pure: the raw answers are kept, so a probe doubles as test data.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from windlass.clusters.load import cluster_names, load_cluster
from windlass.clusters.model import Cluster, Partition
from windlass.errors import LaunchError, WindlassError
from windlass.units import parse_seconds, print_seconds

COMMANDS: dict[str, tuple[str, ...]] = {
    "sinfo": ("sinfo", "-h", "-o", "%R|%l|%D|%G|%c|%m|%a"),
    "partitions": ("scontrol", "-o", "show", "partition"),
    "config": ("scontrol", "show", "config"),
    "qos": ("sacctmgr", "-nP", "show", "qos", "format=name,maxwall,maxtres,mintres"),
    "accounts": ("sacctmgr", "-nP", "show", "assoc", "user=$USER", "format=account,partition,qos"),
}
TOOLS = (
    "singularity",
    "apptainer",
    "ch-run",
    "enroot",
    "eacct",
    "accinfo",
    "saldo",
    "lumi-allocations",
    "bsc_queues",
    "nvidia-smi",
    "rocm-smi",
)
Ask = Callable[[tuple[str, ...]], str | None]


@dataclass(frozen=True)
class Difference:
    key: str
    file: str
    machine: str
    verdict: str
    """same, differs, "not in the file", "not on the machine" or unknown."""


@dataclass(frozen=True)
class Probe:
    """What the machine said, and how it differs from the file."""

    cluster: str
    host: str
    differences: tuple[Difference, ...]
    tools: tuple[str, ...]
    raw: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.cluster} beside the live machine ({self.host}); tools here: {', '.join(self.tools) or 'none'}"

    def rows(self) -> list[tuple[str, str, str, str]]:
        return [(d.key, d.file, d.machine, d.verdict) for d in self.differences]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe(cluster: Cluster | None = None, ask: Ask | None = None) -> Probe:
    """Ask the scheduler of this machine. Without a cluster: the one whose host name patterns fit."""
    if ask is None and shutil.which("sinfo") is None:
        raise LaunchError(
            "clusters.slurm-machine-sinfo-path",
            "there is no SLURM on this machine (sinfo is not on the PATH)",
            hint="run the probe on a login node of the cluster",
        )
    cluster = cluster or recognise()
    raw = {name: (ask or _ask)(words) for name, words in COMMANDS.items()}
    if raw["sinfo"] is None:
        raise LaunchError(
            "clusters.sinfo-gave-answer",
            "sinfo gave no answer",
            hint="the controller may be away: try again in some minutes",
        )
    tools = tuple(tool for tool in TOOLS if shutil.which(tool))
    return Probe(cluster.name, socket.gethostname(), tuple(compare(cluster, raw)), tools, raw)


def recognise() -> Cluster:
    """The cluster file whose host name patterns fit this machine."""
    names = (socket.gethostname(), socket.getfqdn())
    for name in cluster_names():
        known = load_cluster(name)
        if any(fnmatch(host, pattern) for pattern in known.hostname_patterns for host in names):
            return known
    raise LaunchError(
        "clusters.cluster-file-knows-host",
        f"no cluster file knows the host {names[1]}",
        hint=f"name one: windlass clusters NAME --probe ({', '.join(cluster_names())})",
    )


def _ask(words: tuple[str, ...]) -> str | None:
    command = [os.path.expandvars(word) for word in words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# -- pure ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LivePartition:
    name: str
    max_time: float | None
    nodes: int
    cores: int | None
    memory_mb: int | None
    devices: int | None
    max_nodes: int | None = None


def read_sinfo(text: str) -> dict[str, LivePartition]:
    """Lines of `%R|%l|%D|%G|%c|%m|%a`; a partition with several kinds of node has several lines."""
    found: dict[str, LivePartition] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != 7:
            continue
        name, limit, nodes, gres, cores, memory, _ = (cell.strip() for cell in cells)
        old = found.get(name)
        found[name] = LivePartition(
            name,
            _limit(limit),
            int(nodes) + (old.nodes if old else 0),
            _first_int(cores),
            _first_int(memory),
            gres_devices(gres),
        )
    return found


def read_partitions(text: str | None) -> dict[str, int | None]:
    """`scontrol -o show partition`: MaxNodes by partition; None is unlimited."""
    found: dict[str, int | None] = {}
    for line in (text or "").splitlines():
        name = re.search(r"PartitionName=(\S+)", line)
        nodes = re.search(r"MaxNodes=(\S+)", line)
        if name and nodes:
            found[name.group(1)] = int(nodes.group(1)) if nodes.group(1).isdigit() else None
    return found


def read_config(text: str | None) -> dict[str, str]:
    """`scontrol show config`: lines of `Key = value`."""
    pairs = (line.partition("=") for line in (text or "").splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def read_qos(text: str | None) -> dict[str, float | None]:
    """Name -> longest wall time; None is unlimited."""
    rows = [line.split("|") for line in (text or "").splitlines() if line]
    return {cells[0]: _limit(cells[1]) for cells in rows if len(cells) >= 2}


def gres_devices(text: str) -> int | None:
    """`gpu:a100:4(S:0-1)` -> 4; `(null)` -> None."""
    counts = [int(n) for n in re.findall(r"gpu(?::[\w.-]+)?:(\d+)", text)]
    return sum(counts) if counts else None


def _limit(text: str) -> float | None:
    try:
        return parse_seconds(text)
    except WindlassError:
        return None


def _first_int(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else None


def compare(cluster: Cluster, raw: Mapping[str, str | None]) -> Iterator[Difference]:
    """Every value that both sides know, and what only one of them has."""
    live = read_sinfo(raw.get("sinfo") or "")
    limits, quality = read_partitions(raw.get("partitions")), read_qos(raw.get("qos"))
    listed = cluster.slurm.partitions if cluster.slurm else []
    for row in listed:
        yield from _partition(row, live, limits, quality)
    names = {row.name for row in listed}
    for name in sorted(set(live) - names):
        yield Difference(
            f"partition {name}", "absent", f"{live[name].nodes} nodes, {_time(live[name].max_time)}", "not in the file"
        )
    default = cluster.slurm.partition if cluster.slurm else None
    if default in live:
        yield from _node(cluster, live[default or ""])
    yield from _site(cluster, raw)


def _partition(
    row: Partition,
    live: Mapping[str, LivePartition],
    limits: Mapping[str, int | None],
    quality: Mapping[str, float | None],
) -> Iterator[Difference]:
    key = f"partition {row.name}" + (f" qos {row.qos}" if row.qos else "")
    if row.name not in live:
        yield Difference(key, "listed", "absent", "not on the machine")
        return
    time = live[row.name].max_time
    if row.qos in quality:
        own = quality[row.qos or ""]
        time = own if own is not None and (time is None or own < time) else time
    yield _same(f"{key} max_time", _time(row.max_time), _time(time))
    if row.qos is None or row.qos not in quality:  # a QOS has node limits of its own, in TRES
        most = limits.get(row.name)
        effective = live[row.name].nodes if most is None else min(most, live[row.name].nodes)
        yield _same(f"{key} max_nodes", str(row.max_nodes or "no limit"), str(effective))


def _node(cluster: Cluster, live: LivePartition) -> Iterator[Difference]:
    node = cluster.node
    yield _same("nodes", str(cluster.nodes or "unknown"), str(live.nodes))
    yield _same("node.devices", str(node.devices), str(live.devices if live.devices is not None else "unknown"))
    yield _same(
        "node.cores",
        str(node.cores),
        str(live.cores if live.cores is not None else "unknown"),
        also=str(node.cores_usable),
    )
    if live.memory_mb is not None:
        memory = node.memory_usable or node.memory
        close = memory is not None and abs(memory / (live.memory_mb * 2**20) - 1) < 0.06
        yield Difference(
            "node.memory",
            "unknown" if memory is None else f"{memory / 1e9:.0f} GB",
            f"{live.memory_mb * 2**20 / 1e9:.0f} GB",
            "same" if close else "differs",
        )


def _site(cluster: Cluster, raw: Mapping[str, str | None]) -> Iterator[Difference]:
    config = read_config(raw.get("config"))
    requeue = {"1": True, "0": False}.get(config.get("JobRequeue", ""))
    if requeue is not None:
        given = cluster.slurm.requeue_default if cluster.slurm else None
        yield _same("slurm.requeue_default", str(given if given is not None else "unknown"), str(requeue))
    if "MaxArraySize" in config:
        given_array = cluster.slurm.max_array if cluster.slurm else None
        yield _same("slurm.max_array", str(given_array or "unknown"), str(max(0, int(config["MaxArraySize"]) - 1)))
    for key in ("SLURM_VERSION", "AcctGatherEnergyType", "PreemptMode", "KillWait"):
        if key in config:
            yield Difference(key, "", config[key], "unknown")
    accounts = sorted({line.split("|")[0] for line in (raw.get("accounts") or "").splitlines() if line})
    if accounts:
        yield Difference("your accounts", "", ", ".join(accounts), "unknown")
    local = [p for p in (s.path for s in cluster.storage.values()) if p.startswith("/") and "$" not in p]
    for path in local:
        yield Difference(
            f"storage {path}",
            "listed",
            "exists" if Path(path).exists() else "absent",
            "same" if Path(path).exists() else "not on the machine",
        )


def _same(key: str, file: str, machine: str, also: str | None = None) -> Difference:
    if file == "unknown":
        return Difference(key, file, machine, "not in the file")
    if machine == "unknown":
        return Difference(key, file, machine, "unknown")
    return Difference(key, file, machine, "same" if machine in (file, also) else "differs")


def _time(seconds: float | None) -> str:
    return "no limit" if seconds is None else print_seconds(seconds)
