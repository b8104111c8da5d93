"""Cross-entropy of single tokens and log-probability of texts, in batches, without ever holding all logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.convert.source import ProgressCallback
from windlass.data.tokenizer import Tokenizer
from windlass.errors import DataError
from windlass.evaluate.open_model import OpenModel

CHUNK_POSITIONS = 4096  # whose logits exist at the same time
# Tokens of a context and of the text after it.
TokenPair = tuple[list[int], list[int]]
TokenNats = Callable[[Tensor, Tensor], Tensor]


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of every target. Compiled, it reads the logits where they are, without a copy in fp32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


@torch.inference_mode()
def token_losses(
    model: Any, inputs: Tensor, targets: Tensor, documents: Tensor | None = None, nats: TokenNats = token_nats
) -> Tensor:
    """(batch, time) nats of every target, in fp32."""
    if model.head is None:  # a transformers model gives logits only
        logits = model(inputs, None, documents)[..., : model.vocab]
        return token_nats(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
    hidden = model.body(inputs, documents).flatten(0, 1).split(CHUNK_POSITIONS)
    weight = head_weight(model)
    parts = zip(hidden, targets.flatten().split(CHUNK_POSITIONS), strict=True)
    return torch.cat([nats(F.linear(part, weight), goals) for part, goals in parts]).view(targets.shape)


def head_weight(model: Any) -> Tensor:
    """The head without its padded rows; that of the embedding where they are tied."""
    return (model.embed.weight if model.tied else model.head.weight)[: model.vocab]


def token_pair(tokenizer: Tokenizer, context: str, following: str, *, specials: bool = False) -> TokenPair:
    """Both texts tokenized together and cut where the context ends; spaces at the border belong to what follows.

    `specials`: the context is a rendered chat template.
    """
    stripped = context.rstrip()
    ids = tokenizer.encode(context + following, specials=specials)
    before = tokenizer.encode(stripped, specials=specials) if stripped else []
    return before, ids[len(before) :]


def likelihoods(
    opened: OpenModel,
    pairs: Sequence[TokenPair],
    *,
    first: int | None,
    batch: int | None = None,
    progress: ProgressCallback = lambda done, total: None,
) -> list[tuple[float, bool]]:
    """For each pair the log-probability in nats, and whether greedy decoding would give exactly this text.

    `first` stands before a text without context (the end token of another document). What is longer than the model's
    sequence loses its beginning, as it would in use.
    """
    rows = []
    for context, following in pairs:
        if not following:
            raise DataError(
                "evaluate.nothing-to-score",
                "the text after the context has no tokens",
                hint="give every choice at least one character",
            )
        tokens = [*(context or [end_token(first)]), *following][-(opened.max_length + 1) :]
        rows.append((tokens[:-1], following[-opened.max_length :]))
    # Long rows first: memory runs out at once or never, and rows of one batch need little padding.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    answers: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    done = 0
    while done < len(order):
        size = batch or max(1, opened.batch_tokens // len(rows[order[done]][0]))
        chosen = order[done : done + size]
        for number, answer in zip(chosen, _score_rows(opened, [rows[i] for i in chosen]), strict=True):
            answers[number] = answer
        done += len(chosen)
        progress(done, len(order))
    return answers


def end_token(token: int | None) -> int:
    """The end token, which stands before a text without context."""
    if token is None:
        raise DataError(
            "evaluate.end-token-missing",
            "a text without context needs an end-of-document token before it",
            hint="use a tokenizer that has one; this one has none",
        )
    return token


@torch.inference_mode()
def _score_rows(opened: OpenModel, rows: list[TokenPair]) -> list[tuple[float, bool]]:
    model, device = opened.model, opened.device
    width = max(len(inputs) for inputs, _ in rows)
    # Padding stands at the end: no token attends to later ones, so it changes nothing.
    tokens = torch.tensor([[*inputs, *([0] * (width - len(inputs)))] for inputs, _ in rows], device=device)
    row = torch.tensor([i for i, (_, goals) in enumerate(rows) for _ in goals], device=device)
    positions = [p for inputs, goals in rows for p in range(len(inputs) - len(goals), len(inputs))]
    position = torch.tensor(positions, device=device)
    targets = torch.tensor([goal for _, goals in rows for goal in goals], device=device)
    if model.head is None:
        logits = model(tokens)[row, position, : model.vocab].float()
    else:
        logits = F.linear(model.body(tokens)[row, position], head_weight(model)).float()
    nats = torch.zeros(len(rows), dtype=torch.float64, device=device)
    nats.index_add_(0, row, token_nats(logits, targets).double())
    wrong = torch.zeros(len(rows), dtype=torch.long, device=device)
    wrong.index_add_(0, row, (logits.argmax(-1) != targets).long())
    return [(-cost, count == 0) for cost, count in zip(nats.tolist(), wrong.tolist(), strict=True)]
