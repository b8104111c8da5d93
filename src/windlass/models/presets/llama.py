"""The Llama family: grouped-query attention with rotary positions, RMSNorm, SwiGLU (or GELU).

Mistral without a sliding window has the same form. Our rotary embedding turns the two halves of a head as Hugging
Face's does, so no weight is reordered. Presets of related families take their tables from here."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE

# Keys that transformers 4 and 5 both read.
CONFIG = {
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
    "max_position_embeddings": ConfigSlot("positions"),
    "tie_word_embeddings": ConfigSlot("tied", default=lambda model: False),
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": ConfigSlot("init_std", default=lambda model: 0.02),
    "use_cache": True,
    # Those of the tokenizer take their place; transformers would put in those of another model.
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": ConfigSlot("dtype"),
    "dtype": ConfigSlot("dtype"),
}
NO_ATTENTION_BIAS = Requirement(("attention_bias",), (False,), "its attention has biases")
NO_BIASES = (
    NO_ATTENTION_BIAS,
    Requirement(("mlp_bias",), (False,), "its feed-forward layers have biases"),
)
SCALED_ROPE = Requirement(
    ("rope_parameters.rope_type", "rope_parameters.type", "rope_scaling.rope_type", "rope_scaling.type"),
    ("default", "linear", "llama3", "yarn"),
    "its rotary positions are scaled ({value})",
)
NO_WINDOW = Requirement(("use_sliding_window",), (False,), "some of its layers attend in a window")
SILU = Requirement(("hidden_act", "hidden_activation"), ("silu",), "its activation is {value}")
WEIGHTS = {
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
}
QK_NORM_WEIGHTS = {
    "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.{layer}.attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
}
QKV_BIASES = {
    f"layers.{{layer}}.attention.w{letter}.bias": f"model.layers.{{layer}}.self_attn.{letter}_proj.bias"
    for letter in "qkv"
}
# Feed-forward weights of a block without a gate.
UNGATED_WEIGHTS = {
    "layers.{layer}.feed_forward.w1.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.feed_forward.w2.weight": "model.layers.{layer}.mlp.down_proj.weight",
}
TRANSFORMS = {"embed.weight": "pad-vocabulary", "head.weight": "pad-vocabulary"}
TIED = {"head.weight": "embed.weight"}

PRESET = Preset(
    spec=transformer_spec,
    hf=HFFormat(
        family="llama",
        config={**CONFIG, "pretraining_tp": 1},
        parts=(ROPE,),
        model_types=("llama", "mistral"),
        requirements=(
            Requirement(("sliding_window",), (0,), "it attends in a window of {value:,}", model_type="mistral"),
            Requirement(("sliding_window",), (0,), "it attends in a window of {value:,}", model_type="gemma2"),
            SCALED_ROPE,
            *NO_BIASES,
            SILU,
            Requirement(
                ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_pct"),
                (1.0,),
                "it rotates {value:.0%} of each head",
            ),
            Requirement(("use_parallel_residual",), (False,), "its branches run in parallel"),
            Requirement(("attn_logit_softcapping",), (), "its attention scores are capped at {value}"),
            Requirement(("final_logit_softcapping",), (), "its logits are capped at {value}"),
        ),
        weights=WEIGHTS,
        transforms=TRANSFORMS,
        tied=TIED,
        layerwise=True,
    ),
)
