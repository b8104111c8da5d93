"""Attention against scores written out: groups of heads, windows, documents, blocks of queries, caps, sinks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from windlass.blocks.attention.kernels import (
    QUERY_BLOCK,
    Scores,
    block_mask,
    block_masked_attention,
    causal_attention,
    expand_heads,
    needs_expanded_heads,
)


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, numbers: torch.Tensor, start: int, sinks=None
):  # type: ignore[no-untyped-def]
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    score = q @ k.transpose(-1, -2) * (scores.scale or q.shape[-1] ** -0.5)
    if scores.softcap:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    key, query = torch.arange(k.shape[2]), start + torch.arange(q.shape[2])[:, None]
    visible = (key <= query) & (query - key < (scores.window or k.shape[2]))
    visible = visible & (numbers[:, None, start : start + q.shape[2], None] == numbers[:, None, None, : k.shape[2]])
    score = score.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return score.softmax(-1) @ v
    return score.exp() @ v / (score.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])


@pytest.mark.parametrize(
    ("scores", "documents", "start"),
    [
        (Scores(), False, 0),
        (Scores(window=7), False, 0),
        (Scores(window=7, scale=0.3), True, 0),
        (Scores(window=500), True, 9),
        (Scores(softcap=2.0), False, 0),
        (Scores(softcap=2.0, window=5), True, 9),
        (Scores(), False, 30),
    ],
)
def test_blocks_of_queries_give_what_all_scores_give(
    monkeypatch: pytest.MonkeyPatch, scores: Scores, documents: bool, start: int
) -> None:
    monkeypatch.setattr("windlass.blocks.attention.kernels.QUERY_BLOCK", 8)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 31 - start, 4), torch.randn(2, 2, 31, 4), torch.randn(2, 2, 31, 4)
    numbers = torch.tensor([[0] * 14 + [1] * 17, [0] * 20 + [1] * 11]) if documents else torch.zeros(2, 31)
    out = causal_attention(q, k, v, scores, numbers if documents else None, start=start)
    assert torch.allclose(out, written_out(q, k, v, scores, numbers, start), atol=1e-6)


@pytest.mark.parametrize(("window", "start"), [(0, 0), (7, 0), (7, 9)])
def test_a_sink_takes_a_share_of_the_attention(monkeypatch: pytest.MonkeyPatch, window: int, start: int) -> None:
    monkeypatch.setattr("windlass.blocks.attention.kernels.QUERY_BLOCK", 8)
    torch.manual_seed(0)
    q, k, v, sinks = (
        torch.randn(2, 6, 31 - start, 4),
        torch.randn(2, 2, 31, 4),
        torch.randn(2, 2, 31, 4),
        torch.randn(6),
    )
    numbers = torch.tensor([[0] * 14 + [1] * 17, [0] * 20 + [1] * 11])
    out = causal_attention(q, k, v, Scores(window=window), numbers, sinks, start=start)
    assert torch.allclose(out, written_out(q, k, v, Scores(window=window), numbers, start, sinks), atol=1e-6)


@pytest.mark.parametrize(("window", "width", "sinks"), [(0, 4, True), (7, 4, True), (0, 8, False)])
def test_one_kernel_with_a_mask_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, window: int, width: int, sinks: bool
) -> None:
    """As on a GPU, without its compiler; values may be wider than keys."""
    monkeypatch.setattr("windlass.blocks.attention.kernels._compiled", lambda function: function)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 64, 4), torch.randn(2, 2, 64, 4), torch.randn(2, 2, 64, width)
    scores, numbers, sink = (
        Scores(window=window),
        torch.arange(64).expand(2, 64) // 20,
        torch.randn(6) if sinks else None,
    )
    mask = block_mask(window, 64, numbers, torch.device("cpu"))
    out = block_masked_attention(q, k, v, scores, mask, sink)
    assert torch.allclose(out, causal_attention(q, k, v, scores, numbers, sink), atol=1e-6)


def test_the_square_of_positions_never_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **o: (sizes.append(o["attn_mask"].numel()), real(*a, **o))[1]
    )
    length = 3 * QUERY_BLOCK
    q = torch.randn(1, 1, length, 8)
    causal_attention(q, q, q, Scores(window=256))
    assert len(sizes) == 3 and max(sizes) <= QUERY_BLOCK * (QUERY_BLOCK + 256) < length**2 / 6


def test_heads_are_repeated_only_where_a_fast_kernel_needs_it() -> None:
    assert needs_expanded_heads("cuda", torch.float32, grouped=True, masked=False)
    assert needs_expanded_heads("cuda", torch.bfloat16, grouped=True, masked=True)
    assert not needs_expanded_heads("cuda", torch.bfloat16, grouped=True, masked=False)
    assert not needs_expanded_heads("cuda", torch.float32, grouped=False, masked=True)
    assert not needs_expanded_heads("cpu", torch.float32, grouped=True, masked=True)
