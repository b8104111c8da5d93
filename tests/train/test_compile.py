"""Do compiled blocks compute what eager ones do, and does a budget save memory? The compiler's front end only: no
code is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.clusters.scheduler import Place
from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.runs.folder import Run
from windlass.train import loop

ALONE = Place(0, 1, 0, 1, 0, 1, None, None, "single")


def recipe(family: str = "llama", **train: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "c", "model": {"family": family, "layers": 2, "width": 32, "ffn": 48, "heads": 2, "vocab": 100},
        "data": {"seq_len": 16, "batch_tokens": 64}, "train": {"steps": 3, "precision": "fp32", **train}, "layout": {"micro_batch": 4},
        "energy": {"enabled": False}, "optim": {"name": "sgd", "lr": 0.1},
    })  # fmt: skip


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured, differentiated and cut as for a GPU, and then run op by op."""
    import torch._functorch.config as functorch

    real = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: real(self, backend="aot_eager_decomp_partition", **how)
    )
    monkeypatch.setattr(functorch, "activation_memory_budget", 1.0)


def three_steps(value: Recipe) -> tuple[list[list[float]], int]:
    """Losses and norms, and the bytes that the first forward pass kept for its backward pass."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    job = loop.build(value, Run(Path("/nonexistent")), ALONE, [], lambda text: None, announced=False)
    batches = loop.open_batches(job)
    own = {p.untyped_storage().data_ptr() for _, p in job.parts.named_parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    seen = []
    for step in range(3):
        tokens, documents = next(batches)
        if step == 0:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                seen.append(job.stepper.step(tokens, documents, 0.1).values[:2].tolist())
        else:
            seen.append(job.stepper.step(tokens, documents, 0.1).values[:2].tolist())
    batches.close()
    return seen, sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "retnet"])
def test_compiled_blocks_compute_the_same(front_end: None, family: str) -> None:
    eager, _ = three_steps(recipe(family))
    compiled, _ = three_steps(recipe(family, compile=True))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-5, atol=1e-6)


def test_a_budget_keeps_less_and_computes_the_same(front_end: None) -> None:
    whole, most = three_steps(recipe(compile=True))
    tight, least = three_steps(recipe(compile=True, recompute="budget", recompute_budget=0.0))
    middle, between = three_steps(recipe(compile=True, recompute="budget", recompute_budget=0.5))
    assert least < between < most
    for seen in (tight, middle):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(whole), rtol=1e-5, atol=1e-6)


def test_a_budget_needs_the_compiler() -> None:
    with pytest.raises(ConfigError, match=r'recompute = "budget" needs train.compile'):
        three_steps(recipe(recompute="budget"))
