"""From a recipe's wishes to the complete layout and step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windlass.config import LayoutConfig, Recipe
from windlass.layout.resolve import JobSize, complete_layout, gradient_sync, job_size, resolve_step
from windlass.layout.types import Layout, StepSpec
from windlass.models.presets import model_spec

NODES_OF_4 = JobSize(devices=16, devices_per_node=4, seq_len=2048, sequences=128)


def resolved(recipe: Recipe, layout: Layout | None = None, *, gpu: bool = True) -> StepSpec:
    return resolve_step(recipe, model_spec(recipe.model), layout or Layout(), gpu=gpu)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({}, {"data": 16, "shard_size": 1, "accumulation": 8}),
        ({"tensor": 2, "pipeline": 2}, {"data": 4, "accumulation": 32}),
        ({"context": 4, "shard": "full"}, {"data": 4, "shard_size": 16, "accumulation": 32}),
        ({"shard": "zero1", "micro_batch": 4}, {"shard_size": 16, "accumulation": 2}),
        ({"shard": "hybrid"}, {"shard_size": 4}),
        ({"shard": "hybrid", "tensor": 2}, {"shard_size": 2, "data": 8}),
        ({"shard": "hybrid", "shard_size": 8}, {"shard_size": 8}),
        ({"shard": "hybrid_zero2"}, {"shard_size": 4, "weight_shards": 1}),
        ({"pipeline": 2, "schedule": "interleaved", "pipeline_chunks": 3}, {"chunks": 3}),
        ({"pipeline": 2, "pipeline_chunks": 3}, {"chunks": 1}),
    ],
    ids=str,
)
def test_degrees_that_follow_from_devices_and_batch(wish: dict[str, Any], expected: dict[str, int]) -> None:
    layout = complete_layout(LayoutConfig.model_validate(wish), NODES_OF_4)
    assert {name: getattr(layout, name) for name in expected} == expected
    assert layout.devices == 16
    assert layout.sequences_per_step == 128


def test_without_a_batch_each_replica_takes_one_micro_batch(recipe: Callable[..., Recipe]) -> None:
    size = job_size(recipe(data={"batch_tokens": None}), 16, 4)
    assert size.sequences is None
    layout = complete_layout(LayoutConfig(micro_batch=4), size)
    assert (layout.accumulation, layout.sequences_per_step) == (1, 64)
    assert job_size(recipe(), 16, 4).sequences == 128


@pytest.mark.parametrize(
    ("shard", "sync", "every", "defer", "keep"),
    [
        ("none", "auto", False, False, True),
        ("zero1", "auto", False, False, True),
        ("zero2", "auto", True, False, False),
        ("full", "auto", True, False, False),
        ("hybrid", "auto", True, True, False),
        ("hybrid", "every", True, False, False),
        ("hybrid_zero2", "auto", True, True, False),
        ("full", "last", False, False, False),
        ("zero1", "every", True, False, True),
    ],
)
def test_when_gradients_are_reduced(shard: str, sync: str, every: bool, defer: bool, keep: bool) -> None:
    result = gradient_sync(Layout(data=8, shard=shard, shard_size=4, sync=sync, accumulation=4))
    assert (result.every_micro_batch, result.defer_replicas, result.keep_weights) == (every, defer, keep)
    assert result.reason
    single = gradient_sync(Layout(data=8, shard=shard, shard_size=4, sync=sync))
    assert single.every_micro_batch and not single.reason, "one micro-batch leaves nothing to decide"


@pytest.mark.parametrize(
    ("wish", "vocab", "micro_batch", "tensor", "context", "loss"),
    [
        ("auto", 32768, 1, 1, 1, "plain"),  # 512 tokens x 32,768 rows x 4 bytes = 64 MiB exactly
        ("auto", 32769, 1, 1, 1, "chunked"),  # padded to 32,896 rows
        ("auto", 32768, 2, 1, 1, "chunked"),
        ("auto", 32768, 2, 1, 2, "plain"),  # a context rank has half of the tokens
        ("plain", 32768, 64, 1, 1, "plain"),
        ("chunked", 128, 1, 1, 1, "chunked"),
        ("auto", 128, 1, 2, 1, "chunked"),  # a divided vocabulary
        ("plain", 128, 1, 2, 1, "chunked"),
    ],
)
def test_logits_up_to_64_mib_are_made_whole(
    recipe: Callable[..., Recipe], wish: str, vocab: int, micro_batch: int, tensor: int, context: int, loss: str
) -> None:
    made = recipe(model={"vocab": vocab}, data={"seq_len": 512, "batch_tokens": None}, train={"loss": wish})
    layout = Layout(micro_batch=micro_batch, tensor=tensor, context=context)
    assert resolved(made, layout).loss == loss


@pytest.mark.parametrize(
    ("train", "gpu", "tensor", "fused"),
    [
        ({}, True, 1, False),
        ({"precision": "fp8"}, True, 1, True),
        ({"precision": "fp8"}, False, 1, False),
        ({"precision": "fp8"}, True, 2, False),
        ({"precision": "fp8", "fuse": False}, True, 1, False),
        ({"fuse": True}, False, 1, True),
        ({"fuse": True}, True, 2, False),
    ],
    ids=str,
)
def test_fused_projections(
    recipe: Callable[..., Recipe], train: dict[str, Any], gpu: bool, tensor: int, fused: bool
) -> None:
    assert resolved(recipe(train=train), Layout(tensor=tensor), gpu=gpu).fused_projections is fused


@pytest.mark.parametrize(
    ("tables", "gpu", "expanded"),
    [
        ({}, True, False),
        ({"train": {"precision": "fp32"}}, True, True),
        ({"train": {"precision": "fp32"}}, False, False),
        ({"data": {"mask_documents": True}}, True, False),
    ],
    ids=str,
)
def test_grouped_heads_are_expanded_for_the_kernel_without_groups(
    recipe: Callable[..., Recipe], tables: dict[str, Any], gpu: bool, expanded: bool
) -> None:
    assert resolved(recipe(**tables), gpu=gpu).expand_kv_heads is expanded


def test_masks_over_divided_sequences_need_the_kernel_without_groups(recipe: Callable[..., Recipe]) -> None:
    masked, layout = {"data": {"mask_documents": True}}, Layout(context=2)
    assert resolved(recipe(**masked), layout, gpu=True).expand_kv_heads
    assert not resolved(recipe(**masked, model={"kv_heads": 12}), layout, gpu=True).expand_kv_heads


def test_choices_that_follow_the_device_and_the_model(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    assert resolved(recipe()).compile and not resolved(recipe(), gpu=False).compile
    assert resolved(recipe(train={"compile": True}), gpu=False).compile
    assert not resolved(recipe(train={"engine": "deepspeed"})).compile
    assert resolved(recipe()).engine == "native"
    assert resolved(recipe(train={"engine": "deepspeed"})).engine == "deepspeed"
    assert resolved(recipe()).moment_tensors == 2
    assert resolved(recipe(optim={"name": "sgd"})).moment_tensors == 1
    # Muon keeps one moment for the matrices of layers, and AdamW's two for embedding and head.
    params = model_spec(recipe().model).params
    muon = resolved(recipe(optim={"name": "muon"})).moment_tensors
    assert muon * params.stored == pytest.approx(params.body + 2 * (params.stored - params.body))
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    foreign = resolved(recipe(model={"family": "hf", "config": str(tmp_path)}))
    assert (foreign.engine, foreign.loss) == ("torch", "plain")
    masked = {"data": {"mask_documents": True}}
    assert resolved(recipe(**masked)).mask_documents
    assert not resolved(recipe(model={"family": "retnet"}, **masked)).mask_documents, "retention has no mask"


def test_the_search_may_replace_the_recompute_policy(recipe: Callable[..., Recipe]) -> None:
    made = recipe(train={"recompute": "full"})
    spec = model_spec(made.model)
    assert resolve_step(made, spec, Layout(), gpu=True).recompute == "full"
    assert resolve_step(made, spec, Layout(), gpu=True, recompute="none").recompute == "none"
