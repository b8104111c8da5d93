"""Nemotron: zero-centred LayerNorm, squared ReLU without a gate, half of each head turned. Luciole 1B and 23B have
this form."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE
from windlass.models.presets import llama

NORM_BIASES = {
    name.replace("weight", "bias"): target.replace("weight", "bias")
    for name, target in llama.WEIGHTS.items()
    if name.endswith("norm.weight")
}

PRESET = Preset(
    spec=transformer_spec,
    defaults={
        "norm": "layer",
        "zero_centred_norm": True,
        "activation": "relu2",
        "rope_fraction": 0.5,
        "rope_theta": 10_000.0,
    },
    hf=HFFormat(
        family="nemotron",
        config={
            **{key: value for key, value in llama.CONFIG.items() if key != "rms_norm_eps"},
            "architectures": ["NemotronForCausalLM"],
            "model_type": "nemotron",
            "hidden_act": "relu2",
            "norm_eps": ConfigSlot("norm_eps", default=lambda model: 1e-5),
        },
        parts=(ROPE,),
        model_types=("nemotron",),
        requirements=(
            llama.SCALED_ROPE,
            *llama.NO_BIASES,
            Requirement(("hidden_act",), ("relu2",), "its activation is {value}"),
        ),
        weights={
            **{name: target for name, target in llama.WEIGHTS.items() if ".w3." not in name},
            **NORM_BIASES,
            **llama.UNGATED_WEIGHTS,
        },
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
