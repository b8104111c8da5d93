import pytest

from windlass.config.model import ModelConfig
from windlass.cost.params import count, textbook
from windlass.cost.shapes import make_shape, shape_of, shape_of_hf_config


def test_llama_3_8b_by_hand(llama_8b):
    # per layer: q and o 2 x 4096^2, k and v 2 x 4096 x 1024, three 4096 x 14336, two norms of 4096
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    found = count(llama_8b)
    assert found.per_layer == layer
    assert found.total == 32 * layer + 4096 + 2 * 128256 * 4096 == 8_030_261_248
    assert sum(found.terms.values()) == found.total


def test_padding_counts_in_what_is_stored_only():
    shape = make_shape(layers=2, width=256, heads=4, vocab=1000)
    found = count(shape)
    assert shape.padded_vocab == 1024
    assert found.stored - found.total == 2 * 24 * 256
    assert (
        count(make_shape(layers=2, width=256, heads=4, vocab=1000, tied=True)).stored
        == count(make_shape(layers=2, width=256, heads=4, vocab=1024, tied=True)).total
    )


@pytest.mark.parametrize(("layers", "width", "vocab"), [(24, 1024, 50257), (96, 12288, 51200), (70, 14336, 250680)])
def test_textbook_form(layers, width, vocab):
    shape = make_shape(arch="gpt", layers=layers, width=width, heads=16, vocab=vocab)
    assert count(shape).total == textbook(layers, width, vocab)


@pytest.mark.parametrize(
    ("width", "values", "layers", "heads", "body"),
    [(512, 864, 6, 2, 19.1e6), (1024, 1728, 16, 4, 203.5e6), (2048, 3456, 24, 8, 1220.6e6)],
)
def test_retnet_bodies_of_the_paper(width, values, layers, heads, body):
    shape = make_shape(
        arch="retnet",
        layers=layers,
        width=width,
        ffn=values,
        heads=heads,
        vocab=50000,
        value_width=values,
        tied=False,
        glu=True,
    )
    assert count(shape).per_layer == 2 * width**2 + 3 * width * values + 3 * width * values + 2 * width
    assert count(shape).body == pytest.approx(body, rel=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_active_parameters_count_the_head_and_not_the_look_up(tied):
    shape = make_shape(layers=2, width=256, heads=4, vocab=1024, tied=tied)
    assert count(shape).active == count(shape).body + 1024 * 256


MODELS = [
    ModelConfig(layers=3, width=256, ffn=640, heads=8, kv_heads=2, vocab=1000),
    ModelConfig(layers=2, width=256, ffn=512, heads=4, vocab=1000, tied=True),
    ModelConfig(layers=2, width=256, ffn=512, heads=4, head_dim=32, vocab=1024, activation="gelu"),
    ModelConfig(family="retnet", layers=3, width=256, ffn=432, heads=4, vocab=1000),
    ModelConfig(family="retnet", layers=2, width=256, ffn=512, heads=2, value_width=432, vocab=1000, tied=True),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.family}-{m.activation}-{'tied' if m.tied else 'untied'}")
def test_equal_to_the_engines_own_models(model):
    import torch

    from windlass.models import build

    with torch.device("meta"):
        net = build(model, seq_len=128)
    assert sum(p.numel() for p in net.parameters()) == count(shape_of(model)).stored


HUGGING_FACE = [
    ("LlamaConfig", {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}),
    ("LlamaConfig", {"vocab_size": 999, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8, "tie_word_embeddings": True}),
    ("GPT2Config", {"vocab_size": 1000, "n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 128}),
    ("BloomConfig", {"vocab_size": 1000, "hidden_size": 256, "n_layer": 3, "n_head": 8}),
    ("MptConfig", {"vocab_size": 1000, "d_model": 256, "n_layers": 3, "n_heads": 8, "no_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys"), HUGGING_FACE, ids=lambda v: v if isinstance(v, str) else "")
def test_equal_to_transformers(name, keys):
    import torch
    import transformers

    config = getattr(transformers, name)(**keys)
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in net.parameters())
    shape = shape_of_hf_config(config.to_dict())
    assert count(shape).stored == expected
