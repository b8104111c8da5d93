"""Tables of Hugging Face names and keys are run in both directions, and another package can add one."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest

from windlass.config import ModelConfig
from windlass.convert.config_json import match_format
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset
from windlass.registry import PRESETS


def test_llama_names_and_config_go_both_ways() -> None:
    llama = PRESETS.load("llama").hf
    assert llama.hf_name("layers.31.feed_forward.w2.weight") == "model.layers.31.mlp.down_proj.weight"
    assert llama.hf_name("layers.0.retention.wq.weight") is None
    assert llama.transforms.get("head.weight") == "pad-vocabulary" and "norm.weight" not in llama.transforms
    model = ModelConfig(layers=2, width=48, ffn=96, heads=4, vocab=100)
    config = llama.write_config(model.model_dump(mode="json"), {"positions": 64, "dtype": "bfloat16"})
    assert (config["num_key_value_heads"], config["head_dim"], config["dtype"]) == (4, 12, "bfloat16")
    read = ModelConfig(**llama.read_config(config))
    assert read == model.model_copy(update={"kv_heads": 4, "head_dim": 12})


@pytest.mark.parametrize(
    ("changes", "family", "reasons"),
    [
        ({}, "llama", 0),
        ({"rope_scaling": {"rope_type": "dynamic"}, "mlp_bias": True}, "hf", 2),
        ({"hidden_act": "gelu"}, "hf", 1),
        ({"model_type": "mistral", "sliding_window": 4096}, "hf", 1),
        ({"model_type": "mistral", "sliding_window": None}, "llama", 0),
        ({"model_type": "opt"}, "hf", 1),
        ({"model_type": "windlass_retnet"}, "retnet", 0),
    ],
)
def test_config_is_matched_to_a_format(changes: dict[str, Any], family: str, reasons: int) -> None:
    format, differences = match_format({"model_type": "llama", **changes})
    assert format.family == family and len(differences) == reasons


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (
            {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
             "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            ["gemma2", "4,096", "gelu_pytorch_tanh", "50.0", "30.0"],
        ),
        ({"model_type": "gemma", "hidden_act": "gelu"}, ["gemma", "gelu"]),
        (
            {"model_type": "gpt_neox", "hidden_act": "gelu", "attention_bias": True, "rotary_pct": 0.25,
             "use_parallel_residual": True},
            ["gpt_neox", "attention has biases", "gelu", "25%", "parallel"],
        ),
    ],
)  # fmt: skip
def test_the_reasons_name_each_feature_with_its_value(config: dict[str, Any], values: list[str]) -> None:
    format, reasons = match_format(config)
    assert format.family == "hf" and len(reasons) == len(values)
    assert all(value in reason for value, reason in zip(values, reasons, strict=True))


FORMAT = HFFormat(family="other", model_types=("other",), config={"model_type": "other", "size": ConfigSlot("width")})
PRESET = Preset(spec=PRESETS.load("llama").spec, hf=FORMAT)


def test_another_package_adds_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("other", f"{__name__}:PRESET", "windlass.presets")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[test_config_is_matched_to_a_format.__module__])
    assert PRESETS.names()[-1] == "other"
    assert match_format({"model_type": "other"})[0] is PRESETS.load("other").hf


def test_presets_do_not_import_torch() -> None:
    code = (
        "import sys; from windlass.registry import PRESETS; [PRESETS.load(n) for n in PRESETS.names()];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
