"""Heads of fine-tuning tasks on any model: labels of texts, of pairs and of words, numbers, hidden tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.blocks.head.module import OutputHead
from windlass.models.decoder import DecoderModel
from windlass.models.hf import HFModel
from windlass.models.spec import ModelSpec


@dataclass(frozen=True)
class TaskHead:
    """`task` as in `[tune]`; `outputs`: labels, or 1 for a number."""

    task: str
    outputs: int
    pad: int = 0
    class_weights: tuple[float, ...] | None = None
    dropout: float | None = None

    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of what counts, twice: to descend and to report."""
        logits = logits.float()
        if self.task in ("classify", "tag", "masked"):
            weight = None if self.class_weights is None else logits.new_tensor(self.class_weights)
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), weight=weight, reduction="sum")
        else:
            counted = ~targets.isnan()
            values, goals = logits.view(targets.shape)[counted], targets[counted].float()
            is_number = self.task == "regress"
            loss = (F.mse_loss if is_number else F.binary_cross_entropy_with_logits)(values, goals, reduction="sum")
        return torch.stack((loss, loss.detach()))


class HFTaskModel(HFModel):
    """A transformers model with a task's head. `documents` holds the segment of each token, -1 where it is padding."""

    def __init__(self, net: Any, seq_len: int, head: TaskHead) -> None:
        super().__init__(net, seq_len)
        self.task_head = head
        body = f"net.{net.base_model_prefix}."
        self.new_names = frozenset(name for name in self.state_dict() if not name.startswith(body) or ".pooler." in name)
        types = getattr(net.config, "type_vocab_size", 0) or 0
        self.has_segments = types > 1

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        inputs: dict[str, Tensor] = {"input_ids": x}
        if documents is not None:
            inputs["attention_mask"] = (documents >= 0).long()
            if self.has_segments:
                inputs["token_type_ids"] = documents.clamp(min=0)
        logits: Tensor = self.net(**inputs).logits
        return logits if targets is None else self.task_head.sums(logits, targets)


class PooledEncoder(nn.Module):
    """The encoder of an encoder-decoder model with a linear head on the mean of its hidden states."""

    base_model_prefix = "encoder_model"

    def __init__(self, encoder: Any, outputs: int) -> None:
        super().__init__()
        self.encoder_model, self.config = encoder, encoder.config
        self.classifier = nn.Linear(encoder.config.hidden_size, outputs)
        self._init_weights: Callable[[nn.Module], None] = encoder._init_weights
        self.tie_weights: Callable[[], None] = encoder.tie_weights

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.encoder_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return _Logits(self.classifier((hidden * mask).sum(1) / mask.sum(1)))


@dataclass(frozen=True)
class _Logits:
    logits: Tensor


class TaskDecoder(DecoderModel):
    """One of our decoders with a task's head: on the last token of a text, or on each token for tags."""

    new_names = frozenset({"head.weight"})

    def __init__(self, spec: ModelSpec, seq_len: int, head: TaskHead) -> None:
        super().__init__(spec, seq_len)
        self.task_head, self.tied = head, False
        self.head = OutputHead(self.width, head.outputs, head.outputs)

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        # Causal, and padded at the end: padding changes nothing before it.
        hidden = self.body(x)
        assert self.head is not None and self.head.weight is not None
        if self.task_head.task != "tag":
            last = (x.shape[1] if documents is None else (documents >= 0).sum(1)) - 1
            hidden = hidden[torch.arange(len(x), device=x.device), last]
        logits = F.linear(hidden, self.head.weight)
        return logits if targets is None else self.task_head.sums(logits, targets)
