"""How each kind of sharding calls FSDP."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from windlass.layout.types import Layout, StepSpec
from windlass.train import parallelize


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
    )
    parallelize.shard_parameters(model, StepSpec(seq_len=8), world, [])
    assert [module for module, _ in calls] == [*([layer] for layer in layers), model]
    assert {options["reshard_after_forward"] for _, options in calls[:-1]} == {frees}
    assert {options["mesh"] for _, options in calls} == {mesh}
