"""DeepSeek-V2: latent attention, leading dense layers, then experts with shared ones, chosen by softmax."""

from collections.abc import Callable, Mapping
from typing import Any

from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import ConfigPart, HFFormat, Preset, Requirement
from windlass.models.hf_parts import ROPE
from windlass.models.presets import llama
from windlass.models.presets.qwen3_moe import EXPERT_WEIGHTS

# Key of [model.latent] and of [model.experts] -> key in transformers.
LATENT_KEYS = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
EXPERT_KEYS = {
    "count": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "groups": "n_group",
    "groups_kept": "topk_group",
    "scale": "routed_scaling_factor",
    "renormalise": "norm_topk_prob",
}
LATENT = ConfigPart(  # a rank of 0 is null in the folder
    lambda config: {"latent": {key: config.get(name) or 0 for key, name in LATENT_KEYS.items()}},
    lambda model: {name: model["latent"][key] or None for key, name in LATENT_KEYS.items()},
    ("latent",),
)


def routed_experts(method: Callable[[int], str], scoring: str) -> ConfigPart:
    """Keys of the mixture of experts; `method` names the way of choosing them, by the number of groups."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        experts = {key: config.get(name) for key, name in EXPERT_KEYS.items() if config.get(name) is not None}
        if config.get("topk_method") == "greedy":  # over all experts, whatever the number of groups
            experts |= {"groups": 1, "groups_kept": 1}
        return {"experts": experts}

    def write(model: Mapping[str, Any]) -> dict[str, Any]:
        experts = {**model["experts"]}
        experts["ffn"] = experts["ffn"] or model["ffn"]
        experts["groups_kept"] = experts["groups_kept"] or experts["groups"]
        keys = {name: experts[key] for key, name in EXPERT_KEYS.items()}
        return keys | {"topk_method": method(experts["groups"]), "scoring_func": scoring, "moe_layer_freq": 1}

    return ConfigPart(read, write, tuple(f"experts.{key}" for key in EXPERT_KEYS))


CONFIG: Mapping[str, Any] = {key: value for key, value in llama.CONFIG.items() if key not in ("head_dim", "mlp_bias")}
REQUIREMENTS = (
    llama.SCALED_ROPE,
    *llama.NO_BIASES,
    llama.SILU,
    Requirement(("moe_layer_freq",), (1,), "only every {value}th layer has experts"),
)
ATTENTION = "model.layers.{layer}.self_attn"
SHARED = "model.layers.{layer}.mlp.shared_experts"
WEIGHTS = {
    **{name: target for name, target in llama.WEIGHTS.items() if ".attention.wk." not in name and ".wv." not in name},
    **EXPERT_WEIGHTS,
    "layers.{layer}.attention.wq_down.weight": f"{ATTENTION}.q_a_proj.weight",
    "layers.{layer}.attention.wq_up.weight": f"{ATTENTION}.q_b_proj.weight",
    "layers.{layer}.attention.q_norm.weight": f"{ATTENTION}.q_a_layernorm.weight",
    "layers.{layer}.attention.wkv_down.weight": f"{ATTENTION}.kv_a_proj_with_mqa.weight",
    "layers.{layer}.attention.kv_norm.weight": f"{ATTENTION}.kv_a_layernorm.weight",
    "layers.{layer}.attention.wkv.weight": f"{ATTENTION}.kv_b_proj.weight",
    "layers.{layer}.feed_forward.shared.w1.weight": f"{SHARED}.gate_proj.weight",
    "layers.{layer}.feed_forward.shared.w2.weight": f"{SHARED}.down_proj.weight",
    "layers.{layer}.feed_forward.shared.w3.weight": f"{SHARED}.up_proj.weight",
}
DEFAULTS: Mapping[str, Any] = {"rope_theta": 10_000.0, "norm_eps": 1e-6}

PRESET = Preset(
    spec=transformer_spec,
    defaults={
        **DEFAULTS,
        "latent": {"kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        "experts": {"count": 64, "top_k": 6, "shared": 2, "dense_layers": 1, "renormalise": False},
    },
    hf=HFFormat(
        family="deepseek_v2",
        config={**CONFIG, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
        parts=(
            ROPE,
            LATENT,
            routed_experts(lambda groups: "greedy" if groups == 1 else "group_limited_greedy", "softmax"),
        ),
        model_types=("deepseek_v2",),
        requirements=(
            *REQUIREMENTS,
            Requirement(("scoring_func",), ("softmax",), "its router's scores are {value}"),
            Requirement(("topk_method",), ("greedy", "group_limited_greedy"), "its experts are chosen by {value}"),
            Requirement(
                ("norm_topk_prob",), (False,), "weights of experts are renormalised, which transformers ignores"
            ),
        ),
        weights=WEIGHTS,
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)
