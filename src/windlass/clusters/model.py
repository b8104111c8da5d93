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
    """Document, address or person."""
    on: str | None = None
    """Date of the source or of the reading, as precisely as known ("2024-10")."""
    status: Literal["documented", "measured", "derived", "unverified", "assumed"] = "documented"
    """How sure it is; what is not documented or measured is listed apart."""
    note: str = ""
    """What a reader should know of it."""


class Device(Table):
    """One addressable accelerator: what PyTorch calls cuda:i (on MI250X a GCD)."""

    name: str
    """As cluster files name it."""
    vendor: Literal["nvidia", "amd", "cpu"]
    """Decides libraries, environment and sensors."""
    arch: str
    """The compiler's name: sm_90, gfx90a."""
    memory: Bytes
    """As sold, for example "94 GB"; `usable_memory` is what the driver gives a program."""
    usable_memory: Bytes | None = None
    """What the driver gives a program."""
    bf16_tflops: PositiveFloat | None
    """Dense peak as quoted: the denominator of every MFU."""
    silicon_tflops: PositiveFloat | None = None
    """Dense bf16 peak of this very part where it is not the catalogue's (Leonardo's A100 has 124 multiprocessors, not 108): time is
    computed from it. None: the quoted one."""
    fp8_tflops: PositiveFloat | None = None
    """Dense peak; None where the device has no fp8 units."""
    fp32_tflops: PositiveFloat | None = None
    """Dense peak in fp32."""
    matmul_tflops: PositiveFloat | None = None
    """Highest bf16 matrix rate that was measured on such a device, where known."""
    bandwidth_gbs: PositiveFloat | None
    """Device memory bandwidth, GB/s."""
    tdp_watts: PositiveFloat | None
    """The sheet's power at full load."""
    idle_watts: PositiveFloat | None = None
    """Power at rest."""
    per_module: PositiveInt = 1
    """Addressable devices that share one module (and its power counter): 2 on MI250X."""
    name_patterns: list[str] = Field(default_factory=list)
    """Lower-case parts of the name that the driver reports."""
    aliases: list[str] = Field(default_factory=list)
    """What tables of published runs call it: all words of one entry occur in the name."""
    sources: dict[str, Source] = Field(default_factory=dict)
    """Where its numbers were read."""

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
    """Physical cores."""
    cores_usable: PositiveInt | None = None
    """Cores that jobs may use; all when left out."""
    reserved_cores: list[int] = Field(default_factory=list)
    """Numbers of the system's own cores; masks keep off them."""
    numa: list[NumaDomain] = Field(default_factory=list)
    """Which cores and devices sit together."""
    memory: Bytes | None = None
    """Host memory."""
    memory_usable: Bytes | None = None
    """What a job may ask for."""
    arch: Literal["x86_64", "aarch64"] = "x86_64"
    """Of the CPUs: wheels and containers must match."""
    local_disk: str | None = None
    """Path of the node's own disk."""
    cpu_watts: PositiveFloat | None = None
    """All CPUs of a node at full load."""
    other_watts: PositiveFloat | None = None
    """Memory, network cards, fans and conversion losses."""
    ceiling_watts: PositiveFloat | None = None
    """The most a whole node draws, where known."""


class Links(Table):
    intra_gbs: PositiveFloat | None = None
    """GB/s one device can send to the others of its node, one direction."""
    inter_gbs_per_node: PositiveFloat | None = None
    """GB/s of a node into the fabric, one direction."""
    intra_latency_us: PositiveFloat = 8.0
    """Microseconds of a message inside a node."""
    inter_latency_us: PositiveFloat = 20.0
    """Microseconds of a message between nodes."""
    intra_busbw_gbs: PositiveFloat | None = None
    """Measured all-reduce bus bandwidth inside a node, where known."""
    inter_busbw_gbs: PositiveFloat | None = None
    """Measured all-reduce bus bandwidth between nodes, where known."""
    fabric: str = ""
    """Its name and shape."""
    nics: PositiveInt | None = None
    """Network cards of a node."""
    nic_gbits: PositiveFloat | None = None
    """Gbit/s of one card."""


class Partition(Table):
    name: str
    """As `sbatch --partition` takes it."""
    qos: str | None = None
    """Quality of service that this row is about."""
    max_time: Seconds | None = None
    """Longest wall time."""
    min_nodes: PositiveInt = 1
    """Fewest nodes of a job."""
    max_nodes: PositiveInt | None = None
    """Most nodes of a job."""
    gpus: bool = True
    """It has the devices of this file; false: a CPU queue."""
    use_for: str = ""
    """In words."""


class Slurm(Table):
    partition: str | None = None
    """The one that `launch` takes when the recipe names none."""
    qos: str | None = None
    """The one that `launch` takes when the recipe names none."""
    partitions: list[Partition] = Field(default_factory=list)
    """The queues and their limits."""
    account_required: bool = False
    """sbatch refuses a job without an account."""
    qos_required: bool = False
    """sbatch refuses a job without a QOS."""
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gres"
    """How devices are asked for."""
    tasks_mode: Literal["rank", "node"] = "rank"
    """rank: one task per device. node: one task per node that starts the ranks itself."""
    cpus_per_task: PositiveInt | None = None
    """Cores of a rank; by cores and devices when left out."""
    mem: str | None = None
    """Value of --mem; None: the option is not written."""
    mem_forbidden: bool = False
    """The site refuses --mem."""
    exclusive: bool = False
    """Write --exclusive."""
    whole_node: bool = False
    """Several nodes only with all their devices."""
    requeue_default: bool | None = None
    """Whether the site requeues by itself; unknown when left out."""
    extra: dict[str, str] = Field(default_factory=dict)
    """Further sbatch options, name = value."""
    srun_extra: list[str] = Field(default_factory=list)
    """Further words for srun."""
    export_srun_cpus: bool = False
    """srun does not inherit --cpus-per-task since SLURM 22.05: export SRUN_CPUS_PER_TASK."""
    rules: dict[str, str] = Field(default_factory=dict)
    """Site rules checked before submission: rule name -> its text; see launch/checks.py."""
    max_array: PositiveInt | None = None
    """Most tasks of an array."""
    max_submitted: PositiveInt | None = None
    """Most jobs of one person in the queue."""
    cpu_partition: str | None = None
    """For tokenising and evaluation."""


class Binding(Table):
    kind: Literal["none", "cores", "mask"] = "none"
    """How ranks are tied to cores: not at all, by cores, or by `masks`."""
    masks: list[str] = Field(default_factory=list)
    """One hexadecimal CPU mask per local rank."""


class EnvVar(Table):
    value: str
    """What is exported."""
    why: str
    """Stands as a comment in the script."""
    source: str = ""
    """Where it was read."""


class Container(Table):
    runtime: Literal["singularity", "apptainer", "charliecloud", "none"] = "none"
    """The site's own."""
    gpu_flag: str = ""
    """--nv or --rocm."""
    image_hint: str = ""
    """Where the site keeps images."""
    binds: list[str] = Field(default_factory=list)
    """Folders that every container here needs."""
    env: dict[str, EnvVar] = Field(default_factory=dict)
    """Variables inside the container, each with a reason."""
    modules: list[str] = Field(default_factory=list)
    """Modules to load before it starts."""


class Storage(Table):
    path: str
    """May hold $VARIABLES of the site."""
    quota: Bytes | None = None
    """Bytes."""
    files: PositiveInt | None = None
    """Number of files."""
    purge_days: PositiveInt | None = None
    """Days after which unused files are deleted."""
    use_for: str = ""
    """In words."""
    fast: bool = False
    """The place to stage hot data to."""


class Network(Table):
    internet: Literal["yes", "no", "unknown"] = "unknown"
    """Whether compute nodes reach the internet."""
    master_suffix: str = ""
    """Appended to the first node's name to reach it over the fast network ("i" at JSC)."""
    socket_ifname: str | None = None
    """Interfaces of the fast network."""


class Billing(Table):
    unit: str = "node-hour"
    """What the site charges in."""
    per_node_hour: PositiveFloat | None = None
    """Units charged for one node for one hour."""
    rule: str = ""
    """In words."""


class EnergyFacts(Table):
    sources: list[Literal["nvml", "amdsmi", "rapl", "cray", "slurm", "ear"]] = Field(default_factory=list)
    """Where energy can be read, best first."""
    pm_counters: str | None = None
    """Folder of Cray's counters."""
    ear_flags: list[str] = Field(default_factory=list)
    """sbatch options that switch EAR on."""


class Grid(Table):
    country: str = ""
    """Whose grid it is."""
    pue: float | None = Field(default=None, ge=1.0)
    """The building's power over the machine's."""
    g_per_kwh: float | None = Field(default=None, ge=0)
    """Location-based: the country's average."""
    market_g_per_kwh: float | None = Field(default=None, ge=0)
    """Market-based: what the site's contract says."""
    euro_per_kwh: float | None = Field(default=None, ge=0)
    """Price of electricity."""


class Efficiency(Table):
    """Constants fitted from measured runs by `windlass plan --calibrate`; None: the planner's own default."""

    matmul: float | None = Field(default=None, gt=0, le=1.5)
    """Share of the matrix rate that is reached."""
    memory: float | None = Field(default=None, gt=0, le=1.5)
    """Share of the bandwidth."""
    network: float | None = Field(default=None, gt=0, le=1.5)
    """Share of the links."""
    overlap: float | None = Field(default=None, ge=0, le=1)
    """Share of communication that hides behind computation."""
    fitted_on: str | None = None
    """Date of the fit."""
    fitted_from: str | None = None
    """Runs that it was fitted to."""


class Cluster(Table):
    name: str
    title: str
    """As people say it."""
    site: str = ""
    """Centre, town, country."""
    hostname_patterns: list[str] = Field(default_factory=list)
    """Login nodes are recognised by these."""
    device: str
    """Name of a device in devices.toml."""
    nodes: PositiveInt | None = None
    """How many there are."""
    verified_on: str | None = None
    """When somebody last compared this file with the live machine; None: never."""
    notes: list[str] = Field(default_factory=list)
    """Traps, in words."""
    node: Node
    links: Links = Field(default_factory=Links)
    gpu_links: Links | None = None
    """Of a machine that is described by its CPU: what to assume between GPUs that are found there."""
    slurm: Slurm | None = None
    binding: Binding = Field(default_factory=Binding)
    env: dict[str, EnvVar] = Field(default_factory=dict)
    modules: list[str] = Field(default_factory=list)
    """Modules of the site that bring Python and PyTorch."""
    container: Container = Field(default_factory=Container)
    storage: dict[str, Storage] = Field(default_factory=dict)
    network: Network = Field(default_factory=Network)
    billing: Billing = Field(default_factory=Billing)
    energy: EnergyFacts = Field(default_factory=EnergyFacts)
    grid: Grid = Field(default_factory=Grid)
    efficiency: Efficiency = Field(default_factory=Efficiency)
    sources: dict[str, Source] = Field(default_factory=dict)
