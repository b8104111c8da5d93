"""Model families that recipes name and how Hugging Face folders store them. No torch."""

from windlass.registry import Registry

PRESETS = Registry(
    "windlass.presets",
    {
        "llama": "windlass.models.presets.llama:FORMAT",
        "retnet": "windlass.models.presets.retnet:FORMAT",
        "hf": "windlass.models.presets.hf:FORMAT",
    },
)
