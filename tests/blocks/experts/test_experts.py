"""A mixture of experts against each token computed alone, its losses, and its biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from windlass.blocks.base import BlockContext
from windlass.blocks.experts.module import Experts, within_best_groups
from windlass.blocks.experts.rows import sorted_by_expert
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.config.model import ExpertsConfig
from windlass.layout.types import Layout, StepSpec

SIZES: dict[str, Any] = {"width": 16, "hidden": 12, "count": 8, "top_k": 3}
CONTEXT = BlockContext({})


def make_block(**changes: Any) -> Experts:
    torch.manual_seed(0)
    block = Experts(ExpertsSpec(**SIZES | changes))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.5)
    return block


def one_token(block: Experts, x: torch.Tensor) -> torch.Tensor:
    """Without groups, bias and sorting."""
    spec, logits = block.spec, block.router @ x
    scores = logits.softmax(0) if spec.router == "softmax" else logits.sigmoid()
    weights, chosen = scores.topk(spec.top_k)
    weights = (weights / weights.sum() if spec.renormalise else weights) * spec.scale
    out = x.new_zeros(spec.width)
    for weight, expert in zip(weights, chosen.tolist(), strict=True):
        if block.w3 is None:
            out = out + weight * (block.w2[expert] @ F.relu(block.w1[expert] @ x).square())
        else:
            out = out + weight * (block.w2[expert] @ (F.silu(block.w1[expert] @ x) * (block.w3[expert] @ x)))
    if (shared := block.shared) is not None and shared.w3 is None:
        out = out + shared.w2.weight @ F.relu(shared.w1.weight @ x).square()
    elif shared is not None:
        out = out + shared.w2.weight @ (F.silu(shared.w1.weight @ x) * (shared.w3.weight @ x))
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "sigmoid", "scale": 2.5, "shared_hidden": 20},
        {"renormalise": False, "top_k": 8},
        {"activation": "relu2", "shared_hidden": 20},
    ],
    ids=str,
)
def test_each_token_meets_its_experts(changes: dict[str, Any]) -> None:
    block, x = make_block(**changes), torch.randn(2, 9, 16, requires_grad=True)
    slope = torch.randn(2, 9, 16)
    out = block(x, CONTEXT)
    (out * slope).sum().backward()
    gradients = [p.grad.clone() for p in (x, *block.parameters())]
    x.grad = None
    block.zero_grad()
    alone = torch.stack([one_token(block, token) for token in x.flatten(0, 1)]).view_as(x)
    (alone * slope).sum().backward()
    torch.testing.assert_close(out, alone, rtol=1e-5, atol=1e-5)
    for gradient, parameter in zip(gradients, (x, *block.parameters()), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [8, 256, 300])
def test_rows_are_sorted_by_expert_and_keep_their_order(count: int) -> None:
    chosen = torch.randint(0, count, (400, 3))
    assert torch.equal(sorted_by_expert(chosen, count), chosen.flatten().argsort(stable=True))


def test_losses_enter_the_backward_pass_and_are_those_of_each_sequence() -> None:
    block, x = make_block(balance_strength=0.5, z_loss=0.1), torch.randn(3, 6, 16)
    plain = torch.autograd.grad(block(x, CONTEXT).sum(), block.router)[0]
    block.clear_counts()
    block.auxiliary_scale = 0.25
    together = torch.autograd.grad(block(x, CONTEXT).sum(), block.router)[0]
    counted = block.statistics.clone()

    expected = torch.zeros(())
    for sequence in x:
        logits = sequence @ block.router.t()
        shares = logits.softmax(-1)
        loads = torch.bincount(shares.topk(3).indices.flatten(), minlength=8).float()
        balance = 8 * (loads / (3 * 6) * shares.mean(0)).sum()  # 1 where all experts are equally used
        expected = expected + 6 * 0.5 * balance + 0.1 * logits.logsumexp(-1).square().sum()
    gradient = torch.autograd.grad(0.25 * expected, block.router)[0]
    torch.testing.assert_close(together - plain, gradient, rtol=1e-3, atol=1e-4)
    assert counted[-1] == pytest.approx(expected.item(), rel=1e-5) and counted[:8].sum() == 3 * 18

    block.zero_grad()
    parts = sum(torch.autograd.grad(block(part, CONTEXT).sum(), block.router)[0] for part in x.split(1))
    torch.testing.assert_close(parts, together, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        before = block.statistics.clone()
        block(x, CONTEXT)
    assert torch.equal(block.statistics, before), "validation is not counted"


def test_a_bias_and_a_loss_balance_together() -> None:
    both = ExpertsConfig(count=8, top_k=2, balance="both", balance_weight=1e-4)
    assert (both.loss_strength, both.bias_strength) == (1e-4, 1e-3)
    assert ExpertsConfig(count=8, top_k=2, balance="bias", balance_weight=0.01).bias_strength == 0.01
    block, x = make_block(balance_strength=0.5, bias_step=0.01), torch.randn(3, 6, 16)
    block(x, CONTEXT)
    assert block.bias is not None and block.statistics[-1] > 0


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    block = make_block(bias_step=0.01, router="sigmoid", renormalise=False)
    tokens = torch.randn(10, 16)
    scores = (tokens @ block.router.t()).sigmoid()
    assert block.bias is not None
    block.bias[5] = 10.0
    chosen, weights, loads = block.route(tokens, 1)
    assert (chosen == 5).any(-1).all() and loads[0, 5] == 10
    torch.testing.assert_close(weights, scores.gather(1, chosen))
    block.bias.zero_()
    loads = torch.tensor([3.0, 5.0, 4.0, 4.0, 4.0, 4.0, 0.0, 8.0])
    block.move_bias(loads, torch.tensor(False))
    assert not block.bias.any(), "a skipped step moves nothing"
    block.move_bias(loads, torch.tensor(True))
    expected = torch.tensor([0.01, -0.01, 0.0, 0.0, 0.0, 0.0, 0.01, -0.01])
    assert torch.equal(block.bias, expected)
    block.to(torch.bfloat16)
    assert block.bias.dtype == block.statistics.dtype == torch.float32 and block.w1.dtype == torch.bfloat16
    assert "bias" in block.state_dict() and "statistics" not in block.state_dict()


@pytest.mark.parametrize(
    ("router", "kept"),
    [("softmax", [0, 0, 1, 1, 0, 0]), ("sigmoid", [0, 0, 0, 0, 1, 1])],
)
def test_groups_rank_by_their_best_experts(router: str, kept: list[int]) -> None:
    spec = ExpertsSpec(width=4, hidden=4, count=6, top_k=2, router=router, groups=3, groups_kept=1)
    ranked = torch.tensor([[0.3, 0.1, 0.6, 0.0, 0.5, 0.4]])
    assert within_best_groups(ranked, spec).isfinite().int().tolist() == [kept]


def test_costs_count_what_a_token_meets() -> None:
    spec, step, layout = ExpertsSpec(**SIZES, shared_hidden=20), StepSpec(seq_len=32), Layout()
    assert spec.params() == {"experts": 3 * 8 * 16 * 12, "router": 8 * 16, "shared experts": 3 * 16 * 20}
    assert sum(spec.params().values()) == sum(p.numel() for p in make_block(shared_hidden=20).parameters())
    assert spec.active_params() == 3 * 3 * 16 * 12 + 8 * 16 + 3 * 16 * 20
    # Routing, three copies of the token, and gate, up and their product.
    assert spec.kept_bytes(step, layout) == (8 * 8 + 28 * 3) + 2 * 3 * 16 + 2 * 3 * (3 * 12 + 20)
    assert spec.divides("tensor") == (("model.experts.ffn", 12), ("model.experts.shared_ffn", 20))
    ungated = ExpertsSpec(**SIZES, shared_hidden=20, activation="relu2")
    assert sum(ungated.params().values()) == 2 * 8 * 16 * 12 + 8 * 16 + 2 * 16 * 20
    assert ungated.active_params() == 2 * 3 * 16 * 12 + 8 * 16 + 2 * 16 * 20
    assert ungated.kept_bytes(step, layout) == (8 * 8 + 28 * 3) + 2 * 3 * 16 + 2 * 2 * (3 * 12 + 20)
