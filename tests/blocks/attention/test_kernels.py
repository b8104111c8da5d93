"""Attention with fewer key heads than query heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from windlass.blocks.attention.kernels import document_mask, expand_heads, needs_expanded_heads


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_give_what_groups_give(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 9, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    numbers = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    options = {"attn_mask": document_mask(numbers, numbers)} if masked else {"is_causal": True}
    grouped = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert torch.equal(F.scaled_dot_product_attention(q, expand_heads(k, 6), expand_heads(v, 6), **options), grouped)


def test_heads_are_repeated_only_where_a_fast_kernel_needs_it() -> None:
    assert needs_expanded_heads("cuda", torch.float32, grouped=True, masked=False)
    assert needs_expanded_heads("cuda", torch.bfloat16, grouped=True, masked=True)
    assert not needs_expanded_heads("cuda", torch.bfloat16, grouped=True, masked=False)
    assert not needs_expanded_heads("cuda", torch.float32, grouped=False, masked=True)
    assert not needs_expanded_heads("cpu", torch.float32, grouped=True, masked=True)
