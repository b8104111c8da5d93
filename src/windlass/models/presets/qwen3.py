"""Qwen 3, dense: Llama with an RMSNorm of each head's queries and keys. OpenEuroLLM's 9B has the same form."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset
from windlass.models.hf_parts import ROPE
from windlass.models.presets import llama

PRESET = Preset(
    spec=transformer_spec,
    defaults={"qk_norm": "head", "rope_theta": 1_000_000.0, "norm_eps": 1e-6},
    hf=HFFormat(
        family="qwen3",
        config={
            **llama.CONFIG,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": False,
        },
        parts=(ROPE,),
        model_types=("qwen3",),
        requirements=(
            llama.SCALED_ROPE,
            llama.NO_ATTENTION_BIAS,
            llama.SILU,
            llama.NO_WINDOW,
        ),
        weights={**llama.WEIGHTS, **llama.QK_NORM_WEIGHTS},
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
        layerwise=True,
    ),
)
