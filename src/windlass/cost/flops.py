"""FLOPs per token and shares of the device's peak (MFU, HFU). Every figure names how it was counted."""

from dataclasses import dataclass
from typing import Literal

from windlass.errors import ConfigError
from windlass.models.spec import LayerSpec, ModelSpec
from windlass.units import DAY, print_share

Convention = Literal["6N", "6N+attention", "6N+causal attention"]
# Share of the square between positions that a convention counts.
MIXING_SHARES: dict[Convention, float] = {"6N": 0.0, "6N+attention": 1.0, "6N+causal attention": 0.5}
# What PaLM, torchtitan and most published figures count: attention as if it were not causal.
DEFAULT: Convention = "6N+attention"


def flops_per_token(model: ModelSpec, seq_len: int, convention: Convention = DEFAULT) -> float:
    """Model FLOPs of one token, forward and backward. N leaves out the input embedding and counts the head, tied or
    not."""
    if convention not in MIXING_SHARES:
        raise ConfigError(
            "cost.unknown-flops-convention",
            f"unknown FLOPs convention {convention!r}",
            hint=f"use one of {', '.join(MIXING_SHARES)}",
        )
    return 6.0 * model.params.active + 3.0 * model.mixing_flops(seq_len) * MIXING_SHARES[convention]


def hardware_flops_per_token(
    model: ModelSpec, seq_len: int, recompute: str = "none", convention: Convention = DEFAULT
) -> float:
    """FLOPs that the device really does, recomputation included.

    Full recomputation runs the layers' forward pass again, selective (our engine's) some of its products. What a budget
    chose is not known beforehand and not counted.
    """
    flops = flops_per_token(model, seq_len, convention)
    if recompute == "full":
        layers = sum(group.count * group.layer.active_params for group in model.groups)
        norms = model.params.terms["final norm"]
        return flops + 2.0 * (layers + norms) + MIXING_SHARES[convention] * model.mixing_flops(seq_len)
    if recompute != "selective":
        return flops
    for group in model.groups:
        blocks = [branch.block for branch in group.layer.branches if not branch.block.kept_by_selective]
        mixing = MIXING_SHARES[convention] * sum(block.mixing_flops(seq_len) for block in blocks)
        flops += group.count * (2.0 * group.layer.active_params * recomputed_share(group.layer, "selective") + mixing)
    return flops


def recomputed_share(layer: LayerSpec, policy: str) -> float:
    """Share of a layer's matrix products that our recomputation repeats.

    Selective keeps every second product. The compiler leaves out the last one, whose result nobody reads.
    """
    weights = [product.weights for product, _ in layer.products]
    if policy == "full":
        return 1.0 - weights[-1] / sum(weights)
    return sum(weights[1:-1:2]) / sum(weights)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """A share of peak with what it counts and what it is a share of."""

    # 0 to 1; None when the device's peak is unknown.
    value: float | None
    convention: str
    denominator: str
    # The same work against the highest matrix rate measured on such a device.
    of_achievable: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return f"MFU not measured ({self.denominator})"
        text = f"MFU {print_share(self.value)} ({self.convention}; of {self.denominator})"
        return text + (
            f", {print_share(self.of_achievable)} of the achievable matmul rate"
            if self.of_achievable is not None
            else ""
        )


def mfu(
    model: ModelSpec,
    seq_len: int,
    tokens_per_second_per_device: float,
    peak_tflops: float | None,
    *,
    convention: Convention = DEFAULT,
    matmul_tflops: float | None = None,
) -> Utilisation:
    """Model FLOP utilisation of one device."""
    flops = flops_per_token(model, seq_len, convention)
    return _utilisation(flops * tokens_per_second_per_device, peak_tflops, convention, matmul_tflops)


def hfu(
    model: ModelSpec,
    seq_len: int,
    tokens_per_second_per_device: float,
    peak_tflops: float | None,
    *,
    recompute: str,
    convention: Convention = DEFAULT,
) -> Utilisation:
    """Hardware FLOP utilisation: recomputation counts as work."""
    flops = hardware_flops_per_token(model, seq_len, recompute, convention)
    return _utilisation(flops * tokens_per_second_per_device, peak_tflops, f"{convention} with {recompute} recompute")


def _utilisation(
    flops_per_second: float, peak_tflops: float | None, convention: str, matmul_tflops: float | None = None
) -> Utilisation:
    if peak_tflops is None:
        return Utilisation(None, convention, "the device's peak is unknown")
    rate = flops_per_second / 1e12
    achievable = rate / matmul_tflops if matmul_tflops else None
    return Utilisation(rate / peak_tflops, convention, f"{peak_tflops:g} TFLOP/s dense bf16 peak", achievable)


def training_days(flops: float, devices: int, peak_tflops: float, utilisation: float) -> float:
    """How long `devices` need at a given share of their peak."""
    return flops / (devices * peak_tflops * 1e12 * utilisation) / DAY
