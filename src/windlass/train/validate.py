"""Validation in the training loop: mean loss on the held-out split, by source, over the same sequences every time."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.data.store import open_store
from windlass.data.stream import Stream, open_stream
from windlass.errors import WindlassError
from windlass.models.decoder import DecoderModel
from windlass.train.batches import token_batch
from windlass.train.masking import HELD_OUT_SALT
from windlass.train.mesh import World
from windlass.train.parallelize import ModelParts
from windlass.train.step import Stepper
from windlass.train.targets import TargetMaker

Ints = npt.NDArray[np.int64]
# Held-out sequences that are scanned to find some of each source; a source rarer than that is left out.
MAX_SCANNED_SEQUENCES = 200_000


@dataclass(frozen=True)
class HeldOutSource:
    """The held-out part of one source: which sequences of the stream are used, and how much it counts."""

    name: str
    language: str | None
    # Of the text that is used, or of the source by the store's ledger without a tokenizer; None: unknown.
    bytes_per_token: float | None
    indexes: Ints
    # Of all held-out tokens.
    share: float


@dataclass(frozen=True)
class HeldOutLoss:
    """The result of one pass for a source, for a language, or for everything held out."""

    # Nats per token.
    loss: float
    # Comparable between tokenizers. Computed on windows, where `windlass eval` uses complete documents.
    bits_per_byte: float | None


@dataclass(frozen=True)
class Validation:
    overall: HeldOutLoss
    sources: dict[str, HeldOutLoss]
    languages: dict[str, HeldOutLoss]
    # Scores of labels, or further means of the objective, by name.
    scores: dict[str, float | None] = field(default_factory=dict)

    def text(self) -> str:
        """For the log: losses, and the scores that could be computed."""
        losses = ", ".join(f"{name} {part.loss:.4f}" for name, part in self.sources.items())
        loss = f"loss {self.overall.loss:.4f}" + (f" ({losses})" if len(self.sources) > 1 else "")
        return ", ".join([loss, *(f"{name} {value:.4f}" for name, value in self.scores.items() if value is not None)])

    def line(self) -> dict[str, float | None]:
        """The same as flat keys of a metrics line; sources only when there are several."""
        line: dict[str, float | None] = {}
        sources = self.sources if len(self.sources) > 1 else {}
        for suffix, part in {"": self.overall, **{f"/{name}": part for name, part in sources.items()}}.items():
            line[f"val_loss{suffix}"] = part.loss
            if part.bits_per_byte is not None:
                line[f"val_bits_per_byte{suffix}"] = part.bits_per_byte
        return {**line, **{f"val_{name}": value for name, value in self.scores.items()}}

    def compared(self, metric: str) -> float | None:
        """The value of `save.metric`; lower is better."""
        part = self.overall if metric == "val_loss" else self.sources[metric.removeprefix("val_loss/")]
        return part.loss

    def event(self) -> dict[str, Any]:
        return {
            "val_loss": self.overall.loss,
            "bits_per_byte": self.overall.bits_per_byte,
            "sources": {name: asdict(part) for name, part in self.sources.items()},
            "languages": {name: asdict(part) for name, part in self.languages.items()},
            "scores": self.scores,
        }


class Validator:
    def __init__(
        self, stream: Stream, sequences: int, recipe: Recipe, world: World, parts: ModelParts, stepper: Stepper
    ) -> None:
        self.stream, self.recipe, self.world, self.parts, self.stepper = stream, recipe, world, parts, stepper
        self._per_rank = stepper.plan.sequences_per_pass
        self._batch_size = self._per_rank * world.layout.data
        self.held = hold_out(stream, sequences, self._batch_size)
        self.targets = TargetMaker(recipe, world, parts.modules[0].vocab, held_out=True)
        if recipe.task in ("masked", "prefer"):
            # The loss of hidden tokens or of pairs is not the length of a code of the text.
            self.held = [replace(part, bytes_per_token=None) for part in self.held]
        elif world.is_main:  # the only rank that records it
            self.held = with_measured_bytes(stream, self.held)

    def run(self, stopping: Callable[[], object] = lambda: None) -> Validation | None:
        """One pass over all sources, the same result on every rank; None if `stopping` returned a reason between
        batches, or if nothing is held out."""
        if not self.held:
            return None
        # Of each source: what counts (tokens, targets or pairs), summed loss, further sums of the objective.
        further = self.stepper.further
        totals = torch.zeros(len(self.held), 2 + len(further), dtype=torch.float64, device=self.world.device)
        with torch.no_grad(), without_dropout(self.parts.modules):
            for index, part in enumerate(self.held):
                for start in range(0, len(part.indexes), self._batch_size):
                    totals[index] += self._batch(part.indexes[start : start + self._batch_size])
                    if stopping():
                        return None
        self.world.sum_(totals)
        validation = combine(self.held, (totals[:, 1] / totals[:, 0].clamp(min=1)).tolist())
        count, _, *sums = totals.sum(0).tolist()
        return replace(validation, scores={name: total / count for name, total in zip(further, sums, strict=True)})

    def _batch(self, indexes: Ints) -> Tensor:
        """Sums of this rank's part of a batch: what counts, loss, further sums."""
        numbers = indexes[self.world.data_rank * self._per_rank :][: self._per_rank]
        batch = token_batch(self.stream.batch(numbers, documents=self.recipe.data.masks_documents), self.world.device)
        part = self.targets.make(batch, HELD_OUT_SALT)
        if self.stepper.pipeline is None:
            sums = self.parts.modules[0](part.inputs, part.targets, part.documents)
        else:
            sums = torch.zeros(2 + len(self.stepper.further), device=self.world.device)
            for of_micro_batch in self.stepper.pipeline.run("eval", part):
                sums += of_micro_batch
        return torch.cat((self.targets.count(part)[None], sums[1:].double() * float(self.world.counts_loss)))


@contextlib.contextmanager
def without_dropout(modules: Iterable[DecoderModel]) -> Iterator[None]:
    """Dropout would add noise to the loss and consume random numbers of training. Our own families have none."""
    changed = [module for module in modules if module.has_dropout]
    for module in changed:
        module.eval()
    try:
        yield
    finally:
        for module in changed:
            module.train()


def hold_out(stream: Stream, sequences: int, batch_size: int) -> list[HeldOutSource]:
    """About `sequences` sequences, of every source in proportion and at least one batch of each.

    A batch is of one source, so that its loss is known without a loss per token; a source that is smaller than a
    batch is repeated in it.
    """
    sizes = getattr(getattr(stream, "mixture", None), "windows", None)
    weights = np.ones(len(stream.sources)) if sizes is None else np.asarray(sizes, dtype=np.float64)
    shares = weights / weights.sum()
    # Using more than is held out would only repeat the text.
    sequences = sequences if sizes is None else min(sequences, int(weights.sum()))
    counts = [max(1, round(share * sequences / batch_size)) * batch_size if share else 0 for share in shares]
    # The first sequences of each source, as many as needed or as one pass over the held-out text has.
    limit = max(sequences, int(weights.sum()))
    source_of = np.zeros(0, dtype=np.int64)  # of each sequence that was scanned
    while len(source_of) < min(limit, MAX_SCANNED_SEQUENCES):
        numbers = np.arange(len(source_of), min(len(source_of) + 1024, limit), dtype=np.int64)
        source_of = np.concatenate((source_of, stream.identity(numbers)[0]))
        if (np.bincount(source_of, minlength=len(counts)) >= counts).all():
            break
    held = []
    for index, (name, count, share) in enumerate(zip(stream.sources, counts, shares, strict=True)):
        chosen = np.flatnonzero(source_of == index)[:count]
        if len(chosen):
            info = stream.store.sources[name] if stream.store is not None else None
            bytes_per_token = info.bytes / info.tokens if info and info.bytes and info.tokens else None
            if not getattr(stream, "counts_all", True):  # the bytes of answers alone are not known
                bytes_per_token = None
            language = info.language if info else None
            held.append(HeldOutSource(name, language, bytes_per_token, np.resize(chosen, count), float(share)))
    return held


def with_measured_bytes(stream: Stream, held: list[HeldOutSource]) -> list[HeldOutSource]:
    """With the bytes of the very text that is used: held-out documents can differ from the rest of their source."""
    store = stream.store
    if store is None or store.tokenizer_file is None or not stream.counts_all:
        return held
    try:
        from windlass.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(store.tokenizer_file, eos=store.eos)
    except (ImportError, WindlassError):  # a compute node without the package: the ledger's mean is close enough
        return held
    measured = []
    for part in held:
        batches = (stream.sequences(part.indexes[at : at + 64])[:, 1:] for at in range(0, len(part.indexes), 64))
        sizes = [
            (row.size, len(tokenizer.decode(row[row != store.eos].tolist()).encode()))
            for rows in batches
            for row in rows
        ]
        tokens, text_bytes = map(sum, zip(*sizes, strict=True))
        measured.append(replace(part, bytes_per_token=text_bytes / tokens))
    return measured


def combine(held: Sequence[HeldOutSource], means: Sequence[float]) -> Validation:
    """Mean losses by source, combined by how much of the held-out text each source is."""

    def total(pairs: Sequence[tuple[HeldOutSource, float]]) -> HeldOutLoss:
        share = sum(part.share for part, _ in pairs)
        loss = sum(part.share * mean for part, mean in pairs) / share
        text_bytes = [part.share * part.bytes_per_token for part, _ in pairs if part.bytes_per_token is not None]
        return HeldOutLoss(
            loss, loss / math.log(2) / (sum(text_bytes) / share) if len(text_bytes) == len(pairs) else None
        )

    pairs = list(zip(held, means, strict=True))
    languages = dict.fromkeys(part.language for part in held if part.language is not None)
    return Validation(
        overall=total(pairs),
        sources={part.name: total([(part, mean)]) for part, mean in pairs},
        languages={name: total([pair for pair in pairs if pair[0].language == name]) for name in languages},
    )


def open_validator(recipe: Recipe, world: World, parts: ModelParts, stepper: Stepper, vocab: int) -> Validator | None:
    """None when nothing is held out."""
    data = recipe.data
    if data.store is None or (data.validation is None and "validation" not in open_store(Path(data.store)).splits):
        return None
    stream = open_stream(data, seed=recipe.seed, split=data.validation or "validation", vocab=vocab)
    return Validator(stream, max(1, recipe.train.eval_tokens // data.seq_len), recipe, world, parts, stepper)
