"""Qwen 3, dense: Llama with an RMSNorm of each head's queries and keys. OpenEuroLLM's 9B has the same form."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE
from windlass.models.presets.llama import (
    CONFIG,
    NO_ATTENTION_BIAS,
    QK_NORM_WEIGHTS,
    SCALED_ROPE,
    SILU,
    TIED,
    TRANSFORMS,
    WEIGHTS,
)

PRESET = Preset(
    spec=transformer_spec,
    defaults={"qk_norm": "head", "rope_theta": 1_000_000.0, "norm_eps": 1e-6},
    hf=HFFormat(
        family="qwen3",
        config={**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False},
        parts=(ROPE,),
        model_types=("qwen3",),
        requirements=(
            SCALED_ROPE,
            NO_ATTENTION_BIAS,
            SILU,
            Requirement(("use_sliding_window",), (False,), "some of its layers attend in a window"),
        ),
        weights={**WEIGHTS, **QK_NORM_WEIGHTS},
        transforms=TRANSFORMS,
        tied=TIED,
        layerwise=True,
    ),
)
