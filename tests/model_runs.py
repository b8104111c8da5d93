"""Fixtures of tests/convert and tests/evaluate: a small tokenizer, a store with two languages, and runs of both families."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from windlass.checkpoint.save import Saver
from windlass.config import DataConfig, Loaded, ModelConfig, Recipe, SaveConfig, TrainConfig
from windlass.config.sources import DataFile, DataSource
from windlass.data.store import Store, open_store
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import Tokenizer, train_bpe
from windlass.models.build import build_model
from windlass.runs.folder import Run, create_run

DUTCH = "de het een water schip lier touw wind kracht samen draait grote zware last hijst mannen zee haven"
ENGLISH = "the a water ship winch rope wind power together turns great heavy load lifts men sea harbour naïve"
LLAMA = {"family": "llama", "layers": 2, "width": 48, "ffn": 96, "heads": 4, "kv_heads": 2}
RETNET = {"family": "retnet", "layers": 2, "width": 48, "ffn": 80, "heads": 4, "chunk": 16}

HYBRID = {
    "family": "nemotron_h",
    "layers": 4,
    "pattern": "M*-M",
    "mamba": {"heads": 4, "head_dim": 8, "state": 12, "groups": 2, "chunk": 8},
}


def make_text(word_list: str, seed: int, count: int) -> str:
    dice, choices = random.Random(seed), word_list.split()
    return " ".join(dice.choice(choices) + dice.choice(["", "", ".", ",", "\n"]) for _ in range(count))


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpus")
    lengths = [20, 60, 200, 600]
    return {
        name: write_texts(folder / f"{name}.jsonl", [make_text(text, i, lengths[i % 4]) for i in range(80)])
        for name, text in (("dutch", DUTCH), ("english", ENGLISH))
    }


@pytest.fixture(scope="session")
def tokenizer(corpus: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [json.loads(line)["text"] for path in corpus.values() for line in path.read_text().splitlines()]
    return train_bpe(texts, 330, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def make_store(corpus: dict[str, Path]) -> Callable[[Path, Tokenizer], Store]:
    def make(folder: Path, trained: Tokenizer) -> Store:
        sources = {
            name: DataSource(paths=[str(path)], language=name[:2], licence="CC0", origin="made")
            for name, path in corpus.items()
        }
        tokenize(
            DataFile(
                output=str(folder),
                tokenizer=str(trained.path),
                sources=sources,
                validation=0.2,
                workers=1,
                engine="tokenizers",
            )
        )
        return open_store(folder)

    return make


@pytest.fixture(scope="session")
def store(make_store: Any, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("store") / "store", tokenizer)


def save_run(folder: Path, store: Path, *, vocab: int, seq_len: int = 32, precision: str = "fp32", **model: Any) -> Run:
    """A run folder with one checkpoint of random weights (large ones, so that a wrong weight shows)."""
    config = ModelConfig(**{**LLAMA, "vocab": vocab, "init_std": 0.2, **model})
    data = DataConfig(store=str(store), seq_len=seq_len)
    recipe = Recipe(name="small", model=config, data=data, train=TrainConfig(precision=precision, steps=1))
    run = create_run(folder, Loaded(recipe=recipe, text="", path=None, origins={}))
    net = build_model(config, seq_len=seq_len)
    net.init_weights(3)
    saver = Saver(run, SaveConfig(asynchronous=False))
    saver.save(7, {"model": dict(net.state_dict())}, {"tokens": 700}, block=True)
    saver.close()
    return run


@pytest.fixture(scope="session")
def make_run(store: Store, tokenizer: Tokenizer) -> Callable[..., Run]:
    return partial(save_run, store=store.path, vocab=tokenizer.vocab_size)


@pytest.fixture(scope="session")
def llama_run(make_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "llama")


@pytest.fixture(scope="session")
def retnet_run(make_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "retnet", **RETNET, kv_heads=None)


@pytest.fixture(scope="session")
def hybrid_run(make_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "hybrid", **HYBRID)
