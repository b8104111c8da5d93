"""The Llama family: grouped-query attention with rotary positions, RMSNorm, SwiGLU (or GELU).

Mistral without a sliding window has the same form. Our rotary embedding turns the two halves of a head as Hugging
Face's does, so no weight is reordered."""

from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec, padded_rows
from windlass.blocks.interface import BlockSpec
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.config import ModelConfig
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset, Requirement
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec


def default_hidden(width: int) -> int:
    """Inner width of a gated feed-forward block with as many weights as one of four times the width, rounded up to
    256."""
    return -(-(8 * width // 3) // 256) * 256


def spec(config: ModelConfig) -> ModelSpec:
    assert config.width and config.heads  # config.check has asked for them
    attention = AttentionSpec(
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        head_dim=config.head_dim or config.width // config.heads,
        rope_theta=config.rope_theta,
    )
    return decoder_spec(config, "attention", attention, config.ffn or default_hidden(config.width))


def decoder_spec(config: ModelConfig, name: str, mixer: BlockSpec, hidden: int) -> ModelSpec:
    """Equal layers of a mixer and a feed-forward block, each behind an RMSNorm; the mixer's parameters begin with
    `name`."""
    assert config.layers and config.width and config.vocab
    norm = NormSpec(width=config.width, eps=config.norm_eps)
    mlp = MlpSpec(width=config.width, hidden=hidden, gated=config.activation == "swiglu")
    layer = LayerSpec((Branch(name, mixer, norm, f"{name}_norm"), Branch("feed_forward", mlp, norm, "ffn_norm")))
    return ModelSpec(
        embedding=EmbeddingSpec(vocab=config.vocab, rows=padded_rows(config.vocab), width=config.width),
        groups=(LayerGroup(layer, config.layers),),
        norm=norm,
        tied=config.tied,
        init_std=config.init_std,
    )


PRESET = Preset(
    spec=spec,
    hf=HFFormat(
        family="llama",
        # Keys that transformers 4 and 5 both read.
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": ConfigSlot("vocab", required=True),
            "hidden_size": ConfigSlot("width", required=True),
            "intermediate_size": ConfigSlot("ffn", required=True),
            "num_hidden_layers": ConfigSlot("layers", required=True),
            "num_attention_heads": ConfigSlot("heads", required=True),
            "num_key_value_heads": ConfigSlot("kv_heads", default=lambda model: model["heads"]),
            "head_dim": ConfigSlot("head_dim", default=lambda model: model["width"] // model["heads"]),
            "hidden_act": "silu",
            "rms_norm_eps": ConfigSlot("norm_eps", default=lambda model: 1e-6),
            "rope_theta": ConfigSlot("rope_theta", default=lambda model: 10_000.0),
            "rope_parameters": {"rope_type": "default", "rope_theta": ConfigSlot("rope_theta")},
            "max_position_embeddings": ConfigSlot("positions"),
            "tie_word_embeddings": ConfigSlot("tied", default=lambda model: False),
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": ConfigSlot("init_std", default=lambda model: 0.02),
            "use_cache": True,
            "pretraining_tp": 1,
            "torch_dtype": ConfigSlot("dtype"),
            "dtype": ConfigSlot("dtype"),
        },
        model_types=("llama", "mistral"),
        requirements=(
            Requirement(("sliding_window",), (0,), "it attends in a window of {value:,}", model_type="mistral"),
            Requirement(("sliding_window",), (0,), "it attends in a window of {value:,}", model_type="gemma2"),
            Requirement(
                ("rope_parameters.rope_type", "rope_parameters.type", "rope_scaling.rope_type", "rope_scaling.type"),
                ("default",),
                "its rotary positions are scaled ({value})",
            ),
            Requirement(("attention_bias",), (False,), "its attention has biases"),
            Requirement(("mlp_bias",), (False,), "its feed-forward layers have biases"),
            Requirement(("hidden_act", "hidden_activation"), ("silu",), "its activation is {value}"),
            Requirement(
                ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_pct"),
                (1.0,),
                "it rotates {value:.0%} of each head",
            ),
            Requirement(("use_parallel_residual",), (False,), "its branches run in parallel"),
            Requirement(("attn_logit_softcapping",), (), "its attention scores are capped at {value}"),
            Requirement(("final_logit_softcapping",), (), "its logits are capped at {value}"),
        ),
        fixed={"activation": "swiglu"},
        weights={
            "embed.weight": "model.embed_tokens.weight",
            "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
            "layers.{layer}.attention.wq.weight": "model.layers.{layer}.self_attn.q_proj.weight",
            "layers.{layer}.attention.wk.weight": "model.layers.{layer}.self_attn.k_proj.weight",
            "layers.{layer}.attention.wv.weight": "model.layers.{layer}.self_attn.v_proj.weight",
            "layers.{layer}.attention.wo.weight": "model.layers.{layer}.self_attn.o_proj.weight",
            "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
            "layers.{layer}.feed_forward.w1.weight": "model.layers.{layer}.mlp.gate_proj.weight",
            "layers.{layer}.feed_forward.w3.weight": "model.layers.{layer}.mlp.up_proj.weight",
            "layers.{layer}.feed_forward.w2.weight": "model.layers.{layer}.mlp.down_proj.weight",
            "norm.weight": "model.norm.weight",
            "head.weight": "lm_head.weight",
        },
        transforms={"embed.weight": "pad-vocabulary", "head.weight": "pad-vocabulary"},
        tied={"head.weight": "embed.weight"},
        layerwise=True,
    ),
)
