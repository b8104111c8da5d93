"""The `[model]` table: the network that is trained."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from windlass.config.base import Registered, Table
from windlass.registry import BLOCKS, PRESETS, import_target


class RopeScalingConfig(Table):
    """`[model.rope_scaling]`: rotary positions for sequences that are longer than those of the original model."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear slows all frequencies equally; llama3 and yarn keep the high ones."""
    factor: Annotated[float, Field(ge=1)]
    """How many times longer the sequences may be."""
    old_length: PositiveInt | None = None
    """Sequence length before the scaling. Needed by llama3 and yarn."""
    low_turns: PositiveFloat = 1.0
    """llama3: pairs of dimensions with fewer turns over the old length are slowed by the full factor
    (low_freq_factor)."""
    high_turns: PositiveFloat = 4.0
    """llama3: pairs of dimensions with more turns over the old length are not slowed (high_freq_factor)."""
    beta_fast: PositiveFloat = 32.0
    """yarn: pairs with more turns over the old length are not slowed."""
    beta_slow: PositiveFloat = 1.0
    """yarn: pairs with fewer turns over the old length are slowed by the full factor."""
    truncate: bool = True
    """yarn: the two limits are rounded to whole pairs."""
    attention_factor: PositiveFloat | None = None
    """yarn: factor applied to cosines and sines (default: 0.1 ln(factor) + 1)."""
    mscale: PositiveFloat | None = None
    """yarn: if mscale_all_dim is set too, attention_factor defaults to (0.1 mscale ln(factor) + 1) / (0.1
    mscale_all_dim ln(factor) + 1)."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn: latent attention also multiplies its scores by the square of 0.1 mscale_all_dim ln(factor) + 1."""


class ExpertsConfig(Table):
    """`[model.experts]`: several feed-forward blocks (experts), a few of which each token uses. No token is ever
    dropped."""

    count: PositiveInt
    """Number of experts in a layer, not counting shared experts."""
    top_k: PositiveInt
    """Number of experts that each token uses."""
    ffn: PositiveInt | None = None
    """Inner size of one expert (default: model.ffn)."""
    shared: NonNegativeInt = 0
    """Number of shared experts, which every token uses; they are computed as one."""
    shared_ffn: PositiveInt | None = None
    """Inner size of one shared expert (default: that of the others)."""
    dense_layers: NonNegativeInt = 0
    """Number of first layers that have a plain feed-forward block of size model.ffn instead."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores."""
    renormalise: bool = True
    """The scores of a token's experts are divided by their sum."""
    groups: PositiveInt = 1
    """Group-limited routing: number of groups of experts; a token uses `groups_kept` of them."""
    groups_kept: PositiveInt | None = None
    """Number of groups that a token's experts may come from (default: all). softmax ranks groups by their best expert,
    sigmoid by their two best experts."""
    scale: PositiveFloat = 1.0
    """Factor applied to the routing weights of the experts."""
    bias: bool = False
    """The router and all matrices of the experts have a bias."""
    balance: Literal["loss", "bias", "both", "none"] = "loss"
    """How the experts are kept equally used. loss: an auxiliary loss per sequence. bias: a bias on the choice of
    experts (not on their weights), which is adjusted after each step by the loads in the whole batch. both: loss and
    bias. none: not at all."""
    balance_weight: PositiveFloat | None = None
    """Factor of the balance loss (default: 0.01). The loss is 1 in a layer whose experts are equally used. With
    balance = "bias": the step of the bias."""
    bias_step: PositiveFloat | None = None
    """Step of the balancing bias (default: 0.001)."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the router's z-loss, the squared log-sum-exp of its logits; 0: off."""

    @property
    def loss_strength(self) -> float:
        """Factor of the balance loss; 0 without one."""
        return self.balance_weight or 0.01 if self.balance in ("loss", "both") else 0.0

    @property
    def bias_strength(self) -> float:
        """Step of the balancing bias; 0 without one."""
        if self.balance not in ("bias", "both"):
            return 0.0
        return self.bias_step or (self.balance_weight if self.balance == "bias" else None) or 0.001


class LatentConfig(Table):
    """`[model.latent]`: multi-head latent attention. Keys and values of all heads are made from one narrow vector."""

    kv_rank: PositiveInt
    """Width of the latent vector from which keys and values are computed."""
    q_rank: NonNegativeInt = 0
    """Width of the latent vector from which queries are computed; 0: they are computed from the residual stream."""
    nope_dim: PositiveInt
    """Dimensions of each head's queries and keys without rotary positions."""
    rope_dim: PositiveInt
    """Dimensions of each head's queries and keys with rotary positions; all heads share those of the keys."""
    value_dim: PositiveInt
    """Width of each head's values."""


class MambaConfig(Table):
    """`[model.mamba]`: the Mamba-2 mixer of the M layers."""

    heads: PositiveInt
    """Number of heads, each with a state of its own."""
    head_dim: PositiveInt = 64
    """Width of one head."""
    state: PositiveInt = 128
    """State size per channel of a head (ssm_state_size)."""
    groups: PositiveInt = 8
    """Number of groups of heads; the heads of a group share their B and C projections (n_groups)."""
    conv: Annotated[int, Field(ge=2)] = 4
    """Number of positions that the convolution sees, including its own (conv_kernel)."""
    chunk: PositiveInt = 128
    """Chunk length of the computation; the result does not depend on it."""
    dt_min: PositiveFloat = 0.001
    """Smallest time step, and the lower end of the range of initial time steps (time_step_min)."""
    dt_max: PositiveFloat = 0.1
    """Upper end of the range of initial time steps (time_step_max)."""


REPEATED = "..."  # at the end of `model.pattern`
LAYER_KINDS = "FWN"
GATED = ("swiglu", "geglu", "clamped_swiglu")  # activations with a gate
HYBRID_KINDS = "M*-E"  # of family nemotron_h: layers of one block


class ModelConfig(Table):
    """Names of Hugging Face's config.json are read as ours: hidden_size as width, num_hidden_layers as layers. Keys of
    a block of an installed package are one more table: `[model.<block>]`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any] = Field(init=False)

    family: Annotated[str, Registered(PRESETS)] = "llama"
    """Published model family. It sets the defaults of the keys below, and the Hugging Face format of import and
    export. hf builds any causal language model from a local Hugging Face config. Installed packages may add
    families."""
    layers: PositiveInt | None = None
    """Number of transformer layers."""
    width: PositiveInt | None = None
    """Hidden size of the residual stream."""
    ffn: PositiveInt | None = None
    """Inner size of the feed-forward block (for SwiGLU: of each of the two branches)."""
    heads: PositiveInt | None = None
    """Number of attention heads (RetNet: retention heads)."""
    kv_heads: PositiveInt | None = None
    """Key/value heads of grouped-query attention (default: as many as `heads`)."""
    head_dim: PositiveInt | None = None
    """Width of one head (default: width / heads)."""
    vocab: PositiveInt | None = None
    """True vocabulary size; the embedding is padded up to a multiple of 128."""
    tied: bool = False
    """Input embedding and output head share their weights."""
    activation: Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "relu2", "xielu"] = "swiglu"
    """Activation of the feed-forward block; swiglu, geglu and clamped_swiglu have a gate."""
    clamp_alpha: PositiveFloat = 1.702
    """clamped_swiglu: gate * sigmoid(clamp_alpha * gate) * (up + 1)."""
    clamp_limit: PositiveFloat = 7.0
    """clamped_swiglu: the gate is clamped to at most this value, up to plus or minus this value."""
    experts: ExpertsConfig | None = None
    """Mixture of experts instead of the feed-forward block (in a pattern with E: in the E layers)."""
    mamba: MambaConfig | None = None
    """Mamba-2 mixer of the M layers."""
    pattern: str | None = None
    """Kind of each layer, one letter each: F full attention, W attention in a window, N full attention without rotary
    positions, each followed by a feed-forward block (default: F everywhere). Family nemotron_h has layers of one block:
    M Mamba-2, * attention without rotary positions, - feed-forward, E experts. `...` at the end repeats the letters
    before it."""
    window: PositiveInt | None = None
    """Number of positions that a query of a W layer sees, including its own."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys, over each head or over all heads together."""
    latent: LatentConfig | None = None
    """Latent attention instead of grouped heads."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of queries, keys and values (qkv), or also of the attention's output (all)."""
    attention_sinks: bool = False
    """Each head has a trained extra score that takes a share of the attention and contributes no value."""
    attention_softcap: PositiveFloat | None = None
    """Attention scores pass through softcap * tanh(score / softcap)."""
    attention_scale: PositiveFloat | None = None
    """Factor applied to the attention scores (default: head_dim^-0.5)."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary position embedding."""
    rope_theta_window: PositiveFloat | None = None
    """Base in W layers (default: rope_theta)."""
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head's dimensions that is rotated."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of the rotary positions in F layers; W layers are scaled only with rope_scaling_windows."""
    rope_scaling_windows: bool = False
    """W layers use the scaled rotary positions too."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with a bias."""
    norm_place: Literal["pre", "post", "both"] = "pre"
    """Norms are applied before each block, after it (x + norm(block(x))), or both."""
    zero_centred_norm: bool = False
    """Norms multiply by one plus their weight."""
    embedding_scale: PositiveFloat | Literal["sqrt_width"] = 1.0
    """Factor applied to the token embeddings."""
    logit_scale: PositiveFloat = 1.0
    """Factor applied to the logits."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside the norms."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    value_width: PositiveInt | None = None
    """RetNet: width of values and gate (dv) (default: the feed-forward width)."""
    retention: Literal["parallel", "chunkwise"] = "chunkwise"
    """RetNet: which of the two equivalent forms training uses."""
    chunk: PositiveInt = 512
    """RetNet: chunk length of the chunkwise form."""
    config: str | None = None
    """hf: folder or file with a Hugging Face config.json."""
    assumed: list[str] = Field(default_factory=list)
    """Keys of this table whose published value is unknown and was assumed by the recipe's author."""

    @classmethod
    def extra_table(cls, key: str) -> type[Table] | None:
        """The table of a block of an installed package; None where no such block has one."""
        if key in BLOCKS.builtin or key not in BLOCKS.names():
            return None
        table: type[Table] | None = getattr(import_target(f"{BLOCKS.target(key)}.spec"), "TABLE", None)
        return table

    def block_table(self, block: str) -> Any:
        """The keys of a block of an installed package, with its defaults where the recipe leaves them out."""
        values = (self.model_extra or {}).get(block)
        table = self.extra_table(block)
        return table() if values is None and table is not None else values

    @model_validator(mode="before")
    @classmethod
    def _take_family_defaults(cls, values: Any) -> Any:
        family = values.get("family") if isinstance(values, dict) else None
        if not isinstance(family, str) or not (family in PRESETS.builtin or family in PRESETS.names()):
            return values
        preset = PRESETS.load(family)
        defaults = preset.defaults
        for table in ("experts", "latent", "mamba"):
            if isinstance(values.get(table), dict):
                keys = {**defaults.get(table, {}), **preset.table_defaults.get(table, {})}
                values = {**values, table: {**keys, **values[table]}}
        return {**defaults, **values}

    @model_validator(mode="wrap")
    @classmethod
    def _check_block_tables(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Hugging Face's names become ours; unknown keys are refused together with the problems of the other keys."""
        if not isinstance(values, dict):
            return handler(values)
        aliases, values = hf_aliases(values), with_our_names(values)
        if not (extra := set(values).difference(cls.model_fields)):
            return handler(values)
        checked: dict[str, Any] = {key: value for key, value in values.items() if key not in extra}
        problems: list[Any] = []
        for key in sorted(extra):
            if key in aliases:
                twice = PydanticCustomError(
                    "two_names", f"is another name for {aliases[key]}, which is set too; remove one of them"
                )
                problems.append({"type": twice, "loc": (key,), "input": values[key]})
                continue
            table = cls.extra_table(key)
            if table is None:
                problems.append({"type": "extra_forbidden", "loc": (key,), "input": values[key]})
                continue
            try:
                checked[key] = table.model_validate(values[key])
            except ValidationError as error:
                problems += [{**problem, "loc": (key, *problem["loc"])} for problem in error.errors()]
        try:
            model = handler(checked)
        except ValidationError as error:
            problems = [*error.errors(), *problems]
        if problems:
            details: list[Any] = [
                {key: problem[key] for key in ("type", "loc", "input", "ctx") if key in problem} for problem in problems
            ]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return model


def hf_aliases(table: Mapping[str, Any]) -> dict[str, str]:
    """Names in config.json -> keys of the [model] table: those of its family, and Llama's, which most families share.
    Empty for a table that has only our keys."""
    if not set(table).difference(ModelConfig.model_fields):
        return {}
    aliases: dict[str, str] = PRESETS.load("llama").hf.aliases()
    family = table.get("family")
    if isinstance(family, str) and family in PRESETS.names():
        aliases = aliases | PRESETS.load(family).hf.aliases()
    return aliases


def with_our_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """A [model] table with our keys. A name stays where our key is there too: validation refuses the two."""
    renamed: dict[str, Any] = {}
    if not (aliases := hf_aliases(table)):
        return dict(table)
    for name, value in table.items():
        key = aliases.get(name, name)
        renamed[name if key in renamed or (key != name and key in table) else key] = value
    return renamed


def layer_letters(model: ModelConfig) -> str:
    """The kind of each layer, first to last."""
    layers, pattern = model.layers or 0, model.pattern or f"F{REPEATED}"
    letters = pattern.removesuffix(REPEATED)
    return letters if letters == pattern else (letters * (layers // len(letters) + 1))[:layers]
