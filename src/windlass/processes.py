"""Child processes that end with their parent, and process pools."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def usable_cores() -> int:
    """CPU cores this process may use; under a scheduler fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` (or the first call in a forked child) that makes the kernel end the child when this process dies.

    Linux only; elsewhere the child simply lives on.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None)  # loaded here: a forked child of a threaded process should not load libraries

    def in_child() -> None:
        with contextlib.suppress(AttributeError):
            libc.prctl(_PR_SET_PDEATHSIG, int(signal_number))
        if os.getppid() != parent:  # the parent died before prctl: nobody would end this process
            os._exit(1)

    return in_child
