"""What must a launcher, a planner and an energy reporter know of a machine? One TOML file per cluster, in this shape.

Numbers carry their source: the `[sources]` table maps a dotted key (or a whole table, "node") to where it was read and when.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from windlass.config.base import Bytes, Seconds, Table


class Source(Table):
    """Where a value was read."""

    source: str
    on: str | None = None
    """Date of the source or of the reading, as precisely as known ("2024-10")."""
    status: Literal["documented", "measured", "derived", "unverified", "assumed"] = "documented"
    note: str = ""


class Device(Table):
    """One addressable accelerator: what PyTorch calls cuda:i (on MI250X a GCD)."""

    name: str
    vendor: Literal["nvidia", "amd", "cpu"]
    arch: str
    memory: Bytes
    """As sold, for example "94 GB"; `usable_memory` is what the driver gives a program."""
    usable_memory: Bytes | None = None
    bf16_tflops: PositiveFloat | None
    """Dense peak as quoted: the denominator of every MFU."""
    silicon_tflops: PositiveFloat | None = None
    """Dense bf16 peak of this very part where it is not the catalogue's (Leonardo's A100 has 124 multiprocessors, not 108): time is
    computed from it. None: the quoted one."""
    fp8_tflops: PositiveFloat | None = None
    """Dense peak; None where the device has no fp8 units."""
    fp32_tflops: PositiveFloat | None = None
    matmul_tflops: PositiveFloat | None = None
    """Highest bf16 matrix rate that was measured on such a device, where known."""
    bandwidth_gbs: PositiveFloat | None
    """Device memory bandwidth, GB/s."""
    tdp_watts: PositiveFloat | None
    idle_watts: PositiveFloat | None = None
    per_module: PositiveInt = 1
    """Addressable devices that share one module (and its power counter): 2 on MI250X."""
    name_patterns: list[str] = Field(default_factory=list)
    """Lower-case parts of the name that the driver reports."""
    aliases: list[str] = Field(default_factory=list)
    """What tables of published runs call it: all words of one entry occur in the name."""
    sources: dict[str, Source] = Field(default_factory=dict)

    @property
    def peak_tflops(self) -> float | None:
        """The dense bf16 peak that bounds its speed."""
        return self.silicon_tflops or self.bf16_tflops

    @property
    def generation(self) -> str:
        """Its architecture by the vendor's name ("sm_90" and "hopper" are the same); the arch itself where we know no name."""
        low = self.arch.lower().replace("_", "").replace("-", "")
        return GENERATIONS.get(low, low)


GENERATIONS = {
    "sm70": "volta",
    "sm75": "turing",
    "sm80": "ampere",
    "sm86": "ampere",
    "sm89": "ada",
    "sm90": "hopper",
    "sm90a": "hopper",
    "sm100": "blackwell",
    "sm103": "blackwell",
    "sm120": "blackwell",
    "gfx90a": "cdna2",
    "gfx942": "cdna3",
    "gfx950": "cdna4",
}


class NumaDomain(Table):
    id: int
    cores: str
    """"0-15" or "1-7,9-15"."""
    devices: list[int] = Field(default_factory=list)
    """Local device numbers that sit on it."""


class Node(Table):
    devices: PositiveInt
    """Addressable devices per node."""
    cores: PositiveInt
    cores_usable: PositiveInt | None = None
    reserved_cores: list[int] = Field(default_factory=list)
    numa: list[NumaDomain] = Field(default_factory=list)
    memory: Bytes | None = None
    memory_usable: Bytes | None = None
    arch: Literal["x86_64", "aarch64"] = "x86_64"
    local_disk: str | None = None
    cpu_watts: PositiveFloat | None = None
    """All CPUs of a node at full load."""
    other_watts: PositiveFloat | None = None
    """Memory, network cards, fans and conversion losses."""
    ceiling_watts: PositiveFloat | None = None


class Links(Table):
    intra_gbs: PositiveFloat | None = None
    """GB/s one device can send to the others of its node, one direction."""
    inter_gbs_per_node: PositiveFloat | None = None
    """GB/s of a node into the fabric, one direction."""
    intra_latency_us: PositiveFloat = 8.0
    inter_latency_us: PositiveFloat = 20.0
    intra_busbw_gbs: PositiveFloat | None = None
    """Measured all-reduce bus bandwidth inside a node, where known."""
    inter_busbw_gbs: PositiveFloat | None = None
    fabric: str = ""
    nics: PositiveInt | None = None
    nic_gbits: PositiveFloat | None = None


class Partition(Table):
    name: str
    qos: str | None = None
    max_time: Seconds | None = None
    min_nodes: PositiveInt = 1
    max_nodes: PositiveInt | None = None
    gpus: bool = True
    use_for: str = ""


class Slurm(Table):
    partition: str | None = None
    """The one that `launch` takes when the recipe names none."""
    qos: str | None = None
    partitions: list[Partition] = Field(default_factory=list)
    account_required: bool = False
    qos_required: bool = False
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gres"
    tasks_mode: Literal["rank", "node"] = "rank"
    """rank: one task per device. node: one task per node that starts the ranks itself."""
    cpus_per_task: PositiveInt | None = None
    mem: str | None = None
    """Value of --mem; None: the option is not written."""
    mem_forbidden: bool = False
    exclusive: bool = False
    whole_node: bool = False
    """Several nodes only with all their devices."""
    requeue_default: bool | None = None
    extra: dict[str, str] = Field(default_factory=dict)
    srun_extra: list[str] = Field(default_factory=list)
    export_srun_cpus: bool = False
    """srun does not inherit --cpus-per-task since SLURM 22.05: export SRUN_CPUS_PER_TASK."""
    rules: dict[str, str] = Field(default_factory=dict)
    """Site rules checked before submission: rule name -> its text; see launch/checks.py."""
    max_array: PositiveInt | None = None
    max_submitted: PositiveInt | None = None
    cpu_partition: str | None = None
    """For tokenising and evaluation."""


class Binding(Table):
    kind: Literal["none", "cores", "mask"] = "none"
    masks: list[str] = Field(default_factory=list)
    """One hexadecimal CPU mask per local rank."""


class EnvVar(Table):
    value: str
    why: str
    source: str = ""


class Container(Table):
    runtime: Literal["singularity", "apptainer", "charliecloud", "none"] = "none"
    gpu_flag: str = ""
    image_hint: str = ""
    binds: list[str] = Field(default_factory=list)
    env: dict[str, EnvVar] = Field(default_factory=dict)
    modules: list[str] = Field(default_factory=list)


class Storage(Table):
    path: str
    quota: Bytes | None = None
    files: PositiveInt | None = None
    purge_days: PositiveInt | None = None
    use_for: str = ""
    fast: bool = False
    """The place to stage hot data to."""


class Network(Table):
    internet: Literal["yes", "no", "unknown"] = "unknown"
    master_suffix: str = ""
    """Appended to the first node's name to reach it over the fast network ("i" at JSC)."""
    socket_ifname: str | None = None


class Billing(Table):
    unit: str = "node-hour"
    per_node_hour: PositiveFloat | None = None
    """Units charged for one node for one hour."""
    rule: str = ""


class EnergyFacts(Table):
    sources: list[Literal["nvml", "amdsmi", "rapl", "cray", "slurm", "ear"]] = Field(default_factory=list)
    """Where energy can be read, best first."""
    pm_counters: str | None = None
    ear_flags: list[str] = Field(default_factory=list)


class Grid(Table):
    country: str = ""
    pue: float | None = Field(default=None, ge=1.0)
    g_per_kwh: float | None = Field(default=None, ge=0)
    """Location-based: the country's average."""
    market_g_per_kwh: float | None = Field(default=None, ge=0)
    """Market-based: what the site's contract says."""
    euro_per_kwh: float | None = Field(default=None, ge=0)


class Efficiency(Table):
    """Constants fitted from measured runs by `windlass plan --calibrate`; None: the planner's own default."""

    matmul: float | None = Field(default=None, gt=0, le=1.5)
    memory: float | None = Field(default=None, gt=0, le=1.5)
    network: float | None = Field(default=None, gt=0, le=1.5)
    overlap: float | None = Field(default=None, ge=0, le=1)
    fitted_on: str | None = None
    fitted_from: str | None = None


class Cluster(Table):
    name: str
    title: str
    site: str = ""
    hostname_patterns: list[str] = Field(default_factory=list)
    device: str
    """Name of a device in devices.toml."""
    nodes: PositiveInt | None = None
    """How many there are."""
    verified_on: str | None = None
    """When somebody last compared this file with the live machine; None: never."""
    notes: list[str] = Field(default_factory=list)
    node: Node
    links: Links = Field(default_factory=Links)
    slurm: Slurm | None = None
    binding: Binding = Field(default_factory=Binding)
    env: dict[str, EnvVar] = Field(default_factory=dict)
    modules: list[str] = Field(default_factory=list)
    container: Container = Field(default_factory=Container)
    storage: dict[str, Storage] = Field(default_factory=dict)
    network: Network = Field(default_factory=Network)
    billing: Billing = Field(default_factory=Billing)
    energy: EnergyFacts = Field(default_factory=EnergyFacts)
    grid: Grid = Field(default_factory=Grid)
    efficiency: Efficiency = Field(default_factory=Efficiency)
    sources: dict[str, Source] = Field(default_factory=dict)
