"""One file per family of network; pure modules that know no mesh and no rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.config import ModelConfig
    from windlass.models.parts import Model

PAD_VOCAB = 128
"""Embedding rows are padded to a multiple of this, so that GEMMs meet aligned shapes."""


def padded_vocab(vocab: int) -> int:
    return -(-vocab // PAD_VOCAB) * PAD_VOCAB


def build(config: ModelConfig, *, seq_len: int) -> Model:
    """The network of a recipe. Build under `torch.device("meta")` for a big one, then `to_empty` and `init_weights`."""
    if config.family == "llama":
        from windlass.models.llama import build_llama

        return build_llama(config, seq_len)
    if config.family == "retnet":
        from windlass.models.retnet import build_retnet

        return build_retnet(config, seq_len)
    from windlass.models.hf import build_hf

    return build_hf(config, seq_len)
