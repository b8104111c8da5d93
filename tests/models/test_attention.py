"""Attention with fewer heads of keys than of queries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from windlass.models.attention import document_mask, every_head, only_slow_kernel_groups


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_give_what_groups_give(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 9, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    numbers = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    how = {"attn_mask": document_mask(numbers, numbers)} if masked else {"is_causal": True}
    grouped = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
    assert torch.equal(F.scaled_dot_product_attention(q, every_head(k, 6), every_head(v, 6), **how), grouped)


def test_heads_are_repeated_only_where_a_fast_kernel_needs_it() -> None:
    assert only_slow_kernel_groups("cuda", torch.float32, grouped=True, masked=False)
    assert only_slow_kernel_groups("cuda", torch.bfloat16, grouped=True, masked=True)
    assert not only_slow_kernel_groups("cuda", torch.bfloat16, grouped=True, masked=False)
    assert not only_slow_kernel_groups("cuda", torch.float32, grouped=False, masked=True)
    assert not only_slow_kernel_groups("cpu", torch.float32, grouped=True, masked=True)
