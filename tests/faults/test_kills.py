"""A sample of the random kills of benchmarks/faults.py: one in each phase of each kind of work."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults import kills
from tests.faults.kills import Kill

pytestmark = [pytest.mark.multi, pytest.mark.xdist_group("faults"), pytest.mark.timeout(600)]


def check(sample: list[Kill], least: int) -> None:
    assert len({kill.phase for kill in sample}) >= least  # on a busy machine a short phase can be over too soon
    assert [kill for kill in sample if not kill.good] == []


def test_staging_survives_a_kill_in_every_phase(tmp_path: Path) -> None:
    check(list(kills.stage_kills(tmp_path, runs=1, files=200)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_training_survives_a_kill_in_every_phase(tmp_path: Path, world: int) -> None:
    check(list(kills.training_kills(tmp_path, world, runs=1, seed=world)), 3)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["tokenizing", "sweep", "eval", "export", "finetuning"])
def test_a_command_survives_a_kill_in_every_phase(tmp_path: Path, work: str) -> None:
    check(list(getattr(kills, f"{work}_kills")(tmp_path, runs=1)), 2)
