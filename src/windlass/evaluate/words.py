"""How does transformers get our tokenizer? tokenizer.json and its settings, whatever kind of file we were given. No torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from windlass.data.tokenizer import JsonTokenizer, RanksTokenizer, Tokenizer, load_tokenizer
from windlass.errors import DataError
from windlass.files import read_json, write_atomic, write_json

BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""What else transformers keeps beside a tokenizer."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, longest: int) -> None:
    """Write what `AutoTokenizer.from_pretrained(folder)` reads; the ids are the same as ours.

    A tokenizer that came with transformers' settings keeps them (begin and end tokens, chat template).
    """
    settings: dict[str, Any] = {
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    if isinstance(tokenizer, JsonTokenizer):
        write_atomic(folder / "tokenizer.json", tokenizer.path.read_bytes())
    elif isinstance(tokenizer, RanksTokenizer):
        write_atomic(folder / "tokenizer.json", json_of_ranks(tokenizer))
    else:
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
        settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": False}
        write_json(folder / "tokenizer_config.json", settings_beside(tokenizer) or settings)
        return
    refuse_other_ids(tokenizer, folder / "tokenizer.json")
    end = end_token(tokenizer)
    ends = {} if end is None else {"eos_token": end, "bos_token": end, "pad_token": end}
    theirs = settings_beside(tokenizer)
    if theirs is None:
        write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast", **ends})
        write_json(folder / "special_tokens_map.json", ends)
        return
    write_json(folder / "tokenizer_config.json", theirs | ({} if _end_of(theirs) == end else {"eos_token": end}))
    for name in BESIDE:
        if (tokenizer.path.parent / name).is_file():
            shutil.copyfile(tokenizer.path.parent / name, folder / name)


def settings_beside(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """tokenizer_config.json that stands beside the tokenizer's file; None when there is none."""
    return read_json(tokenizer.path.with_name("tokenizer_config.json"))


def _end_of(settings: dict[str, Any], which: str = "eos_token") -> str | None:
    """A special token's text; it stands there plainly or as an object."""
    value = settings.get(which)
    return value.get("content") if isinstance(value, dict) else value


def end_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids for config.json: the end of a document also begins one, unless the tokenizer has a token of its own for that."""
    if tokenizer.eos is None:
        return {}
    name = _end_of(settings_beside(tokenizer) or {}, "bos_token")
    found = tokenizer.encode(name, specials=True) if name else []
    return {"eos_token_id": tokenizer.eos, "bos_token_id": found[0] if len(found) == 1 else tokenizer.eos}


def refuse_other_ids(tokenizer: Tokenizer, written: Path) -> None:
    """The written file must cut text as ours does: a model with other ids is another model."""
    import argparse

    text = Path(argparse.__file__).read_text(encoding="utf-8")[:20_000] + " naïve ÅŁż 日本語 Привет 12345\n\t  x"
    ours, theirs = tokenizer.encode(text), load_tokenizer(written).encode(text)
    if ours != theirs:
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise DataError(
            "evaluate.exported-tokenizer-gives-other",
            f"the exported tokenizer gives other ids than {tokenizer.path} from token {place} on",
            hint="convert the tokenizer to a tokenizer.json yourself and name it with --tokenizer",
        )


def end_token(tokenizer: Tokenizer) -> str | None:
    return None if tokenizer.eos is None else tokenizer.decode([tokenizer.eos]) or None


def json_of_ranks(tokenizer: RanksTokenizer) -> str:
    """A tokenizers JSON with the specials in their places and the ranks behind `first`."""
    value = json.loads(tokenizer.engine_json() or "{}")
    vocab = {token: number + tokenizer.first for token, number in value["model"]["vocab"].items()}
    value["model"]["vocab"] = {**vocab, **dict(tokenizer.specials)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    value["added_tokens"] = [
        {"id": number, "content": name, **flags} for name, number in sorted(tokenizer.specials, key=lambda s: s[1])
    ]
    return json.dumps(value, ensure_ascii=False)
