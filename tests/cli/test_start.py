"""`windlass` alone knows what a folder holds and which command moves it on."""

import json

import pytest

from windlass.cli.start import Here, RunHere, look, next_command, summary

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
    here = look(folder)
    assert here.recipes == ["mine.toml"]
    assert here.data_files == ["texts.toml"]
    assert here.stores == {"data/a": 12}
    assert here.runs == []


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
    ],
)
def test_state_of_a_run_and_the_next_command(folder, events, state, command):
    add_run(folder, "r", events)
    here = look(folder)
    assert here.runs[0].state == state
    assert next_command(here)[0] == command


def test_a_reported_run_wants_evaluation_and_an_evaluated_one_export(folder):
    run = add_run(folder, "r", [(1, "started"), (2, "finished")], step=9, report_html=1)
    assert next_command(look(folder))[0] == "windlass eval runs/r"
    (run / "eval.jsonl").write_text("")
    assert next_command(look(folder))[0].startswith("windlass export runs/r")


def test_the_newest_run_decides(folder):
    add_run(folder, "old", [(1, "started"), (2, "stopped")])
    add_run(folder, "new", [(5, "started"), (9, "finished")], step=3)
    here = look(folder)
    assert [r.path for r in here.runs] == ["runs/new", "runs/old"]
    assert summary(here)["train"] == "1 finished, 1 stopped"


def test_without_runs(folder):
    assert next_command(Here())[0] == "windlass init"
    assert next_command(look(folder))[0] == "windlass plan mine.toml"
    assert next_command(Here(recipes=["a.toml"], data_files=["d.toml"]))[0] == "windlass tokenize d.toml"
    own = Here(recipes=["recipes/x.toml", "mine.toml"])
    assert next_command(own)[0] == "windlass plan mine.toml"


def test_summary_is_empty_where_there_is_nothing():
    assert set(summary(Here()).values()) == {""}
    run = RunHere(path="runs/a", state="running", step=1, seen_at=0, launched=True, reported=False, evaluated=False)
    assert summary(Here(runs=[run]))["launch"] == "1 run launched"


def complete(words, count, folder):
    import os
    import subprocess
    import sys

    env = {**os.environ, "_WINDLASS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    code = "import sys; sys.argv = ['windlass']; from windlass.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    return done.stdout.split()


def test_the_shell_completes_commands_machines_and_runs(folder):
    add_run(folder, "poro-34b", [(1, "started")])
    assert complete("windlass clusters lu", 2, folder) == ["lumi-g"]
    assert set(complete("windlass plan r.toml --cluster sn", 4, folder)) == {"snellius-a100", "snellius-h100"}
    assert complete("windlass watch po", 2, folder) == ["poro-34b"]
    assert complete("windlass pla", 1, folder) == ["plan"]


def test_runs_are_offered_by_name_only(tmp_path):
    from windlass.cli.complete import runs

    assert runs("", tmp_path / "absent") == []
    (tmp_path / "a").mkdir()
    assert runs("", tmp_path) == [], "a folder without a run in it"
    (tmp_path / "a" / "config.json").write_text("{}")
    assert runs("", tmp_path) == ["a"] and runs("b", tmp_path) == [] and runs("./", tmp_path) == []
