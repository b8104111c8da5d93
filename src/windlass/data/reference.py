"""What does the reference library say about a few texts, without building tables of a whole vocabulary that they never touch?

A byte-level BPE joins two tokens only where their bytes stand side by side in the text. So tokens and merges whose bytes cannot occur
in the texts decide nothing about them: without these the library loads in a tenth of the time and gives the same ids. Where
anything else could have a say (a normalizer, an unknown token, added words), the answer here is None and the whole file is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from windlass.data.tokenizer import byte_names

_LONG = 8
"""Tokens up to so many characters are kept if they occur in the texts; longer ones if their beginning and end of this length do."""
_SPLITTERS = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
"""Steps that cut a text and change no character of it."""


def small_json(value: Any, texts: Iterable[str]) -> dict[str, Any] | None:
    """The parsed tokenizer file with only what can matter for `texts`; None where that cannot be told from the file."""
    try:
        if not _plain_bpe(value):
            return None
        vocab, merges = value["model"]["vocab"], value["model"]["merges"]
        seen = _parts(texts)
        kept = {
            name: number
            for name, number in vocab.items()
            if (name[:_LONG] in seen and name[-_LONG:] in seen) or len(name) == 1
        }
        known = [token for token in value.get("added_tokens") or [] if token["content"] in vocab]
        fresh = [token for token in value.get("added_tokens") or [] if token["content"] not in vocab]
        kept.update((token["content"], vocab[token["content"]]) for token in known)  # the text has it by another name
        pairs = list(_pairs(merges, kept))
        for left, right in pairs:  # whatever is named must be known
            kept[left], kept[right] = vocab[left], vocab[right]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    model = {**value["model"], "vocab": kept, "merges": pairs}
    # Fresh ones first: some versions (0.21) number them after the largest id met so far, which may lie far beyond what is kept.
    value = {**value, "added_tokens": [*fresh, *known]}
    nothing = dict.fromkeys(("truncation", "padding", "post_processor", "decoder"))
    return {**value, **nothing, "model": model}


def _plain_bpe(value: Any) -> bool:
    model = value["model"]
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
    words = [token for token in value.get("added_tokens") or [] if not token.get("special")]
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in odd)
        and value.get("normalizer") is None
        and _byte_level(value.get("pre_tokenizer"))
        and all(token["content"] in model["vocab"] for token in words)
    )


def _byte_level(step: Any) -> bool:
    """Whether the characters that the model sees are the bytes of the text, each by its name."""
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    *before, last = steps
    return (
        all(s["type"] in _SPLITTERS for s in before)
        and last["type"] == "ByteLevel"
        and not last.get("add_prefix_space")
    )


def _parts(texts: Iterable[str]) -> set[str]:
    """Everything of up to `_LONG` characters that occurs in the texts, in the names of their bytes."""
    table = dict(enumerate(byte_names()))
    named = " ".join(text.encode().decode("latin-1").translate(table) for text in texts)  # a space is nobody's name
    return {named[i : i + size] for size in range(1, _LONG + 1) for i in range(len(named))}


def _pairs(merges: list[Any], kept: dict[str, int]) -> Iterator[list[str]]:
    """Merges whose result is kept, in their order, which is their rank."""
    if merges and isinstance(merges[0], str):
        yield from (merge.split(" ") for merge in merges if merge.replace(" ", "", 1) in kept)
    else:
        yield from ([left, right] for left, right in merges if left + right in kept)
