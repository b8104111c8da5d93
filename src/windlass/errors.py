"""Errors with a stable code, a message, a hint and an exit code."""

from __future__ import annotations

import errno
import re
import resource
import sys


class WindlassError(Exception):
    """What went wrong, with the numbers; `hint` says what to do about it.

    `code` is stable ("layout.batch-not-divisible"): tests and scripts match it instead of the message.
    The CLI prints message and hint and exits with `exit_code`.
    """

    exit_code = 1

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[type[WindlassError], tuple[str, str, str | None]]:
        return type(self), (self.code, self.message, self.hint)  # process pools pickle exceptions


class ConfigError(WindlassError):
    """A recipe, sweep, data or cluster file has invalid or contradictory values."""

    exit_code = 2


class PlanError(WindlassError):
    """No valid layout of this model exists on this cluster, or none fits into its memory."""

    exit_code = 3


class RunError(WindlassError):
    """A run folder is missing, locked, damaged or belongs to another recipe."""

    exit_code = 4


class DataError(WindlassError):
    """A source, tokenizer or token store is missing, damaged or does not match."""

    exit_code = 5


class LaunchError(WindlassError):
    """The scheduler rejected a job or cannot be reached."""

    exit_code = 6


class CheckpointError(WindlassError):
    """A checkpoint is missing, incomplete, damaged or of another shape."""

    exit_code = 7


class TrainError(WindlassError):
    """Training stopped for a reason that a restart alone does not fix."""

    exit_code = 8


class ProfileError(WindlassError):
    """A trace cannot be read or captured."""

    exit_code = 9


class MemoryLimitError(WindlassError):
    """This process may not have more memory."""

    exit_code = 12  # EXIT_OUT_OF_MEMORY


def address_space_limit() -> int | None:
    """Bytes of address space that this process may map (`ulimit -v`); None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def lack_of_memory(error: BaseException) -> MemoryLimitError | None:
    """The error of a failed allocation, mapping or thread start in words; None for any other error."""
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not is_memory and not re.search(_MEMORY_TEXTS, str(error)):
        return None
    limit, detail = address_space_limit(), str(error).strip().splitlines()[-1:] or [type(error).__name__]
    if limit is None:
        hint = "use a machine or job with more memory, or a smaller model or batch"
        return MemoryLimitError("system.out-of-memory", f"out of memory: {detail[0]}", hint=hint)
    return MemoryLimitError(
        "system.memory-limit",
        f"out of memory: {detail[0]}; a process may map {limit / 2**20:,.0f} MiB of address space here (ulimit -v)",
        hint=f"raise the limit (`ulimit -v unlimited`); {ADDRESS_SPACE_NOTE}; files are complete, so run it again",
    )


ADDRESS_SPACE_NOTE = "PyTorch maps about 1 GiB, and tens of GiB with a GPU"
# Address space that a command with this library needs. With less, the library may end the process by itself at any
# moment: OpenBLAS, the dynamic loader and C++ do, with a message that explains nothing.
LIBRARY_BYTES = {"numpy": 192 << 20, "torch": 1 << 30}


class ImportGuard:
    """A finder of modules that finds none, and refuses those of LIBRARY_BYTES under a lower `ulimit -v`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        limit, needed = address_space_limit(), LIBRARY_BYTES.get(name)
        if limit is not None and needed is not None and limit < needed:
            raise MemoryLimitError(
                "system.memory-limit",
                f"this command needs {name}, which needs {needed / 2**20:,.0f} MiB of address space; a process may map "
                f"{limit / 2**20:,.0f} MiB here (ulimit -v)",
                hint=f"raise the limit (`ulimit -v unlimited`); {ADDRESS_SPACE_NOTE}",
            )


def guard_imports() -> None:
    """To be called once, at the start of a program."""
    if address_space_limit() is not None:
        sys.meta_path.insert(0, ImportGuard())


_MEMORY_TEXTS = (
    r"failed to map segment|[Cc]annot allocate memory|can't allocate memory|bad_alloc|can't start new thread"
)

# Exit codes of a command that a signal stopped, as a shell counts them.
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


class TerminatedError(KeyboardInterrupt):
    """SIGTERM (from `kill`, scancel or the queue's time limit), which stops a command as Ctrl-C does."""


def interrupt_exit_code(error: KeyboardInterrupt) -> int:
    return EXIT_TERMINATED if isinstance(error, TerminatedError) else EXIT_INTERRUPTED


# Exit codes of a training process, read by the supervisor, the job chain and sweeps.
EXIT_DONE = 0  # the run is finished: no further job is needed
EXIT_OUT_OF_MEMORY = 12  # a device ran out of memory: restarting the same layout fails again
EXIT_HANG = 13  # the watchdog ended the job; the error record names the rank
EXIT_DIVERGED = 14  # too many non-finite or spiking steps in a row
# Stopped early on purpose (signal or wall time) after a good save: submit the next job (EX_TEMPFAIL of sysexits.h).
EXIT_RESUMABLE = 75
