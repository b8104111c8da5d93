"""Perplexity and bits per byte on held-out documents, by source, language and document length.

Documents are laid end to end and cut every seq_len tokens, as in training, so the mean over all tokens is the
validation loss. Every token is scored once, the document's end token included: nats / ln 2 / bytes is then the length
of a code for the documents, and models with different tokenizers can be compared by it.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from windlass.blocks.attention.kernels import attention_kernel
from windlass.convert.source import ProgressCallback
from windlass.data.shards import refuse_outside
from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer
from windlass.errors import DataError
from windlass.evaluate.likelihood import TokenNats, token_losses, token_nats
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.scores import ratio_score
from windlass.files import set_compile_cache
from windlass.runs.scores import EvalScore

# Document lengths in bytes of text: tokens differ in length between tokenizers.
LENGTHS = ((2 * 1024, "under 2 KiB"), (8 * 1024, "2 to 8 KiB"), (32 * 1024, "8 to 32 KiB"), (math.inf, "over 32 KiB"))
COMPILE_FROM_TOKENS = 5_000_000  # compiling takes about a minute


@dataclass(frozen=True)
class HeldOutDocument:
    source: str
    language: str | None
    tokens: int
    bytes: int
    nats: float

    @property
    def length(self) -> str:
        return next(name for limit, name in LENGTHS if self.bytes < limit)


@dataclass(frozen=True)
class HeldOutResult:
    scores: list[EvalScore]
    documents: list[HeldOutDocument]
    seconds: float  # time in the model, without reading and decoding
    tokens: int

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


def evaluate_text(
    opened: OpenModel,
    store: Store,
    tokenizer: Tokenizer,
    *,
    split: str = "validation",
    max_tokens: int | None = None,
    batch: int | None = None,
    compiles: bool | None = None,
    progress: ProgressCallback = lambda done, total: None,
) -> HeldOutResult:
    """Score complete documents of a split, about `max_tokens` of them, of every source in proportion."""
    texts = [
        (name, store.tokens(name, split)[start:stop])
        for name, spans in choose_documents(store, split, max_tokens)
        for start, stop in spans
    ]
    for name, ids in texts:
        refuse_outside(ids, opened.model.vocab, f"source {name} of {store.path}")
    total = sum(len(ids) for _, ids in texts)
    if compiles is None:
        compiles = opened.device.type == "cuda" and total >= COMPILE_FROM_TOKENS
    token_loss: TokenNats = token_nats
    if compiles and opened.model.head is not None:  # the blocks as training does, and the loss, for one shape
        set_compile_cache()
        for layer in opened.model.typed_layers():
            layer.compile(dynamic=False)
            layer.carries = True
        token_loss = torch.compile(token_nats, dynamic=False)
    nats, seconds = document_nats(opened, [ids for _, ids in texts], store.eos, batch, token_loss, progress)
    documents = []
    for number, ((name, ids), cost) in enumerate(zip(texts, nats, strict=True)):
        # Without an end token there is nothing before the very first token, so it is not scored.
        scored = len(ids) - int(store.eos is None and number == 0)
        documents.append(
            HeldOutDocument(name, store.sources[name].language, scored, byte_count(ids, tokenizer, store.eos), cost)
        )
    return HeldOutResult(summarize(documents), documents, seconds, total)


def choose_documents(store: Store, split: str, max_tokens: int | None) -> list[tuple[str, list[tuple[int, int]]]]:
    """Source -> spans of its documents; with fewer tokens than the split has, always the same sample of documents."""
    arrays = {name: store.tokens(name, split) for name in store.sources if store.shards[name].get(split)}
    if not arrays:
        raise DataError(
            "evaluate.split-missing",
            f"{store.path} has no {split!r} split",
            hint=f"it has {', '.join(store.splits) or 'none'}; set `validation` in the data file",
        )
    share = 1.0 if max_tokens is None else max_tokens / max(1, sum(map(len, arrays.values())))
    chosen = []
    for name, array in arrays.items():
        spans = [(start, stop) for start, stop in array.documents() if stop > start]
        if share < 1 and spans:  # documents in a fixed random order until the share is reached, back in stored order
            order = np.random.default_rng(0).permutation(len(spans))
            sizes = np.array([spans[i][1] - spans[i][0] for i in order])
            before = np.cumsum(sizes) - sizes
            spans = [spans[i] for i in sorted(order[before < share * sizes.sum()])]
        chosen.append((name, spans))
    return chosen


def byte_count(ids: npt.NDArray[Any], tokenizer: Tokenizer, eos: int | None) -> int:
    """UTF-8 bytes of a document's text, without its end token."""
    text = ids[:-1] if eos is not None and len(ids) and ids[-1] == eos else ids
    return len(tokenizer.decode(text.tolist()).encode("utf-8", errors="replace"))


def document_nats(
    opened: OpenModel,
    texts: list[npt.NDArray[Any]],
    eos: int | None,
    batch: int | None,
    token_loss: TokenNats,
    progress: ProgressCallback,
) -> tuple[list[float], float]:
    """Summed cost of each document, all of them laid end to end in full windows, and the seconds it took."""
    if not texts:
        return [], 0.0
    # An end token comes before the first document, as everywhere in training.
    first = np.array([texts[0][0] if eos is None else eos], dtype=texts[0].dtype)
    tokens = torch.from_numpy(np.concatenate([first, *texts]).astype(np.int64))
    numbers = torch.from_numpy(np.repeat(np.arange(len(texts)), [len(ids) for ids in texts]))
    # An input belongs to the document of its own token; the first one ends the document before.
    documents = torch.cat((numbers[:1] - 1, numbers[:-1])) if opened.recipe.data.masks_documents else None
    length, count = opened.max_length, len(tokens) - 1
    rows = min(batch or max(1, opened.batch_tokens // length), math.ceil(count / length))

    def windows(values: torch.Tensor, start: int) -> torch.Tensor:
        """(rows, length) of a flat tensor; the end is padded, where no scored token attends to it."""
        part = values[start : start + rows * length]
        return F.pad(part, (0, rows * length - len(part))).view(rows, length).to(opened.device)

    parts: list[torch.Tensor] = []
    pending: deque[torch.Tensor] = deque()
    started = time.perf_counter()
    with attention_kernel(opened.recipe.train.attention, opened.device):
        for start in range(0, count, rows * length):
            stop = min(count, start + rows * length)
            ids = windows(documents, start) if documents is not None else None
            losses = token_losses(
                opened.model, windows(tokens[:-1], start), windows(tokens[1:], start), ids, token_loss
            )
            pending.append(losses.flatten()[: stop - start])
            if len(pending) > 2:  # two batches behind, so that the device never waits for the next one
                parts.append(pending.popleft().cpu())
            progress(stop, count)
        parts += [losses.cpu() for losses in pending]
    costs = torch.cat(parts).double()
    seconds = time.perf_counter() - started
    if eos is None:
        costs[0] = 0.0
    return torch.zeros(len(texts), dtype=torch.float64).index_add_(0, numbers, costs).tolist(), seconds


def summarize(documents: list[HeldOutDocument]) -> list[EvalScore]:
    groups: dict[str, list[HeldOutDocument]] = {"all": documents} if documents else {}
    for document in documents:
        groups.setdefault(f"source {document.source}", []).append(document)
    for document in documents:
        groups.setdefault(f"language {document.language or 'unknown'}", []).append(document)
    for _, name in LENGTHS:
        if inside := [document for document in documents if document.length == name]:
            groups[f"length {name}"] = inside
    return [score for group, inside in groups.items() for score in group_scores(group, inside)]


def group_scores(group: str, documents: list[HeldOutDocument]) -> list[EvalScore]:
    """Bits per byte and perplexity of some documents, with intervals over documents."""
    nats, tokens, size = (
        np.array([getattr(d, key) for d in documents], dtype=np.float64) for key in ("nats", "tokens", "bytes")
    )
    detail = {"tokens": int(tokens.sum()), "bytes": int(size.sum()), "nats": float(nats.sum())}

    def exp(value: float | None) -> float | None:
        return None if value is None else math.exp(min(value, 700.0))

    loss = ratio_score("perplexity", group, "perplexity", nats, tokens, detail)
    perplexity = replace(loss, value=exp(loss.value), low=exp(loss.low), high=exp(loss.high))
    bits = ratio_score("perplexity", group, "bits_per_byte", nats / math.log(2), size, detail)
    return [bits, perplexity] if size.sum() > 0 else [perplexity]
