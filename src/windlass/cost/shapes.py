"""Which numbers of a network does the arithmetic need? One frozen value, taken from a recipe's `[model]` table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windlass.config.model import ModelConfig
from windlass.errors import ConfigError

Arch = Literal["llama", "gpt", "bloom", "mpt", "retnet"]
PAD = 128
"""Our embeddings are padded to a multiple of this, so that the head's matrix product uses whole tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What parameters, FLOPs, memory and time depend on."""

    arch: str = "llama"
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """True vocabulary size."""
    padded_vocab: int
    """Rows of the embedding as stored."""
    tied: bool = False
    glu: bool = True
    """Two branches in the feed-forward block (SwiGLU): three matrices instead of two."""
    biases: bool = False
    """Linear layers carry biases."""
    layer_norm: bool = False
    """LayerNorm with weight and bias instead of RMSNorm with a weight."""
    embedding_norm: bool = False
    """A further LayerNorm after the embedding (BLOOM)."""
    positions: int = 0
    """Learned position vectors (0: rotary, ALiBi or none)."""
    value_width: int = 0
    """RetNet: width of values and gate."""
    chunk: int = 0
    """RetNet: chunk length of the chunkwise form; 0: the parallel form."""

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def pad(vocab: int, multiple: int = PAD) -> int:
    return -(-vocab // multiple) * multiple


def make_shape(
    *,
    layers: int,
    width: int,
    heads: int,
    vocab: int,
    ffn: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    arch: str = "llama",
    padded_vocab: int | None = None,
    tied: bool | None = None,
    glu: bool | None = None,
    positions: int | None = None,
    value_width: int = 0,
    chunk: int = 0,
) -> Shape:
    """A shape with the habits of its family filled in: GPT-2-like ones have biases, LayerNorm, four times the width and tied embeddings."""
    old = arch in ("gpt", "bloom", "mpt")
    return Shape(
        arch=arch,
        layers=layers,
        width=width,
        ffn=ffn if ffn is not None else _default_ffn(width, old),
        heads=heads,
        kv_heads=kv_heads if kv_heads is not None else heads,
        head_dim=head_dim if head_dim is not None else width // heads,
        vocab=vocab,
        padded_vocab=padded_vocab if padded_vocab is not None else pad(vocab),
        tied=old if tied is None else tied,
        glu=not old if glu is None else glu,
        biases=arch in ("gpt", "bloom"),  # MPT's published models have none, not even in their norms ("no_bias")
        layer_norm=arch in ("gpt", "bloom"),
        embedding_norm=arch == "bloom",
        positions=positions or 0,
        value_width=value_width,
        chunk=chunk,
    )


def _default_ffn(width: int, old: bool) -> int:
    """Four times the width, or the SwiGLU block with as many parameters, rounded up to 256 as Llama does."""
    return 4 * width if old else -(-(8 * width // 3) // 256) * 256


def shape_of(model: ModelConfig) -> Shape:
    """The shape of a recipe's model; says which keys are missing."""
    if model.family == "hf":
        return _shape_of_hf(model)
    missing = [key for key in ("layers", "width", "heads", "vocab") if getattr(model, key) is None]
    if missing:
        raise ConfigError(
            "cost.model-given-model-size",
            f"model: {', '.join(missing)} not given, so the {model.family} model has no size",
            hint="give layers, width, heads and vocab (ffn, kv_heads and head_dim have defaults)",
        )
    assert model.layers and model.width and model.heads and model.vocab
    if model.head_dim is None and model.width % model.heads:
        raise ConfigError(
            "cost.model-width-divisible-model",
            f"model.width ({model.width}) is not divisible by model.heads ({model.heads})",
            hint=f"the nearest width that is: {round(model.width / model.heads) * model.heads}",
        )
    kv_heads = model.kv_heads or model.heads
    if model.heads % kv_heads:
        raise ConfigError(
            "cost.model-heads-multiple-model",
            f"model.heads ({model.heads}) is not a multiple of model.kv_heads ({kv_heads})",
            hint="each key/value head serves the same number of query heads",
        )
    retnet = model.family == "retnet"
    ffn = model.ffn or (model.value_width if retnet else None) or _default_ffn(model.width, False)
    return make_shape(
        arch=model.family,
        layers=model.layers,
        width=model.width,
        ffn=ffn,
        heads=model.heads,
        kv_heads=model.heads if retnet else kv_heads,
        head_dim=model.head_dim,
        vocab=model.vocab,
        tied=model.tied,
        glu=retnet or model.activation == "swiglu",
        value_width=(model.value_width or ffn) if retnet else 0,
        chunk=model.chunk if retnet and model.retention == "chunkwise" else 0,
    )


def _shape_of_hf(model: ModelConfig) -> Shape:
    if model.config is None:
        raise ConfigError(
            "cost.model-config-given",
            "model.config is not given",
            hint='family = "hf" needs the folder or file of a Hugging Face config.json',
        )
    path = Path(model.config)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "cost.model-config-cannot-read",
            f"model.config: cannot read {path}: {error}",
            hint="give a folder with config.json, or the file",
        ) from error
    return shape_of_hf_config(raw)


def shape_of_hf_config(raw: dict[str, Any]) -> Shape:
    """The shape that a Hugging Face config.json describes, by the names that its families use."""

    def pick(*names: str, default: int | None = None) -> int:
        for name in names:
            if raw.get(name) is not None:
                return int(raw[name])
        if default is None:
            raise ConfigError(
                "cost.config-json-none",
                f"config.json has none of {', '.join(names)}",
                hint="the planner cannot count this model's parameters",
            )
        return default

    kind = str(raw.get("model_type", "llama"))
    arch = {"gpt2": "gpt", "gpt_neox": "gpt", "opt": "gpt", "bloom": "bloom", "mpt": "mpt"}.get(kind, "llama")
    width, heads = pick("hidden_size", "n_embd", "d_model"), pick("num_attention_heads", "n_head", "n_heads")
    vocab = pick("vocab_size")
    return make_shape(
        arch=arch,
        layers=pick("num_hidden_layers", "n_layer", "n_layers"),
        width=width,
        ffn=pick("intermediate_size", "n_inner", "ffn_dim", default=4 * width),
        heads=heads,
        kv_heads=pick("num_key_value_heads", default=heads),
        head_dim=pick("head_dim", default=width // heads),
        vocab=vocab,
        padded_vocab=vocab,  # transformers stores exactly the rows that it is told
        tied=bool(raw.get("tie_word_embeddings", arch in ("gpt", "bloom", "mpt") and kind != "gpt_neox")),
        positions=pick("n_positions", "max_position_embeddings", default=0) if kind in ("gpt2", "opt") else 0,
    )
