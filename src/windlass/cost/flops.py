"""How much arithmetic is in a token, and what share of the machine's rate does it reach? Every MFU names how it was counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from windlass.cost.params import count
from windlass.cost.shapes import Shape
from windlass.errors import ConfigError

Convention = Literal["6N", "6N+attention", "6N+causal attention"]
DEFAULT: Convention = "6N+attention"
"""What PaLM, torchtitan and most published figures count: attention as if it were not causal."""


@lru_cache(maxsize=4096)
def per_token(shape: Shape, seq_len: int, convention: Convention = DEFAULT) -> float:
    """Model FLOPs of one token, forward and backward. N leaves out the input embedding (a look-up) and counts the head, tied or not."""
    if convention not in get_args(Convention):
        raise ConfigError(
            "cost.unknown-flops-convention",
            f"unknown FLOPs convention {convention!r}",
            hint=f"one of: {', '.join(get_args(Convention))}",
        )
    base = 6.0 * count(shape).active
    if convention == "6N":
        return base
    full = attention_per_token(shape, seq_len)
    return base + (full if convention == "6N+attention" else full * _causal_share(shape))


def attention_per_token(shape: Shape, seq_len: int) -> float:
    """Scores and their product with the values, forward (4 s a L) and backward (twice that); not halved for causality."""
    if shape.arch == "retnet":
        return shape.layers * _retention_per_token(shape, seq_len)
    return 12.0 * shape.layers * seq_len * shape.attention_width


def _retention_per_token(s: Shape, seq_len: int) -> float:
    """Parallel form: 2 T (d + dv) x 3. Chunkwise: T becomes the chunk, plus writing and reading the state (two products of d dv / H)."""
    if not s.chunk or s.chunk >= seq_len:
        return 6.0 * seq_len * (s.width + s.value_width)
    state = 2.0 * 2.0 * s.width * s.value_width / s.heads
    return 6.0 * s.chunk * (s.width + s.value_width) + 3.0 * state


def _causal_share(shape: Shape) -> float:
    # The chunkwise state is needed in full; only the square inside a chunk is halved. The small difference is left out for clarity.
    return 0.5


def hardware_per_token(shape: Shape, seq_len: int, recompute: str = "none", convention: Convention = DEFAULT) -> float:
    """FLOPs that the device really does: full recompute runs the layers' forward again (8N instead of 6N), selective (our engine's)
    some of its products. What a budget chose is not known beforehand; its share is not counted."""
    model = per_token(shape, seq_len, convention)
    attention = model - per_token(shape, seq_len, "6N")
    if recompute == "full":
        return model + 2.0 * count(shape).body + attention / 3.0
    if recompute == "selective":
        again = 2.0 * count(shape).body * selective_products(shape)
        return model + again + (attention / 3.0 if shape.arch == "retnet" else 0.0)
    return model


def product_widths(s: Shape) -> tuple[float, float, float]:
    """Columns of a layer's matrix products: those of its input (queries, keys, values), what they mix to, and all together."""
    retnet = s.arch == "retnet"
    mixed = s.value_width if retnet else s.attention_width
    first = 2.0 * (s.width + s.value_width) if retnet else s.attention_width + 2.0 * s.kv_width
    return first, mixed, first + mixed + (3.0 if s.glu else 2.0) * s.ffn


def selective_products(s: Shape) -> float:
    """Share of a layer's matrix products that our selective recompute does again: every second one (keys, attention's output, the
    up-projection), not the last, whose result nobody reads."""
    first, mixed, whole = product_widths(s)
    skipped = (first / 2.0 if s.arch == "retnet" else s.kv_width) + mixed + (s.ffn if s.glu else 0.0)
    return skipped / whole


@dataclass(frozen=True, slots=True)
class Utilisation:
    """A share of peak with what it counts and what it is a share of."""

    value: float | None
    """0 to 1; None when the device's peak is unknown."""
    convention: str
    denominator: str
    of_achievable: float | None = None
    """The same work against the highest matrix rate measured on such a device."""

    def __str__(self) -> str:
        if self.value is None:
            return f"MFU unknown ({self.denominator})"
        text = f"MFU {self.value:.1%} ({self.convention}; of {self.denominator})"
        return text + (
            f", {self.of_achievable:.1%} of the achievable matmul rate" if self.of_achievable is not None else ""
        )


def mfu(
    shape: Shape,
    seq_len: int,
    tokens_per_second_per_device: float,
    peak_tflops: float | None,
    *,
    convention: Convention = DEFAULT,
    matmul_tflops: float | None = None,
    what: str = "dense bf16 peak",
) -> Utilisation:
    """Model FLOP utilisation of one device."""
    if peak_tflops is None:
        return Utilisation(None, convention, "the device's peak is unknown")
    rate = per_token(shape, seq_len, convention) * tokens_per_second_per_device / 1e12
    achievable = rate / matmul_tflops if matmul_tflops else None
    return Utilisation(rate / peak_tflops, convention, f"{peak_tflops:g} TFLOP/s {what}", achievable)


def hfu(
    shape: Shape,
    seq_len: int,
    tokens_per_second_per_device: float,
    peak_tflops: float | None,
    *,
    recompute: str,
    convention: Convention = DEFAULT,
) -> Utilisation:
    """Hardware FLOP utilisation: recomputation counts as work."""
    if peak_tflops is None:
        return Utilisation(None, convention, "the device's peak is unknown")
    rate = hardware_per_token(shape, seq_len, recompute, convention) * tokens_per_second_per_device / 1e12
    return Utilisation(
        rate / peak_tflops, f"{convention} with {recompute} recompute", f"{peak_tflops:g} TFLOP/s dense bf16 peak"
    )


def training_flops(shape: Shape, seq_len: int, tokens: float, convention: Convention = DEFAULT) -> float:
    return per_token(shape, seq_len, convention) * tokens


def days(flops: float, devices: int, peak_tflops: float, utilisation: float) -> float:
    """How long `devices` need at a given share of their peak."""
    return flops / (devices * peak_tflops * 1e12 * utilisation) / 86_400
