"""OLMo 3: OLMo 2 with attention in a window on three of four layers; scaled positions on the full ones only."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset
from windlass.models.hf_parts import LAYER_TYPES, TWO_ROPES
from windlass.models.presets import llama
from windlass.models.presets.olmo2 import OLMO_DEFAULTS, OLMO_WEIGHTS

PRESET = Preset(
    spec=transformer_spec,
    defaults={**OLMO_DEFAULTS, "pattern": "WWWF...", "window": 4096},
    hf=HFFormat(
        family="olmo3",
        config={**llama.CONFIG, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"},
        parts=(TWO_ROPES, LAYER_TYPES),
        model_types=("olmo3",),
        requirements=(llama.NO_ATTENTION_BIAS, llama.SILU),
        weights=OLMO_WEIGHTS,
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
