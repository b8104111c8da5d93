"""Conversations, adapters and preference pairs train the same on every layout as on one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.multi.conftest import spawn
from tests.train.chat_store import make_store, recipe_table
from tests.train.helpers import build, new_run, run_here

from windlass.config import Recipe
from windlass.convert.weights import open_weights
from windlass.runs.folder import Run
from windlass.train.loop import open_batches
from windlass.train.preference import attach_references, read_reference

TOLERANCE = 3e-6
"""Relative, on losses, gradient norms and rewards."""

CHAT, LORA = {"task": "chat"}, {"task": "chat", "lora": {"rank": 4, "alpha": 8.0}}
PREFER = {"task": "prefer", "beta": 0.3}
Case = tuple[dict[str, Any], dict[str, Any]]
ON_TWO: list[Case] = [
    (CHAT, {"shard": "full"}), (CHAT, {"tensor": 2}), (CHAT, {"pipeline": 2}), (CHAT, {"context": 2}),
    (LORA, {"shard": "full"}), (LORA, {"shard": "zero1"}), (LORA, {"tensor": 2}), (LORA, {"pipeline": 2}), (LORA, {"context": 2}),
    (PREFER, {"shard": "full"}), (PREFER, {"shard": "none"}), (PREFER, {"tensor": 2}),
    (PREFER, {"pipeline": 2}), (PREFER, {"context": 2, "shard": "zero1", "micro_batch": 4}),
]  # fmt: skip
# On four context ranks some have no answer in a micro-batch.
ON_FOUR: list[Case] = [
    (PREFER, {"pipeline": 2, "context": 2, "shard": "full"}),
    (PREFER, {"pipeline": 2, "tensor": 2, "micro_batch": 1, "schedule": "gpipe"}),
    (PREFER, {"context": 2, "tensor": 2, "shard": "zero2"}),
    (PREFER, {"context": 4, "shard": "full", "micro_batch": 1}),
    (PREFER, {"context": 2, "shard": "hybrid", "shard_size": 2, "micro_batch": 1}),
    (PREFER, {"pipeline": 2, "shard": "zero1", "micro_batch": 1}),
]


@dataclass(frozen=True)
class Trained:
    """What a rank has of a run: (loss, gradient norm, reward margin and accuracy of pairs) of its steps and then of a
    validation, and the starting model's scores."""

    steps: list[list[float]]
    reference: list[list[float]]


def recipe(folder: str, tune: dict[str, Any], layout: dict[str, Any], steps: int = 6) -> Recipe:
    pairs = tune["task"] == "prefer"
    # Two or three pairs in a sequence.
    data = {"seq_len": 160, "batch_tokens": 4 * 160} if pairs else {"mix": {"chat": 0.7, "web": 0.3}}
    options = {"data": data, "optim": {"name": "sgd", "lr": 0.3, "schedule": "constant"}, "train": {"steps": steps}}
    store = Path(folder, "pairs" if pairs else "chat", "store")
    table = recipe_table(store, tune, layout=layout, **options)
    # Under adapters the shared weights of embedding and head are not trained; a pipeline holds them twice.
    table["model"]["tied"] = "lora" in tune
    return Recipe.model_validate(table)


def train(folder: str, cases: list[Case]) -> list[Trained]:
    torch.set_num_threads(1)
    runs = []
    for number, (tune, layout) in enumerate(cases):
        training = build(recipe(folder, tune, layout))
        run = new_run(Path(folder, f"run-{training.world.size}-{number}-{tune['task']}"))
        training, is_prefer = replace(training, run=run), tune["task"] == "prefer"
        if is_prefer:
            attach_references(training)
        values, batches = [], open_batches(training)
        for _ in range(3):
            loss, norm, skipped, _, *further = training.stepper.step(next(batches), 0.3).values.tolist()
            assert skipped == 0
            training.progress.advance(training.plan)
            values.append([loss, norm, *further])
        batches.close()
        if is_prefer:
            validation = training.validator.run()
            values.append([validation.overall.loss, 1.0, *validation.scores.values()])
        training.world.barrier()
        files = (run.reference_file, run.held_out_reference_file) if is_prefer else ()
        runs.append(Trained(values, [read_reference(file).tolist() for file in files]))
    return runs


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stores")
    make_store(folder / "chat", texts=20)
    make_store(folder / "pairs", 30, pairs=True, validation=0.3)
    return str(folder)


def compare(folder: str, world: int, cases: list[Case]) -> None:
    alone = cache(
        lambda task, adapters: train(folder, [(LORA if adapters else {"chat": CHAT, "prefer": PREFER}[task], {})])[0]
    )
    for rank in spawn(train, world, folder, cases, timeout=500.0):
        for (tune, layout), got in zip(cases, rank, strict=True):
            expected = alone(tune["task"], "lora" in tune)
            for (loss, norm, *rewards), (loss0, norm0, *rewards0) in zip(got.steps, expected.steps, strict=True):
                assert loss == pytest.approx(loss0, rel=TOLERANCE), (tune, layout)
                assert norm == pytest.approx(norm0, rel=TOLERANCE), (tune, layout)
                assert rewards == pytest.approx(rewards0, rel=TOLERANCE, abs=1e-6), (tune, layout)
            for margins, margins0 in zip(got.reference, expected.reference, strict=True):
                assert np.allclose(margins, margins0, rtol=0.0, atol=1e-5), (tune, layout)


@pytest.mark.multi
@pytest.mark.timeout(600)
def test_two_processes_train_as_one(stores: str) -> None:
    compare(stores, 2, ON_TWO)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pairs_on_divided_pipelines_and_rows(stores: str) -> None:
    compare(stores, 4, ON_FOUR)


RESUMED: list[Case] = [
    (PREFER, {"pipeline": 2}),
    (PREFER, {"context": 2, "shard": "full"}),
    (PREFER | {"lora": LORA["lora"]}, {"pipeline": 2}),
]


def train_once_and_twice(store: str, folder: str) -> None:
    for number, (tune, layout) in enumerate(RESUMED):
        for name, count in (("once", 6), ("twice", 3)):
            run_here(recipe(store, tune, layout, count), new_run(Path(folder, f"{name}-{number}")))
        run_here(recipe(store, tune, layout), Run(Path(folder, f"twice-{number}")))


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_is_the_same_bit_for_bit(stores: str, tmp_path: Path) -> None:
    spawn(train_once_and_twice, 2, stores, str(tmp_path), timeout=500.0)
    for number, case in enumerate(RESUMED):
        once, twice = (
            open_weights(tmp_path / f"{name}-{number}" / "checkpoints" / "step-000000006") for name in ("once", "twice")
        )
        assert all(torch.equal(once[name], twice[name]) for name in once), case
