"""The trace against sums worked by hand, the planner's prediction, and measurements on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.memory_trace.trace import GIB, Tracker, trace
from torch._subclasses.fake_tensor import FakeTensorMode

from windlass.clusters import load_cluster
from windlass.clusters.model import Cluster, Links, Node
from windlass.config import Recipe, load_recipe
from windlass.errors import PlanError

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"layers": 6, "width": 256, "ffn": 704, "heads": 8, "kv_heads": 4, "vocab": 2048}


def machine(devices: int, device: str = "h200") -> Cluster:
    return Cluster(
        name="fake", title="fake", device=device, node=Node(devices=devices, cores=8), links=Links(intra_gbs=100, inter_gbs_per_node=10)
    )  # fmt: skip


def recipe(
    sequences: int, layout: dict[str, object], train: dict[str, object] | None = None, **model: object
) -> Recipe:
    return Recipe.model_validate({
        "name": "traced", "cluster": "workstation", "model": {**MODEL, **model},
        "data": {"seq_len": 1024, "batch_tokens": 1024 * sequences}, "train": {"steps": 10, **(train or {})}, "layout": layout,
    })  # fmt: skip


def test_tracker_counts_a_storage_once_and_until_it_is_gone() -> None:
    with FakeTensorMode():
        tracker = Tracker()
        with tracker:
            first = torch.zeros(1000)
            view = first[10:]
            assert tracker.total == 4000
            second = first + 1
            assert tracker.total == 8000
            del second
            assert tracker.total == 4000
            first.untyped_storage().resize_(0)
            assert tracker.total == 0
            assert tracker.peak == 8000
            del view, first


def test_states_of_one_device_are_fourteen_bytes_per_parameter() -> None:
    traced = trace(recipe(1, {"micro_batch": 1}), machine(1))
    parameters = 2 * 2048 * 256 + 256 + 6 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 704 + 2 * 256)
    held = traced.terms["weights"] + traced.terms["master weights"] + traced.terms["optimizer states"]
    assert held == pytest.approx(14 * parameters)
    assert sum(traced.terms.values()) == pytest.approx(traced.peak)


def test_layers_drawn_on_equal_layers_traced() -> None:
    given = recipe(8, {"shard": "full", "micro_batch": 2})
    drawn = trace(given, machine(4))
    complete = trace(given, machine(4), layers=(6,))
    assert drawn.traced_layers == (2, 4)
    assert drawn.peak == pytest.approx(complete.peak, rel=0.001)
    assert not dist.is_initialized()


CASES = [
    ("one device", 1, 4, {"micro_batch": 4}, {}),
    ("one device, uncompiled", 1, 4, {"micro_batch": 4}, {"compile": False}),
    ("one device, fp8", 1, 4, {"micro_batch": 4}, {"precision": "fp8"}),
    ("copies", 4, 16, {"shard": "none", "micro_batch": 4}, {}),
    ("full", 8, 32, {"shard": "full", "micro_batch": 4}, {}),
    ("zero2", 8, 32, {"shard": "zero2", "micro_batch": 4}, {}),
    ("hybrid_zero2", 8, 32, {"shard": "hybrid_zero2", "shard_size": 4, "micro_batch": 4}, {}),
    ("full, tensor", 8, 16, {"shard": "full", "micro_batch": 4, "tensor": 2}, {}),
    ("full, selective", 8, 64, {"shard": "full", "micro_batch": 8}, {"recompute": "selective"}),
]


@pytest.mark.parametrize(("name", "devices", "sequences", "layout", "train"), CASES, ids=[c[0] for c in CASES])
def test_arithmetic_and_trace_agree(
    name: str, devices: int, sequences: int, layout: dict[str, object], train: dict[str, object]
) -> None:
    """Within 3 %, once the workspaces of GPU libraries, which no tensor shows, are taken off."""
    from windlass.cost.memory import WORKSPACE_BYTES

    traced = trace(recipe(sequences, layout, train), machine(devices))
    assert traced.predicted is not None
    assert traced.predicted - WORKSPACE_BYTES == pytest.approx(traced.peak, rel=0.03)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"micro_batch": 4}, {"norm": "layer", "activation": "relu2"}),
        ({"micro_batch": 4}, {"activation": "xielu", "qk_norm": "head"}),
        ({"micro_batch": 4, "context": 2}, {}),
    ],
    ids=["LayerNorm and squared ReLU", "xIELU and norms of queries and keys", "context"],
)
def test_blocks_of_other_families(layout: dict[str, object], model: dict[str, object]) -> None:
    from windlass.cost.memory import WORKSPACE_BYTES

    traced = trace(recipe(8, layout, **model), machine(2))
    assert traced.predicted is not None
    assert traced.predicted - WORKSPACE_BYTES == pytest.approx(traced.peak, rel=0.03)


@pytest.mark.parametrize(
    ("name", "block"),
    [("qwen3_30b_a3b_jupiter", "experts"), ("luciole_8b_jupiter", "mamba"), ("deepseek_v3_jupiter", "latent")],
)
def test_blocks_without_a_model_of_their_compiled_code_are_refused(name: str, block: str) -> None:
    given = load_recipe(ROOT / "recipes" / f"{name}.toml", ["layout.micro_batch=1"]).recipe
    with pytest.raises(PlanError) as error:
        trace(given, load_cluster("jupiter-booster"))
    assert error.value.code == "trace.block-unsupported" and block in error.value.message


def test_a_divided_embedding_has_a_divided_gradient() -> None:
    """DTensor tries operators out on tensors of the undivided shape, which hold no memory: 12 bytes for each number of the
    whole table were counted."""
    layout: dict[str, object] = {"micro_batch": 1, "tensor": 2, "pipeline": 2, "shard": "zero1"}
    given = recipe(16, layout, vocab=65_536)
    short = given.data.model_copy(update={"seq_len": 128, "batch_tokens": 128 * 16})
    traced = trace(given.model_copy(update={"data": short}), machine(8))
    rows = 65_536 // 2 * 256
    # At most the sum so far and the new gradient, each in fp32, and the new one in 16 bits; and those of the layers.
    assert traced.terms["gradients on their way"] < 12 * rows


def test_a_pipeline_is_traced_on_its_fullest_stage() -> None:
    traced = trace(recipe(8, {"shard": "none", "micro_batch": 1, "pipeline": 2}), machine(4))
    assert traced.stage in (0, 1)
    assert traced.traced_layers == (2, 4)
    half = (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 704 + 2 * 256) * 3 + 2048 * 256
    assert traced.terms["weights"] == pytest.approx(4 * half, rel=0.001)


def test_measured_rows_of_an_h200() -> None:
    """Peaks of torch.cuda.max_memory_allocated stored in benchmarks/results: three that differ in kind."""
    record = json.loads((ROOT / "benchmarks" / "results" / "gpu_plan.json").read_text())
    model = {"layers": 22, "width": 2048, "ffn": 5632, "heads": 32, "kv_heads": 4, "vocab": 32000}
    rows = [r for r in record["rows"] if r["size"] == "1.1b" and r["seq"] == 4096 and r["micro_batch"] in (4, 8)]
    for row in [r for r in rows if r.get("moments") is None and r.get("recompute", "none") != "full"]:
        train = {k: row[k] for k in ("compile", "recompute", "precision", "fp8_scaling", "fuse") if k in row}
        given = recipe(1, {"micro_batch": row["micro_batch"]}, train, **model)
        data = given.data.model_copy(update={"seq_len": 4096, "batch_tokens": 4096 * row["micro_batch"]})
        traced = trace(given.model_copy(update={"data": data}), machine(1))
        assert traced.peak / GIB == pytest.approx(row["allocated_gib"], rel=0.02), row


def test_json_and_text_say_the_same() -> None:
    traced = trace(recipe(4, {"micro_batch": 4}), machine(1))
    record = traced.json()
    assert record["peak_gib"] == pytest.approx(traced.peak / GIB)
    assert sum(record["terms_gib"].values()) == pytest.approx(record["peak_gib"])
    assert f"{record['peak_gib']:.2f} GiB per rank" in traced.text()
    assert "uncompiled" not in traced.text()


@pytest.mark.parametrize(
    ("layout", "train", "code"),
    [
        ({"micro_batch": 1, "shard": "full", "offload": "optimizer"}, {}, "trace.offload-unsupported"),
        ({"micro_batch": 1}, {"recompute": "budget"}, "trace.recompute-unsupported"),
        ({"micro_batch": 1}, {"engine": "deepspeed"}, "trace.engine-unsupported"),
    ],
)
def test_what_cannot_be_traced_is_refused(layout: dict[str, object], train: dict[str, object], code: str) -> None:
    with pytest.raises(PlanError) as error:
        trace(recipe(2, layout, train), machine(2))
    assert error.value.code == code


def test_a_recipe_without_a_layout_is_refused() -> None:
    given = load_recipe(ROOT / "recipes" / "gptnl_8b_snellius.toml", []).recipe.model_copy(update={"layout": None})
    with pytest.raises(PlanError) as error:
        trace(given, load_cluster("snellius-h100"))
    assert error.value.code == "trace.layout-missing"
