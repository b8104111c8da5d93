"""RetNet: retention with a decay per head instead of attention, and a gated feed-forward block.

transformers does not have it: its folder holds our parameter names and the recipe's [model] table.
"""

from dataclasses import replace

from windlass.blocks.retention.spec import RetentionSpec
from windlass.config import ModelConfig
from windlass.models.assemble import decoder_spec, default_hidden, layer_spec
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset
from windlass.models.spec import ModelSpec


def spec(config: ModelConfig) -> ModelSpec:
    assert config.width and config.heads  # config.check has asked for them
    hidden = config.ffn or config.value_width or default_hidden(config.width)
    retention = RetentionSpec(
        width=config.width,
        value_width=config.value_width or hidden,
        heads=config.heads,
        chunk=config.chunk if config.retention == "chunkwise" else 0,
    )
    layers = [layer_spec(config, "retention", retention, hidden)] * (config.layers or 0)
    return replace(decoder_spec(config, layers), measured=False)


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
