"""Folder format of our RetNet, which transformers does not have: our parameter names and the recipe's [model] table."""

from windlass.models.presets.format import HFFormat, Slot

FORMAT = HFFormat(
    family="retnet",
    config={
        "model_type": "windlass_retnet",
        "architectures": ["WindlassRetNet"],
        "torch_dtype": Slot("dtype"),
        "dtype": Slot("dtype"),
        "vocab_size": Slot("vocab"),
        "max_position_embeddings": Slot("positions"),
        "model": Slot("*"),
    },
    model_types=("windlass_retnet",),
    library="windlass",
)
