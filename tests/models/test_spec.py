"""Sizes of models: by hand, as published, and equal to the modules that are built from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.blocks.embedding.spec import padded_rows
from windlass.config import ModelConfig
from windlass.errors import ConfigError
from windlass.models.build import build_model
from windlass.models.presets import model_spec
from windlass.models.presets.hf import classic_spec, spec_of_config_json
from windlass.models.spec import ModelSpec


def small(**keys: Any) -> ModelSpec:
    return model_spec(ModelConfig(**{"layers": 2, "width": 256, "heads": 4, "vocab": 1000, **keys}))


def test_llama_3_8b_by_hand() -> None:
    model = small(layers=32, width=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
    # per layer: q and o 2 x 4096^2, k and v 2 x 4096 x 1024, three 4096 x 14336, two norms of 4096
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert model.groups[0].layer.num_params == layer
    assert model.params.total == 32 * layer + 4096 + 2 * 128256 * 4096 == 8_030_261_248
    assert sum(model.params.terms.values()) == model.params.total


@pytest.mark.parametrize(("vocab", "rows"), [(128, 128), (129, 256), (50257, 50304), (128256, 128256)])
def test_vocabulary_is_padded_to_whole_tiles(vocab: int, rows: int) -> None:
    assert padded_rows(vocab) == rows


def test_padding_counts_only_in_what_is_stored() -> None:
    model = small()
    assert model.embedding.rows == 1024
    assert model.params.stored - model.params.total == 2 * 24 * 256
    assert small(tied=True).params.stored == small(vocab=1024, tied=True).params.total


@pytest.mark.parametrize(("layers", "width", "vocab"), [(24, 1024, 50257), (96, 12288, 51200), (70, 14336, 250680)])
def test_textbook_form_of_a_gpt(layers: int, width: int, vocab: int) -> None:
    model = classic_spec(family="gpt", layers=layers, width=width, hidden=4 * width, heads=16, kv_heads=16,
                         head_dim=width // 16, vocab=vocab, rows=vocab, tied=True)  # fmt: skip
    assert model.params.total == layers * (12 * width**2 + 13 * width) + vocab * width + 2 * width


def test_gpt_2_is_the_textbook_form_and_its_positions() -> None:
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    h, layers, vocab = 768, 12, 50257
    textbook = h * vocab + layers * (12 * h**2 + 13 * h) + 2 * h
    assert textbook == 123_653_376
    assert spec_of_config_json({"model_type": "gpt2", **sizes}).params.total == textbook + 1024 * h == 124_439_808


@pytest.mark.parametrize(
    ("width", "values", "layers", "heads", "body"),
    [(512, 864, 6, 2, 19.1e6), (1024, 1728, 16, 4, 203.5e6), (2048, 3456, 24, 8, 1220.6e6)],
)
def test_retnet_bodies_of_the_paper(width: int, values: int, layers: int, heads: int, body: float) -> None:
    model = small(family="retnet", layers=layers, width=width, ffn=values, heads=heads, vocab=50000)
    layer = model.groups[0].layer
    assert layer.num_params == 2 * width**2 + 3 * width * values + 3 * width * values + 2 * width
    assert model.params.body == pytest.approx(body, rel=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_active_parameters_count_the_head_and_not_the_look_up(tied: bool) -> None:
    params = small(vocab=1024, tied=tied).params
    assert params.active == params.body + 1024 * 256


MODELS = [
    {"layers": 3, "ffn": 640, "heads": 8, "kv_heads": 2},
    {"ffn": 512, "tied": True},
    {"ffn": 512, "head_dim": 32, "vocab": 1024, "activation": "gelu"},
    {"family": "retnet", "layers": 3, "ffn": 432},
    {"family": "retnet", "ffn": 512, "heads": 2, "value_width": 432, "tied": True},
    {"family": "retnet", "ffn": 432, "activation": "gelu"},
    {"family": "nemotron_h", "layers": 3, "ffn": 432, "pattern": "M-*", "mamba": {"heads": 8}},
    {"family": "nemotron_h", "ffn": 432, "pattern": "ME", "mamba": {"heads": 8}, "experts": {"count": 3, "top_k": 2}},
]


@pytest.mark.parametrize("keys", MODELS, ids=str)
def test_equal_to_the_modules_built_from_it(keys: dict[str, Any]) -> None:
    config = ModelConfig(**{"layers": 2, "width": 256, "heads": 4, "vocab": 1000, **keys})
    with torch.device("meta"):
        module = build_model(config, seq_len=128)
    assert sum(p.numel() for p in module.parameters()) == model_spec(config).params.stored


HUGGING_FACE = [
    ("LlamaConfig", {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}),
    ("LlamaConfig", {"vocab_size": 999, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8, "tie_word_embeddings": True}),
    ("GPT2Config", {"vocab_size": 1000, "n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 128}),
    ("BloomConfig", {"vocab_size": 1000, "hidden_size": 256, "n_layer": 3, "n_head": 8}),
    ("MptConfig", {"vocab_size": 1000, "d_model": 256, "n_layers": 3, "n_heads": 8, "no_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys"), HUGGING_FACE, ids=lambda v: v if isinstance(v, str) else "")
def test_equal_to_transformers(name: str, keys: dict[str, Any]) -> None:
    import transformers

    config = getattr(transformers, name)(**keys)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    assert spec_of_config_json(config.to_dict()).params.stored == sum(p.numel() for p in module.parameters())


def test_defaults_of_a_llama() -> None:
    branches = small(heads=8, kv_heads=2, width=512, vocab=32001).groups[0].layer.branches
    attention, mlp = (branch.block for branch in branches)
    assert (attention.head_dim, attention.kv_width) == (64, 128)  # type: ignore[attr-defined]
    assert mlp.hidden == 1536  # type: ignore[attr-defined]  # 8/3 of the width, rounded up to 256


def test_a_hugging_face_config(tmp_path: Path) -> None:
    raw = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3,
           "intermediate_size": 640, "vocab_size": 999, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = model_spec(ModelConfig(family="hf", config=str(tmp_path)))
    assert (model.num_layers, model.tied, model.embedding.rows, model.foreign) == (3, True, 999, True)
    assert model.groups[0].layer.branches[0].block.kv_heads == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "model.config-unreadable"),
        ("{", "model.config-unreadable"),
        ("[1]", "model.config-unreadable"),
        ('{"a":' * 20_000, "model.config-unreadable"),
        ("{}", "model.config-lacks-size"),
        ('{"hidden_size": 64, "num_attention_heads": 0}', "model.config-size-invalid"),
        ('{"hidden_size": "many"}', "model.config-size-invalid"),
        ('{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": -3}', "model.config-size-invalid"),
        ('{"hidden_size": 1e400}', "model.config-lacks-size"),
    ],
)
def test_bad_hugging_face_configs(tmp_path: Path, content: str | None, code: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        model_spec(ModelConfig(family="hf", config=str(path)))
    assert error.value.code == code


def test_hf_without_a_config_says_so() -> None:
    with pytest.raises(ConfigError) as error:
        model_spec(ModelConfig(family="hf"))
    assert error.value.code == "model.config-missing"


def test_a_hybrid_has_layers_of_one_block() -> None:
    mamba = {"heads": 4, "head_dim": 16, "state": 8, "groups": 2}
    model = small(
        family="nemotron_h", layers=5, ffn=512, pattern="M-*ME", mamba=mamba, experts={"count": 4, "top_k": 2}
    )
    kinds = [[branch.block.kind for branch in layer.branches] for layer in model.layers()]
    assert kinds == [["mamba"], ["mlp"], ["attention"], ["mamba"], ["experts"]]
    assert model.num_branches == model.num_layers == 5 and not model.measured
    # Inputs 256 x (64 + 64 + 2 x 16 + 4), output 64 x 256, convolution 96 x 5, state 3 x 4, norms 64 and 256.
    assert model.groups[0].layer.num_params == 256 * 164 + 64 * 256 + 96 * 5 + 12 + 64 + 256
    # Attention grows with the sequence, Mamba-2 does not.
    assert model.mixing_flops(8192) - model.mixing_flops(4096) == 4 * 4096 * 256
    # The matrix that ends a branch begins smaller by the number of branches, of which there are four here.
    config = ModelConfig(family="nemotron_h", layers=4, width=64, ffn=64, heads=4, vocab=64, pattern="-...")
    built = build_model(config, seq_len=8)
    built.init_weights(0)
    stds = [float(built.get_parameter(f"layers.0.feed_forward.{name}.weight").std()) for name in ("w1", "w2")]
    assert stds[0] / stds[1] == pytest.approx(2.0, rel=0.05)
