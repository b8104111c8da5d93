"""How each kind of sharding calls FSDP."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from windlass.errors import TrainError
from windlass.layout.types import Layout, StepSpec
from windlass.train import parallelize
from windlass.train.parallelize import even_shard, shard_placement


@pytest.mark.parametrize(
    ("shard", "size", "frees", "mesh"),
    [
        ("zero2", 8, False, "one axis"),
        ("full", 8, True, "one axis"),
        ("hybrid", 4, True, "two axes"),
        ("hybrid_zero2", 4, False, "two axes"),
    ],
)
def test_which_weights_are_freed_after_the_forward_pass_and_over_which_axes(
    monkeypatch: pytest.MonkeyPatch, shard: str, size: int, frees: bool, mesh: str
) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(parallelize, "fully_shard", lambda module, **options: calls.append((module, options)))
    layers = [nn.Linear(2, 2) for _ in range(2)]
    model: Any = SimpleNamespace(
        layer_modules=lambda: layers, modules=lambda: layers, embed=None, head=None, norm=None, tied=False
    )
    world: Any = SimpleNamespace(
        layout=Layout(data=8, shard=shard, shard_size=size),
        mesh={"fsdp": "one axis", ("rep", "fsdp"): "two axes"},
        copies=8 // size,
        cuda=False,
        expert_mesh=None,
    )
    parallelize.shard_parameters(model, StepSpec(seq_len=8), world, [])
    assert [module for module, _ in calls] == [*([layer] for layer in layers), model]
    assert {options["reshard_after_forward"] for _, options in calls[:-1]} == {frees}
    assert {options["mesh"] for _, options in calls} == {mesh}


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((128, 768, 2048), 64, 0),
        ((128, 768, 2048), 256, 1),
        ((6, 20, 64), 4, 1),
        ((6, 20, 64), 64, 2),
        ((6, 21, 65), 4, 0),
    ],
)
def test_stacked_experts_are_divided_evenly(shape: tuple[int, ...], shards: int, dim: int) -> None:
    assert even_shard(torch.Size(shape), shards) == Shard(dim)


def test_expert_parallelism_names_the_torch_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    monkeypatch.delattr(_fsdp_common, "ShardPlacementResult")
    world: Any = SimpleNamespace(expert_mesh=object(), layout=Layout(data=4, expert=4))
    with pytest.raises(TrainError) as error:
        shard_placement(world)
    assert error.value.code == "train.expert-needs-torch" and torch.__version__ in error.value.message
