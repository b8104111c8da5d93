"""Heads of fine-tuning tasks on any model: labels of texts, of pairs and of words, numbers, hidden tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.blocks.divide import gathered, own_part
from windlass.blocks.head.module import OutputHead
from windlass.config import ModelConfig, Recipe
from windlass.config.tune import TuneConfig
from windlass.errors import ConfigError
from windlass.layout.types import IGNORED
from windlass.models.decoder import DecoderModel
from windlass.models.hf import HFModel, build_net, parameters_on_meta, read_hf_config
from windlass.models.presets import model_spec
from windlass.models.presets.hf import import_transformers
from windlass.models.spec import ModelSpec


@dataclass(frozen=True)
class TaskHead:
    """`task` as in `[tune]`; `outputs`: labels, or 1 for a number."""

    task: str
    outputs: int
    pad: int | None = 0  # None: as the model's config says
    class_weights: tuple[float, ...] | None = None
    dropout: float | None = None

    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of what counts, twice: for the backward pass and for the log."""
        logits = logits.float()
        if self.task in ("classify", "tag", "masked"):
            weight = None if self.class_weights is None else constant(self.class_weights, logits.device)
            loss = F.cross_entropy(
                logits.flatten(0, -2), targets.flatten(), weight=weight, reduction="sum", ignore_index=IGNORED
            )
        else:
            counted, goals = ~targets.isnan(), targets.nan_to_num().float()
            loss_of = F.mse_loss if self.task == "regress" else F.binary_cross_entropy_with_logits
            loss = (loss_of(logits.view(targets.shape), goals, reduction="none") * counted).sum()
        return torch.stack((loss, loss.detach()))


@cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept on the device: copying it there would end the recording of a CUDA graph."""
    return torch.tensor(values, device=device)


def masked_head(tune: TuneConfig | None) -> TaskHead | None:
    """The head that predicts hidden tokens; None where a run does not hide any."""
    if tune is None or tune.task != "masked":
        return None
    return TaskHead("masked", 1, pad=None, dropout=tune.dropout)


class HFTaskModel(HFModel):
    """A transformers model with a task's head. `documents` holds the segment of each token, -1 where it is padding."""

    def __init__(self, net: Any, seq_len: int, head: TaskHead) -> None:
        super().__init__(net, seq_len)
        self.task_head = head
        body = f"net.{net.base_model_prefix}."
        self.new_names = frozenset(
            name for name in self.state_dict() if not name.startswith(body) or ".pooler." in name
        )
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


def tuned_model(recipe: Recipe) -> HFTaskModel | None:
    """The transformers model with the head for which a run was tuned; None for a model that predicts next tokens. It
    is an error if no class of transformers has such a head."""
    tune = recipe.tune
    if tune is None or tune.predicts_text:
        return None
    head = masked_head(tune) or TaskHead(tune.task, max(1, len(tune.labels)), pad=None)
    model = _build(recipe.model, recipe.data.seq_len, head)
    if not isinstance(model, HFTaskModel) or isinstance(model.net, PooledEncoder):
        raise ConfigError(
            "convert.task-head",
            f"{recipe.name} has a head for task {tune.task!r}, which no class of transformers has for this model",
            hint="export the model that fine-tuning started from; `windlass finetune` prints the scores",
        )
    return model


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
    divides_head = False

    def __init__(self, spec: ModelSpec, seq_len: int, head: TaskHead) -> None:
        super().__init__(spec, seq_len)
        self.task_head, self.tied = head, False
        self.head = OutputHead(self.width, head.outputs, head.outputs)

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        # Causal, and padded at the end: padding changes nothing before it.
        hidden = own_part(gathered(self.body(x)))
        assert self.head is not None and self.head.weight is not None
        if self.task_head.task != "tag":
            last = (x.shape[1] if documents is None else (documents >= 0).sum(1)) - 1
            hidden = hidden[torch.arange(len(x), device=x.device), last]
        logits = F.linear(hidden, own_part(self.head.weight))
        return logits if targets is None else self.task_head.sums(logits, targets)


def build_task_model(config: ModelConfig, seq_len: int, head: TaskHead, *, frozen: bool = False) -> DecoderModel:
    """A model with the head of a fine-tuning task instead of its own. `frozen`: only the head is trained."""
    model = _build(config, seq_len, head)
    if frozen:
        new_names = set(model.new_names)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in new_names)
    return model


def _build(config: ModelConfig, seq_len: int, head: TaskHead) -> HFTaskModel | TaskDecoder:
    if config.family != "hf":
        if head.task == "masked":
            raise ConfigError(
                "tune.needs-encoder",
                f'tune.task = "masked" hides tokens from an encoder, and {config.family} is a decoder',
                hint='use family = "hf" with the config.json of an encoder (BERT, RoBERTa)',
            )
        return TaskDecoder(model_spec(config), seq_len, head)
    hf_config = read_hf_config(config, seq_len)
    transformers = import_transformers()

    hf_config.pad_token_id = hf_config.pad_token_id if head.pad is None else head.pad
    if head.dropout is not None:
        for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout_rate",
                    "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "pooler_dropout",
                    "cls_dropout", "summary_first_dropout"):  # fmt: skip
            if hasattr(hf_config, key):
                setattr(hf_config, key, head.dropout)
    path = Path(config.config or "")
    if head.task == "masked":
        if type(hf_config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING:
            raise ConfigError(
                "tune.needs-encoder",
                f'tune.task = "masked" needs an encoder, and {path} is {hf_config.model_type}',
                hint="use the config.json of an encoder (BERT, RoBERTa), or pre-train it without [tune]",
            )
        return HFTaskModel(build_net(transformers.AutoModelForMaskedLM, hf_config, path), seq_len, head)
    hf_config.num_labels = head.outputs
    if head.task == "tag":
        return HFTaskModel(build_net(transformers.AutoModelForTokenClassification, hf_config, path), seq_len, head)
    if hasattr(hf_config, "num_decoder_layers"):  # T5: its own class would run the decoder too
        encoder = build_net(transformers.AutoModelForTextEncoding, hf_config, path)
        with parameters_on_meta() if torch.empty(0).is_meta else contextlib.nullcontext():
            return HFTaskModel(PooledEncoder(encoder, head.outputs), seq_len, head)
    return HFTaskModel(build_net(transformers.AutoModelForSequenceClassification, hf_config, path), seq_len, head)
