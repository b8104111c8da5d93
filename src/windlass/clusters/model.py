"""The tables of a cluster file and of devices.toml.

Numbers carry their source: the `[sources]` table maps a dotted key, or a whole table ("node"), to document and date.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from windlass.config.base import Bytes, Seconds, Table
from windlass.config.shell import (
    HOST_SUFFIX,
    MASK,
    OPTION,
    OPTIONS,
    Line,
    ModuleName,
    PathText,
    SafeVariables,
    SbatchKey,
    SbatchValue,
    SlurmName,
    VariableName,
)


class FactSource(Table):
    """Where a value was read."""

    source: str = Field(description="Document, address or person.")
    on: str | None = Field(
        default=None, description='Date of the source or of the measurement, as precise as it is known ("2024-10").'
    )
    status: Literal["documented", "measured", "derived", "unverified", "assumed"] = Field(
        default="documented",
        description="How reliable the value is; values that are neither documented nor measured are listed separately.",
    )
    note: str = Field(default="", description="Note for the reader.")


class Device(Table):
    """One addressable accelerator: what PyTorch calls cuda:i (on MI250X a GCD)."""

    name: str = Field(description="Name used in cluster files.")
    vendor: Literal["nvidia", "amd", "cpu"] = Field(description="Determines libraries, environment and sensors.")
    arch: str = Field(description="The compiler's name: sm_90, gfx90a.")
    memory: Bytes = Field(description='Nominal size, for example "94 GB"; `usable_memory` is what a program can use.')
    usable_memory: Bytes | None = Field(default=None, description="Memory that a program can use.")
    bf16_tflops: PositiveFloat | None = Field(description="Dense bf16 peak as quoted: the denominator of every MFU.")
    silicon_tflops: PositiveFloat | None = Field(
        default=None,
        description="Dense bf16 peak of this part where it differs from the catalogue (Leonardo's A100 has 124 "
        "multiprocessors, not 108); times are computed from it. Default: the quoted one.",
    )
    fp8_tflops: PositiveFloat | None = Field(
        default=None, description="Dense fp8 peak; not set if the device has no fp8 units."
    )
    fp32_tflops: PositiveFloat | None = Field(default=None, description="Dense peak in fp32.")
    matmul_tflops: PositiveFloat | None = Field(
        default=None, description="Highest bf16 matrix rate measured on such a device, where known."
    )
    bandwidth_gbs: PositiveFloat | None = Field(description="Device memory bandwidth, GB/s.")
    tdp_watts: PositiveFloat | None = Field(description="Power at full load according to the data sheet.")
    idle_watts: PositiveFloat | None = Field(default=None, description="Power when idle.")
    per_module: PositiveInt = Field(
        default=1, description="Addressable devices that share one module (and its power counter): 2 on MI250X."
    )
    name_patterns: list[str] = Field(
        default_factory=list, description="Lower-case parts of the name that the driver reports."
    )
    aliases: list[str] = Field(
        default_factory=list,
        description="Names in tables of published runs; an entry matches a name that contains all its words.",
    )
    sources: dict[str, FactSource] = Field(default_factory=dict, description="Sources of its numbers.")

    @property
    def peak_tflops(self) -> float | None:
        """The dense bf16 peak that bounds its speed."""
        return self.silicon_tflops or self.bf16_tflops

    @property
    def generation(self) -> str:
        """The vendor's name of its architecture ("sm_90" is "hopper"); the arch itself where there is none."""
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
    cores: str = Field(description='"0-15" or "1-7,9-15".')
    devices: list[int] = Field(default_factory=list, description="Local device numbers attached to it.")


class Node(Table):
    devices: PositiveInt = Field(description="Addressable devices per node.")
    cores: PositiveInt = Field(description="Physical cores.")
    cores_usable: PositiveInt | None = Field(default=None, description="Cores that jobs may use (default: all).")
    reserved_cores: list[int] = Field(
        default_factory=list, description="Cores reserved for the system; masks must not use them."
    )
    numa: list[NumaDomain] = Field(default_factory=list, description="Which cores and devices belong together.")
    memory: Bytes | None = Field(default=None, description="Host memory.")
    memory_usable: Bytes | None = Field(default=None, description="Memory that a job may request.")
    arch: Literal["x86_64", "aarch64"] = Field(
        default="x86_64", description="CPU architecture: wheels and containers must match."
    )
    local_disk: str | None = Field(default=None, description="Path of the node's own disk.")
    cpu_watts: PositiveFloat | None = Field(default=None, description="Power of all CPUs of a node at full load.")
    other_watts: PositiveFloat | None = Field(
        default=None, description="Power of memory, network cards, fans and conversion losses."
    )
    ceiling_watts: PositiveFloat | None = Field(default=None, description="Highest power of a whole node, where known.")


class Links(Table):
    intra_gbs: PositiveFloat | None = Field(
        default=None, description="GB/s that one device can send to the others in its node, in one direction."
    )
    inter_gbs_per_node: PositiveFloat | None = Field(
        default=None, description="GB/s that a node can send into the network, in one direction."
    )
    intra_latency_us: PositiveFloat = Field(
        default=8.0, description="Latency of a message inside a node, in microseconds."
    )
    inter_latency_us: PositiveFloat = Field(
        default=20.0, description="Latency of a message between nodes, in microseconds."
    )
    intra_busbw_gbs: PositiveFloat | None = Field(
        default=None, description="Measured all-reduce bus bandwidth inside a node, where known."
    )
    inter_busbw_gbs: PositiveFloat | None = Field(
        default=None, description="Measured all-reduce bus bandwidth between nodes, where known."
    )
    fabric: str = Field(default="", description="Name and topology.")
    nics: PositiveInt | None = Field(default=None, description="Network cards per node.")
    nic_gbits: PositiveFloat | None = Field(default=None, description="Gbit/s of one card.")


class Partition(Table):
    name: SlurmName = Field(description="Name for `sbatch --partition`.")
    qos: SlurmName | None = Field(default=None, description="Quality of service that this row applies to.")
    max_time: Seconds | None = Field(default=None, description="Wall-time limit.")
    min_nodes: PositiveInt = Field(default=1, description="Minimum nodes of a job.")
    max_nodes: PositiveInt | None = Field(default=None, description="Maximum nodes of a job.")
    gpus: bool = Field(default=True, description="Whether it has the devices of this file; false: a CPU partition.")
    cores: PositiveInt | None = Field(
        default=None, description="Cores of one node that a job may use (default: those of [node])."
    )
    user_cores: PositiveInt | None = Field(
        default=None, description="Cores that all jobs of one user may use at the same time, if limited."
    )
    use_for: Line = Field(default="", description="Description.")


class SlurmLimits(Table):
    partition: SlurmName | None = Field(default=None, description="Default for `launch` when the recipe names none.")
    qos: SlurmName | None = Field(default=None, description="Default for `launch` when the recipe names none.")
    partitions: list[Partition] = Field(default_factory=list, description="Partitions and their limits.")
    account: SlurmName | None = Field(
        default=None,
        description="Account if neither the recipe nor SBATCH_ACCOUNT names one; set it in your own cluster file.",
    )
    account_required: bool = Field(default=False, description="sbatch rejects a job without an account.")
    qos_required: bool = Field(default=False, description="sbatch rejects a job without a QOS.")
    gpu_option: Literal["gpus-per-node", "gres", "none"] = Field(
        default="gres", description="How devices are requested."
    )
    tasks_mode: Literal["rank", "node"] = Field(
        default="rank", description="rank: one task per device. node: one task per node that starts the ranks itself."
    )
    cpus_per_task: PositiveInt | None = Field(
        default=None, description="Cores per rank (default: usable cores divided by devices)."
    )
    mem: SbatchValue | None = Field(default=None, description="Value of --mem (default: the option is not written).")
    mem_forbidden: bool = Field(default=False, description="The site rejects --mem.")
    exclusive: bool = Field(default=False, description="Write --exclusive.")
    whole_node: bool = Field(default=False, description="Jobs on several nodes must use all their devices.")
    requeue_default: bool | None = Field(
        default=None, description="Whether the site requeues jobs by default; not set: unknown."
    )
    extra: dict[SbatchKey, SbatchValue] = Field(
        default_factory=dict, description="Additional sbatch options, name = value."
    )
    srun_extra: list[Annotated[str, OPTION]] = Field(default_factory=list, description="Additional srun arguments.")
    export_srun_cpus: bool = Field(
        default=False, description="srun does not inherit --cpus-per-task since SLURM 22.05: export SRUN_CPUS_PER_TASK."
    )
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="Site rules checked before submission: rule name -> text; see launch/checks.py.",
    )
    max_array: PositiveInt | None = Field(default=None, description="Maximum tasks of a job array.")
    max_submitted: PositiveInt | None = Field(default=None, description="Maximum jobs of one user in the queue.")
    cpu_partition: SlurmName | None = Field(default=None, description="Partition for tokenizing and evaluation.")


class Binding(Table):
    kind: Literal["none", "cores", "mask"] = Field(
        default="none", description="How ranks are bound to cores: not at all, by cores, or by `masks`."
    )
    masks: list[Annotated[str, MASK]] = Field(
        default_factory=list, description="One hexadecimal CPU mask per local rank."
    )


class EnvVar(Table):
    value: Line = Field(description="Exported value.")
    why: Line = Field(description="Reason; a comment in the job script.")
    source: str = Field(default="", description="Source.")


class Container(Table):
    runtime: Literal["singularity", "apptainer", "charliecloud", "none"] = Field(
        default="none", description="Container runtime of the site."
    )
    gpu_flag: Annotated[str, OPTIONS] = Field(default="", description="--nv or --rocm.")
    image_hint: PathText = Field(default="", description="Where the site keeps images.")
    binds: list[PathText] = Field(default_factory=list, description="Folders that every container needs.")
    env: Annotated[dict[VariableName, EnvVar], SafeVariables] = Field(
        default_factory=dict, description="Variables inside the container, each with a reason."
    )
    modules: list[ModuleName] = Field(default_factory=list, description="Environment modules to load before it starts.")
    activate: VariableName | None = Field(
        default=None,
        description="Variable of the site's images whose value activates their Python; run before every command. An "
        "image without it starts the command at once.",
    )
    definition: str | None = Field(
        default=None, description="Definition file in containers/ from which `windlass image` builds."
    )
    build_modules: list[ModuleName] = Field(
        default_factory=list, description="Environment modules that are needed to build an image."
    )


class Storage(Table):
    path: PathText = Field(description="Path; may contain $VARIABLES of the site.")
    quota: Bytes | None = Field(default=None, description="Size limit.")
    files: PositiveInt | None = Field(default=None, description="Maximum number of files.")
    purge_days: PositiveInt | None = Field(default=None, description="Days after which unused files are deleted.")
    use_for: Line = Field(default="", description="Description.")
    fast: bool = Field(default=False, description="Fast storage, for data that is read often.")


class Network(Table):
    internet: Literal["yes", "no", "unknown"] = Field(
        default="unknown", description="Whether compute nodes have internet access."
    )
    master_suffix: Annotated[str, HOST_SUFFIX] = Field(
        default="", description='Appended to the first node\'s name to reach it over the fast network ("i" at JSC).'
    )
    socket_ifname: str | None = Field(default=None, description="Interfaces of the fast network.")


class Billing(Table):
    unit: str = Field(default="node-hour", description="Unit that the site charges in.")
    per_node_hour: PositiveFloat | None = Field(default=None, description="Units charged for one node for one hour.")
    rule: str = Field(default="", description="Description.")


class EnergyFacts(Table):
    sources: list[Literal["nvml", "amdsmi", "rapl", "cray", "slurm", "ear"]] = Field(
        default_factory=list, description="Available energy sources, best first."
    )
    pm_counters: str | None = Field(default=None, description="Folder of Cray's power counters.")
    ear_flags: list[Annotated[str, OPTION]] = Field(default_factory=list, description="sbatch options that enable EAR.")


class Grid(Table):
    country: str = Field(default="", description="Country of the electricity grid.")
    pue: float | None = Field(
        default=None, ge=1.0, description="Power usage effectiveness: facility power divided by IT power."
    )
    g_per_kwh: float | None = Field(default=None, ge=0, description="Location-based intensity: the country's average.")
    market_g_per_kwh: float | None = Field(
        default=None, ge=0, description="Market-based intensity: by the site's contract."
    )
    euro_per_kwh: float | None = Field(default=None, ge=0, description="Price of electricity.")


class Efficiency(Table):
    """Constants fitted from measured runs by `windlass plan --calibrate`; None: the planner's own default."""

    matmul: float | None = Field(default=None, gt=0, le=1.5, description="Fraction of the matrix rate that is reached.")
    memory: float | None = Field(
        default=None, gt=0, le=1.5, description="Fraction of the memory bandwidth that is reached."
    )
    network: float | None = Field(
        default=None, gt=0, le=1.5, description="Fraction of the link bandwidth that is reached."
    )
    overlap: float | None = Field(
        default=None, ge=0, le=1, description="Fraction of communication that overlaps with computation."
    )
    fitted_on: str | None = Field(default=None, description="Date of the fit.")
    fitted_from: str | None = Field(default=None, description="Runs used for the fit.")


class Cluster(Table):
    name: str
    title: Line = Field(description="Display name.")
    site: str = Field(default="", description="Centre, town, country.")
    hostname_patterns: list[str] = Field(default_factory=list, description="Host name patterns of its login nodes.")
    device: str = Field(description="Name of a device in devices.toml.")
    nodes: PositiveInt | None = Field(default=None, description="Number of nodes.")
    verified_on: str | None = Field(
        default=None, description="Date of the last comparison with the live machine; not set: never."
    )
    notes: list[str] = Field(default_factory=list, description="Known pitfalls.")
    node: Node
    links: Links = Field(default_factory=Links)
    gpu_links: Links | None = Field(
        default=None, description="Links assumed between the GPUs of a machine that this file describes by its CPU."
    )
    slurm: SlurmLimits | None = None
    binding: Binding = Field(default_factory=Binding)
    env: Annotated[dict[VariableName, EnvVar], SafeVariables] = Field(default_factory=dict)
    modules: list[ModuleName] = Field(
        default_factory=list,
        description='Modules that `environment = "module"` loads, in this order; empty: not known.',
    )
    container: Container = Field(default_factory=Container)
    storage: dict[str, Storage] = Field(default_factory=dict)
    network: Network = Field(default_factory=Network)
    billing: Billing = Field(default_factory=Billing)
    energy: EnergyFacts = Field(default_factory=EnergyFacts)
    grid: Grid = Field(default_factory=Grid)
    efficiency: Efficiency = Field(default_factory=Efficiency)
    sources: dict[str, FactSource] = Field(default_factory=dict)
