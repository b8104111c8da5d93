"""Which layers each pipeline stage holds, and which are reduced together. The one split that engine and planner use."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from windlass.layout.types import Layout

# Gradients are reduced in fp32.
GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Stage:
    index: int
    layers: range
    has_embedding: bool
    has_head: bool


@lru_cache(maxsize=256)
def stages(num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    """Contiguous and as even as possible; the last stages get fewer layers, because the head costs about a layer or
    two."""
    size, larger = divmod(num_layers, num_stages)
    starts = [index * size + min(index, larger) for index in range(num_stages + 1)]
    return tuple(
        Stage(index, range(start, end), index == 0, index == num_stages - 1)
        for index, (start, end) in enumerate(pairwise(starts))
    )


def stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """Indexes of the stages that a pipeline rank holds, in the order its schedule expects."""
    if layout.pipeline > 1 and layout.schedule == "interleaved":
        return [rank + layout.pipeline * i for i in range(layout.chunks)]
    if layout.pipeline > 1 and layout.schedule == "zbv":
        return [rank, 2 * layout.pipeline - 1 - rank]
    return [rank]


def layers_of_rank(num_layers: int, layout: Layout, rank: int) -> int:
    """Layers of all stages that a pipeline rank holds."""
    split = stages(num_layers, layout.num_stages)
    return sum(len(split[index].layers) for index in stages_of_rank(layout, rank))


def gradient_buckets(layer_params: Sequence[float], bucket_bytes: int | None) -> list[range]:
    """Layers whose gradients are reduced together, from the first on. They are filled from the last layer, whose
    gradients come first; None: each layer by itself."""
    buckets: list[range] = []
    for layer in reversed(range(len(layer_params))):
        if buckets and bucket_bytes is not None:
            together = range(layer, buckets[0].stop)
            if GRADIENT_BYTES * sum(layer_params[together.start : together.stop]) <= bucket_bytes:
                buckets[0] = together
                continue
        buckets.insert(0, range(layer, layer + 1))
    return buckets
