"""DeepSeek-V3: DeepSeek-V2 with queries from a narrow vector, experts chosen by sigmoid within the best groups, and a
bias that balances them beside a small loss. Multi-token prediction is not trained."""

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE
from windlass.models.presets import deepseek_v2, llama

PRESET = Preset(
    spec=transformer_spec,
    defaults={
        **deepseek_v2.DEFAULTS,
        "latent": {"kv_rank": 512, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        "experts": {
            "count": 256,
            "top_k": 8,
            "shared": 1,
            "dense_layers": 3,
            "router": "sigmoid",
            "groups": 8,
            "groups_kept": 4,
            "scale": 2.5,
            "balance": "both",
            "balance_weight": 1e-4,
        },
    },
    hf=HFFormat(
        family="deepseek_v3",
        config={
            **deepseek_v2.CONFIG,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_nextn_predict_layers": 0,
            "rope_interleave": True,
        },
        parts=(ROPE, deepseek_v2.LATENT, deepseek_v2.routed_experts(lambda groups: "noaux_tc", "sigmoid")),
        model_types=("deepseek_v3",),
        requirements=(
            *deepseek_v2.REQUIREMENTS,
            Requirement(("scoring_func",), ("sigmoid",), "its router's scores are {value}"),
            Requirement(("topk_method",), ("noaux_tc",), "its experts are chosen by {value}"),
            Requirement(
                ("rope_interleave",),
                (True,),
                "its rotary positions rotate halves of a head, not neighbouring dimensions",
            ),
        ),
        left_out=(
            Requirement(
                ("num_nextn_predict_layers", "num_mtp_layers"),
                (0,),
                "its {value} layers for multi-token prediction are neither imported nor trained",
            ),
        ),
        weights={
            **deepseek_v2.WEIGHTS,
            "layers.{layer}.feed_forward.bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        },
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
