"""Checkpoints that were saved and are no longer there: refused, or said and recorded."""

from __future__ import annotations

import shutil

import pytest
from tests.checkpoint.test_load import flip, put, shard

from windlass.checkpoint.load import discard_after, find_latest
from windlass.checkpoint.missing import restart_from_scratch
from windlass.checkpoint.save import Saver
from windlass.config.save import SaveConfig
from windlass.errors import CheckpointError
from windlass.runs.events import CheckpointsLost, RolledBack


def losses(run) -> list[tuple[int | None, ...]]:
    return [(e.step, e.to_step, e.lost_steps, e.lost_tokens) for e in run.events(CheckpointsLost)]


@pytest.mark.parametrize("purged", ["the files", "the folder"])
def test_all_gone_is_refused_until_told_to_begin_again(run, net, purged) -> None:
    put(run, 1, net())
    put(run, 7, net())
    shutil.rmtree(run.checkpoints)
    if purged == "the files":
        run.checkpoints.mkdir()
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            find_latest(run)
        assert error.value.code == "checkpoint.gone" and error.value.exit_code == 7
        assert all(text in error.value.message for text in ("step 7", str(run.checkpoint(7))))
    restart_from_scratch(run)
    assert find_latest(run) is None and losses(run) == [(7, 0, 7, 70)]
    put(run, 1, net())  # what is saved from now on counts again
    assert find_latest(run).step == 1
    shutil.rmtree(run.checkpoint(1))
    with pytest.raises(CheckpointError) as error:
        find_latest(run)
    assert error.value.code == "checkpoint.gone" and "step 1 " in error.value.message


def test_a_missing_newest_one_is_recorded_once_and_the_one_before_is_used(run, net) -> None:
    for step in (1, 2, 5):
        put(run, step, net())
    shutil.rmtree(run.checkpoint(5))
    latest = find_latest(run)
    assert latest.step == 2 and all(text in latest.missing for text in ("3 steps", "30", "step-000000005"))
    assert losses(run) == [(5, 2, 3, 30)]
    assert find_latest(run).missing is None and len(losses(run)) == 1


def test_what_keep_rules_rollbacks_and_damage_took_away_is_not_lost(run, net) -> None:
    for step in range(1, 7):
        state = {"model": dict(net().state_dict())}
        assert Saver(run, SaveConfig(keep_last=2, keep_best=0)).save(step, state, {"tokens": step}, block=True).ok
    shutil.rmtree(run.checkpoint(5))  # an old one, deleted by hand: the newest counts
    assert (find_latest(run).step, find_latest(run).missing) == (6, None)
    put(run, 8, net())
    discard_after(run, 6, "rolled back")
    run.record(RolledBack(step=9, to_step=6))
    assert (find_latest(run).step, find_latest(run).missing) == (6, None)
    put(run, 9, net())
    flip(shard(run, 9))
    assert (find_latest(run).step, find_latest(run).missing) == (6, None)
    assert losses(run) == []


def test_beginning_again_is_refused_while_checkpoints_exist_and_nothing_for_a_new_run(run, net) -> None:
    restart_from_scratch(run)
    assert not run.events_file.exists()
    put(run, 3, net())
    with pytest.raises(CheckpointError) as error:
        restart_from_scratch(run)
    assert error.value.code == "checkpoint.not-gone" and losses(run) == []
