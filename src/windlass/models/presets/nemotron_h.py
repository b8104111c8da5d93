"""Nemotron-H: layers of one block each (Mamba-2, attention without rotary positions, squared ReLU, experts without a
gate). Luciole 8B and Nemotron 3 Nano have this form."""

from collections.abc import Mapping
from typing import Any

from windlass.config import ModelConfig
from windlass.config.model import layer_letters
from windlass.models.assemble import transformer_spec
from windlass.models.hf_format import ConfigPart, ConfigSlot, HFFormat, Preset, Requirement
from windlass.models.presets import llama

# Names of layers in transformers 5, and in its first releases.
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E", "mamba": "M", "attention": "*"}
# Key of [model.mamba] or [model.experts] -> key in the folder.
MAMBA_KEYS = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state": "ssm_state_size",
    "groups": "n_groups",
    "conv": "conv_kernel",
    "chunk": "chunk_size",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
}
EXPERT_KEYS = {
    "count": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "groups": "n_group",
    "groups_kept": "topk_group",
    "scale": "routed_scaling_factor",
    "renormalise": "norm_topk_prob",
}


def read_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    types = config.get("layers_block_type") or config.get("layer_types")
    pattern = (
        "".join(LETTERS.get(kind, "?") for kind in types) if types else config.get("hybrid_override_pattern") or ""
    )
    model: dict[str, Any] = {"pattern": pattern, "layers": len(pattern)}
    # Without the key, transformers does not divide the width by the heads.
    model["head_dim"] = config.get("head_dim") or config.get("attention_head_dim") or 128
    if "M" in pattern:
        model["mamba"] = {key: config[name] for key, name in MAMBA_KEYS.items() if config.get(name) is not None}
    if "E" in pattern:
        model["experts"] = {key: config[name] for key, name in EXPERT_KEYS.items() if config.get(name) is not None}
    return model


def write_layers(model: Mapping[str, Any]) -> dict[str, Any]:
    """`hybrid_override_pattern`, which every version of transformers and vLLM reads."""
    pattern, experts = layer_letters(ModelConfig.model_validate(model)), model["experts"]
    config: dict[str, Any] = {"num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern}
    if model["mamba"] is not None:
        config |= {name: model["mamba"][key] for key, name in MAMBA_KEYS.items()}
    if experts is not None:
        derived = {"ffn": experts["ffn"] or model["ffn"], "groups_kept": experts["groups_kept"] or experts["groups"]}
        derived["shared_ffn"] = experts["shared_ffn"] or derived["ffn"]
        config |= {name: derived.get(key, experts[key]) for key, name in EXPERT_KEYS.items()}
    return config


MIXER = "backbone.layers.{layer}.mixer"
# Our names after "layers.{layer}." -> theirs after "backbone.layers.{layer}.mixer.".
MIXER_WEIGHTS = {
    **{f"mamba.{name}.weight": "in_proj.weight" for name in ("wz", "wx", "wb", "wc", "wt")},
    **{f"mamba.conv_{name}.weight": "conv1d.weight" for name in "xbc"},
    **{f"mamba.conv_{name}.bias": "conv1d.bias" for name in "xbc"},
    "mamba.a_log": "A_log",
    "mamba.d": "D",
    "mamba.dt_bias": "dt_bias",
    "mamba.norm.weight": "norm.weight",
    "mamba.wo.weight": "out_proj.weight",
    **{f"attention.w{name}.weight": f"{name}_proj.weight" for name in "qkvo"},
    "feed_forward.w1.weight": "up_proj.weight",
    "feed_forward.w2.weight": "down_proj.weight",
    "feed_forward.router": "gate.weight",
    "feed_forward.bias": "gate.e_score_correction_bias",
    "feed_forward.w1": "experts.{expert}.up_proj.weight",
    "feed_forward.w2": "experts.{expert}.down_proj.weight",
    "feed_forward.shared.w1.weight": "shared_experts.up_proj.weight",
    "feed_forward.shared.w2.weight": "shared_experts.down_proj.weight",
}
OWN_KEYS = ("num_hidden_layers", "hidden_act", "rms_norm_eps", "tie_word_embeddings")

PRESET = Preset(
    spec=transformer_spec,
    defaults={"activation": "relu2"},
    table_defaults={"experts": {"router": "sigmoid", "balance": "bias", "shared": 1}},
    hf=HFFormat(
        family="nemotron_h",
        config={
            **{key: value for key, value in llama.CONFIG.items() if key not in OWN_KEYS},
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "layer_norm_epsilon": ConfigSlot("norm_eps", default=lambda model: 1e-5),
            "tie_word_embeddings": False,
            "use_bias": False,
            "use_conv_bias": True,
            "mamba_proj_bias": False,
            "residual_in_fp32": False,
        },
        parts=(
            ConfigPart(
                read_layers,
                write_layers,
                (
                    *("pattern", "layers", "mamba", "experts"),
                    *(f"mamba.{key}" for key in MAMBA_KEYS),
                    *(f"experts.{key}" for key in EXPERT_KEYS if key != "shared"),
                ),
            ),
        ),
        model_types=("nemotron_h",),
        requirements=(
            *llama.NO_BIASES,
            Requirement(("mlp_hidden_act",), ("relu2",), "its activation is {value}"),
            Requirement(("mamba_hidden_act",), ("silu",), "the activation of its Mamba layers is {value}"),
            Requirement(("use_bias",), (False,), "its Mamba layers have biases"),
            Requirement(("use_conv_bias",), (True,), "its convolutions have no bias"),
            Requirement(("tie_word_embeddings",), (False,), "its embedding is tied"),
            Requirement(("sliding_window",), (), "it attends in a window of {value:,}"),
            Requirement(("moe_latent_size",), (), "its experts work on a latent vector of {value:,} numbers"),
            Requirement(("n_shared_experts",), (1,), "it has {value} shared experts"),
            Requirement(("num_nextn_predict_layers",), (0,), "it predicts {value} further tokens"),
        ),
        weights={
            "embed.weight": "backbone.embeddings.weight",
            **{f"layers.{{layer}}.{name}_norm.weight": "backbone.layers.{layer}.norm.weight" for name in ("mamba", "attention", "ffn")},
            **{f"layers.{{layer}}.{name}": f"{MIXER}.{target}" for name, target in MIXER_WEIGHTS.items()},
            "norm.weight": "backbone.norm_f.weight",
            "head.weight": "lm_head.weight",
        },
        transforms=llama.TRANSFORMS,
        tied=llama.TIED,
    ),
)  # fmt: skip
