"""fp32 matrix products of a CPU by oneDNN, on AMD processors with AVX-512.

torch leaves them to MKL, which uses half of the vector width there: on one core of an EPYC (Zen 5) 71 to 106 GFLOP/s
for the sizes of a small model, where oneDNN reaches 107 to 232 (benchmarks/results/cpu_products.md).
"""

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Below this many multiplications the call from Python takes longer than oneDNN saves.
_MIN_MULTIPLICATIONS = 1 << 21
_library = torch.library.Library("aten", "IMPL")


@cache
def use_onednn() -> bool:
    """Register the products of this module with torch, for every model of this process; whether the processor gains.

    It depends on the processor alone, not on a measurement: a resumed run must add in the same order."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    processor = Path("/proc/cpuinfo")
    if not processor.is_file() or "AuthenticAMD" not in processor.read_text():
        return False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")  # replacing torch's own kernels is the purpose
        for name, kernel in (("mm", _mm), ("mm.out", _mm_out), ("addmm", _addmm)):
            _library.impl(name, kernel, "CPU")
    return True


def _gains(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and a.numel() * b.shape[1] >= _MIN_MULTIPLICATIONS


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN wants the rows of `a` together and copies it where they are not; `b` may have any strides."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return out


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b) if _gains(a, b) else _mm_out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    # By addmm.out, which is not replaced: mm.out would come back here.
    return out.copy_(_product(a, b)) if _gains(a, b) else torch.addmm(out, a, b, beta=0, out=out)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.ndim == 1 and bias.dtype == torch.float32 and beta == alpha == 1 and _gains(a, b):
        return _product(a, b, bias)
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1]))
