"""The model of a recipe as a torch module."""

from windlass.config import ModelConfig
from windlass.models.decoder import DecoderModel
from windlass.models.presets import model_spec


def build_model(config: ModelConfig, *, seq_len: int) -> DecoderModel:
    """Build under `torch.device("meta")` for a big model, then `to_empty` and `init_weights`."""
    if config.family == "hf":
        from windlass.models.hf import build_hf  # imports transformers

        return build_hf(config, seq_len)
    model = DecoderModel(model_spec(config), seq_len)
    model.family = config.family
    return model
