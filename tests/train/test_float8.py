"""FP8 products: accuracy forward and backward, choice of the backend, devices that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass.config import ModelConfig, TrainConfig
from windlass.errors import ConfigError
from windlass.models.build import build_model
from windlass.train import float8
from windlass.train.float8 import apply_float8, cast, choose_backend, float8_product

CUDA = torch.device("cuda", 0)


def tiny() -> Any:
    model = build_model(ModelConfig(layers=1, width=32, ffn=48, heads=2, vocab=100), seq_len=8)
    model.init_weights(0)
    return model


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU of a name, and torchao there or not: what the choice looks at."""

    def pretend(
        name: str, *, capability: tuple[int, int] = (9, 0), gfx: str | None = None, torchao: bool = False
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=gfx))
        monkeypatch.setattr(torch.version, "hip", "7.0" if gfx else None)
        monkeypatch.setattr(float8, "torchao_installed", lambda: torchao)

    return pretend


@pytest.mark.parametrize("rows", [False, True])
def test_close_to_the_exact_product(rows: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 32, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    y = float8_product(x, w, rows=rows)
    exact_x, exact_w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    exact = exact_x @ exact_w.t()
    slope = torch.randn_like(exact)
    y.backward(slope)
    exact.backward(slope)
    for seen, expected in ((y, exact), (x.grad, exact_x.grad), (w.grad, exact_w.grad)):
        assert float((seen - expected).norm() / expected.norm()) < 0.05
        assert not torch.equal(seen, expected)


def test_row_scales_survive_an_outlier() -> None:
    x = torch.ones(4, 16)
    x[0] *= 1e6
    whole, rows = (cast(x, dim) for dim in (None, 1))
    assert float((whole[0].float() * whole[1])[1, 0]) != pytest.approx(1.0, rel=0.05)
    assert float((rows[0].float() * rows[1])[1, 0]) == pytest.approx(1.0, rel=0.05)


def refused(setting: str) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_backend(setting, CUDA)
    return caught.value.code


def test_refused_without_fp8_units(device: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_float8(tiny(), torch.device("cpu"), TrainConfig(precision="fp8"))
    assert caught.value.code == "train.fp8-device"
    device("AMD Instinct MI250X", gfx="gfx90a:sramecc+:xnack-", torchao=True)
    assert refused("auto") == "train.fp8-device"
    device("NVIDIA A100-SXM4-40GB", capability=(8, 0), torchao=True)
    assert refused("torchao") == "train.fp8-device"


def test_torch_comes_first_on_hopper(device: Any) -> None:
    device("NVIDIA H100", torchao=True)
    assert choose_backend("auto", CUDA)[0] == "torch"
    assert choose_backend("torchao", CUDA) == ("torchao", "train.fp8_backend")
    device("NVIDIA H100", torchao=False)
    assert refused("torchao") == "train.torchao-not-installed"


def test_torchao_where_torch_has_no_product(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device("AMD Instinct MI300X", gfx="gfx942", torchao=True)
    assert choose_backend("auto", CUDA)[0] == "torchao"
    assert refused("torch") == "train.fp8-backend"
    device("AMD Instinct MI300X", gfx="gfx942", torchao=False)
    assert refused("auto") == "train.torchao-not-installed"
    device("NVIDIA H100", torchao=True)
    monkeypatch.delattr(torch, "_scaled_mm")  # an old torch
    assert choose_backend("auto", CUDA)[0] == "torchao"


def test_routed_experts_stay_in_bf16_and_the_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "choose_backend", lambda setting, device: ("torch", "the test"))
    experts: Any = {"count": 4, "top_k": 2, "ffn": 16, "shared": 1}
    config = ModelConfig(layers=2, width=32, ffn=48, heads=2, vocab=100, experts=experts)
    model = build_model(config, seq_len=8)
    note = apply_float8(model, torch.device("cpu"), TrainConfig(precision="fp8"))
    # Attention's four and the shared expert's three, in each layer.
    assert "14 products" in note and "experts of 2 layers stay in bf16" in note


@pytest.mark.parametrize("backend", ["torch", "torchao"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_model_computes_about_the_same(monkeypatch: pytest.MonkeyPatch, backend: str, scaling: Any) -> None:
    """On a CPU both only imitate FP8; the numbers are those of the format."""
    if backend == "torchao":
        pytest.importorskip("torchao")
    monkeypatch.setattr(float8, "choose_backend", lambda setting, device: (backend, "the test"))
    plain, narrow = tiny().bfloat16(), tiny().bfloat16()
    note = apply_float8(narrow, torch.device("cpu"), TrainConfig(precision="fp8", fp8_scaling=scaling))
    assert "7 products" in note and backend in note
    assert [n for n, _ in narrow.named_parameters()] == [n for n, _ in plain.named_parameters()]
    tokens = torch.arange(16).view(2, 8) % 100
    losses = []
    for model in (plain, narrow):
        out = model(tokens, tokens)
        out[0].backward()
        losses.append(float(out[1]))
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    for (name, a), (_, b) in zip(plain.named_parameters(), narrow.named_parameters(), strict=True):
        assert float((a.grad - b.grad).float().norm() / a.grad.float().norm()) < 0.2, name
        if ".w" in name:
            assert not torch.equal(a.grad, b.grad), f"{name} was not computed in FP8"
