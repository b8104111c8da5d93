"""Qwen 2 and 2.5, dense: Llama with biases of queries, keys and values."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset
from windlass.models.hf_parts import ROPE
from windlass.models.presets import llama

PRESET = Preset(
    spec=transformer_spec,
    defaults={"attention_bias": "qkv", "rope_theta": 1_000_000.0, "norm_eps": 1e-6},
    hf=HFFormat(
        family="qwen2",
        config={
            **{key: value for key, value in llama.CONFIG.items() if key not in ("attention_bias", "mlp_bias")},
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": False,
        },
        parts=(ROPE,),
        model_types=("qwen2",),
        requirements=(llama.SCALED_ROPE, llama.SILU, llama.NO_WINDOW),
        weights={**llama.WEIGHTS, **llama.QKV_BIASES},
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
        layerwise=True,
    ),
)
