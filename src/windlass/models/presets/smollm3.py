"""SmolLM3: Llama without rotary positions in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from windlass.config import ModelConfig
from windlass.config.model import layer_letters
from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import ConfigPart, HFFormat, Preset
from windlass.models.hf_parts import ROPE
from windlass.models.presets import llama


def read_unturned(config: Mapping[str, Any]) -> dict[str, Any]:
    turned, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval") or 4
    if isinstance(turned, list):
        return {"pattern": "".join("F" if layer else "N" for layer in turned)}
    return {"pattern": "F" * (every - 1) + "N..."}


def write_unturned(model: Mapping[str, Any]) -> dict[str, Any]:
    letters = layer_letters(ModelConfig.model_validate(model))
    return {
        "no_rope_layers": [int(letter != "N") for letter in letters],
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * len(letters),
    }


PRESET = Preset(
    spec=transformer_spec,
    defaults={"pattern": "FFFN...", "tied": True, "norm_eps": 1e-6},
    hf=HFFormat(
        family="smollm3",
        config={**llama.CONFIG, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"},
        parts=(ROPE, ConfigPart(read_unturned, write_unturned, ("pattern",))),
        model_types=("smollm3",),
        requirements=(
            llama.SCALED_ROPE,
            *llama.NO_BIASES,
            llama.SILU,
            llama.NO_WINDOW,
        ),
        weights=llama.WEIGHTS,
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
