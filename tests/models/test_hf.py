"""A model of transformers behind the decoder's interface: its own loss, and its own initial weights on any device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from windlass.config import ModelConfig
from windlass.errors import ConfigError
from windlass.models.build import build_model

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers.Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=120, max_position_embeddings=64, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def test_loss_is_the_network_s_own(folder: Path) -> None:
    model = build_model(ModelConfig(family="hf", config=str(folder)), seq_len=16)
    model.init_weights(0)
    tokens = torch.randint(0, 120, (2, 17))
    sums = model(tokens[:, :-1], tokens[:, 1:])
    theirs = model.net(input_ids=tokens, labels=tokens).loss
    assert float(sums[1].detach()) / 32 == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert len(model.layer_modules()) == 2


def test_meta_build_begins_with_the_same_numbers(folder: Path) -> None:
    full = build_model(ModelConfig(family="hf", config=str(folder)), seq_len=16)
    full.init_weights(0)
    with torch.device("meta"):
        lazy = build_model(ModelConfig(family="hf", config=str(folder)), seq_len=16)
    assert all(p.is_meta for p in lazy.parameters())
    lazy.to_empty(device="cpu")
    lazy.init_weights(0)
    tokens = torch.randint(0, 120, (2, 16))
    assert torch.allclose(full(tokens), lazy(tokens), atol=1e-6)


def test_refusals(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(family="hf", config=str(folder / "absent")), seq_len=16)
    assert caught.value.code == "model.config-missing" and "absent" in caught.value.message
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(family="hf", config=str(folder)), seq_len=65)
    assert caught.value.code == "model.sequence-too-long"
    assert "65" in caught.value.message and "64" in caught.value.message


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta"])
def test_an_encoder_is_not_taken_for_a_causal_model(tmp_path: Path, kind: str) -> None:
    config_class = getattr(transformers, f"{kind}Config")
    config_class(**COMMON, max_position_embeddings=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(family="hf", config=str(tmp_path)), seq_len=16)
    assert caught.value.code == "model.encoder"
    config_class(**COMMON, max_position_embeddings=64, is_decoder=True).save_pretrained(tmp_path)
    model = build_model(ModelConfig(family="hf", config=str(tmp_path)), seq_len=16)
    model.init_weights(0)
    tokens = torch.arange(2, 14)[None]
    changed = torch.cat([tokens[:, :-1], tokens[:, :1]], dim=1)
    with torch.no_grad():
        difference = (model.eval()(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:-1].max() == 0 and difference[-1] > 0


COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 120,
}
KINDS = {
    "Gemma2": {**COMMON, "num_key_value_heads": 2, "head_dim": 8},  # norms begin at zero: their weight is 1 + w
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120},  # last products of a branch begin smaller
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 120, "state_size": 4},  # decays are no normal numbers
    "OPT": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 120, "word_embed_proj_dim": 32},
    "Mixtral": {**COMMON, "num_key_value_heads": 2, "num_local_experts": 4},  # experts in one tensor
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_weights_begin_as_transformers_begins_them(tmp_path: Path, kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**KINDS[kind], bos_token_id=1, eos_token_id=1)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = build_model(ModelConfig(family="hf", config=str(tmp_path)), seq_len=16)
    model.to_empty(device="cpu")
    model.init_weights(0)
    torch.manual_seed(0)
    theirs = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    for name, mine in model.net.named_parameters():
        values, expected = mine.detach(), theirs[name].detach()
        spread = float(expected.std())
        assert float(values.std()) == pytest.approx(spread, rel=0.35, abs=1e-6), name
        assert float(values.mean()) == pytest.approx(float(expected.mean()), abs=0.25 * spread + 1e-6), name
    before = [p.detach().clone() for p in model.parameters()]
    model.init_weights(0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.init_weights(1)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}  # fmt: skip
MAMBA = {"hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
         "n_groups": 2, "head_dim": 8}  # fmt: skip
# The rows of docs/models.md that train through transformers, by model_type.
SPARSE = {
    "mixtral": {**MOE, "num_local_experts": 4},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 8},
    "olmoe": {**MOE, "num_experts": 4},
    "gpt_oss": {**MOE, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
    "deepseek_v2": {**MOE, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**MOE, **LATENT},
    "nemotron_h": MAMBA,
    "nemotron_h with experts": {**MOE, **MAMBA, "hybrid_override_pattern": "ME*E", "n_routed_experts": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_and_hybrid_models_train(tmp_path: Path, kind: str) -> None:
    config = {**COMMON, "num_key_value_heads": 2, "max_position_embeddings": 64, **SPARSE[kind]}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind.split()[0], **config, **special}))
    model = build_model(ModelConfig(family="hf", config=str(tmp_path)), seq_len=16)
    model.init_weights(0)
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(0, 120, (2, 17))
    losses = []
    for _ in range(5):
        loss = model(tokens[:, :-1], tokens[:, 1:])[0] / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.79, abs=0.3)  # the logarithm of 120
    assert losses[-1] < losses[0]
