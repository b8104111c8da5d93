"""Compiled layers compute what eager ones do, and a budget saves memory. The compiler's front end only: no code is
generated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.multi.conftest import spawn
from tests.multi.test_layout_parity import Parity
from tests.train.helpers import build, steps
from torch._dynamo.utils import counters

from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.train import loop

SHAPES = {
    "nemotron_h": {
        "layers": 1,
        "pattern": "M",
        "mamba": {"heads": 4, "head_dim": 8, "state": 8, "groups": 2, "chunk": 8},
    }
}


def recipe(family: str = "llama", **train: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "c", "model": {"family": family, "layers": 2, "width": 32, "ffn": 48, "heads": 2, "vocab": 100, **SHAPES.get(family, {})},
        "data": {"seq_len": 16, "batch_tokens": 64}, "train": {"steps": 3, "precision": "fp32", **train}, "layout": {"micro_batch": 4},
        "energy": {"enabled": False}, "optim": {"name": "sgd", "lr": 0.1},
    })  # fmt: skip


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured, differentiated and cut as for a GPU, and then run op by op."""
    import torch._functorch.config as functorch

    real = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: real(self, backend="aot_eager_decomp_partition", **options)
    )
    monkeypatch.setattr(functorch, "activation_memory_budget", 1.0)


def three_steps(value: Recipe) -> tuple[list[list[float]], int]:
    """Losses and norms, and the bytes that the first forward pass kept for its backward pass."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    training = build(value)
    batches = loop.open_batches(training)
    own = {p.untyped_storage().data_ptr() for _, p in training.parts.named_parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    values = []
    for step in range(3):
        batch = next(batches)
        if step == 0:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                values.append(training.stepper.step(batch, 0.1).values[:2].tolist())
        else:
            values.append(training.stepper.step(batch, 0.1).values[:2].tolist())
    batches.close()
    return values, sum(kept.values())


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("llama", "none"),
        ("mixtral", "full"),
        *(pytest.param(family, "none", marks=pytest.mark.slow) for family in ("retnet", "mixtral", "nemotron_h")),
    ],
)
def test_compiled_blocks_compute_the_same(front_end: None, family: str, recompute: str) -> None:
    eager, _ = three_steps(recipe(family))
    compiled, _ = three_steps(recipe(family, compile=True, recompute=recompute))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-5, atol=1e-6)


def test_every_kind_of_layer_has_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows 8 graphs of one function; kinds of layers times training and evaluation are more."""
    import torch._dynamo.config as dynamo

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr(dynamo, "recompile_limit", 8)
    build(recipe("llama", compile=True))
    assert dynamo.recompile_limit == 8
    hybrid = recipe("nemotron_h", compile=True)
    model = hybrid.model.model_copy(update={"layers": 3, "pattern": "M-*"})
    build(hybrid.model_copy(update={"model": model}))
    assert dynamo.recompile_limit == 4 * (3 + 1)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_are_measured_without_a_break(front_end: None, recompute: str) -> None:
    looks = []
    for options in ({}, {"compile": True, "recompute": recompute}):
        torch._dynamo.reset()
        training = build(recipe(instruments=1, **options))
        batches = loop.open_batches(training)
        looks.append(training.stepper.step(next(batches), 0.1, measure=True).layers)
        batches.close()
    torch.testing.assert_close(looks[1], looks[0], rtol=1e-4, atol=1e-6, equal_nan=True)
    assert torch.isfinite(looks[0][:2]).all()


def test_a_budget_keeps_less_and_computes_the_same(front_end: None) -> None:
    full, most = three_steps(recipe(compile=True))
    tight, least = three_steps(recipe(compile=True, recompute="budget", recompute_budget=0.0))
    middle, between = three_steps(recipe(compile=True, recompute="budget", recompute_budget=0.5))
    assert least < between < most
    for values in (tight, middle):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(full), rtol=1e-5, atol=1e-6)


def test_a_budget_needs_the_compiler() -> None:
    with pytest.raises(ConfigError) as caught:
        three_steps(recipe(recompute="budget"))
    assert caught.value.code == "train.budget-needs-compile"


def compiled_exchange(recompute: str) -> tuple[list[tuple[float, float]], list[int]]:
    """Steps of two ranks that exchange rows in compiled layers, and the number of graphs after each."""
    torch._dynamo.reset()
    layout = {"shard": "full", "expert": 2, "train": {"recompute": recompute, "compile": True}}
    training = build(Parity(2, 4, layout, family="qwen3_moe", layers=2).recipe())
    values, graphs = [], []
    for _ in range(4):
        values += steps(training, 1)
        graphs.append(counters["stats"]["unique_graphs"])
    return values, graphs


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(("recompute", "least"), [("none", 6), ("full", 6), ("selective", 1)])
def test_an_exchange_cuts_a_compiled_layer_and_any_number_of_rows_passes(
    front_end: None, recompute: str, least: int
) -> None:
    """Under selective recomputation only the layer without experts is compiled."""
    expected = Parity(1, 16, {"steps": 4}, family="qwen3_moe", layers=2).train()
    for values, graphs in spawn(compiled_exchange, 2, recompute):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert graphs[0] >= least and graphs[-1] == graphs[0], "compiled again for other numbers of rows"
