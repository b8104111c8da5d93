"""Every rule by its code, its numbers and the nearest valid value."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windlass.config import LayoutConfig, Recipe
from windlass.errors import ConfigError
from windlass.layout import rules
from windlass.layout.resolve import JobSize, complete_layout
from windlass.layout.rules import Violation, check_layout, check_step, nearest_batches, not_ranked, violations
from windlass.layout.types import AXES, Layout
from windlass.models.presets import model_spec
from windlass.models.spec import ModelSpec
from windlass.units import divisors, nearest

ROUTED: dict[str, Any] = {"model": {"family": "qwen3_moe", "experts": {"count": 12, "top_k": 2, "ffn": 256}}}
GPTNL: dict[str, Any] = {"model": {"width": 6656, "ffn": 17920, "heads": 52, "kv_heads": 13}}
# recipe tables, [layout] table, JobSize, code, numbers in the message, nearest value
INVALID: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, tuple[str, ...], str]] = [
    ({}, {"tensor": 8}, {}, "layout.tensor-not-divisible", ("8", "12", "model.heads"), "4"),
    ({"model": {"kv_heads": 2}}, {"tensor": 4}, {}, "layout.tensor-not-divisible", ("4", "2", "kv_heads"), "2"),
    # GPT-NL's 30B: 4 divides 52 heads, and 13 divides 52 and 13, but only 1 divides all of 52, 13 and 17,920.
    (GPTNL, {"tensor": 8}, {}, "layout.tensor-not-divisible", ("8", "52", "model.heads"), "1"),
    (GPTNL, {"tensor": 13}, {}, "layout.tensor-not-divisible", ("13", "17,920", "model.ffn"), "1"),
    ({"model": {"ffn": 2050}}, {"tensor": 4}, {}, "layout.tensor-not-divisible", ("4", "2,050", "ffn"), "2"),
    ({}, {"pipeline": 16}, {"devices": 16}, "layout.too-many-stages", ("12", "16"), "12"),
    (
        {},
        {"pipeline": 8, "schedule": "interleaved"},
        {},
        "layout.too-many-stages",
        ("12", "16"),
        "6",
    ),
    ({}, {"context": 3}, {"devices": 3}, "layout.context-not-divisible", ("3", "2,048"), "2 or 4"),
    ({"data": {"seq_len": 2050}}, {"tensor": 4}, {}, "layout.sequence-not-divisible", ("4", "2,050"), "2"),
    ({}, {"pipeline": 12}, {}, "layout.too-few-devices", ("12", "8 devices"), "12 devices (3 nodes)"),
    ({}, {"pipeline": 3}, {}, "layout.devices-not-divisible", ("3", "8"), "2 or 4"),
    # 128 sequences over 8 replicas x 3: a unit is 24 sequences; 5 x 24 = 120 and 6 x 24 = 144 sequences of 2,048 tokens.
    ({}, {"micro_batch": 3}, {}, "layout.batch-not-divisible", ("262,144", "49,152", "8 replicas"), "245,760 or 294,912"),
    ({}, {"micro_batch": 32}, {}, "layout.batch-not-divisible", ("262,144", "524,288"), "524,288"),
    ({}, {"pipeline": 4, "micro_batch": 64}, {}, "layout.pipeline-not-filled", ("1", "4"), "pipeline 1"),
    (
        {},
        {"pipeline": 4, "schedule": "interleaved", "micro_batch": 2},
        {"sequences": 20},
        "layout.interleaved-not-divisible",
        ("5", "4"),
        "4 micro-batches",
    ),
    ({}, {"shard": "hybrid", "shard_size": 3}, {}, "layout.shard-size-not-divisible", ("3", "8"), "2 or 4"),
    ({"train": {"engine": "deepspeed"}}, {"tensor": 2}, {}, "layout.axis-unsupported", ("2", "deepspeed"), "1"),
    ({"train": {"engine": "deepspeed"}}, {"shard": "hybrid"}, {}, "layout.hybrid-unsupported", ("hybrid",), "zero2"),
    ({}, {"shard": "hybrid_zero2", "shard_size": 3}, {}, "layout.shard-size-not-divisible", ("3", "8"), "2 or 4"),
    ({"train": {"engine": "deepspeed"}}, {"shard": "hybrid_zero2"}, {}, "layout.hybrid-unsupported", ("hybrid_zero2",), "zero2"),
    (ROUTED, {"expert": 8}, {}, "layout.expert-not-divisible", ("8", "12", "model.experts.count"), "6 or 12"),
    (ROUTED, {"expert": 6, "tensor": 2}, {}, "layout.expert-replicas-not-divisible", ("6", "4 replicas"), "4"),
    (ROUTED, {"expert": 6, "shard": "hybrid", "shard_size": 4}, {"devices": 24}, "layout.expert-crosses-shards", ("6", "4"), "4 or 8"),
    ({}, {"expert": 2}, {}, "layout.no-experts", ("2",), "1"),
    ({"train": {"engine": "deepspeed"}, **ROUTED}, {"expert": 2}, {}, "layout.axis-unsupported", ("2", "deepspeed"), "1"),
    ({}, {"offload": "parameters"}, {"devices": 1}, "layout.offload-needs-processes", ("parameters",), "optimizer"),
]  # fmt: skip

NOT_RANKED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, tuple[str, ...], str]] = [
    ({}, {"tensor": 4}, {"devices_per_node": 2}, "layout.tensor-across-nodes", ("4", "2 devices"), "2"),
    ({"model": {"family": "retnet"}}, {"context": 2}, {}, "layout.context-not-priced", ("2",), "1"),
    ({}, {"shard": "full", "tensor": 4}, {"devices": 4}, "layout.shard-without-replicas", ("full",), "none"),
    ({}, {"shard": "hybrid", "shard_size": 1}, {}, "layout.hybrid-divides-nothing", ("1",), "none"),
    ({}, {"shard": "zero2", "pipeline": 2}, {}, "layout.shard-with-pipeline", ("zero2",), "zero1"),
    ({}, {"shard": "hybrid", "pipeline": 2}, {}, "layout.shard-with-pipeline", ("hybrid",), "zero1"),
    ({}, {"shard": "hybrid_zero2", "pipeline": 2}, {}, "layout.shard-with-pipeline", ("hybrid_zero2",), "zero1"),
    ({}, {"shard": "hybrid_zero2", "shard_size": 1}, {}, "layout.hybrid-divides-nothing", ("hybrid_zero2", "1"), "none"),
    ({}, {"offload": "optimizer"}, {}, "layout.offload-needs-sharding", ("optimizer",), "full or hybrid"),
    ({}, {"shard": "hybrid_zero2", "offload": "optimizer"}, {}, "layout.offload-needs-sharding", ("optimizer",), "full or hybrid"),
]  # fmt: skip


def case(recipe: Recipe, wish: dict[str, Any], size: dict[str, Any]) -> tuple[ModelSpec, Layout, JobSize]:
    sizes = {"devices": 8, "devices_per_node": 4, "seq_len": recipe.data.seq_len, "sequences": 128, **size}
    job = JobSize(**sizes)
    return model_spec(recipe.model), complete_layout(LayoutConfig.model_validate(wish), job), job


def check_case(problems: list[Violation], code: str, numbers: tuple[str, ...], expected: str) -> None:
    problem = next(p for p in problems if p.code == code)
    assert all(number in problem.message for number in numbers), problem.message
    assert expected in problem.nearest, problem.nearest


@pytest.mark.parametrize(
    "is_valid, case_values",
    [*((False, values) for values in INVALID), *((True, values) for values in NOT_RANKED)],
    ids=lambda v: v[3] if isinstance(v, tuple) else "not-ranked" if v else "invalid",
)
def test_rule(recipe: Callable[..., Recipe], is_valid: bool, case_values: tuple[Any, ...]) -> None:
    """A layout that the engine cannot run, or runs but the planner does not propose."""
    tables, wish, size, code, numbers, expected = case_values
    made = recipe(**tables)
    model, layout, job = case(made, wish, size)
    invalid = violations(model, layout, job, made.train.engine)
    if is_valid:
        assert code not in {p.code for p in invalid}
    problems = not_ranked(model, layout, job, made.train.engine) if is_valid else invalid
    check_case(problems, code, numbers, expected)


def test_offload_that_overflows_the_host(recipe: Callable[..., Recipe]) -> None:
    made = recipe()
    model, layout, job = case(made, {"shard": "full", "offload": "optimizer"}, {})
    # 8 bytes a parameter, an eighth of them on each of the node's four devices.
    need = 8 * model.params.stored / 8 * 4
    problems = not_ranked(model, layout, job, host_memory_bytes=need / 2)
    check_case(problems, "layout.host-memory-too-small", (f"{need / 2**30:,.0f} GiB",), "4 nodes")
    assert not_ranked(model, layout, job, host_memory_bytes=need) == []
    assert not_ranked(model, layout, job, moments="bf16", host_memory_bytes=need / 2) == []
    # DeepSpeed's ZeRO-2 divides the states in the same way.
    zero2 = replace(layout, shard="zero2")
    assert not_ranked(model, zero2, job, "deepspeed", host_memory_bytes=need) == []
    assert len(not_ranked(model, zero2, job, "deepspeed", host_memory_bytes=need / 2)) == 1


def test_a_hugging_face_model_is_not_divided(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 640, **sizes}))
    made = recipe(model={"family": "hf", "config": str(tmp_path)})
    for axis in AXES:
        model, layout, job = case(made, {axis: 2}, {})
        check_case(violations(model, layout, job), "layout.axis-unsupported", (axis, "2"), "1")
        assert not_ranked(model, layout, job) == []
    model, layout, job = case(made, {"shard": "full"}, {})
    assert violations(model, layout, job) == []


def test_all_codes_of_the_rules_are_provoked_here() -> None:
    codes = set(re.findall(r'"(layout\.[a-z-]+)"', inspect.getsource(rules)))
    provoked = {row[3] for row in INVALID + NOT_RANKED} | {"layout.host-memory-too-small"}
    assert codes - provoked == set()
    assert "layout.{axis}-not-divisible" in inspect.getsource(rules)  # tensor and context of it are in the table


@pytest.mark.parametrize(
    "wish",
    [
        {"micro_batch": 4},
        {"pipeline": 8},  # uneven: 12 layers in 8 stages
        {"pipeline": 2, "schedule": "interleaved", "micro_batch": 4, "pipeline_chunks": 5},
        {"pipeline": 2, "schedule": "zbv"},
        {"shard": "hybrid"},
        {"tensor": 2, "context": 2, "shard": "full"},
    ],
    ids=str,
)
def test_valid_layouts_have_no_violation(recipe: Callable[..., Recipe], wish: dict[str, Any]) -> None:
    model, layout, job = case(recipe(), wish, {})
    assert violations(model, layout, job) == []
    check_layout(model, layout, job)


def test_device_trouble_is_not_repeated_by_the_batch_rules(recipe: Callable[..., Recipe]) -> None:
    model, layout, job = case(recipe(), {"pipeline": 3, "micro_batch": 3}, {})
    assert [p.code for p in violations(model, layout, job)] == ["layout.devices-not-divisible"]


def test_check_layout_raises_all_violations_with_the_first_code(recipe: Callable[..., Recipe]) -> None:
    model, layout, job = case(recipe(), {"tensor": 8, "micro_batch": 3}, {})
    with pytest.raises(ConfigError) as error:
        check_layout(model, layout, job)
    assert error.value.code == "layout.tensor-not-divisible"
    assert "12" in error.value.message and "micro_batch 3" in error.value.message
    assert "nearest valid value: 4" in error.value.message


@pytest.mark.parametrize(
    ("tables", "code"),
    [
        ({"model": {"family": "retnet"}, "data": {"mask_documents": True}}, "model.no-document-mask"),
        ({"model": {"family": "hf"}, "data": {"mask_documents": True}}, "model.no-document-mask"),
        ({"model": {"family": "hf"}, "train": {"loss": "chunked"}}, "model.setting-needs-own-blocks"),
        ({"model": {"family": "hf"}, "train": {"precision": "fp8"}}, "model.setting-needs-own-blocks"),
        ({"model": {"family": "hf"}, "train": {"fuse": True}}, "model.setting-needs-own-blocks"),
        ({"model": {"family": "hf"}, "train": {"attention": "flash3"}}, "model.setting-needs-own-blocks"),
        ({"model": {}, "tune": {"task": "chat", "lora": {"dropout": 0.1}}}, "tune.lora-dropout-divided"),
    ],
)
def test_settings_that_a_models_blocks_do_not_have(
    recipe: Callable[..., Recipe], tmp_path: Path, tables: dict[str, Any], code: str
) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    if tables["model"].get("family") == "hf":
        tables = {**tables, "model": {"family": "hf", "config": str(tmp_path)}}
    made = recipe(**tables)
    with pytest.raises(ConfigError) as error:
        check_step(made, model_spec(made.model), tensor=2)
    assert error.value.code == code


def test_nearest_and_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert nearest(5, [1, 2, 4, 8]) == "4 or 8"
    assert nearest(9, [1, 2]) == "2"
    assert nearest(3, []) == "none"


@pytest.mark.parametrize(
    ("layout", "sequences", "expected"),
    [
        ({"data": 88}, 528, [528]),
        ({"data": 88}, 512, [528, 440]),
        ({"data": 88}, 484, [528, 440]),  # equally near: the larger first
        ({"data": 88, "micro_batch": 4}, 512, [352, 704]),
        ({"data": 88}, 20, [88]),
        ({"data": 10, "pipeline": 4}, 30, [40]),  # a pipeline of four needs four micro-batches
        ({"data": 10, "pipeline": 4}, 52, [50, 60]),
        ({"data": 10, "pipeline": 4, "schedule": "interleaved"}, 52, [40, 80]),
    ],
)
def test_nearest_batches(layout: dict[str, Any], sequences: int, expected: list[int]) -> None:
    size = JobSize(devices=88, devices_per_node=4, seq_len=4096, sequences=sequences)
    assert nearest_batches(Layout(**layout), size) == expected
