"""A sample of the random kills of benchmarks/faults.py: one in each phase of training and of tokenising."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.kills import Kill, tokenizing_kills, training_kills

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.xdist_group("faults"), pytest.mark.timeout(600)]


def check(kills: list[Kill], least: int) -> None:
    assert len({kill.phase for kill in kills}) >= least  # on a busy machine a short phase can be over too soon
    assert [kill for kill in kills if not kill.good] == []


@pytest.mark.parametrize("world", [2, 3])
def test_training_survives_a_kill_in_every_phase(tmp_path: Path, world: int) -> None:
    check(list(training_kills(tmp_path, world, runs=1, seed=world)), 3)


def test_tokenising_survives_a_kill_in_every_phase(tmp_path: Path) -> None:
    check(list(tokenizing_kills(tmp_path, runs=1)), 2)
