"""A tokenizer with a chat template, and token stores of conversations, for tests of instruction tuning."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from windlass.config.sources import DataFile, DataSource
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import train_bpe

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = [
    "de",
    "het",
    "een",
    "water",
    "schip",
    "lier",
    "touw",
    "wind",
    "kracht",
    "samen",
    "draait",
    "grote",
    "zware",
    "last",
    "hijst",
    "mannen",
    "zee",
    "haven",
]


def sentence(dice: random.Random, longest: int = 12) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, longest)))


def conversation(number: int) -> dict[str, Any]:
    dice = random.Random(number)
    turns = [
        {"role": role, "content": sentence(dice)} for _ in range(dice.randint(1, 2)) for role in ("user", "assistant")
    ]
    return {"messages": [{"role": "system", "content": sentence(dice)}, *turns] if number % 3 == 0 else turns}


def pair(number: int) -> dict[str, Any]:
    dice = random.Random(number)
    prompt = [{"role": "user", "content": sentence(dice, 3)}]
    return {"prompt": prompt, "chosen": f"zee {sentence(dice, 3)}", "rejected": f"last {sentence(dice, 3)}"}


def make_tokenizer(folder: Path) -> Path:
    trained = train_bpe([sentence(random.Random(i), 40) for i in range(50)] + ["user assistant system"], 290, folder)
    library = Library.from_file(str(trained.path))
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def make_store(folder: Path, count: int = 60, *, pairs: bool = False, texts: int = 0, validation: float = 0.0) -> Path:
    """A store of conversations or pairs, with `texts` documents of a second source `web`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder / "tokenizer")
    make = pair if pairs else conversation
    (folder / "chat.jsonl").write_text("".join(json.dumps(make(i)) + "\n" for i in range(count)))
    sources = {"chat": DataSource(paths=[str(folder / "chat.jsonl")], form="pairs" if pairs else "chat")}
    if texts:
        lines = (json.dumps({"text": sentence(random.Random(-i), 60)}) + "\n" for i in range(texts))
        (folder / "web.jsonl").write_text("".join(lines))
        sources["web"] = DataSource(paths=[str(folder / "web.jsonl")])
    options = {"workers": 1, "engine": "tokenizers", "validation": validation}
    tokenize(DataFile(output=str(folder / "store"), tokenizer=str(tokenizer), sources=sources, **options))  # type: ignore[arg-type]
    return folder / "store"


def recipe_table(store: Path, tune: dict[str, Any], **tables: Any) -> dict[str, Any]:
    data = {"store": str(store), "seq_len": 96, "batch_tokens": 8 * 96, "pack": "documents", "max_epochs": 1000}
    return {
        "name": "chat", "model": {"layers": 2, "width": 48, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab": 320},
        "data": data | tables.pop("data", {}), "optim": {"lr": 1e-2, **tables.pop("optim", {})},
        "train": {"steps": 6, "precision": "fp32", "loss_chunk": 40, **tables.pop("train", {})},
        "layout": {"micro_batch": 2, **tables.pop("layout", {})}, "energy": {"enabled": False},
        "save": {"every": 3, "asynchronous": False, **tables.pop("save", {})}, "tune": tune, **tables,
    }  # fmt: skip
