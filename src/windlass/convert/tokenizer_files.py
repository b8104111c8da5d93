"""Tokenizer files that transformers reads, written from every kind of tokenizer file that we read. No torch."""

import argparse
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from windlass.data.tokenizer import JsonTokenizer, RanksTokenizer, Tokenizer, load_tokenizer, ranks_to_json
from windlass.errors import DataError
from windlass.files import read_json, write_atomic, write_json

# Files that transformers keeps beside a tokenizer, apart from tokenizer_config.json.
SETTINGS_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> dict[str, int]:
    """Write what `AutoTokenizer.from_pretrained(folder)` reads; it gives the same ids as ours.

    A tokenizer that came with transformers' settings keeps them (begin and end tokens, chat template). Returns the ids
    for config.json: the end token also begins a document, unless the tokenizer has a begin token.
    """
    original = read_json(tokenizer.path.with_name("tokenizer_config.json"))
    settings: dict[str, Any] = {
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    if not isinstance(tokenizer, JsonTokenizer | RanksTokenizer):
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
        settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    else:
        content = tokenizer.path.read_bytes() if isinstance(tokenizer, JsonTokenizer) else json_of_ranks(tokenizer)
        write_atomic(folder / "tokenizer.json", content)
        check_ids(tokenizer, folder / "tokenizer.json")
        end = None if tokenizer.eos is None else tokenizer.decode([tokenizer.eos]) or None
        if original is None:
            specials = {} if end is None else {"eos_token": end, "bos_token": end, "pad_token": end}
            settings |= {"tokenizer_class": "PreTrainedTokenizerFast", **specials}
            write_json(folder / "special_tokens_map.json", specials)
        else:
            original.pop("auto_map", None)  # names code, which is not copied
            original |= {} if _special_token(original, "eos_token") == end else {"eos_token": end}
        names = SETTINGS_FILES if original is not None else SETTINGS_FILES[-1:]  # else only a chat template
        for path in (tokenizer.path.with_name(name) for name in names):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    write_json(folder / "tokenizer_config.json", original or settings)
    if tokenizer.eos is None:
        return {}
    begin = _special_token(original or {}, "bos_token")
    ids = tokenizer.encode(begin, specials=True) if begin else []
    return {"eos_token_id": tokenizer.eos, "bos_token_id": ids[0] if len(ids) == 1 else tokenizer.eos}


def _special_token(settings: dict[str, Any], name: str) -> str | None:
    value = settings.get(name)  # a text, or an object with the text in it
    return value.get("content") if isinstance(value, dict) else value


def check_ids(tokenizer: Tokenizer, written: Path) -> None:
    """The written file must give our ids: with other ids the model is another model."""
    text = Path(argparse.__file__).read_text(encoding="utf-8")[:20_000] + " naïve ÅŁż 日本語 Привет 12345\n\t  x"
    ours, theirs = tokenizer.encode(text), load_tokenizer(written).encode(text)
    if ours != theirs:
        first = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
        raise DataError(
            "convert.tokenizer-ids-differ",
            f"the exported tokenizer gives other ids than {tokenizer.path} from token {first} on",
            hint="convert the tokenizer to a tokenizer.json yourself and name it with --tokenizer",
        )


def json_of_ranks(tokenizer: RanksTokenizer) -> str:
    """A tokenizers JSON with the special tokens at their ids and the ranks after `offset`."""
    value = json.loads(ranks_to_json(tokenizer.ranks, tokenizer.pattern))
    vocab = {token: rank + tokenizer.offset for token, rank in value["model"]["vocab"].items()}
    value["model"]["vocab"] = {**vocab, **dict(tokenizer.specials)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    specials = sorted(tokenizer.specials, key=lambda special: special[1])
    value["added_tokens"] = [{"id": number, "content": name, **flags} for name, number in specials]
    return json.dumps(value, ensure_ascii=False)
