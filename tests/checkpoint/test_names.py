"""A warm start from Hugging Face gives the same logits, not only the same names."""

from __future__ import annotations

import pytest
import torch

from windlass.checkpoint.load import load_model_weights
from windlass.checkpoint.names import from_hf
from windlass.config import ModelConfig
from windlass.errors import CheckpointError
from windlass.models.build import build_model
from windlass.registry import PRESETS

SHAPE = {"layers": 2, "width": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "vocab": 100}


def ours(**changes: object) -> torch.nn.Module:
    model = build_model(ModelConfig(family="llama", **{**SHAPE, **changes}), seq_len=16)
    model.init_weights(seed=3)
    return model


def theirs(folder, *, tied: bool = False):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
        rope_theta=ModelConfig(family="llama", **SHAPE).rope_theta, rms_norm_eps=ModelConfig(family="llama", **SHAPE).norm_eps, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_logits_agree_after_a_warm_start(tmp_path, tied) -> None:
    other, tokens = theirs(tmp_path, tied=tied), torch.arange(2 * 12).view(2, 12) % 100
    model = ours(tied=tied)
    load_model_weights(tmp_path, model)
    with torch.no_grad():
        mine, expected = model(tokens)[..., :100], other(tokens).logits
    assert torch.allclose(mine, expected, atol=1e-5), (mine - expected).abs().max()


def test_every_weight_has_its_name_there_and_back() -> None:
    own = dict(ours().state_dict())
    there = {PRESETS.load("llama").hf.hf_name(name): tensor for name, tensor in own.items()}
    assert None not in there and len(there) == len(own)
    assert all(torch.equal(v, own[k]) for k, v in from_hf("llama", there, own).items())
    assert set(from_hf("llama", there, own)) == set(own)


def test_added_rows_of_a_padded_vocabulary_are_zero() -> None:
    own = {"embed.weight": torch.empty(8, 4)}
    rows = from_hf("llama", {"model.embed_tokens.weight": torch.ones(5, 4)}, own)["embed.weight"]
    assert rows.shape == (8, 4) and rows[:5].eq(1).all() and rows[5:].eq(0).all()


def test_another_architecture_is_refused_by_name(tmp_path) -> None:
    theirs(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_model_weights(tmp_path, ours(layers=3))
    assert error.value.code == "checkpoint.model-mismatch"
    assert all(text in error.value.message for text in ("9 ", "layers.2.attention.wk.weight"))
