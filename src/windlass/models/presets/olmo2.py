"""OLMo 2: norms after each block, RMSNorm of queries and keys over all heads together."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset
from windlass.models.hf_parts import ROPE
from windlass.models.presets import llama

POST_NORM_WEIGHTS = {
    "layers.{layer}.attention_post_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.ffn_post_norm.weight": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
OLMO_DEFAULTS = {"norm_place": "post", "qk_norm": "width", "norm_eps": 1e-6}
OLMO_WEIGHTS = {name: target for name, target in llama.WEIGHTS.items() if "_norm." not in name} | {
    **llama.QK_NORM_WEIGHTS,
    **POST_NORM_WEIGHTS,
}

PRESET = Preset(
    spec=transformer_spec,
    defaults=OLMO_DEFAULTS,
    hf=HFFormat(
        family="olmo2",
        config={**llama.CONFIG, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
        parts=(ROPE,),
        model_types=("olmo2",),
        requirements=(llama.SCALED_ROPE, llama.NO_ATTENTION_BIAS, llama.SILU),
        weights=OLMO_WEIGHTS,
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
