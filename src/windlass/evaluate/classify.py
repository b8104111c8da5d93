"""How well does the model learn to sort texts? A head on the last token's hidden state, trained on a TSV of text and label.

Frozen: only the head learns (the hidden states are computed once). Full: every weight does. Several seeds give a spread; several
processes share each batch, and their gradients are averaged, so that the number of processes changes the speed and not the task.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.opened import Opened
from windlass.evaluate.record import Score, read_utf8, wilson_interval

Tell = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class HowToTune:
    frozen: bool = False
    epochs: int = 3
    batch: int = 16
    """Texts of one step over all processes."""
    lr: float | None = None
    """1e-3 for a head alone, 5e-5 for every weight, when left out."""
    length: int = 256
    """Longer texts lose their beginning's rest: the first so many tokens are read."""
    seeds: Sequence[int] = (0,)
    test_share: float = 0.2
    """Without a test file, this share of the lines, chosen by seed 0, is held out."""


@dataclass(frozen=True)
class Lines:
    texts: list[str]
    labels: list[str]


@dataclass(frozen=True)
class Tuned:
    """What one seed came to."""

    seed: int
    accuracy: float
    macro_f1: float
    correct: int
    count: int
    seconds: float
    texts_per_second: float
    losses: list[float] = field(default_factory=list)


def read_tsv(path: Path | str) -> Lines:
    """Two columns named `text` and `label` (or `target`), or the first two of a file without such names."""
    path = Path(path)
    lines = read_utf8(path, "classification set").split("\n")
    rows = [row for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    if not rows:
        raise DataError(
            "evaluate.empty", f"{path} is empty", hint="one text and its label per line, a tab between them"
        )
    text, label, body = _columns(rows)
    bad = [
        n
        for n, row in enumerate(body, start=1 + len(rows) - len(body))
        if len(row) <= max(text, label) or not row[text].strip() or not row[label].strip()
    ]
    if bad:
        raise DataError(
            "evaluate.line-lacks-text-label",
            f"{path}: line {', '.join(map(str, bad[:5]))} lacks a text or a label",
            hint="a tab stands between text and label",
        )
    return Lines([row[text] for row in body], [row[label].strip() for row in body])


def _columns(rows: list[list[str]]) -> tuple[int, int, list[list[str]]]:
    head = [name.strip().lower() for name in rows[0]]
    label = next((head.index(name) for name in ("label", "target") if name in head), None)
    return (head.index("text"), label, rows[1:]) if "text" in head and label is not None else (0, 1, rows)


def split(lines: Lines, share: float) -> tuple[Lines, Lines]:
    """Training and test lines, the same for every seed and every number of processes."""
    order = np.random.default_rng(0).permutation(len(lines.texts))
    cut = max(1, round(len(order) * share))
    return _pick(lines, order[cut:]), _pick(lines, order[:cut])


def _pick(lines: Lines, numbers: Iterable[int]) -> Lines:
    chosen = list(numbers)
    return Lines([lines.texts[i] for i in chosen], [lines.labels[i] for i in chosen])


def classify(
    open_it: Callable[[], Opened],
    words: Tokenizer,
    train: Lines,
    test: Lines | None,
    how: HowToTune,
    tell: Tell = lambda done, total: None,
) -> tuple[list[Tuned], list[str]]:
    """One result per seed, and the labels. `open_it` gives the model afresh: a full fine-tune changes it."""
    train, test = (train, test) if test is not None else split(train, how.test_share)
    labels = sorted(set(train.labels))
    refuse(train, test, labels, how)
    found, opened = [], None
    for number, seed in enumerate(how.seeds):
        if opened is None or not how.frozen:
            opened = open_it()
        found.append(Tuner(opened, words, labels, how, seed).run(train, test))
        tell(number + 1, len(how.seeds))
    return found, labels


def refuse(train: Lines, test: Lines, labels: list[str], how: HowToTune) -> None:
    if len(labels) < 2:
        raise DataError(
            "evaluate.all-training-texts-label",
            f"all {len(train.texts)} training texts have the label {labels[0]!r}",
            hint="there must be at least two labels",
        )
    unknown = sorted(set(test.labels) - set(labels))
    if unknown:
        raise DataError(
            "evaluate.test-set-labels-training",
            f"the test set has labels that no training text has: {', '.join(unknown[:5])}",
            hint="are both files of the same task?",
        )
    if how.batch % _world():
        raise ConfigError(
            "evaluate.batch-does-divide-over",
            f"a batch of {how.batch} does not divide over {_world()} processes",
            hint=f"choose --batch {math.ceil(how.batch / _world()) * _world()}",
        )


class Tuner:
    """One seed: a head, perhaps the whole model, AdamW and a linear schedule."""

    def __init__(self, opened: Opened, words: Tokenizer, labels: list[str], how: HowToTune, seed: int) -> None:
        if opened.model.head is None:
            raise ConfigError(
                "evaluate.family-hf-model-cannot",
                "a family hf model cannot be fine-tuned here",
                hint="use a Llama or RetNet, or transformers' own trainer",
            )
        self.opened, self.words, self.labels, self.how, self.seed = opened, words, labels, how, seed
        self.length = min(how.length, opened.recipe.data.seq_len)
        torch.manual_seed(seed)
        self.head = nn.Linear(opened.model.width, len(labels)).to(opened.device)
        self.body = [] if how.frozen else list(opened.model.requires_grad_(True).parameters())
        lr = how.lr or (1e-3 if how.frozen else 5e-5)
        # The head begins from nothing and needs larger steps than the rest.
        groups = [
            {"params": self.head.parameters(), "lr": max(lr, 1e-3)},
            *([{"params": self.body, "lr": lr}] if self.body else []),
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def run(self, train: Lines, test: Lines) -> Tuned:
        began = time.perf_counter()
        rows, goals = self.encode(train)
        features = self.features(rows) if self.how.frozen else None
        losses = self.learn(rows, goals, features)
        seconds = time.perf_counter() - began
        guesses, truth = self.guess(test)
        accuracy, f1 = float((guesses == truth).float().mean()), macro_f1(guesses, truth, len(self.labels))
        return Tuned(
            self.seed,
            accuracy,
            f1,
            int((guesses == truth).sum()),
            len(truth),
            seconds,
            self.how.epochs * len(train.texts) / seconds,
            losses,
        )

    def encode(self, lines: Lines) -> tuple[list[list[int]], Tensor]:
        rows = [self.words.encode(text)[: self.length] or [self.words.eos or 0] for text in lines.texts]
        return rows, torch.tensor([self.labels.index(label) for label in lines.labels])

    def hidden(self, rows: list[list[int]]) -> Tensor:
        """The last token's hidden state of each text: it has seen the whole text."""
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.opened.device)
        last = torch.tensor([len(row) - 1 for row in rows], device=self.opened.device)
        return self.opened.model.body(tokens)[torch.arange(len(rows), device=tokens.device), last].float()

    @torch.no_grad()
    def features(self, rows: list[list[int]]) -> Tensor:
        """Hidden states of all texts, by this process's share of them, put together."""
        mine = rows[_rank() :: _world()]
        parts = [self.hidden(mine[i : i + self.how.batch]) for i in range(0, len(mine), self.how.batch)]
        own = torch.cat(parts) if parts else torch.zeros(0, self.opened.model.width, device=self.opened.device)
        return _interleaved(own, len(rows))

    def learn(self, rows: list[list[int]], goals: Tensor, features: Tensor | None) -> list[float]:
        """Epochs of shuffled batches; each process takes its part of every batch."""
        random, losses, step = np.random.default_rng(self.seed), [], 0
        steps = self.how.epochs * math.ceil(len(rows) / self.how.batch)
        for _ in range(self.how.epochs):
            order = random.permutation(len(rows))
            for start in range(0, len(order), self.how.batch):
                batch = order[start : start + self.how.batch]
                losses.append(
                    self.step(batch[_rank() :: _world()], len(batch), rows, goals, features, 1 - step / steps)
                )
                step += 1
        return losses

    def step(
        self, mine: Any, count: int, rows: list[list[int]], goals: Tensor, features: Tensor | None, fade: float
    ) -> float:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * fade
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.opened.device)
        if len(mine):
            inputs = features[torch.as_tensor(mine)] if features is not None else self.hidden([rows[i] for i in mine])
            loss = F.cross_entropy(self.head(inputs), goals[mine].to(self.opened.device), reduction="sum") / count
            loss.backward()
        learned = [*self.head.parameters(), *self.body]
        _sum_gradients(learned)
        nn.utils.clip_grad_norm_(learned, 1.0)
        self.optimizer.step()
        return float(_summed(loss.detach()))

    @torch.no_grad()
    def guess(self, lines: Lines) -> tuple[Tensor, Tensor]:
        rows, goals = self.encode(lines)
        return self.head(self.features(rows)).argmax(-1).cpu(), goals


# -- processes ------------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum_gradients(parameters: list[nn.Parameter]) -> None:
    """Each process computed its part of the batch's mean; a parameter that none of its texts touched has no part."""
    if _world() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def _summed(value: Tensor) -> Tensor:
    if _world() > 1:
        dist.all_reduce(value)
    return value


def _interleaved(mine: Tensor, count: int) -> Tensor:
    """Rows dealt out in turn, back in their order, on every process."""
    if _world() == 1:
        return mine
    whole = torch.zeros(count, mine.shape[1], device=mine.device)
    whole[_rank() :: _world()] = mine
    return _summed(whole)


# -- numbers --------------------------------------------------------------------------------------------------------------


def macro_f1(guesses: Tensor, truth: Tensor, count: int) -> float:
    """The mean over labels of 2 TP / (2 TP + FP + FN); a label that neither side has counts as 0, as in scikit-learn."""
    values = []
    for label in range(count):
        both = int(((guesses == label) & (truth == label)).sum())
        either = int((guesses == label).sum()) + int((truth == label).sum())
        values.append(2 * both / either if either else 0.0)
    return sum(values) / count


def scores_of(task: str, found: Sequence[Tuned], labels: Sequence[str], how: HowToTune) -> list[Score]:
    """Means over seeds; the interval is that of the seeds' spread, or of one seed's test texts."""
    detail = {
        "kind": "classification", "frozen": how.frozen, "labels": len(labels), "epochs": how.epochs, "processes": _world(),
        "seeds": [vars(t) | {"losses": t.losses[-1:]} for t in found], "texts_per_second": float(np.mean([t.texts_per_second for t in found])),
    }  # fmt: skip
    made = []
    for metric in ("accuracy", "macro_f1"):
        values = np.array([getattr(t, metric) for t in found])
        low, high = (
            _spread(values)
            if len(values) > 1
            else (wilson_interval(found[0].correct, found[0].count) if metric == "accuracy" else (None, None))
        )
        made.append(
            Score(
                task=task,
                group="all",
                metric=metric,
                value=float(values.mean()),
                low=low,
                high=high,
                count=found[0].count,
                detail=detail,
            )
        )
    return made


_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a 95 % interval of a mean, by number of seeds; from 11 on 2.2 or less."""


def _spread(values: Any) -> tuple[float, float]:
    half = _T95.get(len(values), 2.2) * float(values.std(ddof=1)) / len(values) ** 0.5
    return max(0.0, float(values.mean()) - half), min(1.0, float(values.mean()) + half)
