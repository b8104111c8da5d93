"""Fault records of ranks, their kinds and exit codes."""

from __future__ import annotations

import errno
import json

import pytest

from windlass import errors
from windlass.runs.faults import INCURABLE, FaultRecord, exit_code_of, kind_of, record_fault, write_fault
from windlass.runs.folder import Run


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (MemoryError("too much"), "oom", 12),
        (errors.ConfigError("x.bad", "bad"), "config", 2),
        (errors.PlanError("x.bad", "bad"), "config", 3),
        (errors.RunError("x.bad", "bad"), "run", 4),
        (errors.DataError("x.bad", "bad"), "data", 5),
        (errors.CheckpointError("x.bad", "bad"), "checkpoint", 7),
        (errors.TrainError("x.bad", "bad"), "train", 8),
        (KeyboardInterrupt(), "interrupted", 130),
        (OSError(errno.ENOSPC, "full"), "disk", 1),
        (RuntimeError("Connection reset by peer"), "lost", 1),
        (RuntimeError("The server socket has failed to listen: EADDRINUSE, address already in use"), "crash", 1),
        (ValueError("Connection reset by peer"), "crash", 1),
    ],
)
def test_kinds_and_exit_codes(error, kind, code):
    assert (kind_of(error), exit_code_of(error)) == (kind, code)


def test_a_record_is_written_and_read_back(tmp_path):
    run = Run(tmp_path)
    record_fault(run, 3, errors.ConfigError("x.y", "first line\nsecond", hint="do this"))
    write_fault(run, FaultRecord(rank=1, kind="hang", error="stuck", culprit=0))
    hang, fault = run.faults()
    assert (fault.rank, fault.kind, fault.error, fault.hint, fault.exit_code) == (
        3,
        "config",
        "first line",
        "do this",
        2,
    )
    assert "culprit" not in json.loads(run.error_file(3).read_text()) and fault.traceback
    assert (hang.rank, hang.culprit, hang.is_cause) == (1, 0, True)


def test_records_of_older_versions_and_damaged_ones(tmp_path):
    run = Run(tmp_path)
    run.ranks.mkdir()
    run.error_file(0).write_text('{"rank": 0, "message": "allocate 2 GiB", "kind": "lost", "time": null}')
    run.error_file(1).write_text("{torn")
    [fault] = run.faults()
    assert (fault.error, fault.is_cause, fault.time) == ("allocate 2 GiB", False, 0.0)


def test_the_two_announcing_lines_become_one(tmp_path):
    record = record_fault(Run(tmp_path), 0, ValueError("these differ:\n  a and b\n  more"))
    assert record.error == "these differ: a and b"


def test_a_restart_cures_a_lock_and_a_lost_rank_but_not_a_recipe():
    assert {2, 3, 5, 7, 8, errors.EXIT_OUT_OF_MEMORY, errors.EXIT_DIVERGED} == set(INCURABLE)
