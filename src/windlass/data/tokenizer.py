"""How does text become numbers, exactly? The reference reader of each kind of tokenizer file; engines are checked against it.

Kinds: `json` (Hugging Face tokenizers), `ranks` (tiktoken's base64 ranks, as Llama-3's tokenizer.model), `tekken` (Mistral's JSON)
and `sentencepiece`. Text that looks like a special token is ordinary text unless `specials` asks otherwise; nothing is stripped.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.errors import DataError
from windlass.files import write_atomic

_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
# A file of ranks says neither how text is split nor which ids are special; the number of ranks tells the published ones apart.
_RANKS = {
    128_000: ("llama-3", _CL100K, 128_256, 128_001, "<|end_of_text|>"),
    200_000: ("llama-4", _O200K, 202_048, 200_001, "<|end_of_text|>"),
    100_256: ("cl100k", _CL100K, 100_277, 100_257, "<|endoftext|>"),
    199_998: ("o200k", _O200K, 200_019, 199_999, "<|endoftext|>"),
    151_643: ("qwen", _QWEN, 151_936, 151_643, "<|endoftext|>"),
}


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer file and what must be known of it before a token is written."""

    path: Path
    kind: str
    vocab_size: int
    """One more than the largest id, specials included."""
    eos: int | None

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def engine_json(self, *, specials: bool = False) -> str | None:
        """The same tokenizer as a Hugging Face JSON, for engines that read only that; None when it cannot be said."""
        return None

    @property
    def offset(self) -> int:
        """What to add to the ids an engine gets from `engine_json`."""
        return 0


@dataclass(frozen=True)
class JsonTokenizer(Tokenizer):
    @cached_property
    def _inner(self) -> Any:
        if (cut := self.__dict__.get("_cut")) is not None:
            inner = _read_json_tokenizer(self.path, cut[0])
            self._agree(inner, cut[1])
        else:
            inner = _read_json_tokenizer(self.path)
            self._agree(inner, self.__dict__.get("added", {}))
        return inner

    def _agree(self, inner: Any, added: dict[str, int]) -> None:
        """Ids of added tokens were read off the file: the library has the last word."""
        for name, number in added.items():
            if inner.token_to_id(name) != number:
                raise DataError(
                    "data.token-tokenizers-library-expected",
                    f"{self.path}: the token {name!r} is {inner.token_to_id(name)} to the tokenizers library, {number} was expected",
                    hint="this is a fault in windlass; please report it with the version of tokenizers",
                )

    def cut_to(self, texts: Sequence[str]) -> None:
        """Until `forget`, whoever reads the file first gets an answer for these texts only: what they cannot touch of a plain
        byte-level BPE is left out. Added tokens then have other ids, by the same rule; that rule is compared with the library's."""
        from windlass.data.reference import small_json

        if "_inner" not in self.__dict__ and (small := small_json(self.parsed, texts)) is not None:
            plain = _plain_ids(small)
            self.__dict__["_cut"] = dump_json(small), plain[1] if plain else {}

    @cached_property
    def parsed(self) -> Any:
        """The file as JSON: tens of megabytes, so whoever needs it no longer calls `forget`."""
        return parse_json(self.path.read_bytes())

    def forget(self) -> None:
        self.__dict__.pop("parsed", None)
        self.__dict__.pop("_cut", None)

    def token_id(self, name: str) -> int | None:
        if (added := self.__dict__.get("added")) is None:
            number: int | None = self._inner.token_to_id(name)
            return number
        return added.get(name, self.parsed["model"]["vocab"].get(name))  # type: ignore[no-any-return]

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        self._inner.encode_special_tokens = not specials
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._inner.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def engine_json(self, *, specials: bool = False) -> str | None:
        return self.path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class RanksTokenizer(Tokenizer):
    """tiktoken's ranks, and tekken's, whose ids start after its special ones."""

    pattern: str
    first: int
    """Id of rank 0."""
    specials: tuple[tuple[str, int], ...]

    @property
    def offset(self) -> int:
        return self.first

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        return _read_tekken(self.path)[0] if self.kind == "tekken" else _read_ranks(self.path)

    @cached_property
    def inner(self) -> Any:
        tiktoken = _need("tiktoken")
        inner_specials = {name: number - self.first for name, number in self.specials if number >= self.first}
        return tiktoken.Encoding(
            self.path.name, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=inner_specials
        )

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        allowed: Any = "all" if specials else set()
        return [i + self.first for i in self.inner.encode(text, allowed_special=allowed, disallowed_special=())]

    def decode(self, ids: Iterable[int]) -> str:
        names = {number: name.encode() for name, number in self.specials}
        parts = (names[int(i)] if int(i) in names else self.inner.decode_bytes([int(i) - self.first]) for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def engine_json(self, *, specials: bool = False) -> str | None:
        return ranks_to_json(self.ranks, self.pattern)


@dataclass(frozen=True)
class SentencePieceTokenizer(Tokenizer):
    @cached_property
    def inner(self) -> Any:
        return _read_sentencepiece(self.path)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        ids: list[int] = self.inner.encode(text)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.inner.decode([int(i) for i in ids])
        return text


def load_tokenizer(path: Path | str, *, eos: str | int | None = None, glance: bool = False) -> Tokenizer:
    """The tokenizer of a file or folder. `eos` overrides which token ends a document, by name or id.

    `glance`: read off a JSON only what must be known before the first token. The library that is the reference then reads the file
    when a text is first encoded, wherever that happens, and complains there if it cannot.
    """
    file = _find(Path(path))
    made = _open(file, glance=glance)
    if eos is not None:
        object.__setattr__(made, "eos", _named_eos(made, eos))
    if isinstance(made, JsonTokenizer) and not glance:
        made.forget()
    return made


def _open(file: Path, *, glance: bool) -> Tokenizer:
    head = _head(file)
    if file.suffix == ".json" or head.lstrip()[:1] == b"{":
        return _open_tekken(file) if _is_tekken(file) else _open_json(file, glance=glance)
    if _looks_like_ranks(head):
        return _open_ranks(file)
    return _open_sentencepiece(file)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        for name in ("tokenizer.json", "tekken.json", "tokenizer.model"):
            if (path / name).is_file():
                return path / name
        for found in sorted([*path.glob("*.tiktoken"), *path.glob("*.model"), *path.glob("tekken*.json")]):
            return found
    what = "holds no tokenizer file" if path.is_dir() else "does not exist"
    raise DataError(
        "data.tokenizer",
        f"the tokenizer {path} {what}",
        hint="name a tokenizer.json, a tokenizer.model (tiktoken ranks or SentencePiece), a tekken.json, or their folder",
    )


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(4096)
    except OSError as error:
        raise DataError(
            "data.tokenizer-cannot-read",
            f"the tokenizer {file} cannot be read: {error.strerror}",
            hint="check its permissions",
        ) from None


def _looks_like_ranks(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0].split()
    return len(first) == 2 and first[1].isdigit()


def _need(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(
            "data.tokenizer-needs-package-installed",
            f"this tokenizer needs the package {package!r}, which is not installed",
            hint="pip install 'windlass[data]'",
        ) from None


# -- Hugging Face JSON ---------------------------------------------------------------------------------------------


def _read_json_tokenizer(file: Path, raw: bytes | None = None) -> Any:
    # A tokenizer that was used before a fork must not have threads of its own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizers = _need("tokenizers")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file)) if raw is None else tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:
        raise DataError(
            "data.tokenizers-json",
            f"{file} is not a tokenizers JSON: {error}",
            hint="is it the tokenizer.json of a model, whole and unchanged?",
        ) from None
    inner.no_truncation()
    inner.no_padding()
    return inner


def parse_json(raw: bytes) -> Any:
    try:
        import orjson

        return orjson.loads(raw)
    except ImportError:  # ten times slower, same answers
        return json.loads(raw)


def dump_json(value: Any) -> bytes:
    try:
        import orjson

        return orjson.dumps(value)
    except ImportError:
        return json.dumps(value, ensure_ascii=False).encode()


def _open_json(file: Path, *, glance: bool) -> Tokenizer:
    made = _glance(file)
    if made is None or not glance:  # the library says what is wrong with a file better than we could
        inner = _read_json_tokenizer(file)
        made = made or _ask(file, inner)
        made.__dict__["_inner"] = inner  # what cached_property would read again
    return made


def _ask(file: Path, inner: Any) -> JsonTokenizer:
    names = {token.content: number for number, token in inner.get_added_tokens_decoder().items()}
    size = max([inner.get_vocab_size(with_added_tokens=True), *(number + 1 for number in names.values())])
    return JsonTokenizer(file, "json", size, _json_eos(file, lambda name: names.get(name, inner.token_to_id(name))))


def _glance(file: Path) -> JsonTokenizer | None:
    """Vocabulary size and end token read off the JSON; None where only the library can tell."""
    try:
        value = parse_json(file.read_bytes())
        if (plain := _plain_ids(value)) is None:
            return None
        vocab, added = plain
        largest = max(vocab.values(), default=-1)
        if largest >= len(vocab) and not added.keys() <= vocab.keys():
            return None  # ids with holes: whether an added token goes into one depends on the library's version
        size = 1 + max([*added.values(), largest])
    except (ValueError, TypeError):
        return None
    made = JsonTokenizer(file, "json", size, _json_eos(file, lambda name: added.get(name, vocab.get(name))))
    made.__dict__.update(parsed=value, added=added)
    return made


def _plain_ids(value: Any) -> tuple[dict[str, int], dict[str, int]] | None:
    """(ids of the model, ids of the added tokens) as the library numbers them; None where the vocabulary is no plain table.

    An added token that the model knows keeps its id; the others follow the vocabulary in the order of the file, whatever it says.
    """
    try:
        vocab, added = value["model"]["vocab"], [token["content"] for token in value.get("added_tokens") or []]
        if not isinstance(vocab, dict) or not all(added):
            return None
        fresh = dict.fromkeys(name for name in added if name not in vocab)
    except (AttributeError, KeyError, TypeError):
        return None
    numbers = {name: len(vocab) + place for place, name in enumerate(fresh)}
    return vocab, {name: numbers[name] if name in numbers else vocab[name] for name in added}


def _json_eos(file: Path, find: Callable[[str], int | None]) -> int | None:
    beside = file.with_name("tokenizer_config.json")
    wanted = None
    if beside.is_file():
        wanted = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
        wanted = wanted.get("content") if isinstance(wanted, dict) else wanted
    for name in ([wanted] if wanted else []) + list(_EOS_NAMES):
        if (number := find(name)) is not None:
            return int(number)
    return None


def _named_eos(made: Tokenizer, eos: str | int) -> int:
    if isinstance(eos, int):
        if not 0 <= eos < made.vocab_size:
            raise DataError(
                "data.eos-lies-outside-tokenizer",
                f"eos = {eos} lies outside the tokenizer's {made.vocab_size:,} ids",
                hint="name a token of the tokenizer",
            )
        return eos
    number: int | None = None
    if isinstance(made, JsonTokenizer):
        number = made.token_id(eos)
    elif isinstance(made, RanksTokenizer):
        number = dict(made.specials).get(eos)
    elif isinstance(made, SentencePieceTokenizer):
        number = made.inner.piece_to_id(eos) if made.inner.piece_to_id(eos) != made.inner.unk_id() else None
    if number is None:
        raise DataError(
            "data.tokenizer-token",
            f"the tokenizer {made.path} has no token {eos!r}",
            hint="name one of its special tokens, or an id",
        )
    return number


# -- ranks ---------------------------------------------------------------------------------------------------------


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                "data.line-base-token-rank",
                f"{file}, line {number}: not a base64 token and its rank",
                hint="the file was cut or is of another kind",
            ) from None
    return ranks


def _open_ranks(file: Path) -> Tokenizer:
    ranks = _read_ranks(file)
    if len(ranks) not in _RANKS:
        known = ", ".join(f"{count:,} ({entry[0]})" for count, entry in _RANKS.items())
        raise DataError(
            "data.ranks-tokenizer-known-here",
            f"{file} has {len(ranks):,} ranks, which no tokenizer known here has",
            hint=f"known counts: {known}; convert others to a tokenizer.json, which carries its split pattern",
        )
    name, pattern, size, eos, eos_name = _RANKS[len(ranks)]
    specials = [(eos_name, eos), *([("<|begin_of_text|>", eos - 1)] if name.startswith("llama") else [])]
    made = RanksTokenizer(file, "ranks", size, eos, pattern, 0, tuple(specials))
    made.__dict__["ranks"] = ranks
    return made


def _is_tekken(file: Path) -> bool:
    # A tekken file is 15 MB of JSON: look before parsing.
    head = _head(file)
    return (b'"config"' in head and b'"default_num_special_tokens"' in head) or (
        b'"token_bytes"' in head and b'"rank"' in head
    )


def _read_tekken(file: Path) -> tuple[dict[bytes, int], dict[str, Any]]:
    try:
        value = json.loads(file.read_bytes())
        config = value["config"]
        used = config["default_vocab_size"] - config["default_num_special_tokens"]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in value["vocab"][:used]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "data.tekken-tokenizer",
            f"{file} is not a tekken tokenizer: {error}",
            hint="it should have config, vocab and their fields",
        ) from None
    config["special_tokens"] = value.get("special_tokens") or []
    return ranks, config


def _open_tekken(file: Path) -> Tokenizer:
    ranks, config = _read_tekken(file)
    specials = {entry["token_str"]: int(entry["rank"]) for entry in config["special_tokens"]}
    specials = {"<unk>": 0, "<s>": 1, "</s>": 2} | specials
    made = RanksTokenizer(
        file,
        "tekken",
        config["default_vocab_size"],
        specials["</s>"],
        config["pattern"],
        config["default_num_special_tokens"],
        tuple(specials.items()),
    )
    made.__dict__["ranks"] = ranks
    return made


def byte_names() -> str:
    """The printable character that stands for each byte in a byte-level vocabulary, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return "".join(chr(b) if b in plain else chr(next(others)) for b in range(256))


def ranks_to_json(ranks: dict[bytes, int], pattern: str) -> str:
    """A Hugging Face JSON with the same ids: a token's merges are all its splits into two known tokens."""
    table = dict(enumerate(byte_names()))
    name = {token: token.decode("latin-1").translate(table) for token in ranks}
    merges: list[str] = []
    for token in ranks:
        merges.extend(f"{name[a]} {name[b]}" for a, b in _splits(token, ranks))
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": None, "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": True, "vocab": {name[token]: rank for token, rank in ranks.items()}, "merges": merges,
        },
    }, ensure_ascii=False)  # fmt: skip


def _splits(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    if len(token) < 2:
        return []
    pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    return sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])) if len(pairs) > 1 else pairs


# -- SentencePiece -------------------------------------------------------------------------------------------------


def _read_sentencepiece(file: Path) -> Any:
    sentencepiece = _need("sentencepiece")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        raise DataError(
            "data.tokenizer-windlass-knows",
            f"{file} is no tokenizer that windlass knows",
            hint=f"SentencePiece said: {str(error).strip() or type(error).__name__}",
        ) from None


def _open_sentencepiece(file: Path) -> Tokenizer:
    inner = _read_sentencepiece(file)
    made = SentencePieceTokenizer(
        file, "sentencepiece", inner.vocab_size(), inner.eos_id() if inner.eos_id() >= 0 else None
    )
    made.__dict__["inner"] = inner
    return made


# -- training ------------------------------------------------------------------------------------------------------


def train_bpe(
    texts: Iterable[str] | Sequence[Path],
    vocab: int,
    out: Path | str,
    *,
    eos: str = "<|end_of_text|>",
    progress: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE of `vocab` ids (the end token included) and write it as a tokenizers JSON. The same texts give the same file."""
    if vocab < 257 + 1:
        raise DataError(
            "data.byte-level-vocabulary-too",
            f"a byte-level vocabulary of {vocab} is too small",
            hint="256 bytes and the end token need 257 ids; 8,000 is a small real one",
        )
    tokenizers = _need("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    # Digits in groups of up to three and words with their leading space, as Llama-3 splits them.
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(_CL100K), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[eos], initial_alphabet=sorted(byte_names()), show_progress=progress
    )
    inner.train_from_iterator(_texts(texts), trainer)
    target = Path(out)
    target = target / "tokenizer.json" if target.suffix != ".json" else target
    write_atomic(target, inner.to_str(pretty=False))
    return load_tokenizer(target)


def _texts(texts: Iterable[str] | Sequence[Path]) -> Iterator[str]:
    for item in texts:
        if isinstance(item, Path):
            yield item.read_text(encoding="utf-8", errors="replace")
        else:
            yield item
