"""What does each single token cost the model? Cross-entropy per position, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096
"""Positions whose logits exist at the same time."""
Costs = Callable[[Tensor, Tensor], Tensor]


def costs(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of every target. Compiled it reads the logits where they are, without a copy in fp32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


@torch.inference_mode()
def token_losses(
    model: Any, inputs: Tensor, targets: Tensor, documents: Tensor | None = None, costs: Costs = costs
) -> Tensor:
    """(batch, time) nats of every target, in fp32."""
    if model.head is None:  # a transformers model gives logits only
        logits = model(inputs, None, documents)[..., : model.vocab].float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    hidden = model.body(inputs, documents).flatten(0, 1)
    weight, goals = head_weight(model), targets.flatten()
    parts = [costs(F.linear(hidden[i : i + CHUNK], weight), goals[i : i + CHUNK]) for i in range(0, len(goals), CHUNK)]
    return torch.cat(parts).view(targets.shape)


def head_weight(model: Any) -> Tensor:
    """The head without its padded rows; the embedding's where they are tied."""
    return (model.embed.weight if model.tied else model.head.weight)[: model.vocab]
