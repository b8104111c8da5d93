"""When was the device here? Marks that cost nothing while training: events of a GPU, which are read later; the host's clock elsewhere."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any
"""A CUDA event, or seconds of the host."""


def mark(cuda: bool) -> Mark:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Events must have been reached: ask after a synchronisation, or long after."""
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)
