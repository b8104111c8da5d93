"""Preference of one answer over another (DPO, arXiv 2305.18290): the loss of pairs against the starting model.

Targets have four numbers per token: the token, and those of `StoreStream.pairs` in `data/stream.py`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from windlass.blocks.head.parallel import full_sequence

# Sums that the loss returns after the first two.
FURTHER_MEANS = ("reward_margin", "reward_accuracy")


# (hidden states, weights of the head) -> logits: the slot `logits` of an `OutputHead`.
Logits = Callable[[Tensor, Tensor], Tensor]


def preference_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, beta: float, chunk: int, logits: Logits
) -> Tensor:
    """(loss, loss, margin of rewards, pairs whose chosen answer has the higher reward), summed over pairs."""
    margins, places = answer_margins(hidden, weight, targets, vocab=vocab, chunk=chunk, logits=logits)
    reference = targets[..., 3].flatten()[places].to(torch.int32).view(torch.float32)
    rewards = beta * (margins - reference)
    loss = -F.logsigmoid(rewards).sum()
    return torch.stack((loss, loss.detach(), rewards.detach().sum(), (rewards > 0).sum().to(loss.dtype)))


def pair_margins(hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, chunk: int, logits: Logits) -> Tensor:
    """(pair number over all sources, log-probability of the chosen answer minus that of the rejected one), float64."""
    margins, places = answer_margins(hidden, weight, targets, vocab=vocab, chunk=chunk, logits=logits)
    return torch.stack((targets[..., 2].flatten()[places].double(), margins.double()))


def answer_margins(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, chunk: int, logits: Logits
) -> tuple[Tensor, Tensor]:
    """Log-probability of the chosen answer minus that of the rejected one for each pair, and a place of the pair among
    the flat targets."""
    hidden = full_sequence(hidden)
    goals, answers = targets[..., 0].flatten(), targets[..., 1]
    width = 2 * (answers.shape[1] // 2 + 1)  # answers of a row at most
    numbers = (answers + width * torch.arange(len(answers), device=answers.device)[:, None]).flatten()
    counted = (goals >= 0).nonzero().squeeze(1)
    states = hidden.flatten(0, -2)[counted]
    step = partial(_log_probabilities, vocab=vocab, logits=logits)
    parts = [
        checkpoint(step, states[at : at + chunk], weight, goals[counted[at : at + chunk]], use_reentrant=False)
        for at in range(0, len(counted), chunk)
    ]
    sums = torch.zeros(width * len(answers), device=hidden.device)
    sums = sums.index_add(0, numbers[counted], torch.cat(parts)) if parts else sums + 0.0 * hidden.sum()
    places = torch.full((len(sums) // 2,), -1, device=hidden.device)
    places[numbers[counted] // 2] = counted
    present = places >= 0
    chosen, rejected = sums.view(-1, 2)[present].unbind(1)
    return chosen - rejected, places[present]


def _log_probabilities(hidden: Tensor, weight: Tensor, goals: Tensor, *, vocab: int, logits: Logits) -> Tensor:
    return -F.cross_entropy(logits(hidden, weight)[:, :vocab].float(), goals, reduction="none")
