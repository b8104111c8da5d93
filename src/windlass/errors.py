"""Errors with a stable code, a message, a hint and an exit code."""

from __future__ import annotations


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


# Exit codes of a training process, read by the supervisor, the job chain and sweeps.
EXIT_DONE = 0  # the run is finished: no further job is needed
EXIT_OUT_OF_MEMORY = 12  # a device ran out of memory: restarting the same layout fails again
EXIT_HANG = 13  # the watchdog ended the job; the error record names the rank
EXIT_DIVERGED = 14  # too many non-finite or spiking steps in a row
# Stopped early on purpose (signal or wall time) after a good save: submit the next job (EX_TEMPFAIL of sysexits.h).
EXIT_RESUMABLE = 75
