"""A run stops in one layout and continues in another; its curve is that of a run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.train import helpers

from windlass.config import Recipe
from windlass.runs.folder import Run

TOLERANCE = 3e-6


def recipe(steps: int, micro: int, tied: bool = False, **layout: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "resume", "model": {"layers": 4, "width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab": 250, "tied": tied},
        "data": {"seq_len": 32, "batch_tokens": 512, "tokens": 512 * 10}, "optim": {"lr": 1e-2, "warmup": 512, "schedule": "constant", "eps": 1e-2 if tied else 1e-8},
        "train": {"steps": steps, "precision": "fp32", **layout.pop("train", {})}, "layout": {"micro_batch": micro, **layout},
        "save": {"every": 1000}, "energy": {"enabled": False},
    })  # fmt: skip


def run_here(folder: str, value: Recipe) -> int:
    return helpers.run_here(value, helpers.new_run(Path(folder)))


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    return {line.step: (line.loss, line.grad_norm) for line in Run(folder).metrics_lines()}


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    folder = tmp_path_factory.mktemp("uncut")
    assert run_here(str(folder), recipe(10, 16)) == 0
    return curve(folder)


def same(curve: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]) -> None:
    assert sorted(curve) == sorted(expected)
    for step, (loss, norm) in expected.items():
        assert curve[step][0] == pytest.approx(loss, rel=TOLERANCE), f"loss of step {step}"
        assert curve[step][1] == pytest.approx(norm, rel=10 * TOLERANCE), f"norm of step {step}"


CHAIN: list[tuple[int, int, dict[str, Any]]] = [
    (1, 16, {}),
    (2, 8, {"shard": "full"}),
    (4, 4, {"shard": "full", "tensor": 2}),
    (2, 8, {"shard": "zero1", "pipeline": 2}),
    (4, 2, {"shard": "hybrid", "shard_size": 2}),
    (1, 4, {}),
]


@pytest.mark.multi
def test_each_start_goes_on_in_another_layout(uncut: Any, spawn: Any, tmp_path: Path) -> None:
    for steps, (world, micro, layout) in zip((2, 4, 5, 6, 8, 10), CHAIN, strict=True):
        value = recipe(steps, micro, **layout)
        codes = spawn(run_here, world, str(tmp_path), value) if world > 1 else [run_here(str(tmp_path), value)]
        assert codes == [0] * world
    same(curve(tmp_path), uncut)
    kinds = [e.event for e in Run(tmp_path).events() if e.event in ("started", "resumed")]
    assert kinds == ["started"] + ["resumed"] * 5


@pytest.mark.multi
def test_experts_go_on_on_other_ranks(spawn: Any, tmp_path: Path) -> None:
    """Six experts of 20 x 64: over two ranks a copy is divided by rows of a weight, not by experts."""
    experts = {"family": "qwen3_moe", "experts": {"count": 6, "top_k": 2, "ffn": 20, "balance": "bias"}}

    def routed(steps: int, micro: int, **layout: Any) -> Recipe:
        value = recipe(steps, micro, **layout).model_dump(exclude_unset=True)
        return Recipe.model_validate({**value, "model": {**value["model"], **experts}})

    assert run_here(str(tmp_path / "uncut"), routed(6, 16)) == 0
    chain = [(2, {"shard": "full", "expert": 2}), (4, {"shard": "full", "expert": 2}), (1, {})]
    for steps, (world, layout) in zip((2, 4, 6), chain, strict=True):
        value = routed(steps, 16 // world, **layout)
        codes = (
            spawn(run_here, world, str(tmp_path / "b"), value) if world > 1 else [run_here(str(tmp_path / "b"), value)]
        )
        assert codes == [0] * world
    same(curve(tmp_path / "b"), curve(tmp_path / "uncut"))


@pytest.mark.multi
def test_tied_weights_go_on_from_a_pipeline(spawn: Any, tmp_path: Path) -> None:
    """The checkpoint holds the shared matrix once; a pipeline's last stage has it again after a restart."""
    assert run_here(str(tmp_path / "uncut"), recipe(9, 4, tied=True)) == 0
    split = {"shard": "none", "pipeline": 2, "tied": True}
    for steps, layout in ((3, split), (6, split), (9, {"tied": True})):
        world = layout.get("pipeline", 1)
        value = recipe(steps, 4, **layout)
        codes = spawn(run_here, 2, str(tmp_path / "b"), value) if world > 1 else [run_here(str(tmp_path / "b"), value)]
        assert codes == [0] * world
    same(curve(tmp_path / "b"), curve(tmp_path / "uncut"))


def test_same_layout_goes_on_bit_for_bit(uncut: Any, tmp_path: Path) -> None:
    assert run_here(str(tmp_path), recipe(5, 16)) == 0
    assert run_here(str(tmp_path), recipe(10, 16)) == 0
    assert curve(tmp_path) == uncut


@pytest.mark.integration
def test_bf16_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The fp32 master copy is what is saved, not the bf16 weights."""
    bf16 = {"train": {"precision": "bf16"}}
    assert run_here(str(tmp_path / "a"), recipe(8, 4, train={"precision": "bf16"})) == 0
    assert run_here(str(tmp_path / "b"), recipe(4, 4, **bf16)) == 0
    assert run_here(str(tmp_path / "b"), recipe(8, 4, train={"precision": "bf16"})) == 0
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


@pytest.mark.multi
def test_bf16_single_and_sharded_agree(spawn: Any, tmp_path: Path) -> None:
    bf16 = {"precision": "bf16"}
    assert run_here(str(tmp_path / "a"), recipe(10, 4, train=bf16)) == 0
    spawn(run_here, 2, str(tmp_path / "b"), recipe(10, 4, shard="full", train=bf16))
    a, b = curve(tmp_path / "a"), curve(tmp_path / "b")
    assert max(abs(a[s][0] - b[s][0]) for s in a) < 2e-3


@pytest.mark.multi
def test_pure_bf16_works_sharded(spawn: Any, tmp_path: Path) -> None:
    pure = {"precision": "bf16_pure"}
    assert run_here(str(tmp_path / "a"), recipe(10, 4, train=pure)) == 0
    spawn(run_here, 2, str(tmp_path / "b"), recipe(10, 4, shard="full", train=pure))
    a, b = curve(tmp_path / "a"), curve(tmp_path / "b")
    assert max(abs(a[s][0] - b[s][0]) for s in a) < 2e-2, "rounding at random differs, the course does not"


@pytest.mark.multi
def test_muon_goes_on_in_another_layout(spawn: Any, tmp_path: Path) -> None:
    """Matrices have one moment and the others two; both find their parts again."""

    def value(steps: int, micro: int, **layout: Any) -> Recipe:
        changed = recipe(steps, micro, **layout)
        return changed.model_copy(
            update={"optim": changed.optim.model_copy(update={"name": "muon", "lr": 1e-3, "eps": 1e-2})}
        )

    assert run_here(str(tmp_path / "uncut"), value(6, 16)) == 0
    for steps, layout in ((2, {"shard": "full"}), (4, {"shard": "none", "tensor": 2}), (6, {})):
        part = value(steps, 8, **layout)
        codes = spawn(run_here, 2, str(tmp_path / "b"), part) if layout else [run_here(str(tmp_path / "b"), part)]
        assert set(codes) == {0}
    same(curve(tmp_path / "b"), curve(tmp_path / "uncut"))
