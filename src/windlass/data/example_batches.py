"""Tokenized examples of a fine-tuning task, and the padded micro-batches of each step: a pure function of its
number."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.config import Recipe
from windlass.config.tune import TuneConfig
from windlass.data.examples import Example
from windlass.errors import ConfigError
from windlass.layout.types import IGNORED

Ints = npt.NDArray[np.int64]
# Texts are sorted by length within so many batches: padding falls, and batches stay different in every epoch.
SORTED_BATCHES = 50
Encode = Callable[[Sequence[Example]], "list[EncodedText]"]


@dataclass(frozen=True)
class EncodedText:
    tokens: list[int]
    segments: list[int]  # 0, or 1 in the second text of a pair
    words: list[int | None] | None = None  # the word of each token; None: none of the text
    was_cut: bool = False


@dataclass(frozen=True)
class PaddedBatch:
    """Rows of one micro-batch. `segments` is -1 where a row is padding."""

    tokens: Ints
    segments: Ints
    targets: npt.NDArray[Any]


class EncodedExamples:
    """Examples as tokens and targets; sizes of batches in examples."""

    def __init__(
        self, examples: Sequence[Example], labels: Sequence[str], tune: TuneConfig, encode: Encode, *, pad: int
    ) -> None:
        self.tune, self.labels, self.pad = tune, list(labels), pad
        self.texts = encode(examples)
        self.lengths = np.array([len(text.tokens) for text in self.texts], dtype=np.int64)
        number = {label: index for index, label in enumerate(labels)}
        self.targets = [make_target(tune.task, e.label, t, number) for e, t in zip(examples, self.texts, strict=True)]
        self.cut = sum(text.was_cut for text in self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def counted(self, indexes: Sequence[int] | Ints, weights: Sequence[float] | None = None) -> float:
        """What the summed loss of these examples is divided by to be a mean, as torch's losses do."""
        if self.tune.task == "tag":
            return float(sum(int((self.targets[i] != IGNORED).sum()) for i in indexes))
        if self.tune.task == "multi_label":
            return float(len(indexes) * len(self.labels))
        return float(len(indexes)) if weights is None else sum(weights[int(self.targets[i])] for i in indexes)

    def class_weights(self) -> list[float] | None:
        """balanced: examples / (labels x examples of the label), as scikit-learn computes it."""
        if self.tune.class_weights == "equal":
            return None
        if self.tune.task != "classify":
            raise ConfigError(
                "tune.class-weights",
                f'tune.class_weights = "balanced" is for task classify, not {self.tune.task}',
                hint='use "equal"',
            )
        counts = np.bincount(np.array([int(t) for t in self.targets]), minlength=len(self.labels))
        return [len(self) / (len(self.labels) * count) if count else 0.0 for count in counts.tolist()]

    def pad_rows(
        self, indexes: Sequence[int], *, count: int, width_multiple: int = 1, max_width: int = 0
    ) -> PaddedBatch:
        """These examples as `count` rows; rows beyond them repeat the last one and do not count. As wide as the longest
        text, or the next `width_multiple` up to `max_width`."""
        rows = [*indexes, *[indexes[-1]] * (count - len(indexes))]
        longest = int(max(self.lengths[i] for i in rows))
        width = max(longest, min(max_width, -(-longest // width_multiple) * width_multiple))
        tokens = np.full((count, width), self.pad, dtype=np.int64)
        segments = np.full((count, width), -1, dtype=np.int64)
        targets = empty_targets(self.tune.task, count, width, len(self.labels))
        for row, index in enumerate(rows):
            length = int(self.lengths[index])
            tokens[row, :length] = self.texts[index].tokens
            segments[row, :length] = self.texts[index].segments
            if row < len(indexes):
                targets[row, ...] = fill_to(self.targets[index], targets[row])
        return PaddedBatch(tokens, segments, targets)


def make_target(task: str, label: Any, text: EncodedText, number: dict[str, int]) -> Any:
    if task == "regress":
        return np.float32(label)
    if task == "multi_label":
        return np.isin(np.arange(len(number)), [number[name] for name in label]).astype(np.float32)
    if task == "classify":
        return np.int64(number[label])
    # The first token of a word carries its tag, the others do not count.
    words, tags = text.words or [], np.full(len(text.tokens), IGNORED, dtype=np.int64)
    for place, word in enumerate(words):
        if word is not None and (place == 0 or words[place - 1] != word):
            tags[place] = number[label[word]]
    return tags


def empty_targets(task: str, count: int, width: int, labels: int) -> npt.NDArray[Any]:
    if task == "tag":
        return np.full((count, width), IGNORED, dtype=np.int64)
    if task == "classify":
        return np.full(count, IGNORED, dtype=np.int64)
    return np.full((count, labels) if task == "multi_label" else count, np.nan, dtype=np.float32)


def fill_to(target: Any, row: Any) -> Any:
    """A target with as many values as the row; further ones do not count."""
    if np.ndim(target) == 0 or len(target) == len(row):
        return target
    return np.concatenate((target, np.full(len(row) - len(target), IGNORED, dtype=np.int64)))


@dataclass(frozen=True)
class ExampleOrder:
    """Which examples a step takes. It depends on the seed and the step alone, not on the number of devices."""

    lengths: Ints
    batch: int
    seed: int
    group_by_length: bool

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.lengths) / self.batch)

    def epoch(self, number: int) -> list[Ints]:
        """The batches of an epoch; the last of them may be smaller."""
        random = np.random.default_rng((self.seed, number))
        order = random.permutation(len(self.lengths))
        cuts = range(0, len(order), self.batch)
        if not self.group_by_length:
            return [order[at : at + self.batch] for at in cuts]
        pool = self.batch * SORTED_BATCHES
        pools = (order[at : at + pool] for at in range(0, len(order), pool))
        grouped = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in pools])
        batches = [grouped[at : at + self.batch] for at in cuts]
        return [batches[i] for i in random.permutation(len(batches))]

    def step(self, number: int) -> Ints:
        """Examples of step `number` (from 0), longest first."""
        epoch, place = divmod(number, self.steps_per_epoch)
        chosen = self._kept_epoch(epoch)[place]
        return chosen[np.argsort(-self.lengths[chosen], kind="stable")]

    def _kept_epoch(self, number: int) -> list[Ints]:
        kept: dict[int, list[Ints]] = self.__dict__.setdefault("_epochs", {})
        if number not in kept:
            kept.clear()
            kept[number] = self.epoch(number)
        return kept[number]


def micro_batches(indexes: Ints, micro_batch: int, accumulation: int, ranks: int, rank: int) -> list[list[int]]:
    """This rank's part of a step, `accumulation` lists: at any time all ranks have texts of similar length. An empty
    list: the step has too few examples."""
    cuts = [indexes[at : at + micro_batch].tolist() for at in range(0, len(indexes), micro_batch)]
    return [cuts[i * ranks + rank] if i * ranks + rank < len(cuts) else [] for i in range(accumulation)]


def tokenizer_of_transformers(recipe: Recipe) -> Any:
    """transformers' tokenizer of a model of family hf, with a padding token: that which ends a text where it has none
    (GPT-2, Llama)."""
    from windlass.models.presets.hf import import_transformers, refuse_custom_code

    path = Path(recipe.data.tokenizer or recipe.save.load or recipe.model.config or "")
    folder = path if path.is_dir() else path.parent
    refuse_custom_code(folder)
    tokenizer: Any = import_transformers().AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def encoder_of_transformers(recipe: Recipe) -> tuple[Encode, int]:
    """Encoding by the tokenizer of a Hugging Face folder, with its special tokens; and the padding token."""
    tokenizer = tokenizer_of_transformers(recipe)
    limit = min(recipe.data.seq_len, tokenizer.model_max_length)

    def tokenized(examples: Sequence[Example], **options: Any) -> Any:
        """All texts in one call: the tokenizer uses every core."""
        has_words, has_pairs = isinstance(examples[0].text, tuple), examples[0].pair is not None
        texts = [list(example.text) if has_words else example.text for example in examples]
        pairs = [example.pair for example in examples] if has_pairs else None
        return tokenizer(texts, pairs, is_split_into_words=has_words, verbose=False, **options)

    def encode(examples: Sequence[Example]) -> list[EncodedText]:
        if not examples:
            return []
        result = tokenized(examples, truncation=True, max_length=limit)
        rows = result["input_ids"]
        # A text that fills the limit may have been cut.
        full = [number for number, tokens in enumerate(rows) if len(tokens) >= limit]
        lengths = map(len, tokenized([examples[number] for number in full])["input_ids"]) if full else ()
        cut = {number for number, length in zip(full, lengths, strict=True) if length > len(rows[number])}
        segments = result.get("token_type_ids") or [[0] * len(tokens) for tokens in rows]
        has_words = isinstance(examples[0].text, tuple)
        return [
            EncodedText(
                list(tokens), list(segments[number]), result.word_ids(number) if has_words else None, number in cut
            )
            for number, tokens in enumerate(rows)
        ]

    return encode, int(tokenizer.pad_token_id)


def encoder_of_tokenizer(tokenizer: Any, length: int) -> tuple[Encode, int]:
    """Encoding by one of our tokenizers: no special tokens but one between the texts of a pair."""
    end = tokenizer.eos if tokenizer.eos is not None else 0

    def encode_one(example: Example) -> EncodedText:
        if isinstance(example.text, tuple):
            parts = [tokenizer.encode(word if i == 0 else f" {word}") for i, word in enumerate(example.text)]
            tokens = [token for part in parts for token in part]
            words: list[int | None] = [i for i, part in enumerate(parts) for _ in part]
            return EncodedText(tokens[:length] or [end], [0] * max(1, len(tokens[:length])), words[:length] or [None],
                               len(tokens) > length)  # fmt: skip
        first = tokenizer.encode(example.text)
        second = [end, *tokenizer.encode(example.pair)] if example.pair is not None else []
        tokens = (first + second)[:length] or [end]
        segments = ([0] * len(first) + [1] * len(second))[:length] or [0]
        return EncodedText(tokens, segments, None, len(first) + len(second) > length)

    return lambda examples: [encode_one(example) for example in examples], end
