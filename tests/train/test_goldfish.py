"""Goldfish loss: which tokens count, and that losses and gradients are those of the counted ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.train.helpers import build, steps

from windlass.blocks.head.loss import chunked_loss, next_token_loss
from windlass.config import Recipe, check
from windlass.errors import ConfigError
from windlass.layout.types import IGNORED
from windlass.train.goldfish import left_out


def recipe(**train: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "goldfish", "model": {"layers": 2, "width": 32, "ffn": 48, "heads": 2, "vocab": 250},
        "data": {"seq_len": 32, "batch_tokens": 128}, "optim": {"name": "sgd", "lr": 0.3},
        "train": {"steps": 2, "precision": "fp32", "goldfish_k": 3, "goldfish_h": 5, **train}, "energy": {"enabled": False},
    })  # fmt: skip


def test_every_kth_token_by_the_tokens_before_it() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (64, 501))
    ignored = left_out(tokens, 50, 50)
    assert ignored.shape == (64, 500) and not ignored[:, :49].any()
    assert float(ignored[:, 49:].float().mean()) == pytest.approx(1 / 50, rel=0.1)
    # The same 50 tokens elsewhere leave out the same token, whatever stands around them.
    moved = torch.randint(0, 1000, (64, 501))
    moved[:, 7:300] = tokens[:, 100:393]
    assert torch.equal(left_out(moved, 50, 50)[:, 56:299], ignored[:, 149:392])
    assert left_out(torch.zeros(1, 501, dtype=torch.long), 50, 50)[0, 49:].float().mean() in (0.0, 1.0)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_ignored_targets_count_nowhere(z_loss: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(20, 16, requires_grad=True)
    targets = torch.randint(0, 20, (2, 8))
    targets[0, 3:6] = targets[1, 7] = IGNORED
    logits = F.linear(hidden, weight).flatten(0, 1)[targets.flatten() >= 0]
    entropy = F.cross_entropy(logits, targets.flatten()[targets.flatten() >= 0], reduction="sum")
    total = entropy + z_loss * logits.logsumexp(-1).pow(2).sum()
    expected = torch.autograd.grad(total, (hidden, weight))
    for loss in (next_token_loss, lambda *a, **k: chunked_loss(*a, chunk=5, **k)):
        sums = loss(hidden, weight, targets, vocab=20, z_loss=z_loss)
        torch.testing.assert_close(sums, torch.stack((total, entropy)))
        for mine, theirs in zip(torch.autograd.grad(sums[0], (hidden, weight)), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_the_loss_is_the_mean_of_the_counted_tokens() -> None:
    training = build(recipe())
    tokens = torch.from_numpy(training.stream.sequences([0, 1, 2, 3])).long()
    ignored = left_out(tokens, 3, 5)
    assert 20 < int(ignored.sum()) < 60
    with torch.no_grad():
        logits = training.parts.modules[0](tokens[:, :-1])
    entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert steps(training, 1)[0][0] == pytest.approx(float(entropy[~ignored.flatten()].mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("train", "numbers"),
    [
        ({"goldfish_k": 1}, "at least 2"),
        ({"goldfish_h": 32}, "at most 31"),
        ({"goldfish_k": 1, "goldfish_h": 40}, "40"),
    ],
)
def test_settings_that_leave_nothing_are_refused(train: dict[str, Any], numbers: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(recipe(**train))
    assert error.value.code == "config.invalid" and numbers in str(error.value)
