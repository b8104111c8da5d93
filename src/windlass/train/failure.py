"""Failures that we explain better than torch does: out of memory, a lost worker, divergence."""

import re
import resource
from textwrap import shorten

import torch

from windlass.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, TrainError, WindlassError, lack_of_memory
from windlass.runs.faults import kind_of
from windlass.runs.folder import Run
from windlass.units import print_bytes


class OutOfMemoryError(TrainError):
    exit_code = EXIT_OUT_OF_MEMORY


class DivergedError(TrainError):
    exit_code = EXIT_DIVERGED


class LostWorkerError(WindlassError):
    """Another worker went away; this one is not at fault, and a restart may help."""


def explain(error: BaseException, run: Run) -> BaseException:
    """The same error with numbers and a hint where we can give them; torch's own stays behind it as the cause."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in text
    ):
        requested = "torch does not report the requested size"
        if match := re.search(r"tried to allocate ([\d.]+) (\w+)", text, re.IGNORECASE):
            size = print_bytes(int(match[1])) if match[2] == "bytes" else f"{match[1]} {match[2]}"
            requested = f"it requested {size} more"
        if torch.cuda.is_available():
            peak, total = print_bytes(torch.cuda.max_memory_allocated()), print_bytes(torch.cuda.mem_get_info()[1])
            used = f"{peak} of the device's {total} were in use at the peak"
        else:
            peak = print_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            used = f"the process has used up to {peak}"
        return OutOfMemoryError(
            "train.out-of-memory",
            f"a device ran out of memory: {requested}; {used}",
            hint='use a smaller layout.micro_batch, train.recompute = "full" or more sharding; `windlass plan` lists '
            "layouts that fit",
        )
    if not isinstance(error, WindlassError) and kind_of(error) == "lost":
        first = text.splitlines()[0] if text else type(error).__name__
        first = shorten(
            re.sub(r"\[/\S+:\d+\]", "", first), 160, placeholder=" ..."
        )  # without the line of gloo's source
        return LostWorkerError(
            "train.worker-lost",
            f"another worker exited while this one waited for it ({first})",
            hint=f"see {run.ranks} for that worker's error; the run continues from its last checkpoint when restarted",
        )
    return error if isinstance(error, WindlassError) else lack_of_memory(error) or error
