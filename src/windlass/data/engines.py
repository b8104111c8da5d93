"""Tokenization engines: each is compared with the reference on a sample of texts and rejected on any difference.

Engines are loaded once, before workers are forked, and used only after that: their thread pools do not survive a fork.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
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
    load_json_tokenizer,
    parse_json,
    ranks_to_json,
)
from windlass.errors import DataError
from windlass.files import write_atomic
from windlass.processes import ForkedWorkers, WorkerDiedError

FlatIds = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
EncodeFunction = Callable[[list[str], int | None], FlatIds]
_ZERO = np.zeros(1, dtype=np.int64)
SAMPLE = (
    "",
    " ",
    "\n\n\n",
    "Hello, world! It's 12345678 o'clock; don't WE'LL they've\r\n\r\n\tend  ",
    "  leading and trailing   spaces   ",
    "def f(x):\n    return x ** 2  # caf\u00e9 \u2026\n\n\nclass A:\n\tpass\n",
    "De waarheid is als een \u00efdee; \u201caan\u00adge\u00adnaam\u201d gro\u00dfe Stra\u00dfe, "
    "na\u00efve fa\u00e7ade, \u0141\u00f3d\u017a, \u0130stanbul",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\u4e2d\u6587\u6587\u672c\uff0c\u6ca1\u6709\u7a7a\u683c\u3002 "
    "\ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 "
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "e\u0301 versus \u00e9, \u2126 versus \u03a9, \ufb01 \u2460 \u00bd \u1e9e",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f4\U000e0067\U000e0062 "
    "\u200b\ufeff\u00a0\u3000\u2028x\x00\x01\x7f",
    "<|end_of_text|> <|begin_of_text|> <|endoftext|> </s> <s> <unk> <pad> [INST] [/INST] <|im_start|>user<|im_end|>",
    "a" * 3000,
    " " * 3000 + "x",
    "9" * 1000 + " 3.14159e-10 0x7fffffff 1,234,567.89",
    "http://www.example.org/~user/index.html?q=a+b&c=%20#frag user@example.org C:\\dir\\file.txt",
    "\u4e00\u4e8c\u4e09" * 700,
    "\n\r\n\r \t\x0b\x0c\x85 \u2003 a\u00a0b",
)


class UnsupportedTokenizerError(DataError):
    """The engine does not support this kind of tokenizer, which needs no report."""


class Engine:
    """`encode` turns texts into one flat array of ids and the offsets between which the ids of each text lie.

    Its second argument is the id that ends a document, or None. Adding it there, where the ids are copied anyway, saves
    a second copy. `load` makes such a function; an engine caches every word, so its memory grows until `reload`.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], EncodeFunction],
        *,
        batch_chars: int = 1 << 22,  # to encode in one call; most engines have a cost per call
        usable_before_fork: bool = False,  # it starts no threads; what it learns before the fork, all workers share
        max_worker_bytes: int = 400_000_000,  # of memory, shared memory included, before a fresh worker takes over
    ) -> None:
        self.name, self.load, self.encode = name, load, load()
        self.batch_chars, self.usable_before_fork = batch_chars, usable_before_fork
        self.max_worker_bytes = max_worker_bytes

    def reload(self) -> None:
        del self.encode  # first: the old tables and the new ones together may not fit
        self.encode = self.load()


def choose(
    tokenizer: Tokenizer,
    wanted: str = "auto",
    *,
    specials: bool = False,
    sample: Sequence[str] = (),
    cache: Path | None = None,
) -> tuple[Engine, str]:
    """The first engine of ENGINES that is installed, supports this tokenizer and equals the reference on every sample
    text, and the reason for it.

    `cache` is a folder for a converted tokenizer, so that a restart and the tasks of an array need not convert it
    again.
    """
    if specials and (tokenizer.kind == "tekken" or isinstance(tokenizer, SentencePieceTokenizer)):
        raise DataError(
            "data.special-tokens-unsupported",
            f'special_tokens = "parse" is not possible with {tokenizer.path}: '
            f"a {tokenizer.kind} tokenizer never reads them from text",
            hint="use the model's tokenizer.json, which does, or remove special_tokens",
        )
    names = [wanted] if wanted != "auto" else list(ENGINES)
    rejected: list[str] = []
    texts = [*SAMPLE, *sample]
    try:
        for name in names:
            try:
                engine = ENGINES[name](tokenizer, specials, cache)
            except UnsupportedTokenizerError:
                continue
            except Exception as error:  # an engine that cannot load this tokenizer is skipped; the reason is kept
                rejected.append(f"{name}: {_first_line(error)}")
                continue
            if (difference := _compare_in_child(engine, tokenizer, specials, texts)) is None:
                skipped = f"; skipped {'; '.join(rejected)}" if rejected else ""
                return engine, f"{name} {version(name)}, exact on {len(texts)} sample texts{skipped}"
            rejected.append(f"{name}: {difference}")
    finally:
        if isinstance(tokenizer, JsonTokenizer):
            tokenizer.forget()  # also what was cut to the sample: other texts need the complete file
    listed = "\n  ".join(rejected or [f"{name} does not support a {tokenizer.kind} tokenizer" for name in names])
    raise DataError(
        "data.engine-unusable",
        f"no engine can be used for {tokenizer.path}:\n  {listed}",
        hint='pip install "windlass[data]", or choose engine = "auto" in the data file',
    )


def _first_line(error: BaseException) -> str:
    return (
        "not installed" if isinstance(error, ImportError) else str(error).split("\n")[0][:120] or type(error).__name__
    )


def _compare_in_child(engine: Engine, tokenizer: Tokenizer, specials: bool, sample: list[str]) -> str | None:
    """What is wrong with the engine, or None.

    In a forked child: an engine that was used has threads, and the workers are forked from this process. The memory of
    the reference goes with the child, too.
    """
    if isinstance(tokenizer, JsonTokenizer) and not specials:
        tokenizer.cut_to(sample)  # not in the child, which would copy all the memory it looks at

    def compare(connection: Connection, _: int) -> None:
        try:
            connection.send(first_difference(engine, tokenizer, specials, sample))
        except DataError:  # the reference cannot load its file: no engine helps
            raise
        except Exception as error:
            connection.send(f"it failed on the sample: {_first_line(error)}")

    with contextlib.closing(ForkedWorkers(compare, 1)) as child:
        try:
            return next(child.messages(timeout_seconds=300))[1]  # type: ignore[no-any-return]
        except WorkerDiedError:
            return "it crashed on the sample"
        except TimeoutError:
            return "no result within 300 s"


def first_difference(engine: Engine, tokenizer: Tokenizer, specials: bool, sample: list[str]) -> str | None:
    """Where the engine's ids first differ from the reference's, or None."""
    ids, offsets = engine.encode(sample, None)
    if len(offsets) != len(sample) + 1:
        return f"it returned {len(offsets) - 1} texts for {len(sample)}"
    for number, text in enumerate(sample):
        actual = ids[offsets[number] : offsets[number + 1]].tolist()
        expected = tokenizer.encode(text, specials=specials)
        if actual != expected:
            return f"not exact: {len(actual)} ids instead of {len(expected)}, or other ids, for {text[:40]!r}"
    return None


# -- loaders -------------------------------------------------------------------------------------------------------


def _json_file(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Path:
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.path
    if specials:
        raise DataError(
            "data.special-tokens-unsupported",
            'special_tokens = "parse" needs a tokenizers JSON or the tiktoken engine',
        )
    if cache is None:
        raise DataError("data.cache-missing", "needs a folder for the converted tokenizer")
    file = cache / f"tokenizer-{tokenizer.hash[:16]}.json"
    if not file.is_file():
        if not isinstance(tokenizer, RanksTokenizer):
            raise _unsupported(tokenizer)
        write_atomic(file, ranks_to_json(tokenizer.ranks, tokenizer.pattern))
    return file


def _unsupported(tokenizer: Tokenizer) -> UnsupportedTokenizerError:
    return UnsupportedTokenizerError("data.tokenizer-unsupported", f"does not support a {tokenizer.kind} tokenizer")


def load_gigatoken(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    import gigatoken

    offset = np.uint32(tokenizer.offset)

    def load() -> EncodeFunction:
        if isinstance(tokenizer, SentencePieceTokenizer):
            inner = gigatoken.Tokenizer.from_sentencepiece(tokenizer.path)
        else:
            if isinstance(tokenizer, JsonTokenizer):
                value = tokenizer.parsed
            else:
                value = parse_json(_json_file(tokenizer, specials, cache).read_bytes())
            # gigatoken has no switch for what would cut, pad or turn text into special tokens: leave it out of the
            # file.
            added = [token for token in value.get("added_tokens") or [] if specials or not token.get("special")]
            plain = {**value, "truncation": None, "padding": None, "post_processor": None, "added_tokens": added}
            inner = gigatoken.Tokenizer.from_json(dump_json(plain))
        # One by one is as fast as gigatoken's encode_batch, which imports a large package for its result in every
        # worker.
        return lambda texts, eos: _join(map(inner.encode, texts), offset, eos)

    # Its calls cost nothing, and ids that are still in the processor's cache are joined and written in half the time.
    # Its table of words doubles at once.
    return Engine("gigatoken", load, batch_chars=1 << 19, usable_before_fork=True, max_worker_bytes=330_000_000)


def load_fastokens(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # parallelism comes from processes; idle thread pools only cost
    import fastokens

    offset = np.uint32(tokenizer.offset)

    def load() -> EncodeFunction:
        inner = fastokens.Tokenizer.from_file(str(_json_file(tokenizer, specials, cache)))
        inner.no_truncation()

        def encode(texts: list[str], eos: int | None) -> FlatIds:
            raw, ends = inner.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=not specials)
            ids, offsets = np.frombuffer(raw, dtype="<u4"), np.frombuffer(ends, dtype="<u8").astype(np.int64)
            return add_eos(ids + offset if offset else ids, offsets, eos)

        return encode

    return Engine("fastokens", load)


def load_tiktoken(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    if not isinstance(tokenizer, RanksTokenizer):
        raise _unsupported(tokenizer)
    inner, offset = tokenizer.inner, np.uint32(tokenizer.offset)
    allowed: Any = "all" if specials else set()

    def encode(texts: list[str], eos: int | None) -> FlatIds:
        parts = (inner.encode_to_numpy(text, allowed_special=allowed, disallowed_special=()) for text in texts)
        return _join(parts, offset, eos)

    return Engine("tiktoken", lambda: encode)


def load_tokenizers(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    inner = load_json_tokenizer(_json_file(tokenizer, specials, cache))
    inner.encode_special_tokens = not specials
    offset = np.uint32(tokenizer.offset)

    def encode(texts: list[str], eos: int | None) -> FlatIds:
        encodings = inner.encode_batch_fast(texts, add_special_tokens=False)
        return _join((encoding.ids for encoding in encodings), offset, eos)

    return Engine("tokenizers", lambda: encode)


def load_sentencepiece(tokenizer: Tokenizer, specials: bool, cache: Path | None) -> Engine:
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise _unsupported(tokenizer)
    inner, offset = tokenizer.inner, np.uint32(tokenizer.offset)
    return Engine("sentencepiece", lambda: lambda texts, eos: _join(inner.encode(texts, num_threads=1), offset, eos))


def _join(parts: Iterable[Any], offset: np.uint32, eos: int | None) -> FlatIds:
    """One array of many, with `offset` added to their ids and `eos` after each."""
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


def add_eos(ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64], eos: int | None) -> FlatIds:
    """A flat array with `eos` after each text."""
    if eos is None:
        return ids, offsets
    ends = offsets + np.arange(len(offsets))
    out = np.empty(int(ends[-1]), dtype=np.uint32)
    is_text = np.ones(len(out), dtype=bool)
    is_text[ends[1:] - 1] = False
    out[is_text], out[ends[1:] - 1] = ids, eos
    return out, ends


# By CPU time of complete runs: the bare loops of benchmarks/results/tokenize.md.
ENGINES: dict[str, Callable[[Tokenizer, bool, Path | None], Engine]] = {
    "gigatoken": load_gigatoken,
    "fastokens": load_fastokens,
    "tiktoken": load_tiktoken,
    "tokenizers": load_tokenizers,
    "sentencepiece": load_sentencepiece,
}
