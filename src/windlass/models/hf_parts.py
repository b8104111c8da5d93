"""Parts of config.json that families share: rotary positions, kinds of layers."""

from collections.abc import Mapping
from typing import Any

from windlass.config import ModelConfig
from windlass.config.model import layer_letters
from windlass.models.hf_format import ConfigPart, value_at

# Key of [model.rope_scaling] -> key in transformers.
SCALING_KEYS = {
    "kind": "rope_type",
    "factor": "factor",
    "old_length": "original_max_position_embeddings",
    "low_turns": "low_freq_factor",
    "high_turns": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
# Which of them a kind has.
KEYS_OF_KIND = {
    "linear": ("kind", "factor"),
    "llama3": ("kind", "factor", "old_length", "low_turns", "high_turns"),
    "yarn": tuple(key for key in SCALING_KEYS if key not in ("low_turns", "high_turns")),
}


def read_scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """[model.rope_scaling] of transformers' rope_parameters (or rope_scaling, its name in transformers 4)."""
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in KEYS_OF_KIND:
        return None
    values = {key: parameters.get(SCALING_KEYS[key]) for key in KEYS_OF_KIND[kind][1:]}
    return {"kind": kind} | {key: value for key, value in values.items() if value is not None}


def write_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    return {SCALING_KEYS[key]: scaling[key] for key in KEYS_OF_KIND[scaling["kind"]] if scaling[key] is not None}


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or {}
    model: dict[str, Any] = {"rope_theta": parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0}
    if scaling := read_scaling(parameters) or read_scaling(config.get("rope_scaling") or {}):
        model["rope_scaling"] = scaling
    if fraction := parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor"):
        model["rope_fraction"] = fraction
    return model


def write_rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """For transformers 5, and for 4, which has other names."""
    theta, fraction = {"rope_theta": model["rope_theta"]}, {}
    if model["rope_fraction"] != 1.0:
        fraction = {"partial_rotary_factor": model["rope_fraction"]}
    scaling = write_scaling(model["rope_scaling"])
    older = {"rope_scaling": scaling} if model["rope_scaling"] is not None else {}
    return {**theta, **fraction, **older, "rope_parameters": {**scaling, **theta, **fraction}}


ROPE = ConfigPart(read_rope, write_rope, ("rope_theta", "rope_scaling", "rope_fraction"))


def read_layer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """F and W layers; without a list every n-th layer is full (`sliding_window_pattern`, in older folders)."""
    types, every = config.get("layer_types"), config.get("sliding_window_pattern")
    window = config.get("sliding_window")
    if isinstance(types, list):
        letters = {"full_attention": "F", "sliding_attention": "W"}
        return {"pattern": "".join(letters.get(kind, "?") for kind in types), "window": window}
    return {"pattern": "W" * (every - 1) + "F...", "window": window} if isinstance(every, int) else {"window": window}


def write_layer_types(model: Mapping[str, Any]) -> dict[str, Any]:
    letters = layer_letters(ModelConfig.model_validate(model))
    types = ["sliding_attention" if letter == "W" else "full_attention" for letter in letters]
    return {"sliding_window": model["window"], "layer_types": types}


LAYER_TYPES = ConfigPart(read_layer_types, write_layer_types, ("pattern", "window"))


def read_two_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """One set of parameters for F layers and one for W layers; older folders have the keys of one set."""
    full = value_at(config, "rope_parameters.full_attention")
    if full is None:
        model = read_rope(config)
        theta = config.get("rope_local_base_freq")
        return model | ({"rope_theta_window": theta} if theta else {})
    sliding = value_at(config, "rope_parameters.sliding_attention.rope_theta")
    return read_rope({"rope_parameters": full}) | {"rope_theta_window": sliding}


def write_two_ropes(model: Mapping[str, Any]) -> dict[str, Any]:
    full = write_rope(model)
    sliding = {"rope_type": "default", "rope_theta": model["rope_theta_window"] or model["rope_theta"]}
    both = {"full_attention": full["rope_parameters"], "sliding_attention": sliding}
    return {**full, "rope_local_base_freq": sliding["rope_theta"], "rope_parameters": both}


TWO_ROPES = ConfigPart(read_two_ropes, write_two_ropes, (*ROPE.keys, "rope_theta_window"))


def experts_part(count: str, ffn: str, *, renormalise: bool | None = None, dense_layers: bool = False) -> ConfigPart:
    """Keys of a mixture of experts. `count` and `ffn` are their names in the folder; `renormalise` is what the family
    always does (None: the folder says it); `dense_layers`: the first layers may be dense."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        number = config.get(count) or config.get("num_experts") or config.get("num_local_experts")
        experts = {"count": number, "top_k": config.get("num_experts_per_tok"), "ffn": config.get(ffn)}
        experts["renormalise"] = bool(config.get("norm_topk_prob")) if renormalise is None else renormalise
        experts["dense_layers"] = len(config.get("mlp_only_layers") or ()) if dense_layers else 0
        return {"experts": experts}

    def write(model: Mapping[str, Any]) -> dict[str, Any]:
        experts = model["experts"]
        keys = {count: experts["count"], "num_experts_per_tok": experts["top_k"], ffn: experts["ffn"] or model["ffn"]}
        if renormalise is None:
            keys["norm_topk_prob"] = experts["renormalise"]
        if dense_layers:
            keys |= {"mlp_only_layers": list(range(experts["dense_layers"])), "decoder_sparse_step": 1}
        return keys | {"output_router_logits": False}

    optional = [*(["renormalise"] if renormalise is None else []), *(["dense_layers"] if dense_layers else [])]
    return ConfigPart(read, write, tuple(f"experts.{key}" for key in ("count", "top_k", "ffn", *optional)))
