"""The `[model]` table: the network that is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from windlass.config.base import Table


class ModelConfig(Table):
    family: Literal["llama", "retnet", "hf"] = "llama"
    """llama and retnet are ours; hf builds any causal language model from a local Hugging Face config."""
    layers: PositiveInt | None = None
    """Transformer blocks."""
    width: PositiveInt | None = None
    """Hidden size of the residual stream."""
    ffn: PositiveInt | None = None
    """Inner size of the feed-forward block (for SwiGLU: of each of the two branches)."""
    heads: PositiveInt | None = None
    """Attention heads (RetNet: retention heads)."""
    kv_heads: PositiveInt | None = None
    """Key/value heads of grouped-query attention; as many as `heads` when left out."""
    head_dim: PositiveInt | None = None
    """Width of one head; width / heads when left out."""
    vocab: PositiveInt | None = None
    """True vocabulary size; the embedding is padded up to a multiple of 128."""
    tied: bool = False
    """Input embedding and output head share their weights."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Of the feed-forward block."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary positions."""
    norm_eps: PositiveFloat = 1e-5
    """Added inside the norms."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the first weights."""
    value_width: PositiveInt | None = None
    """RetNet: width of values and gate (dv); the feed-forward's when left out."""
    retention: Literal["parallel", "chunkwise"] = "chunkwise"
    """RetNet: which of the equal forms training uses."""
    chunk: PositiveInt = 512
    """RetNet: chunk length of the chunkwise form."""
    config: str | None = None
    """hf: folder or file with a Hugging Face config.json."""
    assumed: list[str] = Field(default_factory=list)
    """Keys of this table whose published value is unknown and was assumed by the recipe's author."""
