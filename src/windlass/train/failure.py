"""Which failures do we know better than torch's own words? Out of memory and divergence; `supervise.record_error` writes them down."""

from __future__ import annotations

import torch

from windlass.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, TrainError
from windlass.units import print_bytes


class OutOfMemoryError(TrainError):
    exit_code = EXIT_OUT_OF_MEMORY


class DivergedError(TrainError):
    exit_code = EXIT_DIVERGED


def explain(error: BaseException, memory_hint: str | None = None) -> BaseException:
    """The same error in our words where we know better."""
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    ):
        free = f": {memory_hint}" if memory_hint else ""
        peak = print_bytes(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
        return OutOfMemoryError(
            f"a device ran out of memory{free}" + (f" (peak so far {peak})" if peak else ""),
            hint="a smaller layout.micro_batch, train.recompute = full, more sharding, or `windlass plan` for layouts that fit",
        )
    return error
