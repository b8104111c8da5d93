"""A small encoder with its tokenizer, and files of examples in invented Polish reviews."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

GOOD = ["dobry", "świetny", "wspaniały", "miły", "ładny", "pyszny", "szybki", "czysty"]
BAD = ["zły", "okropny", "fatalny", "brudny", "wolny", "niesmaczny", "drogi", "głośny"]
OTHER = [
    "hotel",
    "obsługa",
    "pokój",
    "jedzenie",
    "lekarz",
    "produkt",
    "był",
    "była",
    "jest",
    "bardzo",
    "naprawdę",
    "trochę",
    "tam",
    "tutaj",
    "i",
    "ale",
    "w",
    "na",
]


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Texts of 4 to 25 words, of which one tells the label."""
    dice = random.Random(seed)
    pairs = []
    for _ in range(count):
        label = dice.choice(["minus", "plus"])
        words = dice.choices(OTHER, k=dice.randint(3, 24))
        words.insert(dice.randrange(len(words)), dice.choice(GOOD if label == "plus" else BAD))
        pairs.append((" ".join(words), label))
    return pairs


def write_tsv(path: Path, count: int, seed: int = 0) -> Path:
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in reviews(count, seed)))
    return path


def save_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    tokenizer.train_from_iterator([" ".join(GOOD + BAD + OTHER)] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, model_input_names=inputs, **names)
    fast.save_pretrained(folder)
    return fast


def save_encoder(folder: Path, kind: str = "bert") -> Path:
    import torch
    import transformers

    size = len(save_tokenizer(folder))
    torch.manual_seed(0)
    sizes = {"vocab_size": size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {**sizes, "intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 0}
    make = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**common)),
        "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**common)),
        "deberta": lambda: transformers.DebertaV2Model(
            transformers.DebertaV2Config(**common, relative_attention=True, pos_att_type=["p2c", "c2p"])
        ),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=size, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
        "gpt2": lambda: transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        ),
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**common)),
    }
    make[kind]().save_pretrained(folder)
    return folder


def tune_table(folder: Path, **changes: Any) -> dict[str, Any]:
    """Keys of a recipe that fine-tunes the encoder in `folder`/model on `folder`/train.tsv."""
    tune = {"task": "classify", "train": str(folder / "train.tsv"), "validation": str(folder / "valid.tsv"), "batch": 8}
    return {
        "name": "tuned",
        "model": {"family": "hf", "config": str(folder / "model")},
        "tune": {**tune, **changes.pop("tune", {})},
        "data": {"seq_len": 48},
        "optim": {"lr": 1e-3, "schedule": "constant", **changes.pop("optim", {})},
        "train": {"precision": "fp32", **changes.pop("train", {})},
        "layout": {"micro_batch": 4, **changes.pop("layout", {})},
        "save": {"load": str(folder / "model"), **changes.pop("save", {})},
        **changes,
    }


def make_masked_store(folder: Path) -> Path:
    """A store of reviews with the tokenizer of `folder`/model, for masked language modelling."""
    from windlass.config.sources import DataFile, DataSource
    from windlass.data.tokenize import tokenize

    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in reviews(400)))
    sources = {"reviews": DataSource(paths=[str(texts)])}
    options: dict[str, Any] = {"workers": 1, "engine": "tokenizers", "validation": 0.1, "eos": "[SEP]"}
    tokenize(DataFile(output=str(folder / "store"), tokenizer=str(folder / "model"), sources=sources, **options))
    return folder / "store"


def masked_table(folder: Path, **changes: Any) -> dict[str, Any]:
    """Keys of a recipe that pre-trains the encoder of `folder`/model on that store."""
    data = {"store": str(folder / "store"), "seq_len": 32, "batch_tokens": 256, "max_epochs": 100}
    return {
        "name": "masked",
        "model": {"family": "hf", "config": str(folder / "model")},
        "tune": {"task": "masked", "dropout": 0.0},
        "data": {**data, **changes.pop("data", {})},
        "optim": {"lr": 3e-3, "schedule": "constant"},
        "train": {"precision": "fp32", "steps": 30, "eval_every": 10, "eval_tokens": 512, **changes.pop("train", {})},
        "layout": {"micro_batch": 4, **changes.pop("layout", {})},
        **changes,
    }
