"""Folder format of our RetNet, which transformers does not have: our parameter names and the recipe's [model] table."""

from windlass.models.presets.format import ConfigSlot, HFFormat

RETNET = HFFormat(
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
)
