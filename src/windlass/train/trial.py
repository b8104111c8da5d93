"""Does a step fit in memory? One trial step before the first real one, so that running out of memory costs seconds, not hours.

Its gradients are thrown away: weights, moments, random numbers and data position stay as they were. What it needed is said beside
what the planner's arithmetic predicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from windlass.errors import WindlassError
from windlass.train.failure import OutOfMemoryError
from windlass.train.predict import allocated
from windlass.units import print_bytes

if TYPE_CHECKING:
    from windlass.train.job import Job


def predicted_bytes(job: Job) -> float | None:
    """Peak of the allocator on the fullest device, by the planner's arithmetic; None where it cannot say."""
    train = job.recipe.train
    compiled = job.world.device.type == "cuda" if train.compile is None else train.compile
    fused = any(getattr(part, "fused", False) for module in job.parts.modules for part in module.modules())
    try:
        return allocated(
            job.recipe, job.world.axes, job.geometry, job.world.place.local_world_size, compiled=compiled, fused=fused
        )
    except (WindlassError, ValueError, KeyError):
        return None


def trial_step(job: Job) -> str:
    """Forward and backward of a whole batch of token 0; the sentence for the log."""
    device = job.world.device
    tokens = torch.zeros((job.geometry.per_rank, job.geometry.seq_len + 1), dtype=torch.long, device=device)
    documents = torch.zeros_like(tokens) if job.recipe.data.mask_documents else None
    predicted = predicted_bytes(job)
    try:
        job.stepper.gradients(tokens, documents)
    except torch.OutOfMemoryError as error:
        raise _too_big(job, predicted) from error
    job.optimizer.zero_grad()
    return words(_peak(device), predicted)


def words(seen: int | None, predicted: float | None) -> str:
    said = f"memory: a trial step needed {print_bytes(seen)}"
    if seen is None or predicted is None:
        return f"{said}; no prediction"
    return f"{said}; the planner's arithmetic says {print_bytes(predicted)} ({(predicted - seen) / seen:+.0%})"


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _too_big(job: Job, predicted: float | None) -> OutOfMemoryError:
    free: Any = torch.cuda.mem_get_info(job.world.device)[1] if job.world.device.type == "cuda" else None
    layout = job.recipe.layout
    return OutOfMemoryError(
        "train.out-of-memory",
        f"a trial step of micro_batch {layout.micro_batch} x {job.geometry.seq_len:,} tokens does not fit in {print_bytes(free)}; the planner's arithmetic says {print_bytes(predicted)}",
        hint="`windlass plan` lists layouts that fit; or a smaller layout.micro_batch, train.recompute, more sharding",
    )
