"""Any other causal language model: transformers builds it; only its sizes are read here, from config.json, for the
planner."""

import importlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.blocks.attention.rope import Rope
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.config import ModelConfig
from windlass.config.load import shorten
from windlass.errors import ConfigError
from windlass.files import parse_json, read_json
from windlass.models.hf_format import HFFormat, Preset
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec

# Model types with LayerNorm and a plain feed-forward block; every other type is taken to be like Llama.
CLASSIC = {
    "gpt2": "gpt", "gpt_neox": "gpt", "opt": "gpt", "bert": "gpt", "roberta": "gpt", "xlm-roberta": "gpt",
    "deberta-v2": "gpt", "bloom": "bloom", "mpt": "mpt",
}  # fmt: skip
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Keys of config.json that name the attention kernel.
ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")


def import_transformers() -> Any:
    """transformers without the warnings of torchao, which it imports where it is installed: on a CPU one for each of
    torchao's GPU libraries, and torch's about torchao's own types."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module("transformers")


def spec(config: ModelConfig) -> ModelSpec:
    return spec_of_config_json(read_config_json(config))


def read_config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json that a model of family hf is built from."""
    if config.config is None:
        raise ConfigError(
            "model.config-missing",
            "model.config is not given",
            hint='set it to the folder or file of a Hugging Face config.json, which family = "hf" needs',
        )
    path = Path(config.config)
    path = path / "config.json" if path.is_dir() else path
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model.config-unreadable",
            f"model.config: cannot read {path}: {error}",
            hint="give a folder with config.json, or the file",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            "model.config-unreadable",
            f"model.config: {path} holds a {type(value).__name__}, not an object",
            hint="use the config.json that came with the weights",
        )
    return value


def refuse_custom_code(path: Path) -> None:
    """Refuse a model folder (or the file of a config.json) whose classes are Python files that came with it."""
    listed: list[Any] = []
    for file in (path / "config.json", path / "tokenizer_config.json") if path.is_dir() else (path,):
        settings = read_json(file) or {}
        classes = settings.get("auto_map") or {}
        listed += classes.values() if isinstance(classes, dict) else [classes]
        # transformers takes an attention kernel with a slash in its name from Hugging Face's hub.
        listed += [name for key in ATTENTION_KEYS if "/" in str(name := settings.get(key))]
    code = [str(name) for entry in listed for name in (entry if isinstance(entry, list) else [entry]) if name]
    code += sorted(file.name for file in path.glob("*.py"))
    if code:
        raise ConfigError(
            "model.custom-code",
            f"{path} comes with code of its own ({', '.join(dict.fromkeys(code))}), which windlass does not run",
            hint="if transformers itself has this model_type, delete auto_map from config.json and "
            "tokenizer_config.json and the *.py files in a copy of the folder; else convert the weights to a family "
            "that transformers has",
        )


def spec_of_config_json(raw: dict[str, Any]) -> ModelSpec:
    """By the names that the families of transformers use."""

    def pick(*names: str, default: int | None = None, least: int = 1) -> int:
        value = next((raw[name] for name in names if raw.get(name) is not None), default)
        if value is None:
            raise ConfigError(
                "model.config-lacks-size",
                f"config.json has none of {', '.join(names)}",
                hint="add one of these keys: the planner needs it to count this model's parameters",
            )
        # bool is an int, and 10**15 more than any size of a model.
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 10**15:
            raise ConfigError(
                "model.config-size-invalid",
                f"config.json: {names[0]} is {shorten(repr(value))}, not an integer of at least {least}",
                hint="use the config.json that came with the weights",
            )
        return value

    kind = str(raw.get("model_type", "llama"))
    family = CLASSIC.get(kind, "llama")
    width, heads = (
        pick("hidden_size", "n_embd", "d_model"),
        pick("num_attention_heads", "n_head", "n_heads", "num_heads"),
    )
    dense = classic_spec(
        family=family,
        layers=pick("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        width=width,
        hidden=pick("intermediate_size", "n_inner", "ffn_dim", "d_ff", default=4 * width),
        heads=heads,
        kv_heads=pick("num_key_value_heads", default=heads),
        head_dim=pick("head_dim", "d_kv", default=width // heads),
        vocab=pick("vocab_size"),
        rows=pick("vocab_size"),  # transformers stores exactly the rows that it is told
        tied=bool(raw.get("tie_word_embeddings", family != "llama" and kind != "gpt_neox")),
        positions=pick("n_positions", "max_position_embeddings", default=0, least=0)
        if kind in ("gpt2", "opt", "bert", "roberta", "xlm-roberta")
        else 0,
    )
    return replace(dense, experts=pick(*EXPERT_COUNT_KEYS, default=0, least=0))


def classic_spec(
    *,
    family: str,
    layers: int,
    width: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    rows: int,
    tied: bool,
    gated: bool | None = None,
    positions: int = 0,
) -> ModelSpec:
    """An attention model with the habits of its family: gpt and bloom have biases and LayerNorm, mpt has neither.

    `gated` None: as the family does (Llama gated, the others not).
    """
    bias = family in ("gpt", "bloom")
    norm = NormSpec(width=width, bias=bias)
    attention = AttentionSpec(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope(10_000.0, head_dim),
        bias="all" if bias else "none",
    )
    gated = family == "llama" if gated is None else gated
    mlp = MlpSpec(width=width, hidden=hidden, activation="swiglu" if gated else "gelu", bias=bias)
    layer = LayerSpec((Branch("attention", attention, norm), Branch("feed_forward", mlp, norm)))
    return ModelSpec(
        embedding=EmbeddingSpec(vocab=vocab, rows=rows, width=width, positions=positions, norm=family == "bloom"),
        groups=(LayerGroup(layer, layers),),
        norm=norm,
        tied=tied,
        foreign=True,
    )


PRESET = Preset(
    spec=spec,
    hf=HFFormat(
        family="hf",
        wraps_transformers=True,
        prefix="net.",
        # GPT-NeoX and Pythia folders call the head otherwise than transformers 5 does.
        older_names={"gpt_neox": {"lm_head.weight": "embed_out.weight"}},
    ),
)
