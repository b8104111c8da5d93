"""Tokenizer files and their reference implementations; engines are checked against these.

Kinds: `json` (Hugging Face tokenizers), `ranks` (base64 ranks of tiktoken, such as Llama-3's tokenizer.model), `tekken`
(Mistral's JSON) and `sentencepiece`. Text that looks like a special token is ordinary text unless `specials` is set;
nothing is stripped.
"""

import base64
import binascii
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data import import_optional, orjson
from windlass.errors import DataError
from windlass.files import write_atomic

_FILE_NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model", "*.model", "*.tiktoken", "tekken*.json")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
# A file of ranks has neither the split pattern nor the special ids; the number of ranks identifies published ones.
# Number of ranks -> (name, split pattern, vocabulary size, end token's id, end token)
_PUBLISHED_RANKS = {
    128_000: ("llama-3", _CL100K, 128_256, 128_001, "<|end_of_text|>"),
    200_000: ("llama-4", _O200K, 202_048, 200_001, "<|end_of_text|>"),
    100_256: ("cl100k", _CL100K, 100_277, 100_257, "<|endoftext|>"),
    199_998: ("o200k", _O200K, 200_019, 199_999, "<|endoftext|>"),
    151_643: ("qwen", _QWEN, 151_936, 151_643, "<|endoftext|>"),
}

FindId = Callable[[str], int | None]  # from the name of a special token to its id


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer file with its vocabulary size (largest id + 1, special tokens included) and end-of-document token."""

    path: Path
    kind: str
    vocab_size: int
    eos: int | None
    offset: int = field(default=0, kw_only=True)  # id of rank 0, added to the ids of an engine that gives ranks

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class JsonTokenizer(Tokenizer):
    """A Hugging Face tokenizer.json.

    Optional state in `__dict__`: `added`, ids of added tokens that were read off the file; `_cut`, a file reduced to
    what a sample of texts can touch and its added ids; `_inner`, the library's tokenizer.
    """

    @cached_property
    def _inner(self) -> Any:
        raw, added = self.__dict__.get("_cut") or (None, self.__dict__.get("added", {}))
        inner = load_json_tokenizer(self.path, raw)
        for name, number in added.items():  # read off the file: check them against the library
            if inner.token_to_id(name) != number:
                raise DataError(
                    "data.token-id-mismatch",
                    f"{self.path}: the tokenizers library gives the token {name!r} the id {inner.token_to_id(name)}, "
                    f"{number} was expected",
                    hint="this is a bug in windlass; please report it with the version of tokenizers",
                )
        return inner

    def cut_to(self, texts: Sequence[str]) -> None:
        """Until `forget`, load only what these texts can touch, if the file has not been loaded already.

        Added tokens then have other ids, numbered by the same rule, which is checked against the library's.
        """
        if "_inner" not in self.__dict__ and (small := reduce_json(self.parsed, texts)) is not None:
            ids = _ids_in_file(small)
            self.__dict__["_cut"] = dump_json(small), ids[1] if ids else {}

    @cached_property
    def parsed(self) -> Any:
        """The file as JSON: tens of megabytes, freed by `forget`."""
        return parse_json(self.path.read_bytes())

    def forget(self) -> None:
        self.__dict__.pop("parsed", None)
        self.__dict__.pop("_cut", None)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        self._inner.encode_special_tokens = not specials
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_with_offsets(self, text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Ids, special tokens of the text included, and where in the text each begins and ends (tokens, 2)."""
        self._inner.encode_special_tokens = False
        encoding = self._inner.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=np.uint32), offsets

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))


@dataclass(frozen=True)
class RanksTokenizer(Tokenizer):
    """tiktoken's ranks, and tekken's, whose ranks begin after its special tokens."""

    pattern: str
    specials: tuple[tuple[str, int], ...]
    ranks: dict[bytes, int] = field(repr=False, compare=False)

    @cached_property
    def inner(self) -> Any:
        inner_specials = {name: number - self.offset for name, number in self.specials if number >= self.offset}
        return import_optional("tiktoken").Encoding(
            self.path.name, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=inner_specials
        )

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        allowed: Any = "all" if specials else set()
        return [i + self.offset for i in self.inner.encode(text, allowed_special=allowed, disallowed_special=())]

    def decode(self, ids: Iterable[int]) -> str:
        names = {number: name.encode() for name, number in self.specials}
        parts = (names[int(i)] if int(i) in names else self.inner.decode_bytes([int(i) - self.offset]) for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class SentencePieceTokenizer(Tokenizer):
    inner: Any = field(repr=False, compare=False)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        return list(self.inner.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode([int(i) for i in ids]))


# -- opening -------------------------------------------------------------------------------------------------------


def load_tokenizer(path: Path | str, *, eos: str | int | None = None, glance: bool = False) -> Tokenizer:
    """The tokenizer of a file or folder. `eos` overrides which token ends a document, by name or id.

    `glance`: read from a JSON only what is needed before the first text. The library then loads the file when a text is
    first encoded, and fails there if it cannot.
    """
    path = Path(path)
    candidates = [file for name in _FILE_NAMES for file in sorted(path.glob(name))] if path.is_dir() else [path]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        raise DataError(
            "data.tokenizer-missing",
            f"the tokenizer {path} {'has no tokenizer file' if path.is_dir() else 'does not exist'}",
            hint="name a tokenizer.json, a tokenizer.model (tiktoken ranks or SentencePiece), a tekken.json, "
            "or their folder; to train one: windlass tokenizer train DATA.toml --out FOLDER",
        )
    try:
        with file.open("rb") as opened:
            head = opened.read(4096)
    except OSError as error:
        raise DataError(
            "data.tokenizer-unreadable",
            f"the tokenizer {file} cannot be read: {error.strerror}",
            hint="check its permissions",
        ) from None
    first_line = head.split(b"\n", 1)[0].split()
    tokenizer: Tokenizer
    find_id: FindId
    # A tekken file is 15 MB of JSON: look at its beginning instead of parsing it.
    if (b'"config"' in head and b'"default_num_special_tokens"' in head) or (
        b'"token_bytes"' in head and b'"rank"' in head
    ):
        tokenizer, find_id = _open_tekken(file)
    elif file.suffix == ".json" or head.lstrip()[:1] == b"{":
        tokenizer, find_id = _open_json(file, glance=glance)
    elif len(first_line) == 2 and first_line[1].isdigit():
        tokenizer, find_id = _open_ranks(file)
    else:
        sentencepiece = import_optional("sentencepiece")
        try:
            inner = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except Exception as error:
            raise DataError(
                "data.tokenizer-damaged",
                f"{file} is not a tokenizer of a known kind",
                hint=f"SentencePiece: {str(error).strip() or type(error).__name__}",
            ) from None
        end = inner.eos_id() if inner.eos_id() >= 0 else None
        tokenizer = SentencePieceTokenizer(file, "sentencepiece", inner.vocab_size(), end, inner)
        find_id = {inner.id_to_piece(number): number for number in range(inner.vocab_size())}.get
    if eos is not None:
        number = find_id(eos) if isinstance(eos, str) else eos
        if number is None or not 0 <= number < tokenizer.vocab_size:
            raise DataError(
                "data.eos-unknown",
                f"eos = {eos!r} is not a token of {file}, which has {tokenizer.vocab_size:,} ids",
                hint="give one of its special tokens, or an id",
            )
        object.__setattr__(tokenizer, "eos", number)
    if isinstance(tokenizer, JsonTokenizer) and not glance:
        tokenizer.forget()
    return tokenizer


def parse_json(raw: bytes) -> Any:
    return orjson.loads(raw) if orjson else json.loads(raw)


def dump_json(value: Any) -> bytes:
    return orjson.dumps(value) if orjson else json.dumps(value, ensure_ascii=False).encode()


def load_json_tokenizer(file: Path, raw: bytes | None = None) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive a fork
    tokenizers = import_optional("tokenizers")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file)) if raw is None else tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:
        raise DataError(
            "data.tokenizer-damaged",
            f"{file} is not a tokenizers JSON: {error}",
            hint="use the complete and unchanged tokenizer.json of a model",
        ) from None
    inner.no_truncation()
    inner.no_padding()
    return inner


def _open_json(file: Path, *, glance: bool) -> tuple[Tokenizer, FindId]:
    """Vocabulary size and end token come from the file where its vocabulary is a plain table, else from the library."""
    ids = None
    with contextlib.suppress(ValueError, TypeError):  # the library describes better what is wrong with a file
        value = parse_json(file.read_bytes())
        vocab, added = _ids_in_file(value) or ({}, {})
        # Whether an added token goes into a gap between ids depends on the library's version.
        has_gaps = max(vocab.values(), default=-1) >= len(vocab) and not added.keys() <= vocab.keys()
        ids = None if has_gaps or not vocab else (vocab, added)
    state: dict[str, Any] = {}
    if ids is None or not glance:
        state["_inner"] = inner = load_json_tokenizer(file)
    find_in_vocab: FindId
    if ids is None:
        added = {token.content: number for number, token in inner.get_added_tokens_decoder().items()}
        find_in_vocab, size = inner.token_to_id, inner.get_vocab_size(with_added_tokens=True)
    else:
        find_in_vocab, size = vocab.get, 1 + max(vocab.values())
        state |= {"parsed": value, "added": added}

    def find(name: str) -> int | None:
        return added.get(name, find_in_vocab(name))

    config = file.with_name("tokenizer_config.json")
    wanted = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    wanted = wanted.get("content") if isinstance(wanted, dict) else wanted
    numbers = map(find, [wanted, *_EOS_NAMES] if wanted else _EOS_NAMES)
    eos = next((number for number in numbers if number is not None), None)
    tokenizer = JsonTokenizer(file, "json", max([size, *(number + 1 for number in added.values())]), eos)
    tokenizer.__dict__.update(state)
    return tokenizer, find


def _ids_in_file(value: Any) -> tuple[dict[str, int], dict[str, int]] | None:
    """(ids of the model, ids of added tokens) as the library numbers them; None if the vocabulary is not a plain table.

    An added token that the model has keeps its id; the others follow the vocabulary in the order of the file, whatever
    ids it gives them.
    """
    try:
        vocab, added = value["model"]["vocab"], [token["content"] for token in value.get("added_tokens") or []]
        if not isinstance(vocab, dict) or not all(added):
            return None
        new_names = dict.fromkeys(name for name in added if name not in vocab)
    except (AttributeError, KeyError, TypeError):
        return None
    numbers = {name: len(vocab) + place for place, name in enumerate(new_names)}
    return vocab, {name: numbers[name] if name in numbers else vocab[name] for name in added}


def _open_ranks(file: Path) -> tuple[Tokenizer, FindId]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                "data.tokenizer-damaged",
                f"{file}, line {number}: not a base64 token and its rank",
                hint="check that the file is complete and has this format",
            ) from None
    if len(ranks) not in _PUBLISHED_RANKS:
        counts = ", ".join(f"{count:,} ({entry[0]})" for count, entry in _PUBLISHED_RANKS.items())
        raise DataError(
            "data.ranks-unknown",
            f"{file} has {len(ranks):,} ranks, which no supported tokenizer has",
            hint=f"supported counts: {counts}; convert others to a tokenizer.json, which includes its split pattern",
        )
    name, pattern, size, eos, eos_name = _PUBLISHED_RANKS[len(ranks)]
    specials = [(eos_name, eos), *([("<|begin_of_text|>", eos - 1)] if name.startswith("llama") else [])]
    return RanksTokenizer(file, "ranks", size, eos, pattern, tuple(specials), ranks), dict(specials).get


def _open_tekken(file: Path) -> tuple[Tokenizer, FindId]:
    try:
        value = json.loads(file.read_bytes())
        config = value["config"]
        size, first = config["default_vocab_size"], config["default_num_special_tokens"]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in value["vocab"][: size - first]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "data.tokenizer-damaged",
            f"{file} is not a tekken tokenizer: {error}",
            hint="use a tekken.json with config, vocab and their fields",
        ) from None
    specials = {"<unk>": 0, "<s>": 1, "</s>": 2}
    specials |= {entry["token_str"]: int(entry["rank"]) for entry in value.get("special_tokens") or []}
    eos, pattern, names = specials["</s>"], config["pattern"], tuple(specials.items())
    return RanksTokenizer(file, "tekken", size, eos, pattern, names, ranks, offset=first), specials.get


# -- conversion ----------------------------------------------------------------------------------------------------


def byte_names() -> str:
    """The printable character that stands for each byte in a byte-level vocabulary, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return "".join(chr(b) if b in printable else chr(next(others)) for b in range(256))


def ranks_to_json(ranks: dict[bytes, int], pattern: str) -> str:
    """A Hugging Face JSON with the same ids: the merges of a token are all its splits into two tokens."""
    table = dict(enumerate(byte_names()))
    name = {token: token.decode("latin-1").translate(table) for token in ranks}
    merges: list[str] = []
    for token in ranks:
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges.extend(f"{name[left]} {name[right]}" for left, right in pairs)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
        "vocab": {name[token]: rank for token, rank in ranks.items()}, "merges": merges,
    }  # fmt: skip
    value: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": None,
        "decoder": {**level, "use_regex": True}, "model": model,
    }  # fmt: skip
    return json.dumps(value, ensure_ascii=False)


_MAX_PART = (
    8  # a token of up to 8 characters is kept if it occurs in the texts; a longer one if its first and last 8 do
)
_SPLITTERS = {
    "Split",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
}  # they cut a text and change no character
_SPECIAL_RULES = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk",
)  # fmt: skip


def reduce_json(value: Any, texts: Iterable[str]) -> dict[str, Any] | None:
    """A parsed tokenizer.json reduced to what can matter for `texts`; None where the file does not tell what can.

    A byte-level BPE joins two tokens only where their bytes are adjacent in the text. Tokens and merges whose bytes
    do not occur in the texts decide nothing about them: without these the library loads in a tenth of the time and
    gives the same ids. Where anything else could decide (a normalizer, an unknown token, added words), the complete
    file is needed.
    """
    table = dict(enumerate(byte_names()))
    named = " ".join(text.encode().decode("latin-1").translate(table) for text in texts)  # no byte is named " "
    parts = {named[i : i + size] for size in range(1, _MAX_PART + 1) for i in range(len(named))}
    try:
        model, added = value["model"], value.get("added_tokens") or []
        step = value.get("pre_tokenizer")
        *splitters, last = step["pretokenizers"] if step["type"] == "Sequence" else [step]
        vocab, merges = model["vocab"], model["merges"]
        is_known = (
            model.get("type") == "BPE"
            and not any(model.get(key) for key in _SPECIAL_RULES)
            and last["type"] == "ByteLevel"
            and not last.get("add_prefix_space")
            and value.get("normalizer") is None
            and all(token["content"] in vocab for token in added if not token.get("special"))
            and all(splitter["type"] in _SPLITTERS for splitter in splitters)
        )
        if not is_known:
            return None
        kept = {
            name: number
            for name, number in vocab.items()
            if len(name) == 1 or (name[:_MAX_PART] in parts and name[-_MAX_PART:] in parts)
        }
        in_vocab = [token for token in added if token["content"] in vocab]
        new = [token for token in added if token["content"] not in vocab]
        kept |= {token["content"]: vocab[token["content"]] for token in in_vocab}  # not named by its bytes in the text
        if merges and isinstance(merges[0], str):
            pairs = [merge.split(" ") for merge in merges if merge.replace(" ", "", 1) in kept]
        else:
            pairs = [[left, right] for left, right in merges if left + right in kept]
        kept |= {name: vocab[name] for pair in pairs for name in pair}  # merges may only name tokens of the vocabulary
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    # New tokens first: tokenizers 0.21 numbers them after the largest id so far, which may lie far beyond what is kept.
    unused = dict.fromkeys(("truncation", "padding", "post_processor", "decoder"))
    return {**value, **unused, "added_tokens": [*new, *in_vocab], "model": {**model, "vocab": kept, "merges": pairs}}


# -- training ------------------------------------------------------------------------------------------------------


def tokenizer_file(out: Path) -> Path:
    """The file that `train_bpe` writes."""
    return out if out.suffix == ".json" else out / "tokenizer.json"


def train_bpe(
    texts: Iterable[str] | Sequence[Path],
    vocab: int,
    out: Path | str,
    *,
    eos: str = "<|end_of_text|>",
    progress: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE of `vocab` ids (the end token included) and write it as a tokenizers JSON.

    The same texts give the same file.
    """
    if vocab < 257:
        raise DataError(
            "data.vocabulary-too-small",
            f"a byte-level vocabulary of {vocab} ids is too small",
            hint="use at least 257 ids (256 bytes and the end token); 8,000 is a small real vocabulary",
        )
    tokenizers = import_optional("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Digits in groups of up to three and words with their leading space, as Llama-3 splits them.
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_CL100K), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[eos], initial_alphabet=sorted(byte_names()), show_progress=progress
    )
    contents = (t.read_text(encoding="utf-8", errors="replace") if isinstance(t, Path) else t for t in texts)
    inner.train_from_iterator(contents, trainer)
    target = tokenizer_file(Path(out))
    write_atomic(target, inner.to_str(pretty=False))
    return load_tokenizer(target)
