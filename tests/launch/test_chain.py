"""A chain ends when it is finished or hopeless, and continues otherwise."""

from __future__ import annotations

import json
import time

import pytest

from windlass import errors
from windlass.files import append_line, write_json
from windlass.launch import chain
from windlass.runs import Run
from windlass.runs.events import Finished, RolledBack, Saved, Started
from windlass.runs.faults import INCURABLE


@pytest.fixture
def run(tmp_path):
    write_json(
        tmp_path / "config.json", {"name": "x", "train": {"steps": 100}, "data": {"tokens": None, "batch_tokens": 1024}}
    )
    (tmp_path / "ranks").mkdir()
    return Run(tmp_path)


def link(run: Run, job: str, *, saves: int | None = None, code: int | None = None) -> chain.ChainVerdict:
    """One link: begins, perhaps saves, perhaps ends (None: cut off)."""
    verdict = chain.before(run, job, 0, "node01")
    if verdict.answer == "go":
        if saves is not None:
            run.record(Saved(step=saves))
        if code is not None:
            return chain.after(run, job, 0, code, None)
    return verdict


def test_a_new_run_goes(run):
    assert chain.before(run, "1", 0, "node01").answer == "go"


def test_progress_keeps_a_chain_going_through_cuts(run):
    for number in range(5):
        assert link(run, str(number), saves=10 * (number + 1)).answer == "go"


def test_two_links_without_a_checkpoint_stop_it(run):
    link(run, "1", saves=10, code=75)
    link(run, "2", code=1)
    verdict = link(run, "3", code=1)
    assert verdict.answer == "hopeless" and "2 and 3" in verdict.reason and "step 10" in verdict.reason
    assert chain.before(run, "4", 0, "node01").answer == "hopeless"
    assert [e.reason for e in run.events() if e.event == "gave_up"] == [verdict.reason]


def test_two_cut_off_links_stop_it_too(run):
    link(run, "1")
    link(run, "2")
    verdict = chain.before(run, "3", 0, "node01")
    assert verdict.answer == "hopeless" and "cut off" in verdict.reason


def test_progress_between_two_failures_forgives_them(run):
    link(run, "1", saves=10, code=1)
    link(run, "2", saves=20, code=1)
    assert chain.before(run, "3", 0, "node01").answer == "go"


def test_checkpoints_after_a_rollback_or_a_damaged_one_are_progress_at_a_lower_step(run):
    link(run, "1", saves=1600)
    run.record(RolledBack(step=1610, to_step=1200))
    link(run, "2", saves=1300)
    link(run, "3", saves=1400)
    assert chain.before(run, "4", 0, "node01").answer == "go"
    link(run, "5")
    assert chain.before(run, "6", 0, "node01").answer == "hopeless"  # 4 and 5 have written nothing


@pytest.mark.parametrize("code", sorted(INCURABLE))
def test_a_failure_that_a_restart_does_not_cure_stops_at_once(run, code):
    verdict = link(run, "1", code=code)
    assert verdict.answer == "hopeless" and f"code {code}" in verdict.reason


def test_the_ranks_own_record_beats_sruns_code(run):
    chain.before(run, "1", 0, "node01")
    record = {
        "rank": 3,
        "time": time.time(),
        "exit_code": errors.EXIT_OUT_OF_MEMORY,
        "message": "tried to allocate 2 GiB",
    }
    run.error_file(3).write_text(json.dumps(record))
    verdict = chain.after(run, "1", 0, 137, None)
    assert verdict.answer == "hopeless" and "rank 3: tried to allocate 2 GiB" in verdict.reason


def test_srun_saying_0_after_a_node_failure_is_not_the_end(run):
    assert link(run, "1", saves=10, code=0).answer == "go"


def test_finished_and_then_given_more_steps(run):
    run.record(Started())
    run.record(Finished(step=100, tokens=102_400))
    assert chain.before(run, "2", 0, "node01").answer == "finished"
    write_json(run.config_file, {"train": {"steps": 200}, "data": {}})
    assert chain.before(run, "3", 0, "node01").answer == "go"


def test_launching_again_by_hand_gives_a_new_chance(run):
    link(run, "1", code=1)
    link(run, "2", code=1)
    append_line(run.jobs_file, {"record": "submitted", "time": time.time(), "job": "9", "link": 1})
    assert chain.before(run, "9", 0, "node01").answer == "go"


def test_a_requeued_job_counts_as_a_new_start(run):
    chain.before(run, "1", 0, "node01")
    chain.before(run, "1", 1, "node01")
    assert [(item.job, item.restart) for item in chain.job_starts(chain.records(run))] == [("1", 0), ("1", 1)]
    assert chain.before(run, "1", 2, "node01").answer == "hopeless"
