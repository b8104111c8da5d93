"""Optimizers: equality with torch's own, master copies, stochastic rounding, skipped steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from windlass.config import OptimConfig
from windlass.cost.muon import grouped_iterations, square_products
from windlass.train.optimizers import base
from windlass.train.optimizers.base import build_optimizer, decays, round_stochastically, update_function
from windlass.train.optimizers.muon import exchange
from windlass.train.optimizers.muon import update as muon
from windlass.train.optimizers.spec import is_matrix

COMPILED = (("adamw", "fp32"), ("muon", "bf16"))


def tiny() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.embed, model.layers = nn.Embedding(10, 16), nn.ModuleList([nn.Linear(16, 16, bias=False)])
    model.norm = nn.RMSNorm(16)
    return model


def gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    for p in model.parameters():
        p.grad = torch.randn_like(p)


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_equals_torch(name: str, device_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "compiled_update", update_function)
    ours, theirs = tiny(), tiny()
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.1, momentum=0.9)
    mine = build_optimizer(ours.named_parameters(), config)
    groups = [{"params": [p], "weight_decay": 0.1 if decays(n, p) else 0.0} for n, p in theirs.named_parameters()]
    other: Any = (
        torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
        if name == "adamw"
        else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    )
    for step in range(5):
        gradients(ours, step)
        gradients(theirs, step)
        if device_path:
            with torch.no_grad():
                mine.count += 1
                mine.step_device(mine.slots, 0.1, torch.tensor(1.0), torch.tensor(True))
        else:
            mine.step(0.1)
        other.step()
    for (n, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), n


def lion_by_hand(gradients: list[torch.Tensor], weight: torch.Tensor, config: OptimConfig) -> torch.Tensor:
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        direction = torch.sign(config.beta1 * mean + (1 - config.beta1) * gradient)
        weight = weight - config.lr * (direction + config.weight_decay * weight)
        mean = config.beta2 * mean + (1 - config.beta2) * gradient
    return weight


def ademamix_by_hand(gradients: list[torch.Tensor], weight: torch.Tensor, config: OptimConfig) -> torch.Tensor:
    """As the paper's listing, with the half-life of the slow mean growing by a straight line."""
    first, second, slow = (torch.zeros_like(weight) for _ in range(3))

    def half_life(beta: float) -> float:
        return math.log(0.5) / math.log(beta) - 1

    for step, gradient in enumerate(gradients, start=1):
        done = min(1.0, step / config.slow_warmup)
        beta3 = 0.5 ** (1 / ((1 - done) * half_life(config.beta1) + done * half_life(config.beta3) + 1))
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        slow = beta3 * slow + (1 - beta3) * gradient
        mean, square = first / (1 - config.beta1**step), second / (1 - config.beta2**step)
        update = (mean + config.alpha * done * slow) / (square.sqrt() + config.eps)
        weight = weight - config.lr * (update + config.weight_decay * weight)
    return weight


def muon_by_hand(gradients: list[torch.Tensor], weight: torch.Tensor, config: OptimConfig) -> torch.Tensor:
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        mean = config.muon_momentum * mean + (1 - config.muon_momentum) * gradient
        x = config.muon_momentum * mean + (1 - config.muon_momentum) * gradient
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        update = 0.2 * max(weight.shape) ** 0.5 * x
        weight = weight - config.lr * (update + config.weight_decay * weight)
    return weight


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize(
    ("name", "by_hand"), [("muon", muon_by_hand), ("lion", lion_by_hand), ("ademamix", ademamix_by_hand)]
)
def test_equals_the_papers_formulas(
    name: str, by_hand: Any, device_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "compiled_update", update_function)
    monkeypatch.setattr(muon, "compiled", lambda function: function)
    torch.manual_seed(0)
    weight, steps = torch.randn(20, 16), [torch.randn(20, 16) for _ in range(12)]
    config = OptimConfig(name=name, lr=0.01, beta2=0.99, slow_warmup=8, weight_decay=0.1)
    parameter = nn.Parameter(weight.clone())
    mine = build_optimizer([("layers.0.w", parameter)], config)
    for gradient in steps:
        parameter.grad = gradient.clone()
        if device_path:
            with torch.no_grad():
                mine.count += 1
                mine.step_device(mine.slots, 0.01, torch.tensor(1.0), torch.tensor(True))
        else:
            mine.step(0.01)
    expected = by_hand([gradient.double() for gradient in steps], weight.double(), config)
    assert torch.allclose(parameter.detach().double(), expected, atol=2e-6)


def test_which_parameters_decay() -> None:
    assert {n: decays(n, p) for n, p in tiny().named_parameters()} == {
        "embed.weight": False,
        "layers.0.weight": True,
        "norm.weight": False,
    }


def test_clipping_factor_is_part_of_the_step() -> None:
    a, b = tiny(), tiny()
    one, two = (build_optimizer(m.named_parameters(), OptimConfig(name="sgd")) for m in (a, b))
    gradients(a, 0)
    gradients(b, 0)
    one.step(0.1, torch.tensor(0.25))
    for p in b.parameters():
        p.grad *= 0.25
    two.step(0.1)
    assert all(torch.allclose(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bad_step_changes_nothing(name: str, device_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "compiled_update", update_function)
    monkeypatch.setattr(muon, "compiled", lambda function: function)
    model = tiny()
    mine = build_optimizer(model.named_parameters(), OptimConfig(name=name))
    gradients(model, 0)
    mine.step(0.1)
    before = [t.clone() for s in mine.slots for t in (s.weights, *s.moments.values())]
    gradients(model, 1)
    model.layers[0].weight.grad[0, 0] = float("nan")
    if device_path:
        with torch.no_grad():
            mine.step_device(mine.slots, 0.1, torch.tensor(1.0), torch.tensor(False))
    else:
        mine.step(0.1, 1.0, torch.tensor(False))
    after = [t for s in mine.slots for t in (s.weights, *s.moments.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert float(mine.count) == 1


def test_master_copy_keeps_what_bf16_loses() -> None:
    model = tiny().to(torch.bfloat16)
    mine = build_optimizer(model.named_parameters(), OptimConfig(name="sgd", weight_decay=0), master=True)
    start = model.layers[0].weight.detach().clone()
    for _ in range(100):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        mine.slots[1].moments["momentum"].zero_()
        mine.step(1e-5)
    slot = next(s for s in mine.slots if s.name == "layers.0.weight")
    assert torch.allclose(slot.master, start.float() - 1e-3, atol=1e-5)
    assert torch.equal(model.layers[0].weight, slot.master.to(torch.bfloat16))


def test_fp32_sum_of_bf16_gradients() -> None:
    model = tiny().to(torch.bfloat16)
    mine = build_optimizer(model.named_parameters(), OptimConfig(), master=True)
    mine.accumulate_in_fp32()
    for _ in range(300):  # in bf16 a sum of ones sticks at 256
        (model.layers[0].weight.sum()).backward()
    slot = next(s for s in mine.slots if s.name == "layers.0.weight")
    assert torch.equal(slot.gradient, torch.full((16, 16), 300.0))
    assert model.layers[0].weight.grad is None
    mine.zero_grad()
    assert float(slot.main_grad.sum()) == 0


def test_stochastic_rounding_keeps_the_mean() -> None:
    torch.manual_seed(0)
    value = torch.full((200_000,), 1.0 + 2**-10)
    rounded = round_stochastically(value)
    assert set(rounded.float().unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.float().mean()) == pytest.approx(1.0 + 2**-10, abs=5e-5)
    special = torch.tensor([float("inf"), float("-inf"), 0.0, -2.0])
    assert torch.equal(round_stochastically(special).float(), special)
    assert torch.isnan(round_stochastically(torch.tensor([float("nan")]))).all()


def test_bf16_moments_follow_fp32_ones() -> None:
    torch.manual_seed(0)
    a, b = tiny(), tiny()
    one = build_optimizer(a.named_parameters(), OptimConfig())
    two = build_optimizer(b.named_parameters(), OptimConfig(moments="bf16"))
    assert two.slots[0].moments["exp_avg"].dtype == torch.bfloat16
    for step in range(20):
        gradients(a, step)
        gradients(b, step)
        one.step(1e-2)
        two.step(1e-2)
    assert torch.allclose(a.layers[0].weight, b.layers[0].weight, atol=5e-3)


@pytest.mark.parametrize("device_path", [False, True])
def test_momentum_in_bf16_is_rounded_at_random(device_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut or rounded to the nearest, a speed of 1 would never feel a gradient of 2^-10; at random it does on
    average."""
    monkeypatch.setattr(base, "compiled_update", update_function)
    weight = nn.Parameter(torch.zeros(40_000))
    mine = build_optimizer([("w", weight)], OptimConfig(name="sgd", moments="bf16", momentum=0.999, weight_decay=0))
    mine.slots[0].moments["momentum"].fill_(1.0)
    weight.grad = torch.full_like(weight, 2**-10 + 1e-3)
    if device_path:
        with torch.no_grad(), mine.same_noise():
            mine.step_device(mine.slots, 0.0, torch.tensor(1.0), torch.tensor(True))
    else:
        mine.step(0.0)
    speed = mine.slots[0].moments["momentum"]
    assert speed.dtype == torch.bfloat16 and len(speed.unique()) == 2
    assert float(speed.float().mean()) == pytest.approx(1.0 + 2**-10, abs=2e-4)


@pytest.mark.parametrize("device_path", [False, True])
def test_copies_round_alike_whatever_else_a_rank_holds(device_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks hold unequal parts of the vocabulary and copies of each norm, and after a restart on
    another number of ranks their generators differ: the copies must stay copies."""
    monkeypatch.setattr(base, "compiled_update", update_function)
    seen = []
    for rank, rows in enumerate((43, 43 if device_path else 42)):
        torch.manual_seed(rank)
        part, norm = nn.Parameter(torch.ones(rows, 8).bfloat16()), nn.Parameter(torch.ones(64).bfloat16())
        mine = build_optimizer([("embed.weight", part), ("norm.weight", norm)], OptimConfig(moments="bf16"))
        for step in range(3):
            part.grad, norm.grad = torch.full_like(part, 0.1), torch.full_like(norm, 0.1 + step)
            if device_path:
                with torch.no_grad():
                    mine.count += 1
                    mine.calls += 1
                    with mine.same_noise():
                        mine.step_device(mine.slots, 1e-3, torch.tensor(1.0), torch.tensor(True))
            else:
                mine.step(1e-3)
        seen.append((norm.detach().clone(), mine.slots[1].moments["exp_avg_sq"].clone()))
        after = torch.rand(1)
        torch.manual_seed(rank)
        assert torch.equal(after, torch.rand(1)), "training's own random numbers are left alone"
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert len(seen[0][0].unique()) > 1, "nothing was rounded at random"


@pytest.mark.integration
# One of each kind of moments; the others compile for a minute.
@pytest.mark.parametrize(
    ("name", "moments"),
    [
        pytest.param(name, moments, marks=() if (name, moments) in COMPILED else pytest.mark.slow)
        for name in ("adamw", "ademamix", "lion", "muon", "sgd")
        for moments in ("fp32", "bf16")
    ],
)
def test_the_update_can_be_compiled_for_tensors_of_any_size(
    name: str, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU one compiled function serves every tensor: it must trace without a break when sizes are symbols."""
    torch.compiler.reset()  # or other cases would count towards the recompile limit
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "backend": "aot_eager"}
    monkeypatch.setattr(base, "compiled_update", lambda rule: torch.compile(update_function(rule), **options))
    monkeypatch.setattr(muon, "compiled", lambda function: torch.compile(function, **options))
    model = tiny()
    before = model.layers[0].weight.detach().clone()
    mine = build_optimizer(model.named_parameters(), OptimConfig(name=name, moments=moments))
    gradients(model, 0)
    with torch.no_grad(), mine.same_noise():
        mine.count += 1
        mine.step_device(mine.slots, 1e-2, torch.tensor(1.0), torch.tensor(True))
    assert not torch.equal(model.layers[0].weight, before)
    assert {m.dtype for m in mine.slots[1].moments.values()} == {getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[moments])}  # fmt: skip


def test_muon_keeps_one_moment_for_matrices_and_leaves_the_rest_to_adamw() -> None:
    ours, theirs = tiny(), tiny()
    mine = build_optimizer(ours.named_parameters(), OptimConfig(name="muon"))
    adamw = build_optimizer(theirs.named_parameters(), OptimConfig())
    assert [list(slot.moments) for slot in mine.slots] == [["exp_avg", "exp_avg_sq"], ["exp_avg"], ["exp_avg", "exp_avg_sq"]]  # fmt: skip
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        mine.step(1e-2)
        adamw.step(1e-2)
    assert torch.equal(ours.embed.weight, theirs.embed.weight) and torch.equal(ours.norm.weight, theirs.norm.weight)
    assert not torch.allclose(ours.layers[0].weight, theirs.layers[0].weight)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.3.attention.wq.weight", (64, 64), True),
        ("layers.3.feed_forward.w1", (8, 96, 64), True),
        ("layers.3.feed_forward.router", (32, 64), False),
        ("layers.3.feed_forward.w1_bias", (32, 64), False),
        ("layers.3.attention_norm.weight", (64,), False),
        ("layers.3.mixer.conv.weight", (128, 4), False),
        ("embed.weight", (250, 64), False),
        ("head.weight", (250, 64), False),
        ("model.model.layers.0.mlp.gate.weight", (32, 64), False),
    ],
)
def test_which_parameters_are_orthogonalised(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(name, shape) == expected


def test_matrices_are_multiplied_in_batches_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of experts and the matrices of all layers: one batch for each shape, in the form of torch's own Muon."""
    torch.manual_seed(0)
    shapes = {"layers.0.a": (16, 24), "layers.1.a": (16, 24), "layers.0.b": (24, 16), "layers.1.w1": (3, 16, 24)}
    named = [(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]
    starts = {name: parameter.detach().clone() for name, parameter in named}
    batches, inner = [], muon.orthogonalise
    monkeypatch.setattr(muon, "orthogonalise", lambda x: (batches.append(tuple(x.shape)), inner(x))[1])
    mine = build_optimizer(named, OptimConfig(name="muon", lr=0.01, weight_decay=0.1))
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    mine.step(0.01)
    assert batches == [(5, 16, 24), (1, 24, 16)]
    for name, parameter in named:
        for index in range(3 if parameter.ndim == 3 else 1):
            start, end, gradient = (
                t.view(-1, *t.shape[-2:])[index] for t in (starts[name], parameter.detach(), parameter.grad)
            )
            theirs = nn.Parameter(start.clone())
            theirs.grad = gradient
            torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
            assert torch.allclose(end, theirs.detach(), atol=1e-3), name  # torch iterates in bf16


def test_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.empty(16, 24) for _ in range(5)]
    assert [len(r.matrices) for r in exchange.plan_rounds(weights, round_size=2 * 16 * 24)] == [2, 2, 1]
    monkeypatch.setattr(muon, "ROUND_SIZE", 2 * 16 * 24)
    torch.manual_seed(0)
    x = torch.randn(5, 16, 24)
    assert torch.allclose(muon.orthogonalise(x)[3], muon.orthogonalise(x[3:4])[0], atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(16, 48), (48, 16), (16, 24)], ids=["wide", "tall", "square"])
def test_combined_iterations_equal_one_after_the_other(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, rows, columns)
    a, b, c = muon.COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    assert torch.allclose(muon.orthogonalise(matrices), x, atol=1e-4)


def test_products_of_combined_iterations() -> None:
    """Five squares, one further product for each of the three combined polynomials, and two for each Gram matrix."""
    assert grouped_iterations(2048, 5632) == (2, 3) and grouped_iterations(2048, 2048) == (1, 1, 1, 1, 1)
    assert sum(map(square_products, (2, 3))) == 5 + 3 + 6
    assert sum(map(square_products, (1, 1, 1, 1, 1))) == 5


def test_iterations_in_16_bits_are_closer_to_fp32_than_those_in_bf16() -> None:
    """Singular values over five decades; the plain iteration, all in bf16, beside ours."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(2, size, 64)).Q for size in (64, 176))
    matrices = (left * torch.logspace(0, -5, 64)) @ right.mT
    exact = muon.orthogonalise(matrices)
    a, b, c = muon.COEFFICIENTS
    x = (matrices / matrices.norm(dim=(1, 2), keepdim=True)).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    plain, ours = (float((y.float() - exact).norm()) for y in (x, muon.orthogonalise(matrices.bfloat16())))
    assert ours < 0.8 * plain
