"""Is an FP8 product close to the exact one, forward and backward? And where it is refused."""

from __future__ import annotations

import pytest
import torch

from windlass.config import ModelConfig
from windlass.errors import ConfigError
from windlass.models import build
from windlass.train.float8 import apply_float8, cast, float8_product


@pytest.mark.parametrize("rows", [False, True])
def test_close_to_the_exact_product(rows: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 32, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    y = float8_product(x, w, rows=rows)
    exact_x, exact_w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    exact = exact_x @ exact_w.t()
    slope = torch.randn_like(exact)
    y.backward(slope)
    exact.backward(slope)
    for seen, expected in ((y, exact), (x.grad, exact_x.grad), (w.grad, exact_w.grad)):
        assert float((seen - expected).norm() / expected.norm()) < 0.05
        assert not torch.equal(seen, expected)


def test_row_scales_survive_an_outlier() -> None:
    x = torch.ones(4, 16)
    x[0] *= 1e6
    whole, rows = (cast(x, dim) for dim in (None, 1))
    assert float((whole[0].float() * whole[1])[1, 0]) != pytest.approx(1.0, rel=0.05)
    assert float((rows[0].float() * rows[1])[1, 0]) == pytest.approx(1.0, rel=0.05)


def test_refused_without_the_units() -> None:
    model = build(ModelConfig(layers=1, width=32, ffn=48, heads=2, vocab=100), seq_len=8)
    with pytest.raises(ConfigError, match="has no FP8 matrix units"):
        apply_float8(model, torch.device("cpu"))
