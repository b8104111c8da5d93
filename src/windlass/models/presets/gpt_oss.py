"""gpt-oss: attention sinks, biases everywhere, a mixture of experts with clamped SwiGLU, windows in every second layer,
YaRN in all of them. The folder stacks the experts, with the rows of gate and up in turn."""

from collections.abc import Mapping
from typing import Any

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset, Requirement
from windlass.models.hf_parts import LAYER_TYPES, ROPE, experts_part
from windlass.models.presets import llama
from windlass.models.presets.mixtral import ATTENTION_WEIGHTS

MLP = "model.layers.{layer}.mlp"
CONFIG: Mapping[str, Any] = {key: value for key, value in llama.CONFIG.items() if key != "mlp_bias"}

PRESET = Preset(
    spec=transformer_spec,
    defaults={
        "experts": {"count": 32, "top_k": 4, "bias": True},
        "activation": "clamped_swiglu",
        "attention_bias": "all",
        "attention_sinks": True,
        "pattern": "WF...",
        "window": 128,
        "rope_theta": 150_000.0,
        "rope_scaling": {"kind": "yarn", "factor": 32.0, "old_length": 4096, "truncate": False},
        "rope_scaling_windows": True,
    },
    hf=HFFormat(
        family="gpt_oss",
        config={
            **CONFIG,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "swiglu_alpha": ConfigSlot("clamp_alpha"),
            "swiglu_limit": ConfigSlot("clamp_limit"),
        },
        parts=(ROPE, LAYER_TYPES, experts_part("num_local_experts", "intermediate_size", renormalise=True)),
        model_types=("gpt_oss",),
        requirements=(
            llama.SCALED_ROPE,
            llama.SILU,
            Requirement(("attention_bias",), (True,), "its attention has no biases"),
        ),
        weights={
            **ATTENTION_WEIGHTS,
            **llama.QKV_BIASES,
            "layers.{layer}.attention.wo.bias": "model.layers.{layer}.self_attn.o_proj.bias",
            "layers.{layer}.attention.sinks": "model.layers.{layer}.self_attn.sinks",
            "layers.{layer}.feed_forward.router": f"{MLP}.router.weight",
            "layers.{layer}.feed_forward.router_bias": f"{MLP}.router.bias",
            "layers.{layer}.feed_forward.w1": f"{MLP}.experts.gate_up_proj",
            "layers.{layer}.feed_forward.w3": f"{MLP}.experts.gate_up_proj",
            "layers.{layer}.feed_forward.w2": f"{MLP}.experts.down_proj",
            "layers.{layer}.feed_forward.w1_bias": f"{MLP}.experts.gate_up_proj_bias",
            "layers.{layer}.feed_forward.w3_bias": f"{MLP}.experts.gate_up_proj_bias",
            "layers.{layer}.feed_forward.w2_bias": f"{MLP}.experts.down_proj_bias",
        },
        joined="turns",
        transforms={
            **llama.TRANSFORMS,
            **{f"layers.{{layer}}.feed_forward.{name}": "transpose" for name in ("w1", "w2", "w3")},
        },
        tied=llama.TIED,
    ),
)
