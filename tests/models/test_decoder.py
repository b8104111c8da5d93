"""The decoder: logits equal to transformers' Llama, initial weights by name, fused products, recomputation, documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from windlass.blocks.embedding.spec import padded_rows
from windlass.config import ModelConfig
from windlass.models.build import build_model
from windlass.models.decoder import document_positions

SMALL = ModelConfig(layers=3, width=64, ffn=160, heads=8, kv_heads=2, vocab=250, rope_theta=10000.0)
TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
INNER = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip


def hf_name(name: str) -> str:
    if not name.startswith("layers."):
        return TOP[name]
    _, number, rest = name.split(".", 2)
    return f"model.layers.{number}.{INNER[rest.removesuffix('.weight')]}.weight"


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = SMALL.model_copy(update={"tied": tied})
    model = build_model(config, seq_len=48)
    model.init_weights(3)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, vocab_size=padded_rows(250),
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=64, tie_word_embeddings=tied,
    ))  # fmt: skip
    weights = {hf_name(name): value for name, value in model.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    theirs.tie_weights()
    tokens = torch.randint(0, 250, (2, 48))
    ours, expected = model(tokens), theirs(tokens).logits
    assert torch.allclose(ours[..., :250], expected[..., :250], atol=1e-5)


def test_padding_never_wins() -> None:
    model = build_model(SMALL, seq_len=16)
    model.init_weights(0)
    with torch.no_grad():
        model.head.weight[250:] = 10.0  # what a padded row could learn at worst
        logits = model(torch.randint(0, 250, (2, 16)))
    assert logits.shape[-1] == 256
    assert int(logits.argmax(-1).max()) < 250
    assert float(torch.softmax(logits, -1)[..., 250:].max()) == 0.0


def test_initial_values_depend_on_seed_and_name_only() -> None:
    full, other = build_model(SMALL, seq_len=16), build_model(SMALL, seq_len=16)
    full.init_weights(1)
    other.keep_stage(range(2, 3), first=False, last=True)
    other.init_weights(1)
    names = dict(other.named_parameters())
    assert set(names) < set(dict(full.named_parameters()))
    for name, value in names.items():
        assert torch.equal(value, full.get_parameter(name)), name
    again = build_model(SMALL, seq_len=16)
    again.init_weights(2)
    assert not torch.equal(again.embed.weight, full.embed.weight)


def test_initial_values_have_the_stated_spread() -> None:
    model = build_model(SMALL.model_copy(update={"width": 256, "ffn": 512}), seq_len=16)
    model.init_weights(0)
    assert float(model.embed.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    block = model.layers["0"]
    assert float(block.feed_forward.w1.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.attention.wo.weight.detach().std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert torch.equal(block.ffn_norm.weight, torch.ones(256))


def test_fused_products_change_nothing() -> None:
    model = build_model(SMALL, seq_len=16)
    model.init_weights(0)
    tokens = torch.randint(0, 250, (2, 16))
    before = model(tokens)
    for part in model.modules():
        if hasattr(part, "fused"):
            part.fused = True
    assert torch.allclose(model(tokens), before, atol=1e-6)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_gives_the_same_gradients(recompute: str) -> None:
    model = build_model(SMALL, seq_len=16)
    model.init_weights(0)
    tokens = torch.randint(0, 250, (2, 17))
    gradients = []
    for kind in ("none", recompute):
        for block in model.layers.values():
            block.recompute = kind
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:])[0].backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_documents_do_not_see_each_other() -> None:
    model = build_model(SMALL, seq_len=24)
    model.init_weights(0)
    tokens = torch.randint(1, 250, (1, 24))
    tokens[0, 9] = 0
    numbers = (torch.arange(24) > 9).long()[None]  # the end token still belongs to the document it ends
    together = model(tokens, None, numbers)
    changed = tokens.clone()
    changed[0, :9] = torch.randint(1, 250, (9,))
    assert torch.allclose(model(changed, None, numbers)[0, 10:], together[0, 10:], atol=1e-6)
    assert not torch.allclose(model(changed)[0, 10:], model(tokens)[0, 10:], atol=1e-4)


LATENT = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}


@pytest.mark.parametrize("keys", [{}, {"kv_heads": None, "latent": LATENT}], ids=["attention", "latent"])
def test_positions_begin_again_at_each_document(keys: dict[str, Any]) -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 5, 5, 5, 5, 5]])
    assert document_positions(numbers).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    model = build_model(ModelConfig.model_validate({**SMALL.model_dump(), **keys}), seq_len=6)
    model.init_weights(0)
    tokens = torch.randint(1, 250, (2, 6))
    plain = model(tokens, None, numbers)
    alone = torch.cat([model(part) for part in tokens[1:].split([1, 5], dim=1)], dim=1)
    tables = []
    model.layers["0"].register_forward_pre_hook(lambda _, inputs: tables.append(inputs[1].tables))
    model.resets_positions = True
    model.prepare("cpu")
    again = model(tokens, None, numbers)
    # Rotary positions are relative: inside a document only rounding differs.
    assert torch.allclose(again, plain, atol=1e-5) and torch.allclose(again[1:], alone, atol=1e-5)
    key = model.blocks()[0].table_key
    assert torch.equal(tables[0][key][0][1, 0], model.tables[key][0][[0, 0, 1, 2, 3, 4]])


def test_logits_are_scaled() -> None:
    tokens, logits = torch.randint(0, 250, (1, 8)), []
    for scale in (1.0, 0.25):
        model = build_model(SMALL.model_copy(update={"logit_scale": scale}), seq_len=8)
        model.init_weights(0)
        logits.append(model(tokens)[..., :250])
    assert torch.allclose(logits[0] * 0.25, logits[1], atol=1e-6)


def test_longer_than_trained_is_possible() -> None:
    model = build_model(SMALL, seq_len=8)
    model.init_weights(0)
    tokens = torch.randint(0, 250, (1, 20))
    long = build_model(SMALL, seq_len=20)
    long.init_weights(0)
    assert torch.allclose(model(tokens), long(tokens), atol=1e-6)
    assert torch.allclose(model(tokens[:, :5]), long(tokens)[:, :5], atol=1e-5)
