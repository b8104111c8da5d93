"""OLMoE: a mixture of experts in every layer, weights not renormalised, RMSNorm of queries and keys over all heads."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE, experts_part
from windlass.models.presets import llama
from windlass.models.presets.mixtral import ATTENTION_WEIGHTS
from windlass.models.presets.qwen3_moe import EXPERT_WEIGHTS

PRESET = Preset(
    spec=transformer_spec,
    defaults={
        "experts": {"count": 64, "top_k": 8, "renormalise": False},
        "qk_norm": "width",
        "rope_theta": 10_000.0,
    },
    hf=HFFormat(
        family="olmoe",
        config={
            **{key: value for key, value in llama.CONFIG.items() if key != "mlp_bias"},
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "clip_qkv": None,
        },
        parts=(ROPE, experts_part("num_experts", "intermediate_size")),
        model_types=("olmoe",),
        requirements=(
            llama.SCALED_ROPE,
            llama.NO_ATTENTION_BIAS,
            llama.SILU,
            Requirement(("clip_qkv",), (), "it limits queries, keys and values to {value}"),
        ),
        weights={**ATTENTION_WEIGHTS, **llama.QK_NORM_WEIGHTS, **EXPERT_WEIGHTS},
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
