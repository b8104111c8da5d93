"""Every layout trains the same model: losses and gradient norms of three steps against a single process, in fp32."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.multi.conftest import spawn
from tests.train.helpers import build, steps

from windlass.config import LayoutConfig, ModelConfig, Recipe
from windlass.data.stream import open_stream
from windlass.layout.resolve import complete_layout, job_size
from windlass.layout.types import HYBRID_SHARDS
from windlass.train.batches import batch_plan
from windlass.train.validate import Validator

STEPS = 3
LONG_STEPS = 10
"""Of the whole grid, which is marked slow."""
TOLERANCE = 3e-6
"""Relative, on losses and norms; rounding of sums in another order gives up to about 1e-6 over ten steps."""

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"count": 6, "top_k": 2, "ffn": 48, "shared": 1, "dense_layers": 1, "balance_weight": 0.1, "z_loss": 1e-2},
    "olmoe": {"count": 8, "top_k": 3, "ffn": 32, "router": "sigmoid", "groups": 4, "groups_kept": 2, "balance": "bias", "balance_weight": 2e-3},
    "gpt_oss": {"count": 4, "top_k": 2, "ffn": 48, "balance_weight": 0.1},
    "deepseek_v2": {"count": 6, "top_k": 2, "ffn": 48, "balance_weight": 0.1},
    "deepseek_v3": {"count": 8, "top_k": 3, "ffn": 32, "dense_layers": 1, "groups": 4, "groups_kept": 2, "balance_weight": 0.1},
    "nemotron_h": {"count": 4, "top_k": 2, "ffn": 32, "balance_weight": 2e-3},
}  # fmt: skip
"""Balance losses of a sequence, and biases moved by the loads of the whole batch."""


def make_recipe(
    optimizer: str = "adamw", family: str = "llama", accumulate: int = 1, micro_batch: int = 1, **layout: Any
) -> Recipe:
    shape = {"layers": 4, "width": 64, "ffn": 96, "heads": 4, "vocab": 250}
    shape |= {"value_width": 96, "chunk": 8} if family == "retnet" else {"kv_heads": 2}
    if family in ("olmo3", "gemma3"):
        shape |= {"window": 12, "pattern": "WF..."}
    if family == "gpt_oss" or family.startswith("deepseek"):
        shape["init_std"] = 0.1  # at 0.02 scores are so small that a wrong gradient of theirs would not show
    if family == "gpt_oss":
        shape |= {"window": 12, "rope_scaling": {"kind": "yarn", "factor": 4.0, "old_length": 16}}
    if family.startswith("deepseek"):
        shape |= {"kv_heads": None, "latent": {"kv_rank": 24, "nope_dim": 12, "rope_dim": 8, "value_dim": 16}}
    if family == "deepseek_v3":
        shape["latent"]["q_rank"] = 32
    if family in EXPERTS:
        shape["experts"] = EXPERTS[family]
    if family == "nemotron_h":
        shape |= {"pattern": "ME*M", "mamba": {"heads": 4, "head_dim": 8, "state": 8, "groups": 2, "chunk": 8}}
    if layout.pop("tied", False):
        shape["tied"] = True
    shape |= layout.pop("model", {})
    seq_len, sequences = layout.pop("seq_len", 32), layout.pop("sequences", 16)
    reset = family in ("gpt_oss", "deepseek_v3")
    data = {"mask_documents": True, "reset_positions": reset} if layout.pop("documents", False) else {}
    optim = {"adamw": {"lr": 1e-2}, "sgd": {"lr": 0.3}, "muon": {"lr": 1e-3, "eps": 1e-2}}[optimizer]
    if optimizer == "adamw" and (family in ("retnet", *EXPERTS) or "tied" in shape):
        # At AdamW's own eps these are chaotic: one process in other micro-batches leaves its own curve within ten steps.
        optim = {"lr": 1e-3, "eps": 1e-2}
    return Recipe.model_validate({
        "name": "parity", "model": {"family": family, **shape},
        "data": {"seq_len": seq_len, "batch_tokens": sequences * seq_len, **data},
        "optim": {"name": optimizer, **optim, "warmup": 512, "clip": 1.0},
        "train": {"steps": layout.pop("steps", STEPS), "precision": "fp32", "loss_chunk": 48, **layout.pop("train", {})},
        "layout": {"micro_batch": micro_batch, **layout}, "energy": {"enabled": False}, "save": {"at_end": False, "every": 10**6},
    })  # fmt: skip


def train_here(recipe: Recipe, validate: bool = False) -> list[tuple[float, float]]:
    """The steps on this rank of whatever world there is: (loss, gradient norm) of each, and the validation loss on the way."""
    training = build(recipe)
    if recipe.data.mask_documents:
        # Two documents in each sequence, cut at a place that depends on the sequence.
        training.stream.document_ids = lambda indexes: np.arange(33)[None] >= np.asarray(indexes)[:, None] % 29 + 2
    if not validate:
        return steps(training, recipe.train.steps)
    validator = Validator(training.stream, 32, recipe, training.world, training.parts, training.stepper)
    values = []
    for count in (1, 1):
        values += steps(training, count)
        validation = validator.run()
        assert validation is not None
        values.append((validation.overall.loss, 1.0))
    return values + steps(training, recipe.train.steps - 2)


@pytest.fixture(scope="module")
def alone() -> Any:
    """The single process, once per optimizer, family, tie, kind of data and number of layers."""

    @functools.cache
    def get(
        optimizer: str,
        family: str = "llama",
        tied: bool = False,
        documents: bool = False,
        layers: int = 4,
        goldfish: bool = False,
        steps: int = STEPS,
    ) -> Any:
        torch.set_num_threads(1)
        micro_batch = 4 if tied or documents else 16
        return Parity(1, micro_batch, {"steps": steps}, optimizer, family, tied, documents, layers, goldfish).train()

    return get


def compare(
    curves: list[list[tuple[float, float]]],
    expected: list[tuple[float, float]],
    case: str = "",
    norms: float = 10 * TOLERANCE,
) -> None:
    for rank, values in enumerate(curves):
        for step, ((loss, norm), (loss0, norm0)) in enumerate(zip(values, expected, strict=True)):
            assert loss == pytest.approx(loss0, rel=TOLERANCE), f"loss of step {step} on rank {rank} {case}"
            assert norm == pytest.approx(norm0, rel=norms), f"gradient norm of step {step} on rank {rank} {case}"


Case = tuple[str, int, int, dict[str, Any]]


def grid() -> list[Case]:
    """Every way of sharding x tensor {1, 2} x pipeline {1, 2} x accumulation {1, 4} x optimizer that 8 processes hold."""
    cases: list[Case] = []
    for shard, tensor, pipeline, accumulate, optimizer in itertools.product(
        ("none", "zero1", "zero2", "full", "hybrid", "hybrid_zero2"), (1, 2), (1, 2), (1, 4), ("sgd", "adamw")
    ):
        data = 4 if shard in HYBRID_SHARDS and tensor * pipeline <= 2 else 2
        # A pipeline of two needs at least two micro-batches.
        micro = 16 // data // (2 if pipeline > 1 and accumulate == 1 else accumulate)
        layout: dict[str, Any] = {"shard": shard, "tensor": tensor, "pipeline": pipeline}
        if shard in HYBRID_SHARDS:
            layout["shard_size"] = data // 2
        cases.append((optimizer, data * tensor * pipeline, micro, layout))
    return cases


TOGETHER = 10
"""Layouts that the same processes train one after another: most of a test's time is starting and torch's first look at each operator."""


def groups() -> list[tuple[int, list[Case]]]:
    cases = sorted(grid(), key=lambda case: case[1])
    parts = [list(part) for _, part in itertools.groupby(cases, key=lambda case: case[1])]
    return [(part[0][1], part[i : i + TOGETHER]) for part in parts for i in range(0, len(part), TOGETHER)]


def train_all(recipes: list[Recipe]) -> list[list[tuple[float, float]]]:
    return [train_here(recipe) for recipe in recipes]


@dataclass(frozen=True)
class Parity:
    """A layout whose curve must be that of one process."""

    world: int
    micro: int
    layout: dict[str, Any]
    optimizer: str = "sgd"
    family: str = "llama"
    tied: bool = False
    documents: bool = False
    """Two documents in a sequence, the z-loss and validation: what each layout must bring together in its own way."""
    layers: int = 4
    goldfish: bool = False

    def recipe(self, **changes: Any) -> Recipe:
        masked = {"documents": True, "train": {"z_loss": 1e-2}} if self.documents else {}
        masked = {"train": {"z_loss": 1e-2, "goldfish_k": 4, "goldfish_h": 6}} if self.goldfish else masked
        shape = {"tied": self.tied, "model": {"layers": self.layers}}
        options = {**shape, "micro_batch": self.micro, **masked, **self.layout, **changes}
        return make_recipe(self.optimizer, self.family, **options)

    def train(self) -> list[tuple[float, float]]:
        return train_here(self.recipe(), self.documents)

    def __str__(self) -> str:
        kind = [
            self.family,
            self.optimizer,
            "tied" * self.tied,
            "documents" * self.documents,
            "goldfish" * self.goldfish,
        ]
        kind += [f"{self.layers} layers"] if self.layers != 4 else []
        sizes = [f"{key}={value}" for key, value in self.layout.items()]
        return "-".join([f"{self.world}x{self.micro}", *filter(None, kind), *sizes])


CASES = [
    Parity(2, 8, {"shard": "none"}),
    Parity(2, 8, {"shard": "zero2"}, "adamw"),
    Parity(2, 2, {"shard": "full"}),
    Parity(4, 1, {"shard": "hybrid", "shard_size": 2}),
    Parity(4, 2, {"shard": "hybrid_zero2", "shard_size": 2}, "adamw"),
    Parity(2, 4, {"shard": "none", "tensor": 2}),
    Parity(2, 4, {"shard": "none", "pipeline": 2}),
    Parity(4, 2, {"shard": "full", "tensor": 2}, "adamw"),
    Parity(4, 2, {"shard": "zero1", "pipeline": 2}),
    Parity(8, 2, {"shard": "full", "tensor": 2, "pipeline": 2}),
    Parity(2, 8, {"shard": "full", "context": 2}),
    Parity(4, 4, {"shard": "hybrid", "shard_size": 2, "context": 2, "tensor": 2}),
    Parity(2, 2, {"shard": "none", "pipeline": 2, "schedule": "gpipe"}),
    Parity(2, 2, {"shard": "none", "pipeline": 2, "schedule": "interleaved"}),
    # With validation: two stages of a rank exchange tensors in passes without gradients, too.
    Parity(2, 2, {"shard": "none", "pipeline": 2, "schedule": "zbv"}, documents=True),
    Parity(2, 2, {"shard": "full", "offload": "parameters"}),
    Parity(2, 2, {"shard": "zero1", "offload": "optimizer"}),
    Parity(2, 2, {"shard": "full", "sync": "last"}),
    # A layer's gradients have 123 kB: buckets of two layers, of all four, and of three after one.
    Parity(2, 8, {"shard": "none", "bucket": 250_000}),
    Parity(2, 2, {"shard": "full", "bucket": 400_000, "train": {"recompute": "selective"}}),
    Parity(2, 2, {"shard": "full", "train": {"recompute": "selective", "loss": "chunked"}}),
    Parity(2, 4, {"shard": "full"}, family="retnet"),
    Parity(2, 4, {"shard": "none", "tensor": 2}, family="retnet"),
    Parity(2, 8, {"shard": "full", "context": 2}, family="retnet"),
    Parity(2, 4, {"shard": "full"}, documents=True),
    # A tied head under tensor parallelism shares the divided rows; under a pipeline first and last stage share a gradient.
    Parity(2, 4, {"shard": "none", "tensor": 2}, tied=True),
    Parity(2, 4, {"shard": "none", "pipeline": 2}, "adamw", tied=True),
    Parity(2, 4, {"shard": "none", "pipeline": 2, "schedule": "interleaved"}, tied=True),
    Parity(8, 2, {"shard": "zero1", "pipeline": 2, "tensor": 2}, tied=True),
    # As Poro: tensor 2 x pipeline 4 with stages of 2, 2, 1 and 1 layers.
    Parity(8, 4, {"shard": "none", "pipeline": 4, "tensor": 2}, tied=True, layers=6),
    # What each family adds: norms of heads, of all heads and after blocks, windows, biases of norms, xIELU's parameters.
    Parity(2, 4, {"shard": "none", "tensor": 2}, family="qwen3"),
    Parity(2, 4, {"shard": "full", "tensor": 2}, family="olmo3"),
    Parity(4, 4, {"shard": "none", "context": 2, "tensor": 2}, family="gemma3", documents=True),
    # Each tensor-parallel rank adds its share of a router's loss; stages add their own; context ranks share a sequence.
    Parity(4, 2, {"shard": "zero1", "pipeline": 2}, family="olmoe"),
    # Rows travel to the ranks of their experts, whose gradients are summed over fewer ranks.
    Parity(2, 8, {"shard": "zero1", "context": 2, "expert": 2, "train": {"recompute": "full"}}, family="qwen3_moe"),
    Parity(4, 4, {"shard": "full", "tensor": 2, "expert": 2}, family="qwen3_moe"),
    # Latents that ranks share.
    Parity(4, 4, {"shard": "full", "context": 2, "tensor": 2}, family="deepseek_v3", documents=True),
    # Mamba-2: heads and groups are divided, states and the inputs of convolutions pass from rank to rank.
    Parity(4, 4, {"shard": "full", "tensor": 2}, family="nemotron_h", documents=True),
    # The counted tokens of the whole batch divide the loss.
    Parity(4, 2, {"shard": "full", "tensor": 2}, goldfish=True),
    # Muon needs whole matrices: of shards, of copies (each orthogonalised once), of heads and of stacked experts.
    Parity(4, 4, {"shard": "full", "expert": 2}, "muon", family="qwen3_moe"),
]


def train_cases(cases: list[Parity]) -> list[list[tuple[float, float]]]:
    return [case.train() for case in cases]


@pytest.fixture(scope="module")
def curves() -> Any:
    """The curves of a case, one per rank. The first case of a world size trains all others of that size too."""
    by_case: dict[str, list[list[tuple[float, float]]]] = {}

    def get(wanted: Parity) -> list[list[tuple[float, float]]]:
        cases = [case for case in CASES if case.world == wanted.world and str(case) not in by_case]
        for start in range(0, len(cases) if str(wanted) not in by_case else 0, TOGETHER):
            part = cases[start : start + TOGETHER]
            by_rank = spawn(train_cases, wanted.world, part, timeout=600.0)
            by_case.update({str(case): [rank[i] for rank in by_rank] for i, case in enumerate(part)})
        return by_case[str(wanted)]

    return get


def by_world(case: Parity) -> Any:
    return pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"parity-{case.world}"))


@pytest.mark.multi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", map(by_world, CASES))
def test_a_layout_matches_one_process(curves: Any, alone: Any, case: Parity) -> None:
    compare(
        curves(case),
        alone(case.optimizer, case.family, case.tied, case.documents, case.layers, case.goldfish),
    )


WIDE_CASES = [
    Parity(4, 8, {"shard": "none", "context": 2, "tensor": 2}, family="retnet"),
    Parity(4, 4, {"shard": "full", "tensor": 2}, family="apertus"),
    Parity(4, 4, {"shard": "full", "tensor": 2}, family="qwen3_moe"),
    Parity(4, 4, {"shard": "full", "context": 2, "tensor": 2}, family="gpt_oss", documents=True),
    Parity(4, 4, {"shard": "full"}, "muon"),
    Parity(4, 4, {"shard": "full", "context": 2, "pipeline": 2}, documents=True),
    Parity(2, 2, {"shard": "none"}),
    Parity(2, 4, {"shard": "none", "pipeline": 2}, documents=True),
    Parity(2, 4, {"shard": "full", "pipeline": 2}, family="gemma3"),
    Parity(2, 4, {"shard": "full"}, tied=True),
    Parity(2, 4, {"shard": "none", "tensor": 2}, documents=True),
    Parity(2, 2, {"shard": "full", "train": {"recompute": "full"}}),
    Parity(2, 2, {"shard": "zero1"}),
    Parity(2, 2, {"shard": "none", "bucket": 1_000_000, "train": {"recompute": "full"}}),
    Parity(2, 2, {"shard": "zero2", "bucket": 400_000}),
    Parity(4, 2, {"shard": "zero1", "pipeline": 2}, family="retnet"),
    Parity(2, 4, {"shard": "none", "pipeline": 2, "schedule": "zbv"}, tied=True),
    Parity(2, 4, {"shard": "none", "tensor": 2}, family="nemotron"),
    Parity(2, 8, {"shard": "full", "context": 2, "train": {"recompute": "selective"}}, family="qwen3_moe"),
    Parity(2, 4, {"shard": "full", "tensor": 2}, family="gpt_oss"),
    Parity(4, 4, {"shard": "full", "tensor": 2}, "muon", family="qwen3_moe"),
    Parity(4, 4, {"shard": "none", "context": 2, "tensor": 2, "expert": 2}, family="nemotron_h", documents=True),
    Parity(4, 2, {"shard": "full", "pipeline": 2, "context": 2}),
    Parity(2, 4, {"shard": "none", "tensor": 2}, family="deepseek_v2"),
    Parity(2, 4, {"shard": "full", "pipeline": 2}, family="deepseek_v3"),
    Parity(4, 4, {"shard": "full", "tensor": 2, "expert": 2}, family="gpt_oss"),
    Parity(2, 4, {"shard": "none", "pipeline": 2}, family="nemotron_h", documents=True),
    Parity(2, 8, {"shard": "full", "context": 2}, family="nemotron_h", documents=True),
    Parity(4, 2, {"shard": "none", "context": 2, "pipeline": 2}, goldfish=True),
    Parity(4, 4, {"shard": "none"}, "muon"),
    Parity(4, 2, {"shard": "hybrid", "shard_size": 2}, "muon"),
    Parity(4, 2, {"shard": "zero1", "pipeline": 2}, "muon", family="qwen3_moe"),
    Parity(2, 4, {"shard": "full", "offload": "parameters"}, "muon"),
    *(Parity(4, 2, {"shard": shard, "expert": 2}, family="olmoe") for shard in ("none", "zero1", "zero2", "full")),
    *(Parity(4, 2, {"shard": shard, "expert": 4}, family="olmoe") for shard in ("none", "zero1", "zero2", "full")),
    *(
        Parity(4, 2, {"shard": shard, "shard_size": 2, "expert": expert}, family="olmoe")
        for shard, expert in itertools.product(HYBRID_SHARDS, (2, 4))
    ),
    Parity(4, 2, {"shard": "full", "expert": 2, "sync": "last"}, "adamw", family="olmoe"),
    Parity(4, 1, {"shard": "zero1", "expert": 4, "bucket": 400_000}, family="olmoe"),
    Parity(4, 2, {"shard": "full", "expert": 2, "offload": "parameters"}, family="olmoe"),
    Parity(4, 2, {"shard": "full", "expert": 2, "train": {"recompute": "selective"}}, family="olmoe", tied=True),
    Parity(4, 4, {"shard": "none", "tensor": 2, "expert": 2}, family="olmoe", documents=True),
    *(
        Parity(4, 2, {"shard": "zero1", "pipeline": 2, "schedule": schedule, "expert": 2}, family="qwen3_moe")
        for schedule in ("1f1b", "gpipe", "interleaved", "zbv")
    ),
    Parity(4, 2, {"shard": "full", "expert": 2}, "muon", family="olmoe"),
    Parity(4, 2, {"shard": "hybrid", "shard_size": 2, "expert": 4}, family="gpt_oss"),
    Parity(4, 2, {"shard": "full", "pipeline": 2, "expert": 2}, family="deepseek_v2"),
    Parity(4, 2, {"shard": "zero1", "expert": 4}, family="deepseek_v3"),
    Parity(8, 2, {"shard": "full", "expert": 8}, family="olmoe"),
    Parity(8, 2, {"shard": "full", "expert": 2}, family="olmoe"),
    Parity(8, 2, {"shard": "hybrid", "shard_size": 4, "expert": 2}, family="olmoe"),
    Parity(8, 2, {"shard": "full", "tensor": 2, "expert": 4, "train": {"recompute": "full"}}, family="olmoe"),
    Parity(8, 2, {"shard": "hybrid", "shard_size": 2, "tensor": 2, "context": 2, "expert": 2}, family="qwen3_moe"),
    Parity(8, 2, {"shard": "zero1", "tensor": 2, "pipeline": 2, "expert": 2}, family="olmoe", tied=True),
    Parity(8, 2, {"shard": "zero1", "context": 2, "pipeline": 2, "expert": 4}, family="olmoe", documents=True),
]


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_further_layouts_match_one_process(alone: Any, world: int) -> None:
    cases = [case for case in WIDE_CASES if case.world == world]
    for start in range(0, len(cases), TOGETHER):
        part = cases[start : start + TOGETHER]
        by_rank = spawn(train_cases, world, part, timeout=1200.0)
        for number, case in enumerate(part):
            expected = alone(case.optimizer, case.family, case.tied, case.documents, case.layers, case.goldfish)
            compare([curves[number] for curves in by_rank], expected, str(case))


def reductions(buckets: list[int | None]) -> list[int]:
    """All-reduces of gradients in a second step, for each size of a bucket."""
    counts, sizes, inner = [], list[int](), dist.all_reduce
    for bucket in buckets:
        training = build(make_recipe("sgd", micro_batch=8, shard="none", bucket=bucket))
        steps(training, 1)
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda t, *a, **k: (sizes.append(t.numel()), inner(t, *a, **k))[1])
            steps(training, 1)
        counts.append(sum(size > 16 for size in sizes))  # not the numbers of loss and norm
    return counts


@pytest.mark.multi
def test_a_bucket_is_one_reduction(spawn: Any) -> None:
    """Four layers of 123 kB, the embedding, and the head with the last norm."""
    assert spawn(reductions, 2, [None, 250_000, 400_000, 1_000_000])[0] == [6, 4, 4, 3]


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "retnet"])
@pytest.mark.parametrize(("world", "cases"), groups(), ids=[f"{world}-{i}" for i, (world, _) in enumerate(groups())])
def test_whole_grid_matches_one_process(alone: Any, spawn: Any, world: int, cases: list[Case], family: str) -> None:
    recipes = [
        make_recipe(optimizer, family, micro_batch=micro, steps=LONG_STEPS, **layout)
        for optimizer, _, micro, layout in cases
    ]
    curves = spawn(train_all, world, recipes, timeout=1200.0)
    for number, case in enumerate(cases):
        # The norm of each head's output makes RetNet's gradient steep: one process alone differs by 1e-4 in other micro-batches.
        norms = 1e-3 if (case[0], family) == ("adamw", "retnet") else 10 * TOLERANCE
        compare([values[number] for values in curves], alone(case[0], family, steps=LONG_STEPS), str(case), norms)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_matches_one_process(spawn: Any, tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=250,
        max_position_embeddings=64, tie_word_embeddings=tied,
    ).save_pretrained(tmp_path)  # fmt: skip
    model = ModelConfig(family="hf", config=str(tmp_path))
    one, two = (
        make_recipe("sgd", micro_batch=m, shard=s).model_copy(update={"model": model})
        for m, s in ((16, "none"), (4, "full"))
    )
    compare(spawn(train_here, 2, two), train_here(one))


ODD: dict[str, Any] = {
    "model": {"layers": 5, "width": 48, "heads": 3, "kv_heads": 3, "ffn": 99, "vocab": 131}, "seq_len": 27, "sequences": 12,
}  # fmt: skip
THREE = [
    (4, {"shard": "hybrid", "sync": "last"}),
    (2, {"shard": "zero2"}),
    (6, {"shard": "none", "tensor": 3}),
    (4, {"shard": "none", "pipeline": 3}),
    (6, {"shard": "full", "context": 3}),
]


@pytest.mark.multi
def test_odd_shapes_on_three_processes_match_one(spawn: Any) -> None:
    """Nothing here is a power of two, and neither rows, layers nor parameters divide evenly."""
    recipes = [make_recipe("sgd", micro_batch=micro, **ODD, **layout) for micro, layout in THREE]
    one = train_here(make_recipe("sgd", micro_batch=12, **ODD))
    curves = spawn(train_all, 3, recipes)
    for number, case in enumerate(THREE):
        compare([values[number] for values in curves], one, str(case))


def test_offload_on_one_process_does_not_change_the_curve(alone: Any) -> None:
    compare([train_here(make_recipe("adamw", micro_batch=16, offload="optimizer"))], alone("adamw"))


@pytest.mark.integration
def test_validation_does_not_change_the_curve(alone: Any) -> None:
    validated = alone("sgd", documents=True)
    masked = Parity(1, 4, {}, documents=True)
    plain = train_here(masked.recipe())
    assert validated[::2] == plain
    without = train_here(masked.recipe(train={}))[0]
    assert plain[0][0] == without[0] and plain[0][1] != without[1], (
        "the z-loss is in the gradient and not in the loss shown"
    )
    assert plain[0][0] != train_here(make_recipe("sgd", micro_batch=4))[0][0], "the mask of documents is in force"


def embedding_gradient() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """How the embedding's gradient lies on this rank of two, the whole of it, and what a whole table would have given."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from windlass.blocks.divide import by_rows
    from windlass.blocks.embedding.parallel import parallel_lookup

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    table, tokens, slope = torch.randn(10, 4), torch.randint(0, 10, (3, 8)), torch.randn(3, 8, 4)
    weight = by_rows(table, mesh)
    part = parallel_lookup(tokens, weight, mesh=mesh)
    mine = slope.chunk(2, dim=1)[mesh.get_local_rank()]
    for _ in range(2):  # as accumulation does
        part.backward(mine, retain_graph=True)
    assert isinstance(weight.grad, DTensor)
    full = table.clone().requires_grad_()
    out = torch.nn.functional.embedding(tokens, full)
    out.backward(2 * slope)
    assert torch.equal(part, out.chunk(2, dim=1)[mesh.get_local_rank()])
    return str(weight.grad.placements), weight.grad.to_local(), weight.grad.full_tensor(), full.grad


def notes_here(recipe: Recipe) -> list[str]:
    return build(recipe).parts.notes


@pytest.mark.multi
def test_the_note_on_the_loss_is_what_runs(spawn: Any) -> None:
    for notes in spawn(notes_here, 2, make_recipe(tensor=2, train={"loss": "plain"})):
        losses = [note for note in notes if note.startswith("loss: ")]
        assert len(losses) == 1 and "chunks of 48" in losses[0] and "2 ranks" in losses[0]


@pytest.mark.multi
def test_a_divided_embedding_has_a_divided_gradient(spawn: Any) -> None:
    for placements, part, gradient, expected in spawn(embedding_gradient, 2):
        assert placements == "(Shard(dim=0),)"
        assert part.shape == (5, 4)
        torch.testing.assert_close(gradient, expected)


def train_in_float8(recipe: Recipe) -> list[tuple[float, float]]:
    """FP8's numbers without its units: the product is imitated on a CPU."""
    from windlass.train import float8

    float8.choose_backend = lambda setting, device: ("torch", "imitated")
    return train_here(recipe)


@pytest.mark.multi
def test_float8_is_divided_too(spawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.train import float8

    monkeypatch.setattr(float8, "choose_backend", float8.choose_backend)  # put back after the assignment here
    fp8, bf16 = {"precision": "fp8"}, {"precision": "bf16"}
    one = train_in_float8(make_recipe("sgd", micro_batch=16, train=fp8))
    two = spawn(train_in_float8, 2, make_recipe("sgd", micro_batch=4, tensor=2, train=fp8))
    wide = spawn(train_here, 2, make_recipe("sgd", micro_batch=4, tensor=2, train=bf16))
    for (loss, norm), (loss0, norm0), (loss1, _) in zip(two[0], one, wide[0], strict=True):
        assert loss == pytest.approx(loss0, rel=3e-3), "scales differ by part, so numbers do a little"
        assert norm == pytest.approx(norm0, rel=0.1)
        assert loss != loss1, "the products were not in FP8"


def test_single_process_does_not_depend_on_accumulation(alone: Any) -> None:
    compare([train_here(make_recipe("sgd", micro_batch=4))], alone("sgd"))


def test_stream_is_the_same_everywhere() -> None:
    recipe = make_recipe()
    stream = open_stream(recipe.data, seed=0, vocab=250)

    def indexes(ranks: int) -> list[int]:
        plan = batch_plan(recipe, complete_layout(LayoutConfig(micro_batch=1), job_size(recipe, ranks, ranks)))
        return [index for rank in range(ranks) for index in plan.indexes(32, rank).tolist()]

    for ranks in (2, 4, 8):
        assert indexes(ranks) == indexes(1)
        assert (stream.sequences(indexes(ranks)) == stream.sequences(indexes(1))).all()
