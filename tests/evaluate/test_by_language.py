"""Do models stand beside each other language by language, each with its newest numbers?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.errors import RunError
from windlass.evaluate.by_language import charts_of, languages, recorded, rows_of, table_of
from windlass.evaluate.record import Score, append, wilson_interval
from windlass.runs.folder import Run


def score(group: str, value: float, **more: object) -> Score:
    return Score(task="belebele", group=group, metric="accuracy", value=value, count=10, **more)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = []
    for name, add in (("poro", 0.1), ("other", 0.0)):
        run = Run(tmp_path / name)
        run.path.mkdir()
        run.config_file.write_text("{}")
        append(run, [score("all", 0.3), score("language fi", 0.2)], step=100, tokens=1)
        append(
            run,
            [score("all", 0.5 + add, low=0.4, high=0.6), score("language fi", 0.4 + add), score("source web", 0.9)],
            step=200,
            tokens=2,
        )
        append(run, [score("language en", 0.6 + add)] if name == "poro" else [], step=200, tokens=2)
        made.append(run.path)
    return made


def test_the_newest_checkpoint_counts_and_models_stand_together(runs: list[Path]) -> None:
    rows = recorded(runs)
    assert [(row.model, row.step) for row in rows] == [("poro", 200), ("other", 200)]
    assert languages(rows) == ["fi", "en"]
    columns, cells = table_of(rows)
    assert columns == ("task", "metric", "model", "all", "fi", "en")
    assert cells == [
        ("belebele", "accuracy", "poro", "0.6 ± 0.1", "0.5", "0.7"),
        ("belebele", "accuracy", "other", "0.5 ± 0.1", "0.4", ""),
    ]


def test_a_language_that_is_missing_is_a_gap_in_the_picture(runs: list[Path]) -> None:
    (chart,) = charts_of(recorded(runs))
    assert chart.y_title == "accuracy (higher is better)"
    assert {s.name: s.y for s in chart.series} == {"poro": (0.6, 0.5, 0.7), "other": (0.5, 0.4, None)}


def test_numbers_of_two_checkpoints_never_share_a_row() -> None:
    lines = [score("all", 0.1).line(step=1), score("language fi", 0.2).line(step=1), score("all", 0.3).line(step=2)]
    (row,) = rows_of("m", lines)
    assert row.step == 2 and list(row.cells) == ["all"]


def test_the_command_shows_json_and_page(runs: list[Path], tmp_path: Path) -> None:
    words = ["eval", str(runs[0]), "--recorded", "--beside", str(runs[1]), "--json", "--html", str(tmp_path / "p.html")]
    answer = CliRunner().invoke(build(), words)
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["rows"][0]["languages"]["fi"]["value"] == 0.5
    assert "belebele: accuracy" in (tmp_path / "p.html").read_text()


def test_a_run_without_evaluation_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "new")
    run.path.mkdir()
    run.config_file.write_text("{}")
    with pytest.raises(RunError, match="no evaluation recorded") as caught:
        recorded([run.path])
    assert "windlass eval" in caught.value.hint


def test_the_ends_of_an_interval_are_exact() -> None:
    assert wilson_interval(0, 5)[0] == 0.0 and wilson_interval(5, 5)[1] == 1.0


def test_import_names_what_it_found_instead_of_a_model(tmp_path: Path) -> None:
    from windlass.errors import CheckpointError
    from windlass.evaluate.imports import import_model

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds a\.txt: no model to import") as caught:
        import_model(tmp_path / "data", tmp_path / "run")
    assert "safetensors" in caught.value.hint
    with pytest.raises(CheckpointError, match="does not exist"):
        import_model(tmp_path / "none", tmp_path / "run")


def test_every_checkpoint_has_its_row_when_asked(runs: list[Path]) -> None:
    rows = recorded(runs[:1], every=True)
    assert [row.model for row in rows] == ["poro, step 100", "poro, step 200"]
    assert [row.cells["fi"].value for row in rows] == [0.2, 0.5]


def test_two_runs_of_one_name_are_told_apart(runs: list[Path], tmp_path: Path) -> None:
    twin = tmp_path / "elsewhere" / "poro"
    twin.parent.mkdir()
    runs[1].rename(twin)
    assert [row.model for row in recorded([runs[0], twin])] == [str(runs[0]), str(twin)]
