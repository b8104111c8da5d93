"""Training on a GPU: compiled layers and optimizers, FP8 products, attention kernels. `pytest tests/gpu/test_engine.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.helpers import build, steps
from tests.train.tuning_files import save_encoder, tune_table, write_tsv

from windlass.blocks.attention.kernels import (
    Scores,
    attention_kernel,
    block_mask,
    block_masked_attention,
    causal_attention,
)
from windlass.blocks.head.loss import _chunk_terms, chunk_terms
from windlass.config import OptimConfig, Recipe
from windlass.data.complete_tune import complete_tune
from windlass.layout.types import IGNORED
from windlass.models.task_head import HFTaskModel
from windlass.train.batches import TokenBatch
from windlass.train.capture import WARM_CALLS, Replayed
from windlass.train.optimizers.base import Optimizer, build_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def small_recipe(count: int, **tables: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"layers": 4, "width": 512, "ffn": 1408, "heads": 8, "kv_heads": 4, "vocab": 8000},
        "data": {"seq_len": 512, "batch_tokens": 8192},
        "train": {"steps": count},
        "layout": {"micro_batch": 8},
        "optim": {"lr": 1e-3},
        "energy": {"enabled": False},
        "save": {"at_end": False},
    }
    return Recipe.model_validate({"name": "g", **{k: {**v, **tables.get(k, {})} for k, v in base.items()}})


def curve(count: int = 6, **tables: Any) -> list[float]:
    """Losses of the first steps of a small model."""
    recipe = small_recipe(count, **tables)
    torch.compiler.reset()  # or the curves of other tests would count towards the recompile limit
    training = build(recipe)
    with attention_kernel(recipe.train.attention, training.world.device):
        return [loss for loss, _ in steps(training, count)]


def test_bf16_follows_fp32() -> None:
    assert curve() == pytest.approx(curve(train={"precision": "fp32"}), abs=2e-2)


@pytest.mark.parametrize(
    "change",
    [
        {"compile": False},
        {"loss": "plain"},
        {"fuse": False},
        {"attention": "flash"},
        {"recompute": "full"},
        {"recompute": "selective"},
    ],
    ids=str,
)
def test_a_technique_changes_speed_not_the_curve(change: dict[str, Any]) -> None:
    assert curve(train=change) == pytest.approx(curve(), abs=1e-2)


@pytest.mark.parametrize(
    "change", [{"precision": "fp32"}, {"compile": False}, {"recompute": "full"}, {"recompute": "selective"}], ids=str
)
def test_grouped_products_of_experts_follow_the_loop(change: dict[str, Any]) -> None:
    experts = {"ffn": 256, "experts": {"count": 16, "top_k": 4, "z_loss": 1e-3}}
    assert curve(model=experts, train=change) == pytest.approx(curve(model=experts), abs=2e-2)


@pytest.mark.parametrize(
    "change",
    [{"layout": {"micro_batch": 16}}, {"model": {"ffn": 256, "experts": {"count": 16, "top_k": 4}}}],
    ids=["one micro-batch", "experts, two micro-batches"],
)
def test_a_captured_step_equals_the_launched_one_bit_by_bit(change: dict[str, Any]) -> None:
    """Attention operation by operation: the fused kernels add gradients of queries in any order."""
    losses = [
        curve(train={"capture": capture, "compile": False, "attention": "math"}, **change) for capture in (False, True)
    ]
    assert losses[0] == losses[1]


def task_recipe(folder: Path, kind: str = "bert", **changes: Any) -> Recipe:
    save_encoder(folder / "model", kind)
    files = {
        name: str(write_tsv(folder / f"{name}.tsv", 64, seed)) for seed, name in enumerate(("train", "validation"))
    }
    changes = {"train": {"precision": "bf16"}, **changes}
    return complete_tune(Recipe.model_validate(tune_table(folder, **{**changes, "tune": {**files, **changes["tune"]}})))


@pytest.mark.parametrize(
    ("kind", "tune", "micro_batch"),
    [
        ("bert", {"dropout": 0.0}, 8),
        ("bert", {"dropout": 0.1}, 4),  # two passes a step, of one graph
        ("bert", {"dropout": 0.0, "class_weights": "balanced"}, 8),
        ("roberta", {"dropout": 0.0}, 8),
        ("deberta", {"dropout": 0.0}, 8),
        ("t5", {"dropout": 0.0}, 8),
        ("gpt2", {"dropout": 0.0}, 8),
        ("llama", {}, 8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_replayed_steps_of_a_task_equal_the_launched_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tune: dict[str, Any], micro_batch: int
) -> None:
    recipe = task_recipe(tmp_path, kind, tune=tune, layout={"micro_batch": micro_batch})
    curves = []
    for replays in (True, False):
        if not replays:
            monkeypatch.setattr(Optimizer, "replay_updates", lambda self, **options: None)
        torch.manual_seed(0)
        training = build(recipe)
        assert isinstance(training.optimizer.updates, Replayed) is replays
        curves.append(steps(training, WARM_CALLS + 6))
        replayed = training.stepper.replayed_pass
        assert (replayed is not None) is replays
        if replayed is not None:
            assert replayed.failure is None and any(each.graph for each in replayed.graphs.values())
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)  # atomic sums of an embedding's gradient are not in order


def test_passes_that_wait_for_the_device_are_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers may read a number back, which no CUDA graph can hold."""
    recipe, forward = task_recipe(tmp_path, tune={"dropout": 0.0}, layout={"micro_batch": 8}), HFTaskModel.forward
    curves = [steps(build(recipe), WARM_CALLS + 6)]
    monkeypatch.setattr(HFTaskModel, "forward", lambda self, x, *rest: forward(self, x + 0 * int(x.max()), *rest))
    training = build(recipe)
    curves.append(steps(training, WARM_CALLS + 6))
    assert training.stepper.replayed_pass is not None and training.stepper.replayed_pass.failure
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_a_replayed_pass_equals_the_launched_one() -> None:
    """Compiled, with cuDNN's attention, whose gradients differ in the last digits between two runs."""
    training = build(small_recipe(1, layout={"micro_batch": 16}, train={"capture": True}))
    tokens = torch.randint(0, 8000, (16, 513), device="cuda")
    stepper = training.stepper

    def gradients(run: Any) -> list[torch.Tensor]:
        run(TokenBatch(tokens))
        copies = [gradient.float() for gradient in training.optimizer.gradients()]
        training.optimizer.zero_grad()
        return copies

    with attention_kernel("auto", training.world.device):
        launched, repeated = (gradients(stepper._run_passes) for _ in range(2))
        replayed = [gradients(stepper.gradients) for _ in range(WARM_CALLS + 2)][-1]
    assert stepper.replayed is not None and stepper.replayed.graph is not None
    distances = [
        sum(float((mine - first).square().sum()) for mine, first in zip(other, launched, strict=True)) ** 0.5
        for other in (repeated, replayed)
    ]
    norm = sum(float(gradient.square().sum()) for gradient in launched) ** 0.5
    assert max(distances) <= 1e-5 * norm


@pytest.mark.parametrize(("vocab", "z_loss"), [(7777, 0.0), (8192, 1e-2)], ids=["padded", "z-loss"])
def test_the_loss_kernel_follows_fp32(vocab: int, z_loss: float) -> None:
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(96, 8192, device="cuda"), torch.randint(0, vocab, (96,), device="cuda")
    targets[::3] = IGNORED  # the first row among them, before which there is no memory
    expected = _chunk_terms(logits.bfloat16().double(), targets, vocab, z_loss)
    for ours, exact in zip(chunk_terms("cuda")(logits.bfloat16(), targets, vocab, z_loss), expected, strict=True):
        assert float((ours.double() - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fp8_follows_bf16(scaling: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    assert curve(train={"precision": "fp8", "fp8_scaling": scaling}) == pytest.approx(curve(), abs=5e-2)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_compiled_update_equals_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    weights, gradients = torch.randn(300, 70), [torch.randn(300, 70) for _ in range(4)]
    results = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(weights.to(device, copy=True))
        optimizer = build_optimizer([("w", weight)], OptimConfig(name=name))
        for gradient in gradients:
            weight.grad = gradient.to(device)
            optimizer.step(1e-2, torch.tensor(0.5, device=device), torch.tensor(True, device=device))
        results.append(weight.detach().cpu())
    assert torch.allclose(*results, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_bf16_moments_are_rounded_by_the_step_and_not_by_the_rank_s_generator(name: str) -> None:
    states = []
    for rank in range(2):
        torch.cuda.manual_seed(rank)
        weight = torch.nn.Parameter(torch.ones(300, 70, device="cuda"))
        optimizer = build_optimizer([("w", weight)], OptimConfig(name=name, moments="bf16"))
        for step in range(3):
            weight.grad = torch.full_like(weight, 0.1 + step)
            optimizer.step(1e-2)
        states.append((weight.detach().clone(), *optimizer.slots[0].moments.values()))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert len(states[0][-1].unique()) > 1, "nothing was rounded at random"


def test_retnet_forms_agree_in_bf16() -> None:
    model = {"family": "retnet", "heads": 4, "kv_heads": None, "chunk": 128}
    forms = [curve(model={**model, "retention": form}) for form in ("parallel", "chunkwise")]
    assert forms[0] == pytest.approx(forms[1], abs=2e-2)


def test_the_attention_kernel_changes_although_the_compile_cache_is_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's cache key does not name the attention kernel; ours must."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    names = []
    for kernel in ("cudnn", "flash"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            curve(2, train={"attention": kernel})
        names.append({event.key for event in profile.key_averages()})
    assert any("cudnn" in name for name in names[0])
    assert any("flash" in name for name in names[1] - names[0])
    assert not any("cudnn" in name and "sdpa" in name for name in names[1])


EXPERTS = {"count": 8, "top_k": 2, "ffn": 512}
LATENT = {"kv_rank": 128, "q_rank": 192, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {}, "olmo3": {"window": 100}, "gemma3": {"window": 100}, "apertus": {}, "nemotron": {},
    "gpt_oss": {"window": 100, "experts": EXPERTS},
    "deepseek_v3": {"kv_heads": None, "latent": LATENT, "experts": {**EXPERTS, "groups": 1, "groups_kept": 1, "dense_layers": 1}},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_compiled_follows_itself_operation_by_operation(family: str) -> None:
    model = {"family": family} | FAMILIES[family]
    assert curve(model=model) == pytest.approx(curve(model=model, train={"compile": False}), abs=1e-2)


@pytest.mark.parametrize(
    ("window", "softcap", "width", "sinks"),
    [(0, 0.0, 64, False), (100, 0.0, 64, False), (100, 5.0, 64, False), (0, 0.0, 64, True), (100, 0.0, 64, True), (0, 0.0, 32, False)],
    ids=["documents", "windows", "capped", "sinks", "sinks in windows", "narrow values"],
)  # fmt: skip
def test_the_kernel_that_skips_blocks_equals_blocks_of_queries(
    window: int, softcap: float, width: int, sinks: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(2, 8, 700, 64), (2, 2, 700, 64), (2, 2, 700, width), *([(8,)] if sinks else [])]
    heads = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    numbers = (torch.arange(700, device="cuda")[None] // torch.tensor([[150], [333]], device="cuda")).contiguous()
    scores = Scores(window=window, softcap=softcap)
    results = []
    for attend in (
        lambda: block_masked_attention(
            *heads[:3], scores, block_mask(window, 700, numbers, torch.device("cuda")), *heads[3:]
        ),
        lambda: causal_attention(*heads[:3], scores, numbers, *heads[3:]),
    ):
        out = attend()
        gradients = torch.autograd.grad(out.square().sum(), heads)
        results.append([out.detach(), *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=2e-3, atol=2e-3)
