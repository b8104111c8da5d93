"""`windlass` without a command: the contents of a folder and the next command."""

import json
import sys

import pytest

from windlass.cli import main
from windlass.cli.complete import run_completions
from windlass.cli.start import FolderContents, RunStatus, find_next_command, scan_folder, summarize

RECIPE = 'name = "r"\n[model]\nlayers = 2\nwidth = 64\nffn = 128\nheads = 4\nvocab = 256\n[data]\ntokens = "1M"\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE)
    (tmp_path / "texts.toml").write_text('output = "data/a"\ntokenizer = "t"\n[sources.a]\npaths = ["x"]\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    (tmp_path / "broken.toml").write_text("name = ")
    store = tmp_path / "data" / "a"
    store.mkdir(parents=True)
    (store / "manifest.json").write_text(
        json.dumps({"kind": "windlass-store", "sources": {"a": {"tokens": 5}, "b": {"tokens": 7}}})
    )
    return tmp_path


def add_run(folder, name, events, step=None, **files):
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "events.jsonl").write_text("".join(json.dumps({"time": t, "event": e}) + "\n" for t, e in events))
    if step is not None:
        (run / "metrics.jsonl").write_text(json.dumps({"step": step, "time": events[-1][0]}) + "\n")
    for file in files:
        (run / file.replace("_", ".")).write_text("{}")
    return run


def test_it_sees_recipes_data_files_and_stores_and_nothing_else(folder):
    contents = scan_folder(folder)
    assert contents.recipes == ["mine.toml"]
    assert contents.data_files == ["texts.toml"]
    assert contents.stores == {"data/a": 12}
    assert contents.runs == []


@pytest.mark.parametrize(
    "events, state, command",
    [
        ([], "submitted", "windlass jobs runs/r"),
        ([(1, "started")], "running", "windlass watch runs/r"),
        ([(1, "started"), (2, "stopped")], "stopped", "windlass resume runs/r"),
        ([(1, "started"), (2, "stopped"), (3, "resumed")], "running", "windlass watch runs/r"),
        ([(1, "started"), (2, "fault")], "failed", "windlass watch runs/r --once"),
        ([(1, "started"), (2, "gave_up")], "failed", "windlass watch runs/r --once"),
        ([(1, "started"), (2, "finished")], "finished", "windlass report runs/r"),
        ([(1, "saved"), (2, "imported")], "imported", "windlass plan mine.toml"),
    ],
)
def test_state_of_a_run_and_the_next_command(folder, events, state, command):
    add_run(folder, "r", events)
    contents = scan_folder(folder)
    assert contents.runs[0].state == state
    assert find_next_command(contents)[0] == command


def test_a_reported_run_wants_evaluation_and_an_evaluated_one_export(folder):
    run = add_run(folder, "r", [(1, "started"), (2, "finished")], step=9, report_html=1)
    assert find_next_command(scan_folder(folder))[0] == "windlass eval runs/r"
    (run / "eval.jsonl").write_text("")
    assert find_next_command(scan_folder(folder))[0].startswith("windlass export runs/r")


def test_the_newest_run_decides(folder):
    add_run(folder, "old", [(1, "started"), (2, "stopped")])
    add_run(folder, "new", [(5, "started"), (9, "finished")], step=3)
    contents = scan_folder(folder)
    assert [r.path for r in contents.runs] == ["runs/new", "runs/old"]
    assert summarize(contents)["train"] == "1 finished, 1 stopped"


def test_without_runs(folder):
    assert find_next_command(FolderContents())[0] == "windlass init"
    assert find_next_command(scan_folder(folder))[0] == "windlass plan mine.toml"
    assert find_next_command(FolderContents(recipes=["a.toml"], data_files=["d.toml"]))[0] == "windlass tokenize d.toml"
    own = FolderContents(recipes=["recipes/x.toml", "mine.toml"], data_files=["recipes/d.toml"])
    assert find_next_command(own)[0] == "windlass plan mine.toml"


def test_summary_is_empty_where_there_is_nothing():
    assert set(summarize(FolderContents()).values()) == {""}
    run = RunStatus(path="runs/a", state="running", step=1, seen_at=0, launched=True, reported=False, evaluated=False)
    assert summarize(FolderContents(runs=[run]))["launch"] == "1 run launched"


def test_the_shell_completes_commands_clusters_and_runs(folder, monkeypatch, capsys):
    add_run(folder, "poro-34b", [(1, "started")])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["windlass"])
    monkeypatch.setenv("_WINDLASS_COMPLETE", "complete_bash")
    for line, expected in {
        "windlass clusters lu": {"lumi-g"},
        "windlass plan r.toml --cluster sn": {"snellius-a100", "snellius-h100"},
        "windlass watch po": {"poro-34b"},
        "windlass pla": {"plan"},
    }.items():
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        with pytest.raises(SystemExit):
            main()
        assert set(capsys.readouterr().out.split()) == expected


def test_runs_are_offered_by_name_only(tmp_path):
    assert run_completions("", tmp_path / "absent") == []
    (tmp_path / "a").mkdir()
    assert run_completions("", tmp_path) == [], "a folder without a run in it"
    (tmp_path / "a" / "config.json").write_text("{}")
    assert (
        run_completions("", tmp_path) == ["a"]
        and run_completions("b", tmp_path) == []
        and run_completions("./", tmp_path) == []
    )
