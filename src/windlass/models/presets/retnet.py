"""RetNet: retention with a decay per head instead of attention, and a gated feed-forward block.

transformers does not have it: its folder holds our parameter names and the recipe's [model] table.
"""

from __future__ import annotations

from windlass.blocks.embedding.spec import EmbeddingSpec, padded_rows
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.blocks.retention.spec import RetentionSpec
from windlass.config import ModelConfig
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset
from windlass.models.presets.llama import default_hidden
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec


def spec(config: ModelConfig) -> ModelSpec:
    assert config.layers and config.width and config.heads and config.vocab  # config.check has asked for them
    width = config.width
    hidden = config.ffn or config.value_width or default_hidden(width)
    norm = NormSpec(width=width, eps=config.norm_eps)
    retention = RetentionSpec(
        width=width,
        value_width=config.value_width or hidden,
        heads=config.heads,
        chunk=config.chunk if config.retention == "chunkwise" else 0,
    )
    mlp = MlpSpec(width=width, hidden=hidden, gated=config.activation == "swiglu")
    layer = LayerSpec(
        (Branch("retention", retention, norm, "retention_norm"), Branch("feed_forward", mlp, norm, "ffn_norm"))
    )
    return ModelSpec(
        embedding=EmbeddingSpec(vocab=config.vocab, rows=padded_rows(config.vocab), width=width),
        groups=(LayerGroup(layer, config.layers),),
        norm=norm,
        tied=config.tied,
        init_std=config.init_std,
        measured=False,
    )


PRESET = Preset(
    spec=spec,
    hf=HFFormat(
        family="retnet",
        config={
            "model_type": "windlass_retnet",
            "architectures": ["WindlassRetNet"],
            "torch_dtype": ConfigSlot("dtype"),
            "dtype": ConfigSlot("dtype"),
            "vocab_size": ConfigSlot("vocab"),
            "max_position_embeddings": ConfigSlot("positions"),
            "model": ConfigSlot("*"),
        },
        model_types=("windlass_retnet",),
        library="windlass",
    ),
)
