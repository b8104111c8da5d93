"""What does a Hugging Face folder hold, in our words? Its config.json as the `[model]` table of a recipe; no torch, no weights read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.config import DataConfig, ModelConfig, Recipe
from windlass.errors import ConfigError
from windlass.files import read_json

LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What families call the longest sequence; Bloom has no word for it."""


NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Without these no Llama can be built; transformers would fill in those of a model of 7B."""


def is_hf_folder(path: Path) -> bool:
    """A config.json that names a model type, and weights beside it."""
    config = read_json(path / "config.json") if path.is_dir() else None
    return config is not None and "model_type" in config


def recipe_of(folder: Path, *, name: str | None = None, seq_len: int | None = None) -> Recipe:
    """A recipe whose model is the one in the folder; a Llama becomes ours, any other family is built by transformers."""
    config = read_json(folder / "config.json")
    if config is None or "model_type" not in config:
        raise ConfigError(
            "evaluate.config-json-model",
            f"{folder} has no config.json of a model",
            hint="name a folder that transformers can load",
        )
    longest = longest_of(config) or 2048
    model = model_of(config, folder)
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in (name or folder.resolve().name)).lstrip("._-")
    return Recipe(name=plain or "imported", model=model, data=DataConfig(seq_len=min(seq_len or 2048, longest)))


def longest_of(config: dict[str, Any]) -> int | None:
    """The longest sequence that the model was made for, where its config says so."""
    return next((int(config[key]) for key in LONGEST if config.get(key)), None)


def model_of(config: dict[str, Any], folder: Path) -> ModelConfig:
    """The `[model]` table; family hf for everything that our Llama or RetNet does not compute exactly."""
    if config["model_type"] == "windlass_retnet":
        return ModelConfig(**config["model"])
    if quantized := (config.get("quantization_config") or {}).get("quant_method"):
        raise ConfigError(
            "evaluate.weights-quantized-they-can",
            f"the weights in {folder} are quantized ({quantized}): they can neither be trained nor read exactly",
            hint="take the model's folder of bf16 or fp16 weights",
        )
    reasons = unlike_llama(config)
    if reasons:
        return ModelConfig(family="hf", config=str(folder), vocab=config.get("vocab_size"))
    absent = [key for key in NEEDED if not config.get(key)]
    if absent:
        raise ConfigError(
            "evaluate.config-json-does-say",
            f"{folder}/config.json does not say {', '.join(absent)}",
            hint="take the config.json that came with the weights",
        )
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return ModelConfig(
        family="llama", layers=config["num_hidden_layers"], width=width, ffn=config["intermediate_size"], heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads, head_dim=config.get("head_dim") or width // heads, vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)), rope_theta=theta_of(config), norm_eps=config.get("rms_norm_eps", 1e-6),
        init_std=config.get("initializer_range", 0.02),
    )  # fmt: skip


def theta_of(config: dict[str, Any]) -> float:
    """transformers 5 keeps theta in rope_parameters, earlier ones beside it."""
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def unlike_llama(config: dict[str, Any]) -> list[str]:
    """Why our own Llama would not compute what this model computes; empty when it does."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    reasons = []
    if config["model_type"] not in ("llama", "mistral"):
        reasons.append(f"its family is {config['model_type']}")
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        reasons.append(f"it attends in a window of {config['sliding_window']:,}")
    if kind != "default":
        reasons.append(f"its rotary positions are scaled ({kind})")
    if config.get("attention_bias") or config.get("mlp_bias"):
        reasons.append("its layers have biases")
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"its activation is {config['hidden_act']}")
    return reasons
