"""The three forms of retention are one function: parallel, recurrent and chunkwise, in float64."""

from __future__ import annotations

import pytest
import torch

from windlass.blocks.retention.module import (
    decay_matrix,
    decays,
    retain_chunkwise,
    retain_from,
    retain_one,
    retain_parallel,
)
from windlass.config import ModelConfig
from windlass.models.build import build_model


def inputs(time: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, time, 8, dtype=torch.float64)
    return q, k, torch.randn(2, 3, time, 12, dtype=torch.float64), decays(3, dtype=torch.float64)


@pytest.mark.parametrize(("time", "chunk"), [(40, 8), (50, 8), (7, 16), (64, 32)])
def test_three_forms_agree(time: int, chunk: int) -> None:
    q, k, v, gamma = inputs(time)
    expected = retain_parallel(q, k, v, gamma)
    state = torch.zeros(2, 3, 8, 12, dtype=torch.float64)
    tokens = zip(q.split(1, -2), k.split(1, -2), v.split(1, -2), strict=True)
    recurrent = torch.cat([retain_one(*token, gamma, state) for token in tokens], -2)
    assert torch.allclose(recurrent, expected, atol=1e-12)
    assert torch.allclose(retain_chunkwise(q, k, v, gamma, chunk), expected, atol=1e-12)


def test_recurrent_form_can_be_cut_anywhere() -> None:
    q, k, v, gamma = inputs(20)
    last, state = torch.zeros(2, 2, 3, 8, 12, dtype=torch.float64)
    full = retain_from(q, k, v, gamma, last)
    first = retain_from(q[..., :13, :], k[..., :13, :], v[..., :13, :], gamma, state)
    second = retain_from(q[..., 13:, :], k[..., 13:, :], v[..., 13:, :], gamma, state)
    assert torch.allclose(torch.cat((first, second), -2), full)
    assert torch.allclose(state, last)


def test_gradients_of_the_chunkwise_form() -> None:
    q, k, v, gamma = inputs(12)
    parts = [p[:1, :1].clone().requires_grad_() for p in (q, k, v)]
    assert torch.autograd.gradcheck(lambda a, b, c: retain_chunkwise(a, b, c, gamma[:1], 4), parts)


def test_decay_by_hand() -> None:
    assert decays(2).tolist() == [1 - 1 / 32, 1 - 1 / 64]
    matrix = decay_matrix(3, torch.tensor([0.5]), torch.float32)[0]
    assert matrix.tolist() == [[1, 0, 0], [0.5, 1, 0], [0.25, 0.5, 1]]


def test_medium_has_the_published_size() -> None:
    with torch.device("meta"):
        model = build_model(
            ModelConfig(family="retnet", layers=16, width=1024, ffn=1728, heads=4, vocab=50304), seq_len=2048
        )
    layer = sum(p.numel() for p in model.layers["0"].parameters())
    assert layer / 1e6 == pytest.approx(12.716, abs=1e-3)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(306.5, abs=0.5)


def test_forms_give_the_same_model() -> None:
    common = {"family": "retnet", "layers": 2, "width": 32, "ffn": 48, "heads": 4, "vocab": 100, "chunk": 8}
    tokens = torch.randint(0, 100, (2, 30))
    logits = []
    for form in ("parallel", "chunkwise"):
        model = build_model(ModelConfig(**common, retention=form), seq_len=30)
        model.init_weights(0)
        logits.append(model(tokens))
    assert torch.allclose(*logits, atol=1e-5)


def test_beginning_of_retention_is_xavier() -> None:
    model = build_model(ModelConfig(family="retnet", layers=1, width=64, ffn=96, heads=2, vocab=100), seq_len=8)
    model.init_weights(0)
    bound = 2**-2.5 * (6 / 128) ** 0.5
    weight = model.layers["0"].retention.wq.weight.detach()
    assert float(weight.abs().max()) == pytest.approx(bound, rel=0.01)
    assert float(model.layers["0"].retention.wo.weight.detach().abs().max()) == pytest.approx(
        0.5 * (6 / 160) ** 0.5, rel=0.01
    )
