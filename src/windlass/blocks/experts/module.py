"""Mixture of experts: every token goes through the few experts that its router chose. No token is dropped.

Tokens are copied to their experts and sorted by them, so that each expert multiplies one stretch of rows. Auxiliary
losses enter the backward pass where they are computed, and not through the model's loss: so they work in any pipeline
stage and where a layer is computed again.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.blocks.activations import gate_function
from windlass.blocks.base import Block, BlockContext
from windlass.blocks.divide import own_copy, own_part
from windlass.blocks.experts.rows import SortedRows, SummedRows, grouped_product, memberships, sorted_by_expert
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.blocks.initial_values import Filler
from windlass.blocks.linear import Linear


class Experts(Block):
    last_weight = "w2"
    # One row per expert; None without biases.
    w1_bias: nn.Parameter
    w2_bias: nn.Parameter
    w3_bias: nn.Parameter

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec, self.activated = spec, gate_function(spec.activation, spec.clamp)
        # Not a `Linear`: FP8 rounding would change which experts are chosen.
        self.router = nn.Parameter(torch.empty(spec.count, spec.width))
        self.w1 = nn.Parameter(torch.empty(spec.count, spec.hidden, spec.width))
        self.w2 = nn.Parameter(torch.empty(spec.count, spec.width, spec.hidden))
        self.w3 = nn.Parameter(torch.empty(spec.count, spec.hidden, spec.width)) if spec.gated else None
        sizes = {"w1_bias": spec.hidden, "w2_bias": spec.width, **({"w3_bias": spec.hidden} if spec.gated else {})}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(spec.count, size)) if spec.bias else None)
        self.router_bias = nn.Parameter(torch.empty(spec.count)) if spec.bias else None
        self.shared = SharedExpert(spec) if spec.shared_hidden else None
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(spec.count) if spec.bias_step else None)
        # Of the training step so far: rows of each expert, then the sums over tokens of the router's entropy and of the
        # auxiliary losses.
        self.statistics: Tensor
        self.register_buffer("statistics", torch.zeros(spec.count + 2), persistent=False)
        # The sequence divided over tensor-parallel ranks is brought together, and the ranks' parts of the result are
        # summed and divided again; rows of each expert are summed over context ranks; rows go to the rank of their
        # expert. `parallel.py` sets them.
        self.tensor_ranks = 1
        self.enter: Callable[[Tensor], Tensor] = _unchanged
        self.leave: Callable[[Tensor], Tensor] = _unchanged
        self.sum_loads: Callable[[Tensor], Tensor] = _unchanged
        self.dispatch: Dispatch = stay

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Buffers stay fp32: bf16 cannot count to 1,000, and would lose the small steps of the bias."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.statistics = self.statistics.float()
        self.bias = None if self.bias is None else self.bias.float()
        return self

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        x = self.enter(x)
        tokens = x.flatten(0, 1)
        chosen, weights, loads = self.route(tokens, x.shape[0])
        order = sorted_by_expert(chosen, self.spec.count)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows: Tensor = cast(Any, SortedRows).apply(tokens, order, place, self.spec.top_k)
        rows, row_weights, ends, bring_back = self.dispatch(rows, weights.flatten().gather(0, order), loads.sum(0))
        gate = grouped_product(rows, own_part(self.w1), ends)
        up = None if self.w3 is None else grouped_product(rows, own_part(self.w3), ends)
        if self.spec.bias:
            member = memberships(ends, rows)
            gate = gate + member @ own_part(self.w1_bias)
            up = None if up is None else up + member @ own_part(self.w3_bias)
        # Weighted here and not after the last product, whose result need not be kept then.
        shares = row_weights.to(rows.dtype)[:, None]
        down = grouped_product(self.activated(gate, up) * shares, own_part(self.w2), ends)
        if self.spec.bias:  # every tensor-parallel rank adds its share
            down = down + (member * shares) @ (own_copy(self.w2_bias) / self.tensor_ranks)
        out: Tensor = cast(Any, SummedRows).apply(bring_back(down), order, place, self.spec.top_k)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return self.leave(out.view(x.shape))

    def route(self, tokens: Tensor, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Experts of each token and their weights, both (tokens, top_k), and rows (sequences, experts) of each."""
        spec = self.spec
        router_bias = None if self.router_bias is None else own_copy(self.router_bias)
        logits = F.linear(tokens, own_copy(self.router), router_bias).float()
        scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
        ranked = scores.detach() if self.bias is None else scores.detach() + self.bias
        if spec.groups_kept < spec.groups:
            ranked = within_best_groups(ranked, spec)
        chosen = ranked.topk(spec.top_k).indices
        weights = scores.gather(1, chosen)
        if spec.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * spec.scale
        ones = torch.ones((), device=tokens.device).expand(sequences, chosen.numel() // sequences)
        loads = ones.new_zeros(sequences, spec.count).scatter_add_(1, chosen.view(sequences, -1), ones)
        if torch.is_grad_enabled():
            shares = scores if spec.router == "softmax" else scores / scores.sum(-1, keepdim=True)
            loss = self.auxiliary_loss(logits, shares.view(sequences, -1, spec.count), self.sum_loads(loads))
            with torch.no_grad():
                sums = torch.stack((torch.special.entr(shares).sum(), loss))
                self.statistics.add_(torch.cat((loads.sum(0), sums)))
            if self.auxiliary_scale:
                weights = cast(Any, AddedLoss).apply(weights, loss, self.auxiliary_scale)
        return chosen, weights, loads

    def auxiliary_loss(self, logits: Tensor, shares: Tensor, loads: Tensor) -> Tensor:
        """Sum over tokens. The balance is that of each sequence, so that it does not depend on how sequences are
        divided into micro-batches: sum over experts of (rows / mean rows) x share of the scores."""
        loss = logits.new_zeros(())
        if self.spec.balance_strength:
            relative = loads * (self.spec.count / loads.sum(-1, keepdim=True))
            loss = loss + self.spec.balance_strength * (relative * shares.sum(1)).sum()
        if self.spec.z_loss:
            loss = loss + self.spec.z_loss * logits.logsumexp(-1).square().sum()
        return loss

    def clear_counts(self) -> None:
        self.statistics.zero_()

    @torch.no_grad()
    def move_bias(self, loads: Tensor, is_good: Tensor) -> None:
        """Adjust the bias after a step by the rows of each expert in the whole batch; unchanged if the step was
        skipped."""
        if self.bias is not None:
            self.bias.add_(self.spec.bias_step * is_good * torch.sign(loads.mean() - loads))

    def filler(self, name: str, std: float, num_layers: int) -> Filler:
        return super().filler(name if name != "shared.w2.weight" else "w2", std, num_layers)


class SharedExpert(nn.Module):
    """The experts that every token uses, as one."""

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.w1 = Linear(spec.width, spec.shared_hidden)
        self.w2 = Linear(spec.shared_hidden, spec.width)
        self.w3 = Linear(spec.width, spec.shared_hidden) if spec.gated else None
        self.activated = gate_function(spec.activation, spec.clamp)

    def forward(self, tokens: Tensor) -> Tensor:
        """A tensor-parallel rank returns its part of a sum over ranks."""
        up = None if self.w3 is None else local_product(self.w3, tokens)
        return local_product(self.w2, self.activated(local_product(self.w1, tokens), up))


def local_product(layer: Linear, x: Tensor) -> Tensor:
    """The product with the part of the weights that this rank holds."""
    weight = own_part(layer.weight)
    if weight is layer.weight:
        return layer(x)
    return F.linear(x, weight) if layer.product is None else layer.product(x, weight)


def within_best_groups(ranked: Tensor, spec: ExpertsSpec) -> Tensor:
    """Exclude experts outside a token's best groups."""
    grouped = ranked.view(len(ranked), spec.groups, -1)
    counted = min(1 if spec.router == "softmax" else 2, grouped.shape[-1])
    best = grouped.topk(counted).values.sum(-1).topk(spec.groups_kept).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)


class AddedLoss(torch.autograd.Function):
    """`x` unchanged; the backward pass adds the gradient of `loss` x scale to that of the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.full_like(loss, ctx.scale), None


def _unchanged(x: Tensor) -> Tensor:
    return x


# Of sorted rows, their weights and the number of rows of each expert: the rows and weights that this rank's experts
# multiply, where those of each end, and what brings the results back.
Dispatch = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]]


def stay(rows: Tensor, weights: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """This rank holds all experts."""
    return rows, weights, counts.cumsum(0).to(torch.int32), _unchanged


BLOCK = Experts
