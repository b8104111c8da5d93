"""DeepSpeed under our loop: the native engine's losses at every ZeRO stage, checkpoints that both engines read, and clear refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.config import Recipe, validate
from windlass.errors import ConfigError
from windlass.train.engines import deepspeed

RAW = {
    "name": "ds",
    "model": {"layers": 2, "width": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 512},
    "data": {"seq_len": 64, "batch_tokens": 1024},
    "train": {"steps": 6, "precision": "fp32", "engine": "deepspeed"},
    "layout": {"shard": "full", "micro_batch": 4},
}
TEXT = """
name = "ds"
[model]
layers = 2
width = 64
ffn = 128
heads = 4
kv_heads = 2
vocab = 512
[data]
seq_len = 64
batch_tokens = 1024
[optim]
lr = 1e-2
warmup = 2048
[train]
steps = 6
precision = "fp32"
[layout]
micro_batch = 4
[save]
every = 3
"""
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def recipe(**tables) -> Recipe:
    raw = {key: ({**value, **tables.get(key, {})} if isinstance(value, dict) else value) for key, value in RAW.items()}
    return validate(Recipe, {**raw, **{k: v for k, v in tables.items() if k not in raw}}, "test")


def train(folder: Path, name: str, *words: str) -> list[dict]:
    file = folder / "ds.toml"
    file.write_text(TEXT)
    command = [sys.executable, "-m", "windlass", "train", str(file), *words, "--devices", "2", "--restarts", "0", "-q"]
    done = subprocess.run([*command, "--run", str(folder / name)], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


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
        deepspeed.check_supported(recipe(**tables))
    assert caught.value.code == "train.deepspeed-unsupported" and key in caught.value.message


def test_without_deepspeed_the_message_has_the_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        deepspeed.check_supported(recipe())
    assert caught.value.code == "train.deepspeed-not-installed" and "pip install" in caught.value.hint


def test_its_settings_follow_from_the_recipe():
    from windlass.train.geometry import geometry_of

    made = recipe(layout={"shard": "full", "offload": "parameters"}, train={"precision": "bf16"})
    config = deepspeed.deepspeed_config(made, geometry_of(made, 2))
    assert config["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}  # fmt: skip
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (16, 2)
    assert config["bf16"]["enabled"] and config["communication_data_type"] == "fp32"


def same(one: list[dict], other: list[dict]) -> None:
    assert [m["step"] for m in one] == [m["step"] for m in other]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [m[key] for m in one] == pytest.approx([m[key] for m in other], rel=2e-5), key


@needs_deepspeed
@pytest.mark.multi
def test_losses_are_the_native_engines_and_each_reads_the_others_checkpoint(tmp_path):
    native = train(tmp_path, "native", "layout.shard=full")
    zero3 = train(tmp_path, "zero3", "layout.shard=full", "train.engine=deepspeed")
    same(zero3, native)
    # Native's checkpoint of step 3, continued by ZeRO-1.
    shutil.copytree(tmp_path / "native", tmp_path / "on")
    shutil.rmtree(tmp_path / "on" / "checkpoints" / "step-000000006")
    (tmp_path / "on" / "metrics.jsonl").unlink()
    same(train(tmp_path, "on", "layout.shard=zero1", "train.engine=deepspeed"), native[3:])
    # ZeRO-3's checkpoint of step 3, continued by the native engine.
    shutil.rmtree(tmp_path / "zero3" / "checkpoints" / "step-000000006")
    (tmp_path / "zero3" / "metrics.jsonl").unlink()
    same(train(tmp_path, "zero3", "layout.shard=zero2"), native[3:])


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
    """Four steps of each recipe on this rank, one recipe after the other: loss and gradient norm of each step in a row."""
    from windlass.clusters.scheduler import Place
    from windlass.runs.folder import Run
    from windlass.train import loop

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for table in tables:
        place = Place(rank, world, rank, world, 0, 1, None, None, "test")
        job = loop.build(recipe(**table), Run(Path("/nonexistent")), place, [], lambda text: None, announced=False)
        batches = loop.open_batches(job)
        values = []
        for _ in range(4):
            values.extend(job.stepper.step(*next(batches), 1e-2).values[:2].tolist())
            loop.advance(job)
        batches.close()
        found.append(values)
    return found


def all_alike(spawn, tables: list[dict]) -> None:
    for rank in spawn(losses_here, 2, tables):
        for table, values in zip(tables[1:], rank[1:], strict=True):
            assert values == pytest.approx(rank[0], rel=2e-5), table


@needs_deepspeed
@pytest.mark.multi
def test_every_strategy_has_the_native_engines_losses(spawn):
    all_alike(spawn, [{"train": {"engine": "native"}}, *({"layout": {"offload": "none", **layout}} for layout in STRATEGIES)])  # fmt: skip


@needs_deepspeed
@pytest.mark.multi
@pytest.mark.parametrize("tied", [False, True])
def test_a_foreign_model_has_the_native_engines_losses(spawn, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        max_position_embeddings=128, tie_word_embeddings=tied,
    ).save_pretrained(tmp_path)  # fmt: skip
    hf = {"model": {"family": "hf", "config": str(tmp_path)}}
    native = {**hf, "train": {"engine": "native"}}
    all_alike(spawn, [native, hf, {**hf, "layout": {"shard": "zero1"}}, {**hf, "train": {"recompute": "full"}}])
