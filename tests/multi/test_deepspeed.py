"""DeepSpeed under our loop: the native engine's losses at every ZeRO stage, checkpoints that both engines read, and
clear refusals."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tests.train.helpers import build, new_run, run_here, steps

from windlass.config import LayoutConfig, Recipe, validate
from windlass.errors import ConfigError
from windlass.layout.resolve import complete_layout, job_size
from windlass.layout.types import Layout
from windlass.train.engines import deepspeed

RAW = {
    "name": "ds",
    "model": {"layers": 2, "width": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 512},
    "data": {"seq_len": 64, "batch_tokens": 1024},
    "train": {"steps": 6, "precision": "fp32", "engine": "deepspeed"},
    "layout": {"shard": "full", "micro_batch": 4},
}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def recipe(**tables) -> Recipe:
    raw = {key: ({**value, **tables.get(key, {})} if isinstance(value, dict) else value) for key, value in RAW.items()}
    return validate(Recipe, {**raw, **{k: v for k, v in tables.items() if k not in raw}}, "test")


def layout_of(value: Recipe, devices: int = 2) -> Layout:
    return complete_layout(value.layout or LayoutConfig(), job_size(value, devices, devices))


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"layout": {"tensor": 2}}, "layout.tensor = 2"),
        ({"layout": {"shard": "hybrid"}}, 'layout.shard = "hybrid"'),
        ({"train": {"precision": "fp8"}}, 'train.precision = "fp8"'),
        ({"layout": {"shard": "none", "offload": "optimizer"}}, 'offload = "optimizer" with layout.shard = "none"'),
        ({"layout": {"shard": "none"}, "train": {"precision": "bf16"}}, "no fp32 weights"),
        ({"optim": {"name": "sgd"}}, 'optim.name = "sgd"'),
        ({"train": {"compile": True}}, "train.compile"),
        ({"train": {"recompute": "budget"}}, 'train.recompute = "budget"'),
    ],
)
def test_unsupported_settings_are_refused(tables, key):
    with pytest.raises(ConfigError) as caught:
        deepspeed.check_supported(value := recipe(**tables), layout_of(value))
    assert caught.value.code == "train.deepspeed-unsupported" and key in caught.value.message


def test_without_deepspeed_the_message_has_the_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        deepspeed.check_supported(recipe(), layout_of(recipe()))
    assert caught.value.code == "train.deepspeed-not-installed" and "pip install" in caught.value.hint


def test_its_settings_follow_from_the_recipe():
    settings = recipe(layout={"shard": "full", "offload": "parameters"}, train={"precision": "bf16"})
    config = deepspeed.deepspeed_config(settings, layout_of(settings))
    assert config["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}  # fmt: skip
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (16, 2)
    assert config["bf16"]["enabled"] and config["communication_data_type"] == "fp32"


def metrics_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def same(one: list[dict], other: list[dict]) -> None:
    assert [m["step"] for m in one] == [m["step"] for m in other]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [m[key] for m in one] == pytest.approx([m[key] for m in other], rel=2e-5), key


def run_all(runs: list[tuple[str, str, str, str | None]], folder: Path) -> None:
    """Run after run on this rank: (name, engine, shard, run whose checkpoint of step 3 it continues or None)."""
    import torch.distributed as dist

    for name, engine, shard, source in runs:
        if dist.get_rank() == 0:
            run = new_run(folder / name)
            if source is not None:
                step = "step-000000003"
                shutil.copytree(folder / source / "checkpoints" / step, run.checkpoints / step)
        dist.barrier()
        table = recipe(
            train={"engine": engine}, layout={"shard": shard}, optim={"lr": 1e-2, "warmup": 2048}, save={"every": 3}
        )
        assert run_here(table, new_run(folder / name)) == 0


@needs_deepspeed
@pytest.mark.multi
def test_losses_are_the_native_engines_and_each_reads_the_others_checkpoint(spawn, tmp_path):
    runs = [
        ("native", "native", "full", None),
        ("zero3", "deepspeed", "full", None),
        ("native-then-zero1", "deepspeed", "zero1", "native"),
        ("zero3-then-native", "native", "zero2", "zero3"),
    ]
    spawn(run_all, 2, runs, tmp_path)
    native = metrics_of(tmp_path / "native")
    assert [line["step"] for line in native] == [1, 2, 3, 4, 5, 6]
    same(metrics_of(tmp_path / "zero3"), native)
    for name in ("native-then-zero1", "zero3-then-native"):
        same(metrics_of(tmp_path / name), native[3:])


STRATEGIES = [
    {"shard": "none"},
    {"shard": "zero1"},
    {"shard": "zero2"},
    {"shard": "full"},
    {"shard": "zero1", "offload": "optimizer"},
    {"shard": "zero2", "offload": "optimizer"},
    {"shard": "full", "offload": "optimizer"},
    {"shard": "full", "offload": "parameters"},
]


def losses_here(tables: list[dict]) -> list[list[float]]:
    """Four steps of each recipe on this rank, one recipe after the other: loss and gradient norm of each step in a
    row."""
    return [[value for pair in steps(build(recipe(**table)), 4, lr=1e-2) for value in pair] for table in tables]


def all_alike(spawn, groups: list[list[dict]]) -> None:
    """The first recipe of each group is the reference for the others."""
    for rank in spawn(losses_here, 2, [table for group in groups for table in group]):
        results = iter(rank)
        for group in groups:
            reference = next(results)
            for table in group[1:]:
                assert next(results) == pytest.approx(reference, rel=2e-5), table


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.multi
def test_every_strategy_and_hugging_face_models_have_the_native_engines_losses(spawn, tmp_path):
    transformers = pytest.importorskip("transformers")
    tables = [{"layout": {"offload": "none", **layout}} for layout in STRATEGIES]
    groups = [[{"train": {"engine": "native"}}, *tables]]
    for tied in (False, True):
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
            max_position_embeddings=128, tie_word_embeddings=tied,
        ).save_pretrained(tmp_path / str(tied))  # fmt: skip
        hf = {"model": {"family": "hf", "config": str(tmp_path / str(tied))}}
        native = {**hf, "train": {"engine": "native"}}
        groups.append([native, hf, {**hf, "layout": {"shard": "zero1"}}, {**hf, "train": {"recompute": "full"}}])
    all_alike(spawn, groups)
