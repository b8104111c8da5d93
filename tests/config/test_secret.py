from __future__ import annotations

from pathlib import Path

import pytest

from windlass.config import LaunchConfig, load_recipe, validate
from windlass.config.secret import HIDDEN, find_secret, looks_secret, redact_text
from windlass.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "password", "api_key", "GITHUB_TOKEN"]
)
def test_keys(name):
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    ["tokens", "target_tokens", "tokenizer", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "seq_len", "keys", "monkey"],
)
def test_our_own_words(name):
    assert not looks_secret(name)


def test_a_key_in_launch_env_is_refused_before_it_reaches_a_folder():
    with pytest.raises(ConfigError, match=r"env: WANDB_API_KEY would be written into the run folder") as caught:
        validate(LaunchConfig, {"env": {"WANDB_API_KEY": "0123456789abcdef", "NCCL_DEBUG": "INFO"}}, "recipe.toml")
    assert "wandb login" in str(caught.value)
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize("launch", [
    {"env": {"GITHUB_PAT": "s3cr3t-value"}},
    {"env": {"DB_PASS": "s3cr3t-value"}},
    {"env": {"STORE": "https://ann:s3cr3t-value@host/x"}},
    {"sbatch": {"export": "ALL,HF_TOKEN=s3cr3t-value"}},
    {"container": "docker://ann:s3cr3t-value@registry/image"},
    {"env": {"X": "ghp_s3cr3tvalue0123456789abc"}},
])  # fmt: skip
def test_a_secret_in_the_launch_table_is_refused_and_not_printed(launch):
    with pytest.raises(ConfigError) as caught:
        validate(LaunchConfig, launch, "recipe.toml")
    assert caught.value.code == "config.invalid" and "mode 600" in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("override", [
    "notes=pushed to https://ann:s3cr3t@host/x", "data.store=s3://ann:s3cr3t@host/x", "notes=WANDB_API_KEY=s3cr3t",
])  # fmt: skip
def test_a_secret_in_any_key_is_refused(override):
    recipe = Path(__file__).parents[2] / "recipes" / "tiny_cpu.toml"
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [override])
    assert caught.value.code == "config.invalid" and override.partition("=")[0] in caught.value.message
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("text", ["https://host:8080/x", "ALL,HF_TOKEN", "$HF_TOKEN", "s3://bucket/key", "KEYS=3"])
def test_ordinary_texts_hold_no_secret(text):
    assert find_secret(text) is None and redact_text(text) == text


def test_a_password_in_an_address_is_hidden():
    assert redact_text("see https://ann:abc@host/x") == f"see https://ann:{HIDDEN}@host/x"
