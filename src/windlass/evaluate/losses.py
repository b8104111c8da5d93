"""What does each single token cost the model? Cross-entropy per position, without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2048
"""Positions whose logits exist at the same time."""


@torch.inference_mode()
def token_losses(model: Any, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
    """(batch, time) nats of every target, in fp32."""
    if model.head is None:  # a transformers model gives logits only
        logits = model(inputs, None, documents)[..., : model.vocab].float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    hidden = model.body(inputs, documents).flatten(0, 1)
    weight, goals = head_weight(model), targets.flatten()
    parts = [_chunk(hidden[i : i + CHUNK], weight, goals[i : i + CHUNK]) for i in range(0, len(goals), CHUNK)]
    return torch.cat(parts).view(targets.shape)


def head_weight(model: Any) -> Tensor:
    """The head without its padded rows; the embedding's where they are tied."""
    return (model.embed.weight if model.tied else model.head.weight)[: model.vocab]


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")
