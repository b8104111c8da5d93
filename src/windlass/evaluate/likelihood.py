"""How probable is one text after another? The question behind multiple choice, cloze and EleutherAI's harness; asked in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.data.tokenizer import Tokenizer
from windlass.errors import DataError
from windlass.evaluate.losses import head_weight
from windlass.evaluate.opened import Opened

Pair = tuple[list[int], list[int]]
"""Tokens of the context and of what follows."""
Answer = tuple[float, bool]
"""Nats of log-probability, and whether the model would have said exactly this by itself."""
Tell = Callable[[int, int], None]


def pair(words: Tokenizer, context: str, following: str) -> Pair:
    """Cut where the context ends, as the two are tokenized together; spaces at the border belong to what follows."""
    kept = context.rstrip()
    following, context = context[len(kept) :] + following, kept
    whole = words.encode(context + following)
    before = words.encode(context)
    return (before, whole[len(before) :]) if context else ([], whole)


def likelihoods(
    opened: Opened,
    pairs: Sequence[Pair],
    *,
    first: int | None,
    batch: int | None = None,
    tell: Tell = lambda done, total: None,
) -> list[Answer]:
    """For each pair, in order. `first` stands before a text without context (the end of another document)."""
    longest = opened.recipe.data.seq_len
    rows = [_row(p, first, longest) for p in pairs]
    # Long ones first: memory is needed at once or never, and rows of one batch need little padding.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    found: list[Answer] = [(0.0, True)] * len(rows)
    done = 0
    while done < len(order):
        width = len(rows[order[done]][0])
        count = batch or max(1, (32_768 if opened.device.type != "cpu" else 2048) // max(1, width))
        numbers = order[done : done + count]
        for number, answer in zip(numbers, _ask(opened, [rows[i] for i in numbers]), strict=True):
            found[number] = answer
        done += len(numbers)
        tell(done, len(order))
    return found


def _row(given: Pair, first: int | None, longest: int) -> Pair:
    """(inputs, targets at their end): what does not fit is cut from the left, as it would be in use."""
    context, following = given
    if not following:
        raise DataError(
            "evaluate.nothing-score-text-after",
            "there is nothing to score: the text after the context has no tokens",
            hint="give every choice at least one character",
        )
    if not context:
        if first is None:
            raise DataError(
                "evaluate.text-without-context-needs",
                "a text without context needs an end-of-document token to begin with",
                hint="the tokenizer names none",
            )
        context = [first]
    whole = [*context, *following][-(longest + 1) :]
    return whole[:-1], following[-longest:]


@torch.inference_mode()
def _ask(opened: Opened, rows: list[Pair]) -> list[Answer]:
    width = max(len(inputs) for inputs, _ in rows)
    # Padding stands behind: nothing looks ahead, so it changes nothing.
    tokens = torch.tensor([[*inputs, *([0] * (width - len(inputs)))] for inputs, _ in rows], device=opened.device)
    row = torch.tensor([i for i, (_, goals) in enumerate(rows) for _ in goals], device=opened.device)
    place = torch.tensor(
        [p for inputs, goals in rows for p in range(len(inputs) - len(goals), len(inputs))], device=opened.device
    )
    goals = torch.tensor([g for _, part in rows for g in part], device=opened.device)
    logits = _logits(opened.model, tokens, row, place)
    costs, right = F.cross_entropy(logits, goals, reduction="none").double(), logits.argmax(-1) == goals
    total = torch.zeros(len(rows), dtype=torch.float64, device=opened.device).index_add_(0, row, costs)
    wrong = torch.zeros(len(rows), dtype=torch.long, device=opened.device).index_add_(0, row, (~right).long())
    return [(-cost, count == 0) for cost, count in zip(total.tolist(), wrong.tolist(), strict=True)]


def _logits(model: Any, tokens: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """Only at the asked places."""
    if model.head is None:
        return model(tokens)[row, place, : model.vocab].float()
    return F.linear(model.body(tokens)[row, place], head_weight(model)).float()
