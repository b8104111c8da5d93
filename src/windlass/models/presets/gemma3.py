"""Gemma 3, text: zero-centred norms before and after each block, GeGLU, five layers in a window to one full layer, each
kind with its own rotary base, token vectors times the square root of the width."""

from collections.abc import Mapping
from typing import Any

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import ConfigPart, HFFormat, Preset, Requirement
from windlass.models.hf_parts import LAYER_TYPES, TWO_ROPES
from windlass.models.presets import llama
from windlass.models.presets.olmo2 import POST_NORM_WEIGHTS


def read_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_scale": (config.get("query_pre_attn_scalar") or 256) ** -0.5}


def write_scale(model: Mapping[str, Any]) -> dict[str, Any]:
    scale = model["attention_scale"]
    return {
        "query_pre_attn_scalar": round(scale**-2) if scale else model["head_dim"] or model["width"] // model["heads"]
    }


PRESET = Preset(
    spec=transformer_spec,
    defaults={
        "activation": "geglu",
        "norm_place": "both",
        "zero_centred_norm": True,
        "norm_eps": 1e-6,
        "qk_norm": "head",
        "pattern": "WWWWWF...",
        "window": 1024,
        "rope_theta": 1_000_000.0,
        "rope_theta_window": 10_000.0,
        "embedding_scale": "sqrt_width",
        "tied": True,
    },
    hf=HFFormat(
        family="gemma3",
        config={
            **{key: value for key, value in llama.CONFIG.items() if key != "hidden_act"},
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
        },
        parts=(TWO_ROPES, LAYER_TYPES, ConfigPart(read_scale, write_scale, ("attention_scale",))),
        model_types=("gemma3_text",),
        requirements=(
            llama.NO_ATTENTION_BIAS,
            Requirement(("hidden_activation",), ("gelu_pytorch_tanh",), "its activation is {value}"),
            Requirement(("attn_logit_softcapping",), (), "its attention scores are capped at {value}"),
            Requirement(("final_logit_softcapping",), (), "its logits are capped at {value}"),
            Requirement(("use_bidirectional_attention",), (False,), "it attends to later tokens"),
        ),
        weights={
            **llama.WEIGHTS,
            **llama.QK_NORM_WEIGHTS,
            **POST_NORM_WEIGHTS,
            "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.pre_feedforward_layernorm.weight",
        },
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
