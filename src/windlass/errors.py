"""What can go wrong, in words a tired person can act on: every error carries a message, a hint and an exit code."""

from __future__ import annotations


class WindlassError(Exception):
    """Says what happened, with the numbers; `hint` says what to do about it. `cli` prints both and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class ConfigError(WindlassError):
    """A recipe, sweep or cluster file says something that cannot be."""

    exit_code = 2


class PlanError(WindlassError):
    """No layout of this model on this machine is legal, or none fits."""

    exit_code = 3


class RunError(WindlassError):
    """A run folder is missing, locked, damaged or belongs to another recipe."""

    exit_code = 4


class DataError(WindlassError):
    """A source, tokenizer or token store is missing, damaged or does not match."""

    exit_code = 5


class LaunchError(WindlassError):
    """The scheduler refused, or cannot be reached."""

    exit_code = 6


class CheckpointError(WindlassError):
    """A checkpoint is missing, incomplete, damaged or of another shape."""

    exit_code = 7


class TrainError(WindlassError):
    """Training stopped for a reason that restarting alone does not cure."""

    exit_code = 8


class ProfileError(WindlassError):
    """A trace cannot be read or captured."""

    exit_code = 9


# What a training process tells the launcher and the chain by its exit code.
EXIT_DONE = 0
"""The run is finished: no further link is needed."""
EXIT_OUT_OF_MEMORY = 12
"""A device ran out of memory: restarting the same layout fails again."""
EXIT_HANG = 13
"""The watchdog ended the job; the error record names the rank."""
EXIT_DIVERGED = 14
"""Too many non-finite or spiking steps in a row."""
EXIT_RESUMABLE = 75
"""Stopped early on purpose (signal or wall time) after a good save: start the next link (EX_TEMPFAIL of sysexits)."""
