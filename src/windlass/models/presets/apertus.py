"""Apertus: norms of each head's queries and keys, and xIELU without a gate."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE
from windlass.models.presets import llama

PRESET = Preset(
    spec=transformer_spec,
    defaults={
        "qk_norm": "head",
        "activation": "xielu",
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "old_length": 8192},
    },
    hf=HFFormat(
        family="apertus",
        config={
            **llama.CONFIG,
            "architectures": ["ApertusForCausalLM"],
            "model_type": "apertus",
            "hidden_act": "xielu",
            "post_norm": False,
            "qk_norm": True,
        },
        parts=(ROPE,),
        model_types=("apertus",),
        requirements=(
            llama.SCALED_ROPE,
            *llama.NO_BIASES,
            Requirement(("hidden_act",), ("xielu",), "its activation is {value}"),
        ),
        weights={
            **{name: target for name, target in llama.WEIGHTS.items() if ".w3." not in name},
            **llama.QK_NORM_WEIGHTS,
            **llama.UNGATED_WEIGHTS,
            "layers.{layer}.attention_norm.weight": "model.layers.{layer}.attention_layernorm.weight",
            "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.feedforward_layernorm.weight",
            "layers.{layer}.feed_forward.activation.alpha_p": "model.layers.{layer}.mlp.act_fn.alpha_p",
            "layers.{layer}.feed_forward.activation.alpha_n": "model.layers.{layer}.mlp.act_fn.alpha_n",
        },
        constants={
            "model.layers.{layer}.mlp.act_fn.beta": 0.5,
            "model.layers.{layer}.mlp.act_fn.eps": -1e-6,
        },
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
