"""How well does the model predict text it has not seen? Perplexity and bits per byte, by source, language and document length.

Documents are laid end to end and cut every seq_len tokens, as in training, so the mean over all tokens is the validation loss.
Every token is scored once, the document's end token included: nats / ln 2 / bytes is then the length of a code for the documents,
and models with different tokenizers can be compared by it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer
from windlass.errors import DataError
from windlass.evaluate.losses import Costs, costs, token_losses
from windlass.evaluate.opened import Opened
from windlass.evaluate.record import Score, ratio_interval
from windlass.models.recompute import Recomputed
from windlass.train.attention import attention_backend

TASK = "perplexity"
LENGTHS = ((2 * 1024, "under 2 KiB"), (8 * 1024, "2 to 8 KiB"), (32 * 1024, "8 to 32 KiB"), (math.inf, "over 32 KiB"))
"""Document lengths in bytes of text, because tokens are of different length in different tokenizers."""
COMPILE_FROM = 5_000_000
Tell = Callable[[int, int], None]
"""Called with tokens done and tokens in all."""


@dataclass(frozen=True)
class Document:
    """One held-out document and what it cost."""

    source: str
    language: str | None
    tokens: int
    bytes: int
    nats: float

    @property
    def length(self) -> str:
        return next(name for limit, name in LENGTHS if self.bytes < limit)


@dataclass(frozen=True)
class Evaluation:
    scores: list[Score]
    documents: list[Document]
    seconds: float
    """In the model, without reading and decoding."""
    tokens: int

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


def evaluate(
    opened: Opened, store: Store, tokenizer: Tokenizer, *, split: str = "validation", max_tokens: int | None = None,
    batch: int | None = None, compiles: bool | None = None, tell: Tell = lambda done, total: None,
) -> Evaluation:  # fmt: skip
    """Score whole documents of a split, about `max_tokens` of them, of every source in proportion."""
    chosen = choose(store, split, max_tokens)
    total = sum(stop - start for _, spans in chosen for start, stop in spans)
    scorer = Scorer(opened, batch, total, tell, compiles)
    texts = [(name, store.tokens(name, split)[start:stop]) for name, spans in chosen for start, stop in spans]
    nats = scorer.nats([ids for _, ids in texts], store.eos)
    # Without an end token nothing stands before the very first token, and it is not scored.
    left_out = [int(store.eos is None and number == 0) for number in range(len(texts))]
    documents = [
        Document(name, store.sources[name].language, len(ids) - less, byte_count(ids, tokenizer, store.eos), cost)
        for (name, ids), cost, less in zip(texts, nats, left_out, strict=True)
    ]
    return Evaluation(summarize(documents), documents, scorer.seconds, total)


def choose(store: Store, split: str, max_tokens: int | None) -> list[tuple[str, list[tuple[int, int]]]]:
    """Source -> spans of its documents; where the split is larger than asked for, a sample that is always the same."""
    held = [name for name in store.sources if store.shards[name].get(split)]
    if not held:
        raise DataError(
            "evaluate.split",
            f"{store.path} has no {split!r} split",
            hint=f"it has {', '.join(store.splits) or 'none'}; set `validation` in the data file",
        )
    share = 1.0
    if max_tokens is not None:
        share = min(1.0, max_tokens / max(1, sum(len(store.tokens(name, split)) for name in held)))
    found = []
    for name in held:
        spans = [span for span in store.tokens(name, split).documents() if span[1] > span[0]]
        found.append((name, _some(spans, share)))
    return found


def _some(spans: list[tuple[int, int]], share: float) -> list[tuple[int, int]]:
    """Documents in a fixed random order until this share of the tokens is reached, back in stored order."""
    if share >= 1 or not spans:
        return spans
    order = np.random.default_rng(0).permutation(len(spans))
    sizes = np.array([spans[i][1] - spans[i][0] for i in order])
    before = np.cumsum(sizes) - sizes
    return [spans[i] for i in sorted(order[before < share * sizes.sum()])]


def byte_count(ids: npt.NDArray[Any], tokenizer: Tokenizer, eos: int | None) -> int:
    """UTF-8 bytes of a document's text, without its end token."""
    text = ids[:-1] if eos is not None and len(ids) and ids[-1] == eos else ids
    return len(tokenizer.decode(text.tolist()).encode("utf-8", errors="replace"))


class Scorer:
    """Runs documents through the model in full windows."""

    def __init__(self, opened: Opened, batch: int | None, total: int, tell: Tell, compiles: bool | None = None) -> None:
        self.opened, self.total, self.tell = opened, total, tell
        self.length = opened.recipe.data.seq_len
        # Enough tokens to fill the device: more changes nothing, and memory stays small.
        self.batch = batch or max(1, (32_768 if opened.device.type != "cpu" else 2048) // self.length)
        self.done, self.seconds = 0, 0.0
        # Compiling takes about a minute and pays on a GPU from some millions of tokens on; it wants one shape only.
        self.compiled = compiles if compiles is not None else opened.device.type == "cuda" and total >= COMPILE_FROM
        self.costs = compiled(opened.model) if self.compiled else costs

    def nats(self, texts: list[npt.NDArray[Any]], eos: int | None) -> list[float]:
        """Summed cost of each document."""
        if not texts:
            return []
        # What stands before the first document: the end of another one, as everywhere else in training.
        first = np.array([texts[0][0] if eos is None else eos], dtype=texts[0].dtype)
        flat = torch.from_numpy(np.concatenate([first, *texts]).astype(np.int64))
        numbers = torch.from_numpy(np.repeat(np.arange(len(texts)), [len(t) for t in texts]))
        began = time.perf_counter()
        with attention_backend(self.opened.recipe.train.attention, self.opened.device):
            found = torch.cat(list(_fetched(self._windows(flat, numbers))))
        self.seconds += time.perf_counter() - began
        if eos is None:
            found[0] = 0.0
        return torch.zeros(len(texts), dtype=torch.float64).index_add_(0, numbers, found.double()).tolist()

    def _windows(self, flat: torch.Tensor, numbers: torch.Tensor) -> Iterator[torch.Tensor]:
        count = len(flat) - 1
        width = self.length * self.batch
        for start in range(0, count, width):
            stop = min(count, start + width)
            if self.compiled:  # the last part is filled up behind, where nothing looks
                yield self._ask(flat, numbers, start, stop, self.length, fill=width - (stop - start))
                continue
            whole = start + (stop - start) // self.length * self.length
            if whole > start:
                yield self._ask(flat, numbers, start, whole, self.length)
            if stop > whole:
                yield self._ask(flat, numbers, whole, stop, stop - whole)

    def _ask(
        self, flat: torch.Tensor, numbers: torch.Tensor, start: int, stop: int, length: int, fill: int = 0
    ) -> torch.Tensor:
        """Costs of the targets from start to stop, still on the device."""

        def rows(values: torch.Tensor) -> torch.Tensor:
            return F.pad(values, (0, fill)).view(-1, length).to(self.opened.device)

        # An input belongs to the document of its own token; the first one ends the document before.
        masked = self.opened.recipe.data.mask_documents
        ids = rows(torch.cat((numbers[:1] - 1, numbers))[start:stop]) if masked else None
        found = token_losses(
            self.opened.model, rows(flat[start:stop]), rows(flat[start + 1 : stop + 1]), ids, self.costs
        )
        self.done += stop - start
        self.tell(self.done, self.total)
        return found.flatten()[: stop - start]


def _fetched(parts: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Results in host memory, two batches behind: the device never waits for the next one to be asked."""
    waiting: deque[torch.Tensor] = deque()
    for part in parts:
        waiting.append(part)
        if len(waiting) > 2:
            yield waiting.popleft().cpu()
    yield from (part.cpu() for part in waiting)


def compiled(model: Any) -> Costs:
    """Compile as training does, for one shape; what computes the costs comes back."""
    if model.head is None:
        return costs
    for block in model.layers.values():
        block.compile(dynamic=False)
        block.carries = isinstance(block, Recomputed)
    return torch.compile(costs, dynamic=False)


def summarize(documents: list[Document]) -> list[Score]:
    """Both numbers for everything, then by source, language and length."""
    groups: list[tuple[str, list[Document]]] = [("all", documents)]
    for word, key in (
        ("source", lambda d: d.source),
        ("language", lambda d: d.language or "unknown"),
        ("length", lambda d: d.length),
    ):
        groups += [(f"{word} {name}", inside) for name, inside in _by(documents, key)]
    return [score for name, inside in groups if inside for score in scores_of(name, inside)]


def _by(documents: Iterable[Document], key: Callable[[Document], str]) -> list[tuple[str, list[Document]]]:
    found: dict[str, list[Document]] = {}
    for document in documents:
        found.setdefault(key(document), []).append(document)
    order = [name for _, name in LENGTHS]
    return sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1)


def scores_of(group: str, documents: list[Document]) -> list[Score]:
    """Bits per byte and perplexity of some documents, with intervals over documents."""
    nats, tokens, size = (
        np.array([getattr(d, key) for d in documents], dtype=np.float64) for key in ("nats", "tokens", "bytes")
    )
    detail = {"tokens": int(tokens.sum()), "bytes": int(size.sum()), "nats": float(nats.sum())}
    low, high = ratio_interval(nats, tokens)
    made = [
        Score(
            task=TASK, group=group, metric="perplexity", value=_exp(nats.sum() / tokens.sum()) if tokens.sum() else None, low=_exp(low), high=_exp(high),
            count=len(documents), detail=detail,
        )
    ]  # fmt: skip
    if size.sum() > 0:
        bits = nats / math.log(2)
        low, high = ratio_interval(bits, size)
        value = float(bits.sum() / size.sum())
        made.insert(
            0,
            Score(
                task=TASK,
                group=group,
                metric="bits_per_byte",
                value=value,
                low=low,
                high=high,
                count=len(documents),
                detail=detail,
            ),
        )
    return made


def _exp(nats: float | None) -> float | None:
    return None if nats is None else float(math.exp(min(nats, 700.0)))
