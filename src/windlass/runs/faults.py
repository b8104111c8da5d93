"""Failures of ranks: their records, their kinds, their exit codes, and which of them a restart cannot cure."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from windlass import errors
from windlass.files import NO_SPACE_ERRNOS, write_json
from windlass.runs.events import known_float, read_fields

if TYPE_CHECKING:
    from windlass.runs.folder import Run

# Exit code -> why the same workers would only fail again. Supervisor and job chain use this one table.
# A RunError is not in it: the folder may only be locked by a job that is still ending. A RunError that stays stops both
# after the second failure without a new checkpoint.
INCURABLE = {
    errors.ConfigError.exit_code: "the recipe has an error",
    errors.PlanError.exit_code: "the layout does not fit",
    errors.DataError.exit_code: "the data has an error",
    errors.CheckpointError.exit_code: "the checkpoint has an error",
    errors.TrainError.exit_code: "training stopped for a reason that a restart cannot fix",
    errors.EXIT_OUT_OF_MEMORY: "a device ran out of memory, and would again with the same layout",
    errors.EXIT_DIVERGED: "training diverged",
}

_KINDS = {
    errors.ConfigError: "config",
    errors.DataError: "data",
    errors.CheckpointError: "checkpoint",
    errors.RunError: "run",
    errors.TrainError: "train",
    errors.PlanError: "config",
}
_KINDS_BY_CODE = {errors.EXIT_OUT_OF_MEMORY: "oom", errors.EXIT_DIVERGED: "diverged", errors.EXIT_HANG: "hang"}
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|peer|socket|timed out|nccl|ProcessGroup"
    r"|DistBackendError|DistNetworkError",
    re.I,
)


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """What a rank wrote about its own end to ranks/error-00001.json."""

    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    # See `kind_of`.
    kind: str | None = None
    exception: str | None = None
    error: str = ""
    hint: str | None = None
    exit_code: int | None = None
    # The rank that the watchdog names, in records of a hang.
    culprit: int | None = None
    traceback: list[str] = field(default_factory=list)
    time: float = 0.0

    @property
    def is_cause(self) -> bool:
        """False: the record only says that another rank went away."""
        return self.kind != "lost"


def parse_fault(value: Mapping[str, Any]) -> FaultRecord:
    """A record of this or an older version (which wrote `message`)."""
    error, at = str(value.get("error") or value.get("message") or ""), known_float(value.get("time"))
    return FaultRecord(**{**read_fields(FaultRecord, value), "error": error, "time": at or 0.0})


def write_fault(run: Run, record: FaultRecord) -> None:
    """Write ranks/error-RANK.json. A full disk must not hide the error itself."""
    value = {k: v for k, v in asdict(record).items() if k != "culprit" or record.kind == "hang"}
    with contextlib.suppress(OSError):
        write_json(run.error_file(record.rank or 0), value)


def record_fault(run: Run, rank: int, error: BaseException) -> FaultRecord:
    """Record an exception: the first line of its text, and the second where the first only announces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    record = FaultRecord(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        kind=kind_of(error),
        exception=type(error).__name__,
        error=" ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1]),
        hint=getattr(error, "hint", None),
        exit_code=exit_code_of(error),
        traceback=[line.rstrip() for line in traceback.format_exception(error)],
        time=time.time(),
    )
    write_fault(run, record)
    return record


def kind_of(error: BaseException) -> str:
    """oom, diverged, hang, disk, config, data, checkpoint, run, train, lost (another rank), interrupted, crash."""
    name, text, code = type(error).__name__, str(error), getattr(error, "exit_code", 0)
    is_remote = isinstance(error, (RuntimeError, ConnectionError)) and _LOST.search(text)
    checks: tuple[tuple[str, object], ...] = (  # the first that holds decides
        ("oom", name == "OutOfMemoryError" or isinstance(error, MemoryError)),
        ("lost", name == "LostWorkerError"),
        (_KINDS_BY_CODE.get(code, ""), code in _KINDS_BY_CODE),
        ("interrupted", isinstance(error, KeyboardInterrupt)),
        *((kind, isinstance(error, cls)) for cls, kind in _KINDS.items()),
        ("disk", isinstance(error, OSError) and error.errno in (*NO_SPACE_ERRNOS, errno.EROFS)),
        ("crash", "EADDRINUSE" in text),  # its own port, not another rank: `lost` would blame nobody
        ("lost", type(error).__module__.startswith("torch.distributed") or is_remote),
    )
    return next((kind for kind, holds in checks if holds), "crash")


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, errors.WindlassError):
        return error.exit_code
    return {"oom": errors.EXIT_OUT_OF_MEMORY, "interrupted": 130}.get(kind_of(error), 1)
