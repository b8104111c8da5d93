"""Mixtral: Llama with a mixture of experts in every layer."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE, experts_part
from windlass.models.presets import llama

ATTENTION_WEIGHTS = {name: target for name, target in llama.WEIGHTS.items() if ".feed_forward." not in name}
EXPERTS = "model.layers.{layer}.block_sparse_moe"

PRESET = Preset(
    spec=transformer_spec,
    defaults={"experts": {"count": 8, "top_k": 2}, "rope_theta": 1_000_000.0},
    hf=HFFormat(
        family="mixtral",
        config={
            **{key: value for key, value in llama.CONFIG.items() if key not in ("attention_bias", "mlp_bias")},
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
        },
        parts=(ROPE, experts_part("num_local_experts", "intermediate_size", renormalise=True)),
        model_types=("mixtral",),
        requirements=(
            llama.SCALED_ROPE,
            llama.SILU,
            Requirement(("sliding_window",), (0,), "it attends in a window of {value:,}"),
        ),
        weights={
            **ATTENTION_WEIGHTS,
            "layers.{layer}.feed_forward.router": f"{EXPERTS}.gate.weight",
            "layers.{layer}.feed_forward.w1": f"{EXPERTS}.experts.{{expert}}.w1.weight",
            "layers.{layer}.feed_forward.w2": f"{EXPERTS}.experts.{{expert}}.w2.weight",
            "layers.{layer}.feed_forward.w3": f"{EXPERTS}.experts.{{expert}}.w3.weight",
        },
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
