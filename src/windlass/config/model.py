"""The `[model]` table: the network that is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from windlass.config.base import Registered, Table
from windlass.registry import PRESETS


class ModelConfig(Table):
    family: Annotated[str, Registered(PRESETS)] = "llama"
    """llama and retnet are our own modules; hf builds any causal language model from a local Hugging Face config. Installed
    packages may add families."""
    layers: PositiveInt | None = None
    """Number of transformer layers."""
    width: PositiveInt | None = None
    """Hidden size of the residual stream."""
    ffn: PositiveInt | None = None
    """Inner size of the feed-forward block (for SwiGLU: of each of the two branches)."""
    heads: PositiveInt | None = None
    """Number of attention heads (RetNet: retention heads)."""
    kv_heads: PositiveInt | None = None
    """Key/value heads of grouped-query attention (default: as many as `heads`)."""
    head_dim: PositiveInt | None = None
    """Width of one head (default: width / heads)."""
    vocab: PositiveInt | None = None
    """True vocabulary size; the embedding is padded up to a multiple of 128."""
    tied: bool = False
    """Input embedding and output head share their weights."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation of the feed-forward block."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary position embedding."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside the norms."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    value_width: PositiveInt | None = None
    """RetNet: width of values and gate (dv) (default: the feed-forward width)."""
    retention: Literal["parallel", "chunkwise"] = "chunkwise"
    """RetNet: which of the two equivalent forms training uses."""
    chunk: PositiveInt = 512
    """RetNet: chunk length of the chunkwise form."""
    config: str | None = None
    """hf: folder or file with a Hugging Face config.json."""
    assumed: list[str] = Field(default_factory=list)
    """Keys of this table whose published value is unknown and was assumed by the recipe's author."""
