"""A recipe: one TOML file that describes one run, frozen once loaded; with its plain tables (the others have
modules)."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from windlass.config.base import Bytes, Registered, Table, Tokens
from windlass.config.launch import LaunchConfig
from windlass.config.model import ModelConfig, hf_aliases
from windlass.config.observe import EnergyConfig, ProfileConfig, TrackersConfig
from windlass.config.save import SaveConfig
from windlass.config.shell import PathText
from windlass.config.tune import TuneConfig
from windlass.registry import ENGINES, OBJECTIVES, OPTIMIZERS, SCHEDULES


class DataStage(Table):
    start: Tokens = 0
    """Token position from which this mix applies."""
    mix: dict[str, float]
    """Weight of each source."""


class DataConfig(Table):
    store: PathText | None = None
    """Folder written by `windlass tokenize` (or a Megatron, OLMo or datatrove store). If not set, training uses
    synthetic tokens, for benchmarks."""
    tokenizer: str | None = None
    """Tokenizer file or folder (default: the store's)."""
    mix: dict[str, float] = Field(default_factory=dict)
    """Weight of each source. If empty, each source is read in proportion to its tokens, multiplied by its `epochs` if
    given."""
    epochs: dict[str, float] = Field(default_factory=dict)
    """Maximum number of epochs of each source. Without `mix` it is also the weight: a source with 2.0 is read twice as
    often."""
    max_epochs: float = Field(default=4.0, gt=0)
    """Maximum number of epochs of a source that `epochs` does not name."""
    stages: list[DataStage] = Field(default_factory=list)
    """Mixes that replace `mix` from a given token position on (annealing, continued pre-training)."""
    tokens: Tokens | None = None
    """Number of tokens to train on."""
    seq_len: PositiveInt = 2048
    """Number of tokens in one sequence."""
    batch_tokens: Tokens | None = None
    """Number of tokens in one optimizer step, over all devices."""
    batch_ramp: list[tuple[Tokens, Tokens]] = Field(default_factory=list)
    """Other values of `batch_tokens`, each from a token position on: [["100B", "1Mi"], ["1T", "2Mi"]]. The micro-batch
    stays the same, so nothing is compiled again; accumulation grows."""
    mask_documents: bool = False
    """Attention does not cross document borders inside a packed sequence."""
    reset_positions: bool = False
    """Rotary positions start again at each document. Needs mask_documents."""
    pack: Literal["stream", "documents"] = "stream"
    """stream: documents are concatenated and cut every seq_len tokens; `mask_documents` keeps attention inside a
    document. documents: sequences are filled with complete documents, and attention stays inside each document."""
    long_documents: Literal["leave_out", "cut"] = "leave_out"
    """pack = "documents": conversations longer than seq_len are skipped or truncated; both are counted. A text
    continues in another sequence; a preference pair is always skipped."""
    validation: str | None = None
    """Split that is held out for validation (default: `validation`, if the store has one)."""
    policy: Literal["any", "lawful"] = "any"
    """lawful: refuse sources that do not state both a licence and an origin."""

    @property
    def masks_documents(self) -> bool:
        return self.mask_documents or self.pack == "documents"


class OptimConfig(Table):
    name: Annotated[str, Registered(OPTIMIZERS)] = "adamw"
    """adamw, ademamix, lion, muon (AdamW outside the layers' matrices), sgd (with momentum), or an optimizer of an
    installed package."""
    lr: NonNegativeFloat = 3e-4
    """The highest learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of lr."""
    warmup: Tokens = 0
    """Tokens of linear warm-up."""
    schedule: Annotated[str, Registered(SCHEDULES)] = "cosine"
    """Learning rate after the warm-up. wsd: constant, then a decay at the end."""
    decay: Tokens | None = None
    """wsd: tokens of the final decay (default: a tenth of the run)."""
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """wsd: shape of the final decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW, AdEMAMix, Lion: decay of the first moment (Lion: weight of the moment in the update)."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW, AdEMAMix: decay of the second moment. Lion: decay of its only moment."""
    beta3: float = Field(default=0.9999, gt=0, lt=1)
    """AdEMAMix: decay of the slow moment."""
    alpha: NonNegativeFloat = 8.0
    """AdEMAMix: weight of the slow moment."""
    slow_warmup: NonNegativeInt = 0
    """AdEMAMix: number of steps over which the weight and the decay of the slow moment grow to their final values."""
    eps: PositiveFloat = 1e-8
    """AdamW, AdEMAMix: added to the denominator."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """SGD: momentum."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon: decay of the running mean of each matrix's gradient."""
    nesterov: bool = True
    """Muon: use Nesterov momentum."""
    weight_decay: NonNegativeFloat = 0.1
    """Applied to matrices, not to norms, biases or embeddings."""
    clip: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    qk_clip: NonNegativeFloat = 0.0
    """After a step in which the largest attention logit of a head exceeds this value, scale its queries and keys down
    (Kimi K2 used 100); 0: off. The logit is measured on 16 queries of each sequence."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Precision of the optimizer's moments. bf16 uses stochastic rounding, so that small changes survive on average."""


class TrainConfig(Table):
    engine: Annotated[str, Registered(ENGINES)] = "native"
    """native: plain PyTorch. deepspeed: DeepSpeed's ZeRO in the same training loop."""
    objective: Annotated[str, Registered(OBJECTIVES)] = "next_token"
    """What training minimizes: next_token, or an objective of an installed package."""
    precision: Literal["bf16", "fp32", "fp8", "bf16_pure"] = "bf16"
    """bf16: compute in bf16, with master weights and reduction in fp32. bf16_pure: bf16 weights with stochastic
    rounding."""
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    """precision = "fp8": one scale per tensor, or one per row (finer, at the same speed)."""
    fp8_backend: Literal["auto", "torch", "torchao"] = "auto"
    """Library that computes FP8 products. auto: torch's scaled matmul, or torchao if torch has none for the device."""
    steps: PositiveInt | None = None
    """Number of optimizer steps, instead of data.tokens, for short runs."""
    recompute: Literal["none", "selective", "full", "budget"] = "none"
    """What the backward pass recomputes to save memory: nothing, attention and cheap parts, entire blocks, or as much
    as `recompute_budget` requires."""
    recompute_budget: float = Field(default=0.5, ge=0, le=1)
    """recompute = "budget": share of activation memory to keep."""
    compile: bool | None = None
    """Compile each block with torch.compile (default: on for GPUs, off on a CPU)."""
    capture: bool = False
    """Replay the forward pass, the backward pass and the update as CUDA graphs, for models so small that the host
    cannot launch kernels fast enough. It needs a single process and no document masks."""
    fuse: bool | None = None
    """Compute queries, keys and values in one matrix product, and gate and up in another (default: only in FP8, where
    it is faster)."""
    attention: Literal["auto", "cudnn", "flash", "flash3", "efficient", "math"] = "auto"
    """Attention kernel; auto uses the fastest one that the device and the shape allow."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """How the output head and the cross-entropy are computed. chunked: together, in chunks of tokens, so that the
    logits of all tokens are never in memory at once; fused is another name for it. auto: chunked unless a
    micro-batch's logits are small."""
    loss_chunk: PositiveInt = 4096
    """Tokens per chunk of the chunked loss."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-normalizer added to the loss; 0: off."""
    goldfish_k: NonNegativeInt = 0
    """Leave about every k-th token out of the loss, always the same ones after the same text, so that texts are
    not memorised (Goldfish loss); 0: off."""
    goldfish_h: PositiveInt = 50
    """Goldfish loss: number of preceding tokens that decide whether a token is left out."""
    log_every: PositiveInt = 1
    """Number of steps between two lines of metrics.jsonl."""
    instruments: NonNegativeInt = 0
    """Number of steps between two measurements of every layer: norms of its gradient, weights and update, scale of its
    output, largest attention logit; 0: off."""
    eval_every: NonNegativeInt = 0
    """Number of steps between two validation passes; 0: only at the end, if there is a validation split."""
    eval_tokens: Tokens = 262_144
    """Number of tokens in one validation pass."""
    skip_nonfinite: bool = True
    """Skip the update of a step if the loss or gradient norm is not finite on any rank."""
    skip_spike_sigma: NonNegativeFloat = 0.0
    """Skip a step whose loss or gradient norm is this many standard deviations above its recent mean; 0: off."""
    max_skipped: PositiveInt = 10
    """Stop the run after this many skipped steps in a row."""
    rollback: bool = False
    """After max_skipped skipped steps, return to an earlier checkpoint once and skip that range of data, instead of
    stopping."""
    gc_every: PositiveInt = 100
    """Number of steps between two runs of Python's garbage collector, which is otherwise off."""
    deterministic: bool = False
    """Use only kernels that give bit-identical results every time; slower."""
    watchdog_seconds: NonNegativeFloat = 600.0
    """End the job and name the rank when a rank makes no progress for this many seconds; 0: off."""


class LayoutConfig(Table):
    shard: Literal["none", "zero1", "zero2", "full", "hybrid", "hybrid_zero2"] = "none"
    """none: every device holds everything (DDP). zero1: optimizer states are sharded. zero2: gradients too. full:
    weights too (FSDP). hybrid: full inside a group of `shard_size` devices, replicated across groups. hybrid_zero2:
    zero2 inside a group, replicated across groups."""
    shard_size: PositiveInt | None = None
    """hybrid, hybrid_zero2: number of devices that share one copy (default: the devices of a node)."""
    micro_batch: PositiveInt = 1
    """Number of sequences per device in one forward pass."""
    tensor: PositiveInt = 1
    """Tensor-parallel degree (with sequence parallelism)."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel degree."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zbv"] = "1f1b"
    """Order of micro-batches in a pipeline; zbv and interleaved put several stages on a rank."""
    pipeline_chunks: PositiveInt = 2
    """interleaved: model chunks per pipeline rank."""
    context: PositiveInt = 1
    """Context-parallel degree for long sequences."""
    expert: PositiveInt = 1
    """Expert-parallel degree: number of data- and context-parallel devices that share one copy of the experts. It
    needs no additional devices."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Keep optimizer states (or parameters too) in host memory."""
    sync: Literal["auto", "every", "last"] = "auto"
    """When accumulated gradients are reduced: after every micro-batch (every) or once per step (last). auto: once per
    step if every device holds full gradients (shard none or zero1), otherwise after every micro-batch."""
    bucket: Bytes | None = None
    """Bucket size, such as "25 MB": neighbouring layers whose fp32 gradients fit into it together are reduced (and
    gathered) by one collective. A layer is never split (default: one collective per layer)."""


class ProjectConfig(Table):
    """What the report and the model card say about the project; nothing in training depends on it."""

    title: str = ""
    """Name of the project."""
    id: str = ""
    """Identifier of the project at the computing centre: "EHPC-AIF-2025A01-123"."""
    grant: str = ""
    """Grant or contract numbers."""
    funder: str = ""
    """Who pays for the compute or the people. The allocation itself is `launch.budget_node_hours`."""
    licence: str = ""
    """Licence of the trained weights, by its name on the Hugging Face Hub: "apache-2.0"."""
    base_model: str = ""
    """Hugging Face name of the model that training starts from: "openGPT-X/Teuken-7B-base-v0.6"."""


class Recipe(Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)
    """Letters, digits, dot, dash and underscore: it becomes the run folder's name."""
    cluster: str = "workstation"
    """Cluster that the run uses; `windlass clusters` lists them."""
    nodes: PositiveInt = 1
    """Number of nodes of one job; the cluster determines the number of devices per node."""
    seed: NonNegativeInt = 0
    """Determines the initial weights and the order of sequences, on any number of devices."""
    notes: str = ""
    """Anything a reader should know: what was published, what is assumed."""
    project: ProjectConfig = Field(default_factory=ProjectConfig)
    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    tune: TuneConfig | None = None
    """Fine-tuning. Without this table the run pre-trains."""
    layout: LayoutConfig | None = None
    """Without this table the planner chooses a layout and prints its reason."""
    save: SaveConfig = Field(default_factory=SaveConfig)
    energy: EnergyConfig = Field(default_factory=EnergyConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @property
    def task(self) -> str | None:
        """What the model is fine-tuned for; None: the run pre-trains."""
        return None if self.tune is None else self.tune.task

    @property
    def reads_examples(self) -> bool:
        """Fine-tuning on files of labelled examples, not on a token store."""
        return self.tune is not None and self.tune.reads_examples


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe. The names of Hugging Face's config.json are keys of [model] as well."""
    schema = Recipe.model_json_schema()
    keys = schema["$defs"]["ModelConfig"]["properties"]
    for name, key in hf_aliases({"hidden_size": None}).items():
        keys[name] = {**keys[key], "title": name, "description": f"Hugging Face's name for `{key}`."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "windlass recipe", **schema}
