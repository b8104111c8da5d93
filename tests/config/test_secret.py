from __future__ import annotations

import pytest

from windlass.config import LaunchConfig, validate
from windlass.config.secret import looks_secret
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
