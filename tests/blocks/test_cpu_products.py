"""fp32 products by oneDNN against products in fp64."""

import pytest
import torch

from windlass.blocks import cpu_products as products

LARGE, SMALL = (160, 130, 170), (7, 5, 3)


def matrix(rows: int, columns: int, form: str) -> torch.Tensor:
    if form == "rows":
        return torch.randn(rows, columns)
    if form == "columns":
        return torch.randn(columns, rows).t()
    return torch.randn(rows, 2 * columns)[:, ::2]


@pytest.mark.parametrize("form_a", ["rows", "columns", "every second"])
@pytest.mark.parametrize("form_b", ["rows", "columns", "every second"])
@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=["large", "small"])
def test_products_of_any_strides_agree_with_fp64(sizes, form_a, form_b) -> None:
    torch.manual_seed(0)
    rows, inner, columns = sizes
    a, b, bias = matrix(rows, inner, form_a), matrix(inner, columns, form_b), torch.randn(columns)
    assert products._gains(a, b) == (sizes == LARGE)
    exact = a.double() @ b.double()
    out = torch.full((rows, columns), float("nan"))
    assert products._mm_out(a, b, out=out) is out
    for result in (products._mm(a, b), out, products._addmm(bias, a, b) - bias):
        assert result.is_contiguous() and result.dtype == torch.float32
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)
    scaled = products._addmm(bias, a, b, beta=0.5, alpha=2.0)
    torch.testing.assert_close(scaled.double(), 0.5 * bias.double() + 2 * exact, rtol=1e-5, atol=1e-4)


def test_other_types_and_empty_products_stay_with_torch() -> None:
    whole = torch.arange(160 * 160).view(160, 160) % 7
    assert torch.equal(products._mm(whole, whole), whole @ whole)
    narrow = torch.randn(160, 160, dtype=torch.bfloat16)
    assert torch.equal(products._mm(narrow, narrow), narrow @ narrow)
    assert products._mm(torch.ones(0, 160), torch.ones(160, 160)).shape == (0, 160)
    assert torch.equal(products._mm(torch.ones(160, 0), torch.ones(0, 160)), torch.zeros(160, 160))


def test_where_they_are_registered_torch_uses_them_forward_and_backward() -> None:
    is_registered = products.use_onednn()
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(130, 170), torch.randn(160, 130, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).square().sum().backward()
    names = [event.name for event in profile.events()]
    assert names.count("mkldnn::_linear_pointwise") == (3 if is_registered else 0)
    slope = 2 * (x.double() @ layer.weight.double().t() + layer.bias.double())
    torch.testing.assert_close(x.grad.double(), slope @ layer.weight.double(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(layer.weight.grad.double(), slope.t() @ x.double(), rtol=1e-5, atol=1e-3)
