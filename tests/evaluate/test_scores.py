"""Models are compared language by language, each with its newest scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.errors import RunError
from windlass.evaluate.scores import language_charts, language_rows, language_table, languages, recorded_rows
from windlass.runs.folder import Run
from windlass.runs.scores import EvalScore, append_scores, wilson_interval


def score(group: str, value: float, **more: object) -> EvalScore:
    return EvalScore(task="belebele", group=group, metric="accuracy", value=value, count=10, **more)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = []
    for name, add in (("poro", 0.1), ("other", 0.0)):
        run = Run(tmp_path / name)
        run.path.mkdir()
        run.config_file.write_text("{}")
        append_scores(run, [score("all", 0.3), score("language fi", 0.2)], step=100, tokens=1)
        append_scores(
            run,
            [score("all", 0.5 + add, low=0.4, high=0.6), score("language fi", 0.4 + add), score("source web", 0.9)],
            step=200,
            tokens=2,
        )
        append_scores(run, [score("language en", 0.6 + add)] if name == "poro" else [], step=200, tokens=2)
        made.append(run.path)
    return made


def test_the_newest_checkpoint_counts_and_models_stand_together(runs: list[Path]) -> None:
    rows = recorded_rows(runs)
    assert [(row.model, row.step) for row in rows] == [("poro", 200), ("other", 200)]
    assert languages(rows) == ["fi", "en"]
    columns, cells = language_table(rows)
    assert columns == ("task", "metric", "model", "all", "fi", "en")
    assert cells == [
        ("belebele", "accuracy", "poro", "0.6 ± 0.1", "0.5", "0.7"),
        ("belebele", "accuracy", "other", "0.5 ± 0.1", "0.4", ""),
    ]


def test_a_language_that_is_missing_is_a_gap_in_the_picture(runs: list[Path]) -> None:
    (chart,) = language_charts(recorded_rows(runs))
    assert chart.y_title == "accuracy (higher is better)"
    assert {s.name: s.y for s in chart.series} == {"poro": (0.6, 0.5, 0.7), "other": (0.5, 0.4, None)}


def test_numbers_of_two_checkpoints_never_share_a_row() -> None:
    lines = [score("all", 0.1).line(step=1), score("language fi", 0.2).line(step=1), score("all", 0.3).line(step=2)]
    (row,) = language_rows("m", lines)
    assert row.step == 2 and list(row.cells) == ["all"]


def test_the_command_shows_json_and_page(runs: list[Path], tmp_path: Path) -> None:
    argv = ["eval", str(runs[0]), "--recorded", "--beside", str(runs[1]), "--json", "--html", str(tmp_path / "p.html")]
    answer = CliRunner().invoke(build(), argv)
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["rows"][0]["languages"]["fi"]["value"] == 0.5
    assert "belebele: accuracy" in (tmp_path / "p.html").read_text()


def test_a_run_without_evaluation_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "new")
    run.path.mkdir()
    run.config_file.write_text("{}")
    with pytest.raises(RunError) as error:
        recorded_rows([run.path])
    assert error.value.code == "evaluate.nothing-recorded"


def test_the_ends_of_an_interval_are_exact() -> None:
    assert wilson_interval(0, 5)[0] == 0.0 and wilson_interval(5, 5)[1] == 1.0


def test_every_checkpoint_has_its_row_when_asked(runs: list[Path]) -> None:
    rows = recorded_rows(runs[:1], every_step=True)
    assert [row.model for row in rows] == ["poro, step 100", "poro, step 200"]
    assert [row.cells["fi"].value for row in rows] == [0.2, 0.5]


def test_two_runs_of_one_name_are_told_apart(runs: list[Path], tmp_path: Path) -> None:
    twin = tmp_path / "elsewhere" / "poro"
    twin.parent.mkdir()
    runs[1].rename(twin)
    assert [row.model for row in recorded_rows([runs[0], twin])] == [str(runs[0]), str(twin)]


def test_scores_that_are_the_newest_are_not_recorded_again(tmp_path: Path) -> None:
    """A command that was killed after it had recorded them is given again."""
    run = Run(tmp_path)
    first, second = [score("all", 0.3), score("language fi", 0.2)], [score("all", 0.4), score("language fi", 0.2)]
    other = EvalScore(task="other", group="all", metric="accuracy", value=None, count=0, detail={"sizes": (1, 2)})
    for scores, step in ((first, 1), (first, 1), ([other], 1), ([other], 1), (first, 1), (second, 1), (first, 1)):
        append_scores(run, scores, step=step, tokens=None)
    lines = [json.loads(line) for line in run.eval_file.read_text().splitlines()]
    assert [line["value"] for line in lines] == [0.3, 0.2, None, 0.4, 0.2, 0.3, 0.2]
    append_scores(run, first, step=2, tokens=None)
    assert len(run.eval_file.read_text().splitlines()) == 9
