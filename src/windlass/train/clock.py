"""Time marks that cost nothing while training: events on a GPU, which are read later; the host's clock elsewhere."""

import time
from typing import cast

import torch

Mark = torch.cuda.Event | float
"""A CUDA event, or seconds of the host's clock."""


def mark(cuda: bool) -> Mark:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Both events must have completed: call after a synchronisation, or much later."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1e3
    return cast(float, end) - cast(float, begin)
