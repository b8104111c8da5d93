"""Does a model of transformers train under our roof? Same loss as its own, built with and without memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from windlass.config import ModelConfig
from windlass.errors import ConfigError
from windlass.models import build

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers.Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=120, max_position_embeddings=64, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def test_loss_is_the_network_s_own(folder: Path) -> None:
    model = build(ModelConfig(family="hf", config=str(folder)), seq_len=16)
    model.init_weights(0)
    tokens = torch.randint(0, 120, (2, 17))
    sums = model(tokens[:, :-1], tokens[:, 1:])
    theirs = model.net(input_ids=tokens, labels=tokens).loss
    assert float(sums[1].detach()) / 32 == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert len(model.layers) == 2


def test_meta_build_begins_with_the_same_numbers(folder: Path) -> None:
    whole = build(ModelConfig(family="hf", config=str(folder)), seq_len=16)
    whole.init_weights(0)
    with torch.device("meta"):
        lazy = build(ModelConfig(family="hf", config=str(folder)), seq_len=16)
    assert all(p.is_meta for p in lazy.parameters())
    lazy.to_empty(device="cpu")
    lazy.init_weights(0)
    tokens = torch.randint(0, 120, (2, 16))
    assert torch.allclose(whole(tokens), lazy(tokens), atol=1e-6)


def test_refusals(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        build(ModelConfig(family="hf", config=str(folder / "absent")), seq_len=16)
    with pytest.raises(ConfigError, match=r"data.seq_len \(65\) is more than the model's 64 positions"):
        build(ModelConfig(family="hf", config=str(folder)), seq_len=65)
