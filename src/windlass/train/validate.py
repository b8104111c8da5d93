"""How good is the model on text it has not seen? The mean loss on the validation split, by source, over the same sequences every time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from windlass.config import Recipe
from windlass.data.store import open_store
from windlass.data.stream import open_stream
from windlass.errors import WindlassError
from windlass.train.mesh import World
from windlass.train.parallelize import Parts
from windlass.train.step import Stepper, cut

Ints = npt.NDArray[np.int64]
MOST_SEQUENCES = 200_000
"""Of the held-out ones, that many are looked at to find some of each source: what is rarer than that is left out."""


@dataclass(frozen=True)
class Held:
    """The held-out part of one source: which sequences of the stream are asked, and how much it counts."""

    name: str
    language: str | None
    bytes_per_token: float | None
    """Of the text that is asked, where the tokenizer can say it; else of the whole source, by the store's ledger; None: unknown."""
    indexes: Ints
    share: float
    """Of all held-out tokens."""


@dataclass(frozen=True)
class Found:
    """What one pass says of a source, of a language, or of everything held out."""

    loss: float
    """Nats per token."""
    bits_per_byte: float | None
    """Comparable between tokenizers. Of windows, where `windlass eval` takes whole documents."""


@dataclass(frozen=True)
class Validation:
    whole: Found
    sources: dict[str, Found]
    languages: dict[str, Found]

    def line(self) -> dict[str, float | None]:
        """The same as flat keys of a metrics line; with one source there is nothing to tell apart."""
        made: dict[str, float | None] = {"val_loss": self.whole.loss, "val_bits_per_byte": self.whole.bits_per_byte}
        for name, found in self.sources.items() if len(self.sources) > 1 else ():
            made |= {f"val_loss/{name}": found.loss, f"val_bits_per_byte/{name}": found.bits_per_byte}
        return {key: value for key, value in made.items() if value is not None}

    def event(self) -> dict[str, Any]:
        return {
            "val_loss": self.whole.loss,
            "bits_per_byte": self.whole.bits_per_byte,
            "sources": {name: asdict(found) for name, found in self.sources.items()},
            "languages": {name: asdict(found) for name, found in self.languages.items()},
        }


class Validator:
    def __init__(
        self, stream: Any, sequences: int, recipe: Recipe, world: World, parts: Parts, stepper: Stepper
    ) -> None:
        self.stream, self.recipe, self.world, self.parts, self.stepper = stream, recipe, world, parts, stepper
        self.held = hold(stream, sequences, self._width())
        if world.is_main:  # the only rank that writes it down
            self.held = counted(stream, self.held)

    def loss(self, stopping: Callable[[], object] = lambda: None) -> float | None:
        """Mean cross-entropy of everything held out, the same on every rank."""
        found = self.judge(stopping)
        return None if found is None else found.whole.loss

    def judge(self, stopping: Callable[[], object] = lambda: None) -> Validation | None:
        """One pass over all sources; None when all ranks agreed to stop on the way."""
        with torch.no_grad(), asked_only(self.parts.modules):
            return self._judge(stopping)

    def _judge(self, stopping: Callable[[], object]) -> Validation | None:
        totals = torch.zeros(len(self.held), dtype=torch.float64, device=self.world.device)
        for place, part in enumerate(self.held):
            for start in range(0, len(part.indexes), self._width()):
                totals[place] += self._batch(part.indexes[start : start + self._width()])
                if stopping():
                    return None
        self.world.sum_(totals)
        means = [
            total / (len(part.indexes) * self.recipe.data.seq_len)
            for total, part in zip(totals.tolist(), self.held, strict=True)
        ]
        return validation(self.held, means)

    def _width(self) -> int:
        """Sequences of one pass over all ranks; a pipeline always takes as many micro-batches as in training."""
        geometry = self.stepper.geometry
        each = geometry.per_rank if self.stepper.schedule is not None else geometry.micro_batch
        return each * self.world.axes.data

    def _batch(self, indexes: Ints) -> torch.Tensor:
        each = self._width() // self.world.axes.data
        numbers = indexes[self.world.data_rank * each :][:each]
        tokens = torch.from_numpy(self.stream.sequences(numbers)).to(self.world.device).long()
        documents = (
            torch.from_numpy(self.stream.document_ids(numbers)).to(self.world.device).long()
            if self.recipe.data.mask_documents
            else None
        )
        inputs, targets, ids = cut(tokens, documents, self.world)
        sums = self._sums(inputs, targets, ids)
        return sums if self.world.counts_loss else torch.zeros_like(sums)

    def _sums(self, inputs: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        if self.stepper.schedule is None:
            return self.parts.modules[0](inputs, targets, documents)[1].double()
        return self.stepper.pipeline_sums(inputs, targets, documents)[1].double()


@contextlib.contextmanager
def asked_only(modules: Iterable[Any]) -> Iterator[None]:
    """Without dropout, which would blur the loss and take random numbers from training. Our own families have none."""
    changed = [module for module in modules if module.has_dropout]
    for module in changed:
        module.eval()
    try:
        yield
    finally:
        for module in changed:
            module.train()


def hold(stream: Any, sequences: int, width: int) -> list[Held]:
    """About `sequences` sequences, of every source in proportion and at least one batch of each.

    A batch is of one source, so that its loss is known without a loss per token; a source that is smaller than a batch is repeated
    in it.
    """
    sizes = getattr(getattr(stream, "mixture", None), "windows", None)
    weights = np.ones(len(stream.sources)) if sizes is None else np.asarray(sizes, dtype=np.float64)
    shares = weights / weights.sum()
    # More than is held out would only be the same text again.
    sequences = sequences if sizes is None else min(sequences, int(weights.sum()))
    counts = [max(1, round(share * sequences / width)) * width if share else 0 for share in shares]
    first = _first_of_each(stream, counts, limit=max(sequences, int(weights.sum())))
    return [
        Held(name, *_about(stream.store, name), indexes=np.resize(mine, count), share=float(share))
        for name, mine, count, share in zip(stream.sources, first, counts, shares, strict=True)
        if len(mine)
    ]


def _first_of_each(stream: Any, counts: list[int], limit: int) -> list[Ints]:
    """Numbers of the first sequences of each source, as many as asked for or as one pass over the held-out text has."""
    found: list[list[Ints]] = [[] for _ in counts]
    have = np.zeros(len(counts), dtype=np.int64)
    for start in range(0, min(limit, MOST_SEQUENCES), 1024):
        numbers = np.arange(start, min(start + 1024, limit), dtype=np.int64)
        source, _ = stream.identity(numbers)
        for place, parts in enumerate(found):
            parts.append(numbers[source == place])
        have += np.bincount(source, minlength=len(counts))
        if (have >= counts).all():
            break
    return [np.concatenate(parts)[:count] for parts, count in zip(found, counts, strict=True)]


def _about(store: Any, name: str) -> tuple[str | None, float | None]:
    """Language, and bytes of text per token."""
    if store is None:
        return None, None
    info = store.sources[name]
    return info.language, info.bytes / info.tokens if info.bytes and info.tokens else None


def counted(stream: Any, held: list[Held]) -> list[Held]:
    """With the bytes of the very text that is asked: held-out documents can be unlike the rest of their source."""
    store = stream.store
    if store is None or store.tokenizer_file is None:
        return held
    try:
        from windlass.data.tokenizer import load_tokenizer

        words = load_tokenizer(store.tokenizer_file, eos=store.eos)
    except (ImportError, WindlassError):  # a compute node without the package: the ledger's mean is near enough
        return held
    return [replace(part, bytes_per_token=_bytes_per_token(stream, part, words, store.eos)) for part in held]


def _bytes_per_token(stream: Any, part: Held, words: Any, eos: int | None) -> float:
    size = tokens = 0
    for start in range(0, len(part.indexes), 64):
        targets = stream.sequences(part.indexes[start : start + 64])[:, 1:]
        tokens += targets.size
        size += sum(len(words.decode(row[row != eos].tolist()).encode()) for row in targets)
    return size / tokens


def validation(held: list[Held], means: list[float]) -> Validation:
    """Means by source, put together by how much of the held-out text each source is."""
    pairs = list(zip(held, means, strict=True))
    languages = dict.fromkeys(part.language for part in held if part.language is not None)
    return Validation(
        whole=together(pairs),
        sources={part.name: together([(part, mean)]) for part, mean in pairs},
        languages={name: together([pair for pair in pairs if pair[0].language == name]) for name in languages},
    )


def together(pairs: Iterable[tuple[Held, float]]) -> Found:
    pairs = list(pairs)
    share = sum(part.share for part, _ in pairs)
    loss = sum(part.share * mean for part, mean in pairs) / share
    if any(part.bytes_per_token is None for part, _ in pairs):
        return Found(loss, None)
    size = sum(part.share * (part.bytes_per_token or 0.0) for part, _ in pairs) / share
    return Found(loss, loss / math.log(2) / size)


def open_validator(recipe: Recipe, world: World, parts: Parts, stepper: Stepper, vocab: int) -> Validator | None:
    """None when there is nothing held out."""
    data = recipe.data
    if data.store is None:
        return None
    split = data.validation or "validation"
    if data.validation is None and split not in open_store(Path(data.store)).splits:
        return None
    stream = open_stream(data, seed=recipe.seed, split=split, vocab=vocab)
    return Validator(stream, max(1, recipe.train.eval_tokens // data.seq_len), recipe, world, parts, stepper)
