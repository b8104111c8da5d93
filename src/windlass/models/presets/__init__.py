"""Model families that recipes name and how Hugging Face folders store them. No torch."""

from windlass.registry import Registry

PRESETS = Registry(
    "windlass.presets",
    {
        "llama": "windlass.models.presets.llama:LLAMA",
        "retnet": "windlass.models.presets.retnet:RETNET",
        "hf": "windlass.models.presets.hf:TRANSFORMERS",
    },
)
