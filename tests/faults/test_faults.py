"""A short form of benchmarks/faults.py: each fault once or twice, on a run of sixteen steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults import lab as faults
from tests.faults.lab import Lab, Row, kill_in, kill_while_writing

pytestmark = [pytest.mark.multi, pytest.mark.xdist_group("faults")]
root = pytest.mark.skipif(os.geteuid() != 0, reason="a small tmpfs needs root")
STEPS = 16


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    yield Lab(tmp_path_factory.mktemp("faults"), seed=1)


def good(row: Row, times: int | None = None) -> None:
    assert row.ok, f"{row.fault}: {row.outcome}"
    assert times is None or row.times == times


def test_all_ranks_killed_at_random_moments(lab: Lab) -> None:
    good(faults.killed_at_random(lab, kills=2, steps=STEPS))


def test_one_rank_killed_at_a_random_moment(lab: Lab) -> None:
    good(faults.killed_at_random(lab, kills=1, one=True, steps=STEPS))


def test_killed_at_exact_places_of_a_save_and_in_validation(lab: Lab) -> None:
    harms = [
        kill_while_writing(call=2, ranks=(1,)),
        kill_in(faults.files, "adopt", call=1),
        kill_in(faults.validation.Validator, "_batch", call=2, ranks=(1,)),
    ]
    good(faults.killed_in(lab, "half a shard, before the rename, in validation", harms, steps=STEPS), times=3)


def test_a_signal_to_one_rank_stops_all_at_one_step(lab: Lab) -> None:
    good(faults.signalled(lab, signal.SIGTERM, (1,), steps=STEPS))


def test_a_flipped_bit(lab: Lab) -> None:
    good(faults.damaged(lab, "bit-flipped shard", steps=STEPS))


def test_an_unreadable_version(lab: Lab) -> None:
    good(faults.unreadable_version(lab, steps=STEPS))


@root
def test_a_full_disk(lab: Lab) -> None:
    good(faults.disk_full(lab, steps=28))


@root
def test_a_folder_that_turns_read_only(lab: Lab) -> None:
    good(faults.read_only(lab, steps=STEPS))


def test_stale_and_held_locks(lab: Lab) -> None:
    good(faults.locks(lab))


def test_a_clock_that_jumps(lab: Lab) -> None:
    good(faults.clock_jumps(lab, steps=STEPS))


def test_a_frozen_rank_is_named(lab: Lab) -> None:
    good(faults.hung(lab, steps=STEPS))


def test_a_rank_that_waits_for_data_is_named(lab: Lab) -> None:
    good(faults.stuck(lab, steps=STEPS))


def test_not_a_number_on_one_rank(lab: Lab) -> None:
    good(faults.nan_on_one_rank(lab, steps=STEPS))


def test_bad_data_and_rollback(lab: Lab) -> None:
    good(faults.rolled_back(lab))


def test_other_world_sizes(lab: Lab) -> None:
    good(faults.other_world_sizes(lab, worlds=(2, 1, 4), steps=STEPS))


def test_the_proof_can_fail(lab: Lab) -> None:
    """A comparison that finds nothing is worth something only when it finds what is there."""
    made = faults.recipe(lab.store, steps=STEPS)
    reference = lab.reference(made, 2)
    other = faults.recipe(lab.store, steps=STEPS, optim={"lr": 3.1e-3})
    run = lab.reference(other, 2)
    problems = faults.differences(reference, run, made)
    assert any("losses differ" in p for p in problems) and any("differs in its bits" in p for p in problems)
    samples = Path(run.ranks / "samples-00001.jsonl")
    kept = samples.read_text()
    samples.write_text("\n".join(kept.splitlines()[:-1]))
    assert any("1 steps were given other sequences" in p for p in faults.differences(run, run, other))
    samples.write_text(kept)
