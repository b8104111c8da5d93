"""Which failures do we know better than torch's own words? Out of memory and divergence; `runs.faults.record_fault` writes them down."""

from __future__ import annotations

import re
import resource

import torch

from windlass.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, TrainError
from windlass.units import print_bytes


class OutOfMemoryError(TrainError):
    exit_code = EXIT_OUT_OF_MEMORY


class DivergedError(TrainError):
    exit_code = EXIT_DIVERGED


def explain(error: BaseException) -> BaseException:
    """The same error in our words where we know better; torch's own stays behind it as the cause."""
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    ):
        known = OutOfMemoryError(
            "train.out-of-memory",
            f"a device ran out of memory: {_numbers(str(error))}",
            hint="a smaller layout.micro_batch, train.recompute = full, more sharding, or `windlass plan` for layouts that fit",
        )
        known.__cause__ = error
        return known
    return error


def _numbers(text: str) -> str:
    """What was asked for, what was held and what there is; the first of them from torch's words."""
    asked = re.search(r"tried to allocate ([\d.]+) (\w+)", text, re.IGNORECASE)
    wanted = "torch does not say how much was asked for"
    if asked is not None:
        size = print_bytes(int(asked[1])) if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
        wanted = f"{size} more were asked for"
    if not torch.cuda.is_available():
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"{wanted}; the process has held up to {print_bytes(held)}"
    total = torch.cuda.mem_get_info()[1]
    return f"{wanted}; {print_bytes(torch.cuda.max_memory_allocated())} of the device's {print_bytes(total)} were in use at the peak"
