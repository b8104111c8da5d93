"""Published model families: recipe keys to `ModelSpec`, Hugging Face names and weight transforms. Torch-free.

`windlass.registry.PRESETS` finds them by module name, and those of other packages by the entry point group
"windlass.presets", which names a value `PRESET` of class `models.hf_format.Preset`.
"""

from windlass.config import ModelConfig
from windlass.models.spec import ModelSpec
from windlass.registry import PRESETS


def model_spec(config: ModelConfig) -> ModelSpec:
    spec: ModelSpec = PRESETS.load(config.family).spec(config)
    return spec
