"""The leaderboard of a sweep: one row per model and data set, chosen by validation, ranked by the mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windlass.config.sweep import LeaderboardConfig, load_sweep
from windlass.figures import page
from windlass.figures.leaderboard import entry_table, leaderboard, leaderboard_sections, ranking

BOARD = LeaderboardConfig()


def row(model: str, dataset: str, score: float | None, validation: float = 0.5, **keys: Any) -> dict[str, Any]:
    base = {"model": model, "dataset": dataset, "outcome": "ok", "point": f"{model}-{dataset}-{validation}"}
    return {**base, "score": score, "spread": 0.01, "validation_score": validation, "metric": "macro_f1", **keys}


def test_rows_by_hand() -> None:
    """The better validation wins, though its test score is lower; what did not run has no score and no rank."""
    rows = [
        row("a", "x", 0.9, validation=0.6),
        row("a", "x", 0.8, validation=0.7, seconds=30.0, energy_joules=120.0),
        row("a", "y", 0.6),
        row("b", "x", 0.95),
        row("b", "y", None, outcome="oom"),
        row("c", "x", 0.5),
        row("c", "y", 0.7),
    ]
    entries = leaderboard(BOARD, rows)
    assert [(e["model"], e["dataset"], e["score"]) for e in entries[:2]] == [("a", "x", 0.8), ("a", "y", 0.6)]
    assert entries[0]["points"] == 2 and entries[0]["seconds"] == 30.0
    assert ranking(BOARD, entries) == [("a", pytest.approx(0.7)), ("c", pytest.approx(0.6)), ("b", None)]
    lines = entry_table(BOARD, entries).rows
    assert lines[0][3] == "0.8000 ± 0.0100" and lines[0][7] == "120 J" and lines[1][7] == "not measured"
    assert lines[3][3] == "not run"
    text = page("board", leaderboard_sections(BOARD, entries))
    assert "1 of 6 rows" in text and "macro_f1" in text


def test_less_loss_is_better() -> None:
    rows = [row("a", "x", 2.0, validation=v, metric="loss") for v in (1.5, 1.2)]
    assert leaderboard(BOARD, rows)[0]["point"].endswith("1.2")


def test_an_axis_that_does_not_exist(tmp_path: Path) -> None:
    from windlass.errors import ConfigError

    (tmp_path / "s.toml").write_text(
        'name = "s"\ncommand = "x {model}"\n[leaderboard]\ncolumns = "task"\n[matrix]\nmodel = [1]\n'
    )
    with pytest.raises(ConfigError) as error:
        load_sweep(tmp_path / "s.toml")
    assert error.value.code == "sweep.invalid-file" and "task" in error.value.message
