"""The `[model]` table of a recipe as a `ModelSpec`: which blocks and norms stand in which layer."""

from dataclasses import replace
from itertools import groupby

from windlass.blocks.attention.rope import Rope, RopeScaling
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec, padded_rows
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.blocks.interface import BlockSpec
from windlass.blocks.latent.spec import LatentSpec
from windlass.blocks.mamba.spec import MambaSpec
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.config import ModelConfig
from windlass.config.model import ExpertsConfig, LatentConfig, layer_letters
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec


def default_hidden(width: int) -> int:
    """Inner width of a gated feed-forward block with as many weights as one of four times the width, rounded up to
    256."""
    return -(-(8 * width // 3) // 256) * 256


def transformer_spec(config: ModelConfig) -> ModelSpec:
    """Layers of attention and a feed-forward block, and layers of one block."""
    assert config.width
    hidden = config.ffn or default_hidden(config.width)
    experts = None if config.experts is None else experts_spec(config, config.experts, hidden)
    dense_layers = 0 if config.experts is None else config.experts.dense_layers
    layers = []
    for index, letter in enumerate(layer_letters(config)):
        if letter == "M":
            branch = branch_spec(config, "mamba", mamba_spec(config))
        elif letter == "*":
            branch = branch_spec(config, "attention", attention_spec(config, letter))
        elif letter in "-E":
            branch = feed_forward_spec(config, hidden, experts if letter == "E" else None)
        else:
            mixer = attention_spec(config, letter) if config.latent is None else latent_spec(config, config.latent)
            layers.append(layer_spec(config, "attention", mixer, hidden, experts if index >= dense_layers else None))
            continue
        layers.append(LayerSpec((branch,)))
    spec = decoder_spec(config, layers)
    is_measured = config.experts is None and config.latent is None and config.mamba is None
    return spec if is_measured else replace(spec, measured=False)


def mamba_spec(config: ModelConfig) -> MambaSpec:
    assert config.width and config.mamba  # config.check has asked for them
    return MambaSpec(width=config.width, norm_eps=config.norm_eps, **config.mamba.model_dump())


def experts_spec(config: ModelConfig, experts: ExpertsConfig, hidden: int) -> ExpertsSpec:
    assert config.width
    size = experts.ffn or hidden
    return ExpertsSpec(
        width=config.width,
        hidden=size,
        count=experts.count,
        top_k=experts.top_k,
        shared_hidden=experts.shared * (experts.shared_ffn or size),
        activation=config.activation,
        clamp=(config.clamp_alpha, config.clamp_limit),
        bias=experts.bias,
        router=experts.router,
        renormalise=experts.renormalise,
        groups=experts.groups,
        groups_kept=experts.groups_kept or experts.groups,
        scale=experts.scale,
        balance_strength=experts.loss_strength,
        bias_step=experts.bias_strength,
        z_loss=experts.z_loss,
    )


def attention_spec(config: ModelConfig, letter: str) -> AttentionSpec:
    """Attention of a layer of this kind."""
    assert config.width and config.heads  # config.check has asked for them
    head_dim = config.head_dim or config.width // config.heads
    windowed = letter == "W"
    theta = config.rope_theta_window if windowed and config.rope_theta_window else config.rope_theta
    scaling = rope_scaling(config) if not windowed or config.rope_scaling_windows else None
    return AttentionSpec(
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        head_dim=head_dim,
        rope=None if letter in "N*" else Rope(theta, int(head_dim * config.rope_fraction), scaling),
        window=(config.window or 0) if windowed else 0,
        qk_norm=config.qk_norm,
        qk_norm_eps=config.norm_eps,
        qk_norm_zero_centred=config.zero_centred_norm,
        bias=config.attention_bias,
        sinks=config.attention_sinks,
        scale=config.attention_scale,
        softcap=config.attention_softcap or 0.0,
    )


def latent_spec(config: ModelConfig, latent: LatentConfig) -> LatentSpec:
    assert config.width and config.heads
    scaling, size = rope_scaling(config), latent.nope_dim + latent.rope_dim
    factor = scaling.magnitude(scaling.mscale_all_dim) if scaling and scaling.mscale_all_dim else 1.0
    return LatentSpec(
        width=config.width,
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=size,
        rope=Rope(config.rope_theta, latent.rope_dim, scaling),
        scale=config.attention_scale or size**-0.5 * factor**2,
        softcap=config.attention_softcap or 0.0,
        value_dim=latent.value_dim,
        kv_rank=latent.kv_rank,
        q_rank=latent.q_rank,
    )


def rope_scaling(config: ModelConfig) -> RopeScaling | None:
    if config.rope_scaling is None:
        return None
    values = config.rope_scaling.model_dump()
    return RopeScaling(**{**values, "old_length": values["old_length"] or 0})


def layer_spec(
    config: ModelConfig, name: str, mixer: BlockSpec, hidden: int, experts: BlockSpec | None = None
) -> LayerSpec:
    """A mixer, whose parameters begin with `name`, and a feed-forward block of inner size `hidden` (or `experts`), with
    norms where the recipe puts them."""
    return LayerSpec((branch_spec(config, name, mixer), feed_forward_spec(config, hidden, experts)))


def feed_forward_spec(config: ModelConfig, hidden: int, experts: BlockSpec | None = None) -> Branch:
    assert config.width
    clamp = config.clamp_alpha, config.clamp_limit
    block = experts or MlpSpec(width=config.width, hidden=hidden, activation=config.activation, clamp=clamp)
    return branch_spec(config, "feed_forward", block, "ffn")


def branch_spec(config: ModelConfig, name: str, block: BlockSpec, norm_name: str | None = None) -> Branch:
    norm, norm_name = norm_spec(config), norm_name or name
    pre, post = (norm if config.norm_place in place else None for place in (("pre", "both"), ("post", "both")))
    return Branch(name, block, pre, f"{norm_name}_norm", post, f"{norm_name}_post_norm")


def norm_spec(config: ModelConfig) -> NormSpec:
    assert config.width
    return NormSpec(
        width=config.width,
        eps=config.norm_eps,
        bias=config.norm == "layer",
        zero_centred=config.zero_centred_norm,
    )


def decoder_spec(config: ModelConfig, layers: list[LayerSpec]) -> ModelSpec:
    assert config.width and config.vocab
    scale = config.width**0.5 if config.embedding_scale == "sqrt_width" else config.embedding_scale
    return ModelSpec(
        embedding=EmbeddingSpec(
            vocab=config.vocab, rows=padded_rows(config.vocab), width=config.width, scale=float(scale)
        ),
        groups=tuple(LayerGroup(layer, len(list(group))) for layer, group in groupby(layers)),
        norm=replace(norm_spec(config), scale=config.logit_scale),
        tied=config.tied,
        init_std=config.init_std,
    )
