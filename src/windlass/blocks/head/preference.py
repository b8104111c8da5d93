"""Preference of one answer over another (DPO, arXiv 2305.18290): the loss of pairs against the starting model.

Targets have four numbers per token: the token, and those of `StoreStream.pairs` in `data/stream.py`. Under context
parallelism they are those of complete sequences, so that every rank knows all answers; the hidden states are its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from windlass.blocks.head.parallel import full_sequence

# Sums that the loss returns after the first two.
FURTHER_MEANS = ("reward_margin", "reward_accuracy")


# (hidden states, weights of the head) -> logits: the slot `logits` of an `OutputHead`.
Logits = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PairScorer:
    """Loss and scores of preference pairs, each in the form of an `OutputHead`'s loss."""

    # Answer tokens whose logits exist at the same time.
    chunk: int
    # Those of the head.
    logits: Logits
    # The ranks that hold the parts of each sequence; None: this rank holds complete ones.
    context: DeviceMesh | None

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, beta: float) -> Tensor:
        """(loss, loss, margin of rewards, pairs whose chosen answer has the higher reward), summed over pairs. Each of
        several context ranks returns its equal share."""
        margins, places = self._margins(hidden, weight, targets, vocab)
        present = places >= 0
        reference = targets[..., 3].flatten()[places].to(torch.int32).view(torch.float32)
        rewards = torch.where(present, beta * (margins - reference), 0.0)
        loss = -torch.where(present, F.logsigmoid(rewards), 0.0).sum()
        sums = torch.stack((loss, loss.detach(), rewards.detach().sum(), (rewards > 0).sum().to(loss.dtype)))
        return sums if self.context is None else sums / self.context.size()

    def numbered_margins(self, hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        """Two rows in float64, of equal length for all batches of a shape: the number of a pair over all sources (-1:
        no pair), and the log-probability of its chosen answer minus that of the rejected one."""
        margins, places = self._margins(hidden, weight, targets, vocab)
        numbers = torch.where(places >= 0, targets[..., 2].flatten()[places], -1)
        return torch.stack((numbers.double(), margins.double()))

    def _margins(self, hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """Log-probability of the chosen answer minus that of the rejected one for every pair that the sequences may
        hold, and a place of the pair among the flat targets, -1 where there is no such pair."""
        hidden = full_sequence(hidden)
        goals, answers = targets[..., 0], targets[..., 1]
        rows, length = answers.shape
        width = 2 * (length // 2 + 1)  # answers of a row at most
        numbers = answers + width * torch.arange(rows, device=answers.device)[:, None]
        answered = (goals >= 0).flatten().nonzero().squeeze(1)
        places = torch.full((rows * width // 2,), -1, device=hidden.device)
        places[numbers.flatten()[answered] // 2] = answered
        if self.context is not None:
            part = self.context.get_local_rank()
            own = slice(part * hidden.shape[1], (part + 1) * hidden.shape[1])
            goals, numbers = goals[:, own], numbers[:, own]
        goals, numbers = goals.flatten(), numbers.flatten()
        counted = (goals >= 0).nonzero().squeeze(1)
        states = hidden.flatten(0, -2)[counted]
        step = partial(_log_probabilities, vocab=vocab, logits=self.logits)
        # One part at least: a context rank without answers takes part in every reduction of gradients.
        parts = [
            checkpoint(
                step,
                states[at : at + self.chunk],
                weight,
                goals[counted[at : at + self.chunk]],
                use_reentrant=False,
            )
            for at in range(0, max(1, len(counted)), self.chunk)
        ]
        # The margin is a small difference of large sums: in float64 their order does not matter.
        sums = torch.zeros(rows * width, dtype=torch.float64, device=hidden.device)
        sums = sums.index_add(0, numbers[counted], torch.cat(parts).double())
        if self.context is not None:
            sums = summed(sums, self.context)
        chosen, rejected = sums.view(-1, 2).unbind(1)
        return (chosen - rejected).float(), places


def summed(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks that all return an equal share of one loss: the gradient of each part is that of the complete
    loss, so the backward pass sends nothing."""
    total = part.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total + mesh.size() * (part - part.detach())


def _log_probabilities(hidden: Tensor, weight: Tensor, goals: Tensor, *, vocab: int, logits: Logits) -> Tensor:
    return -F.cross_entropy(logits(hidden, weight)[:, :vocab].float(), goals, reduction="none")
