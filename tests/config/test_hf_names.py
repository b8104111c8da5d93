"""Names of Hugging Face's config.json in `[model]`: read as our keys, shown as our keys, refused beside our keys."""

import pytest

from windlass.config import ModelConfig, load_recipe
from windlass.config.load import apply_override
from windlass.errors import ConfigError
from windlass.registry import PRESETS

HEAD = 'name = "tiny"\n[data]\ntokens = "1M"\nseq_len = 64\nbatch_tokens = 512\n[model]\n'
NAMES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.01,
}
OURS = {
    "width": 64, "layers": 2, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 256, "rope_theta": 10_000.0, "tied": True,
    "norm_eps": 1e-6, "init_std": 0.01,
}  # fmt: skip


@pytest.fixture
def recipe_file(tmp_path):
    def write(table):
        path = tmp_path / "tiny.toml"
        path.write_text(HEAD + "".join(f"{key} = {str(value).lower()}\n" for key, value in table.items()))
        return path

    return write


def test_names_are_read_and_shown_as_ours(recipe_file):
    loaded = load_recipe(recipe_file(NAMES), ["model.num_hidden_layers=6"])
    assert loaded.recipe.model == ModelConfig(**OURS | {"layers": 6})
    values = {key: (value, origin) for key, value, origin in loaded.values()}
    assert values["model.width"] == (64, "recipe") and values["model.layers"] == (6, "override")
    assert "model.hidden_size" not in values


@pytest.mark.parametrize("order", [("width", "hidden_size"), ("hidden_size", "width")])
def test_both_names_of_a_key_are_refused(recipe_file, order):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file(dict.fromkeys(order, 64)))
    assert caught.value.code == "config.invalid"
    assert (
        "model.hidden_size: is another name for width" in caught.value.message and "1 problem" in caught.value.message
    )


def test_a_family_adds_its_own_names():
    # Nemotron-H writes layer_norm_epsilon, gpt-oss swiglu_limit; Llama has neither.
    assert ModelConfig(family="nemotron_h", layer_norm_epsilon=1e-4).norm_eps == 1e-4
    assert ModelConfig(family="gpt_oss", swiglu_limit=5.0).clamp_limit == 5.0
    with pytest.raises(ValueError, match="layer_norm_epsilon"):
        ModelConfig(layer_norm_epsilon=1e-4)


def test_an_axis_of_a_sweep_replaces_the_other_name():
    raw = {"model": {"hidden_size": 64}}
    assert apply_override(raw, ("model", "width"), 128) == "model.width"
    assert apply_override(raw, ("model", "vocab_size"), 512) == "model.vocab"
    assert raw == {"model": {"width": 128, "vocab": 512}}


@pytest.mark.parametrize("family", PRESETS.builtin)
def test_no_name_stands_for_a_key_that_does_not_exist(family):
    aliases = PRESETS.load(family).hf.aliases()
    assert set(aliases.values()) <= set(ModelConfig.model_fields) and not set(aliases) & set(ModelConfig.model_fields)
