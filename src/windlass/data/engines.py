"""Which engine tokenizes fastest and still exactly? Each is tried on a sample against the reference and refused on any difference.

Speeds measured on one core are in benchmarks/results; the order here follows them. Engines are loaded once, before workers
are forked, and used only after: their thread pools do not survive a fork.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data.tokenizer import (
    JsonTokenizer,
    RanksTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    dump_json,
    parse_json,
)
from windlass.errors import DataError
from windlass.files import write_atomic

Flat = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
ORDER = ("gigatoken", "fastokens", "tiktoken", "tokenizers", "sentencepiece")
"""By CPU time of whole runs: the bare loops of benchmarks/results/tokenize.md."""
SAMPLE = (
    "",
    " ",
    "\n\n\n",
    "Hello, world! It's 12345678 o'clock; don't WE'LL they've\r\n\r\n\tend  ",
    "  leading and trailing   spaces   ",
    "def f(x):\n    return x ** 2  # caf\u00e9 \u2026\n\n\nclass A:\n\tpass\n",
    "De waarheid is als een \u00efdee; \u201caan\u00adge\u00adnaam\u201d gro\u00dfe Stra\u00dfe, na\u00efve fa\u00e7ade, \u0141\u00f3d\u017a, \u0130stanbul",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\u4e2d\u6587\u6587\u672c\uff0c\u6ca1\u6709\u7a7a\u683c\u3002 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "e\u0301 versus \u00e9, \u2126 versus \u03a9, \ufb01 \u2460 \u00bd \u1e9e",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f4\U000e0067\U000e0062 \u200b\ufeff\u00a0\u3000\u2028x\x00\x01\x7f",
    "<|end_of_text|> <|begin_of_text|> <|endoftext|> </s> <s> <unk> <pad> [INST] [/INST] <|im_start|>user<|im_end|>",
    "a" * 3000,
    " " * 3000 + "x",
    "9" * 1000 + " 3.14159e-10 0x7fffffff 1,234,567.89",
    "http://www.example.org/~user/index.html?q=a+b&c=%20#frag user@example.org C:\\dir\\file.txt",
    "\u4e00\u4e8c\u4e09" * 700,
    "\n\r\n\r \t\x0b\x0c\x85 \u2003 a\u00a0b",
)


class UnsuitedError(DataError):
    """The engine is not made for this kind of tokenizer, which is no news."""


@dataclass(frozen=True)
class Engine:
    """Texts -> one flat array of ids and the offsets between which each text's ids lie."""

    name: str
    version: str
    encode: Callable[[list[str], int | None], Flat]
    """With the id that ends a document, or None. It is put in here, where the ids are copied anyway: a second copy costs as much."""
    batch: int = 1 << 22
    """Characters to encode in one call. Most engines have a price per call, so the more the better."""
    before_fork: bool = False
    """It starts no threads, so that it may be used before workers are forked; what it has learned by then, all of them know."""
    renew: Callable[[], None] | None = None
    """Load it anew: it keeps every word that it ever met, which is what makes it fast, and its memory grows with the text."""
    stout: int = 400_000_000
    """Bytes of memory, shared ones included, from which on a worker is relieved by a new one, which knows few words yet."""


@dataclass(frozen=True)
class Choice:
    engine: Engine
    reason: str
    """Why this one: printed, as everything chosen automatically is."""


def choose(
    tokenizer: Tokenizer,
    wanted: str = "auto",
    *,
    specials: bool = False,
    sample: Sequence[str] = (),
    cache: Path | None = None,
) -> Choice:
    """The first engine of ORDER that is installed, reads this tokenizer and agrees with the reference on every sample text.

    `cache` is a folder where a converted tokenizer is kept, so that a restart and the tasks of an array need not convert again.
    """
    try:
        return _choose(tokenizer, wanted, specials, sample, cache)
    finally:
        if isinstance(tokenizer, JsonTokenizer):
            tokenizer.forget()  # and what was cut to the sample: other texts need the whole


def _choose(tokenizer: Tokenizer, wanted: str, specials: bool, sample: Sequence[str], cache: Path | None) -> Choice:
    if specials and (tokenizer.kind == "tekken" or isinstance(tokenizer, SentencePieceTokenizer)):
        raise DataError(
            "data.special-tokens-parse-possible",
            f'special_tokens = "parse" is not possible with {tokenizer.path}: a {tokenizer.kind} tokenizer never reads them from text',
            hint="use the model's tokenizer.json, which does, or leave special_tokens out",
        )
    names = [wanted] if wanted != "auto" else list(ORDER)
    refused: list[str] = []
    for name in names:
        try:
            engine = _LOADERS[name](tokenizer, specials, cache)
        except Exception as error:  # an engine that cannot read this tokenizer is passed over; its reason is kept
            if not isinstance(error, UnsuitedError):
                refused.append(f"{name}: {_short(error)}")
            continue
        if (difference := _differs(engine, tokenizer, specials, [*SAMPLE, *sample])) is None:
            checked = len(SAMPLE) + len(sample)
            reason = f"{name} {engine.version}, exact on {checked} sample texts" + (
                f"; passed over {'; '.join(refused)}" if refused else ""
            )
            return Choice(engine, reason)
        refused.append(f"{name}: {difference}")
    listed = "\n  ".join(refused or [f"{name} cannot read a {tokenizer.kind} tokenizer" for name in names])
    raise DataError(
        "data.engine-can-used",
        f"no engine can be used for {tokenizer.path}:\n  {listed}",
        hint='pip install "windlass[data]", or choose engine = "auto" in the data file',
    )


def _short(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    return "not installed" if isinstance(error, ImportError) else f"{text[:120] or type(error).__name__}"


def _differs(engine: Engine, tokenizer: Tokenizer, specials: bool, sample: Sequence[str]) -> str | None:
    """Compare in a forked child: an engine that was used starts threads, and the workers are forked from this process.

    The reference, too, is loaded in the child where it was not before: nobody needs it afterwards, and its memory goes at once.
    """
    if isinstance(tokenizer, JsonTokenizer) and not specials:
        tokenizer.cut_to(sample)  # here, not in the child, which would copy all the memory that it looks at
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_compare, args=(sender, engine, tokenizer, specials, list(sample)), daemon=True)
    child.start()
    sender.close()
    try:
        answer: Any = receiver.recv() if receiver.poll(300) else "it did not answer within 300 s"
    except EOFError:
        answer = "it crashed on the sample"
    if child.is_alive() and answer is not None:
        child.kill()
    child.join()
    if isinstance(answer, tuple):
        raise DataError("data.failed", answer[0], hint=answer[1])
    return answer  # type: ignore[no-any-return]


def _compare(sender: Any, engine: Engine, tokenizer: Tokenizer, specials: bool, sample: list[str]) -> None:
    try:
        sender.send(first_difference(engine, tokenizer, specials, sample))
    except DataError as error:  # the reference cannot read its file: no engine will do
        sender.send((error.message, error.hint))
    except Exception as error:
        sender.send(f"it failed on the sample: {_short(error)}")


def first_difference(engine: Engine, tokenizer: Tokenizer, specials: bool, sample: list[str]) -> str | None:
    """Where the engine's ids first differ from the reference's, or None."""
    ids, offsets = engine.encode(sample, None)
    if len(offsets) != len(sample) + 1:
        return f"it returned {len(offsets) - 1} texts for {len(sample)}"
    for number, text in enumerate(sample):
        got = ids[offsets[number] : offsets[number + 1]].tolist()
        wanted = tokenizer.encode(text, specials=specials)
        if got != wanted:
            return f"not exact: {len(got)} ids instead of {len(wanted)}, or others, for {text[:40]!r}"
    return None


# -- loaders -------------------------------------------------------------------------------------------------------


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _converted(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> str:
    """Path of the tokenizer as a Hugging Face JSON."""
    if isinstance(tokenizer, JsonTokenizer):
        return str(tokenizer.path)
    if specials:
        raise DataError(
            "data.special-tokens-parse-needs", 'special_tokens = "parse" needs a tokenizers JSON or the tiktoken engine'
        )
    if cache is None:
        raise DataError("data.needs-folder-converted-tokenizer", "needs a folder for the converted tokenizer")
    file = cache / f"tokenizer-{tokenizer.hash[:16]}.json"
    if not file.is_file():
        text = tokenizer.engine_json()
        if text is None:
            raise UnsuitedError(f"cannot read a {tokenizer.kind} tokenizer")
        write_atomic(file, text)
    return str(file)


def _fastokens(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    # One thread per worker: parallelism comes from processes, and idle pools only cost.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    import fastokens

    def load() -> Any:
        made = fastokens.Tokenizer.from_file(_converted(tokenizer, specials, cache))
        made.no_truncation()
        return made

    inner, offset = load(), np.uint32(tokenizer.offset)

    def encode(texts: list[str], eos: int | None) -> Flat:
        raw, ends = inner.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=not specials)
        ids, offsets = np.frombuffer(raw, dtype="<u4"), np.frombuffer(ends, dtype="<u8").astype(np.int64)
        return _ended(ids + offset if offset else ids, offsets, eos)

    def renew() -> None:
        nonlocal inner
        inner = None
        inner = load()

    return Engine("fastokens", _version("fastokens"), encode, renew=renew)


def _gigatoken(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    import gigatoken

    def load() -> Any:
        if isinstance(tokenizer, SentencePieceTokenizer):
            return gigatoken.Tokenizer.from_sentencepiece(tokenizer.path)
        if isinstance(tokenizer, JsonTokenizer):
            made = _without_extras(tokenizer.parsed, specials)
        else:
            made = _without_extras(parse_json(Path(_converted(tokenizer, specials, cache)).read_bytes()), specials)
        return gigatoken.Tokenizer.from_json(made)

    inner, offset = load(), np.uint32(tokenizer.offset)

    def encode(texts: list[str], eos: int | None) -> Flat:
        # One by one is as fast as gigatoken's encode_batch, which first imports a large package for its result, in every worker.
        return _joined(map(inner.encode, texts), offset, eos)

    def renew() -> None:
        nonlocal inner
        inner = None
        inner = load()

    # Calls cost nothing here, and ids that are still in the processor's cache are joined, hashed and written in half the time.
    # Its table of words doubles at once, so it is left earlier than others.
    options: dict[str, Any] = {"batch": 1 << 19, "before_fork": True, "stout": 330_000_000}
    return Engine("gigatoken", _version("gigatoken"), encode, renew=renew, **options)


def _without_extras(value: Any, specials: bool) -> bytes:
    """gigatoken has no switch for these: what would cut, pad or turn text into special tokens is taken out of the file."""
    added = [token for token in value.get("added_tokens") or [] if specials or not token.get("special")]
    return dump_json({**value, "truncation": None, "padding": None, "post_processor": None, "added_tokens": added})


def _joined(parts: Iterable[Any], offset: np.uint32, eos: int | None) -> Flat:
    """One array of many, with `offset` added to their ids, and `eos` after each if it is given."""
    arrays = [np.asarray(part, dtype=np.uint32) for part in parts]
    lengths = np.fromiter((len(array) for array in arrays), dtype=np.int64, count=len(arrays))
    if eos is not None:
        end = np.array([(eos - int(offset)) % 2**32], dtype=np.uint32)
        arrays = [array for part in arrays for array in (part, end)]
        lengths += 1
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.uint32)
    if offset:
        flat += offset
    return flat, np.concatenate([_ZERO, np.cumsum(lengths)])


def _ended(ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64], eos: int | None) -> Flat:
    """A flat array with `eos` put after each text."""
    if eos is None:
        return ids, offsets
    ends = offsets + np.arange(len(offsets))
    out = np.empty(int(ends[-1]), dtype=np.uint32)
    body = np.ones(len(out), dtype=bool)
    body[ends[1:] - 1] = False
    out[body], out[ends[1:] - 1] = ids, eos
    return out, ends


_ZERO = np.zeros(1, dtype=np.int64)


def _tiktoken(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    if not isinstance(tokenizer, RanksTokenizer):
        raise UnsuitedError(f"cannot read a {tokenizer.kind} tokenizer")
    inner, offset = tokenizer.inner, np.uint32(tokenizer.offset)
    allowed: Any = "all" if specials else set()

    def encode(texts: list[str], eos: int | None) -> Flat:
        parts = (inner.encode_to_numpy(text, allowed_special=allowed, disallowed_special=()) for text in texts)
        return _joined(parts, offset, eos)

    return Engine("tiktoken", _version("tiktoken"), encode)


def _tokenizers(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(_converted(tokenizer, specials, cache))
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = not specials
    offset = np.uint32(tokenizer.offset)

    def encode(texts: list[str], eos: int | None) -> Flat:
        found = inner.encode_batch_fast(texts, add_special_tokens=False)
        return _joined((encoding.ids for encoding in found), offset, eos)

    return Engine("tokenizers", _version("tokenizers"), encode)


def _sentencepiece(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise UnsuitedError(f"cannot read a {tokenizer.kind} tokenizer")
    inner = tokenizer.inner

    def encode(texts: list[str], eos: int | None) -> Flat:
        return _joined(inner.encode(texts, num_threads=1), np.uint32(0), eos)

    return Engine("sentencepiece", _version("sentencepiece"), encode)


_LOADERS: dict[str, Callable[[Tokenizer, bool, Path | None], Engine]] = {
    "fastokens": _fastokens, "gigatoken": _gigatoken, "tiktoken": _tiktoken, "tokenizers": _tokenizers, "sentencepiece": _sentencepiece,
}  # fmt: skip
