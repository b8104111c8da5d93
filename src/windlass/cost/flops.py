"""FLOPs per token and shares of the device's peak (MFU, HFU). Every figure names how it was counted."""

from typing import Literal

from windlass.errors import ConfigError
from windlass.models.spec import LayerSpec, ModelSpec

Convention = Literal["6N", "6N+attention", "6N+causal attention"]
MIXING_SHARES: dict[Convention, float] = {"6N": 0.0, "6N+attention": 1.0, "6N+causal attention": 0.5}
"""Share of the square between positions that a convention counts."""
DEFAULT: Convention = "6N+attention"
"""What PaLM, torchtitan and most published figures count: attention as if it were not causal."""


def flops_per_token(model: ModelSpec, seq_len: int, convention: Convention = DEFAULT) -> float:
    """Model FLOPs of one token, forward and backward. N leaves out the input embedding and counts the head, tied or
    not."""
    if convention not in MIXING_SHARES:
        raise ConfigError(
            "cost.unknown-flops-convention",
            f"unknown FLOPs convention {convention!r}",
            hint=f"one of: {', '.join(MIXING_SHARES)}",
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
        return flops + 2.0 * model.params.body + MIXING_SHARES[convention] * model.mixing_flops(seq_len)
    if recompute != "selective":
        return flops
    for group in model.groups:
        blocks = [branch.block for branch in group.layer.branches if not branch.block.kept_by_selective]
        mixing = MIXING_SHARES[convention] * sum(block.mixing_flops(seq_len) for block in blocks)
        flops += group.count * (2.0 * group.layer.num_params * recomputed_share(group.layer, "selective") + mixing)
    return flops


def recomputed_share(layer: LayerSpec, policy: str) -> float:
    """Share of a layer's matrix products that our recomputation repeats.

    Selective keeps every second product. The compiler leaves out the last one, whose result nobody reads.
    """
    weights = [product.weights for product, _ in layer.products]
    if policy == "full":
        return 1.0 - weights[-1] / sum(weights)
    return sum(weights[1:-1:2]) / sum(weights)


def mfu(
    model: ModelSpec,
    seq_len: int,
    tokens_per_second_per_device: float,
    peak_tflops: float | None,
    *,
    convention: Convention = DEFAULT,
) -> float | None:
    """Model FLOP utilisation of one device, 0 to 1; None when its peak is unknown."""
    rate = flops_per_token(model, seq_len, convention) * tokens_per_second_per_device / 1e12
    return None if peak_tflops is None else rate / peak_tflops


def hfu(
    model: ModelSpec,
    seq_len: int,
    tokens_per_second_per_device: float,
    peak_tflops: float | None,
    *,
    recompute: str,
    convention: Convention = DEFAULT,
) -> float | None:
    """Hardware FLOP utilisation: recomputation counts as work."""
    rate = hardware_flops_per_token(model, seq_len, recompute, convention) * tokens_per_second_per_device / 1e12
    return None if peak_tflops is None else rate / peak_tflops
