"""The Llama family: grouped-query attention with rotary positions, RMSNorm, SwiGLU (or GELU)."""

from __future__ import annotations

from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec, padded_rows
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.config import ModelConfig
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec


def default_hidden(width: int) -> int:
    """Inner width of a gated feed-forward block with as many weights as one of four times the width, rounded up to 256."""
    return -(-(8 * width // 3) // 256) * 256


def spec(config: ModelConfig) -> ModelSpec:
    assert config.layers and config.width and config.heads and config.vocab  # config.check has asked for them
    width = config.width
    norm = NormSpec(width=width, eps=config.norm_eps)
    attention = AttentionSpec(
        width=width,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        head_dim=config.head_dim or width // config.heads,
        rope_theta=config.rope_theta,
    )
    mlp = MlpSpec(width=width, hidden=config.ffn or default_hidden(width), gated=config.activation == "swiglu")
    layer = LayerSpec(
        (Branch("attention", attention, norm, "attention_norm"), Branch("feed_forward", mlp, norm, "ffn_norm"))
    )
    return ModelSpec(
        embedding=EmbeddingSpec(vocab=config.vocab, rows=padded_rows(config.vocab), width=width),
        groups=(LayerGroup(layer, config.layers),),
        norm=norm,
        tied=config.tied,
        init_std=config.init_std,
    )
