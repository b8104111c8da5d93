"""The loss in chunks equals the plain one, gradients included."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from windlass.blocks.head.loss import chunked_loss
from windlass.config import ModelConfig
from windlass.models.build import build_model

SMALL = ModelConfig(layers=1, width=64, ffn=160, heads=8, kv_heads=2, vocab=250)


@pytest.mark.parametrize("chunk", [7, 32, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_chunked_loss_equals_plain(chunk: int, z_loss: float) -> None:
    model = build_model(SMALL, seq_len=16)
    model.init_weights(0)
    tokens = torch.randint(0, 250, (2, 17))
    model.head.loss = partial(model.head.loss, z_loss=z_loss)
    results = []
    for loss in (model.head.loss, partial(chunked_loss, chunk=chunk, z_loss=z_loss)):
        model.head.loss = loss
        model.zero_grad()
        sums = model(tokens[:, :-1], tokens[:, 1:])
        (sums[0] * 0.5).backward()
        results.append((sums.detach(), [p.grad.clone() for p in model.parameters()]))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-6)
    if z_loss:
        assert float(results[0][0][0]) > float(results[0][0][1])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(a, b, atol=2e-6)
