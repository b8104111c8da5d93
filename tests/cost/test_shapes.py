import json

import pytest

from windlass.config.model import ModelConfig
from windlass.cost.shapes import make_shape, pad, shape_of
from windlass.errors import ConfigError


@pytest.mark.parametrize(("vocab", "padded"), [(128, 128), (129, 256), (50257, 50304), (128256, 128256)])
def test_vocabulary_is_padded_to_whole_tiles(vocab, padded):
    assert pad(vocab) == padded


def test_defaults_follow_the_family():
    old, new = (
        make_shape(arch="gpt", layers=2, width=256, heads=4, vocab=1000),
        make_shape(layers=2, width=256, heads=4, vocab=1000),
    )
    assert (old.ffn, old.tied, old.glu, old.biases, old.layer_norm) == (1024, True, False, True, True)
    assert (new.ffn, new.tied, new.glu, new.biases, new.layer_norm) == (768, False, True, False, False)


def test_a_recipe_model_becomes_a_shape():
    shape = shape_of(ModelConfig(layers=4, width=512, ffn=1376, heads=8, kv_heads=2, vocab=32001))
    assert (shape.head_dim, shape.kv_width, shape.padded_vocab) == (64, 128, 32128)


def test_missing_sizes_are_named():
    with pytest.raises(ConfigError, match=r"layers, vocab not given"):
        shape_of(ModelConfig(width=512, heads=8))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"width": 500, "heads": 8}, r"width \(500\) is not divisible by model.heads \(8\)"),
        ({"width": 512, "heads": 8, "kv_heads": 3}, r"heads \(8\) is not a multiple of model.kv_heads \(3\)"),
    ],
)
def test_heads_that_do_not_divide(keys, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(ModelConfig(layers=2, vocab=1000, **keys))


def test_a_hugging_face_config(tmp_path):
    raw = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3,
           "intermediate_size": 640, "vocab_size": 999, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape = shape_of(ModelConfig(family="hf", config=str(tmp_path)))
    assert (shape.layers, shape.kv_heads, shape.tied, shape.padded_vocab) == (3, 4, True, 999)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), ("{", "cannot read"), ("{}", "has none of hidden_size")]
)
def test_bad_hugging_face_configs(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        shape_of(ModelConfig(family="hf", config=str(path)))


def test_hf_without_a_config_says_so():
    with pytest.raises(ConfigError, match="config is not given"):
        shape_of(ModelConfig(family="hf"))
