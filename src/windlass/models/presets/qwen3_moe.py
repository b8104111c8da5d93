"""Qwen 3 with a mixture of experts: Qwen 3's attention; some leading layers may be dense."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE, experts_part
from windlass.models.presets import llama

EXPERT_WEIGHTS = {
    "layers.{layer}.feed_forward.router": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.feed_forward.w1": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "layers.{layer}.feed_forward.w2": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    "layers.{layer}.feed_forward.w3": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
}

PRESET = Preset(
    spec=transformer_spec,
    defaults={"experts": {"count": 128, "top_k": 8}, "qk_norm": "head", "rope_theta": 1_000_000.0, "norm_eps": 1e-6},
    hf=HFFormat(
        family="qwen3_moe",
        config={
            **llama.CONFIG,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "use_sliding_window": False,
        },
        parts=(ROPE, experts_part("num_experts", "moe_intermediate_size", dense_layers=True)),
        model_types=("qwen3_moe",),
        requirements=(
            llama.SCALED_ROPE,
            llama.NO_ATTENTION_BIAS,
            llama.SILU,
            llama.NO_WINDOW,
            Requirement(("decoder_sparse_step",), (1,), "only every {value}th layer has experts"),
            Requirement(
                ("mlp_only_layers",),
                tuple(list(range(count)) for count in range(128)),
                "some dense layers follow layers with experts ({value})",
            ),
        ),
        weights={**llama.WEIGHTS, **llama.QK_NORM_WEIGHTS, **EXPERT_WEIGHTS},
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
