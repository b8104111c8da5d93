"""The first ride, as a newcomer takes it: every chapter runs, a worker is lost, the run resumes, the report tells it."""

import json
import os
import subprocess
import sys

import pytest

from windlass.errors import RunError
from windlass.files import read_json_lines
from windlass.launch.demo import Story, clear, write_recipe


@pytest.mark.multi
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("demo")
def test_the_whole_story(tmp_path):
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "demo", "--steps", "60"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "demo"
    events = [e["event"] for e in read_json_lines(run / "events.jsonl")]
    assert {"started", "saved", "fault", "restarted", "resumed", "finished"} <= set(events)
    assert events.index("fault") < events.index("resumed") < events.index("finished")
    metrics = list(read_json_lines(run / "metrics.jsonl"))
    assert metrics[0]["loss"] > 8
    assert metrics[-1]["step"] == 60
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert all(m["energy_joules"] is None or m["energy_joules"] > 0 for m in metrics), "unknown is null, never 0"
    page = (run / "report.html").read_text()
    assert "resumed at step" in page
    assert "killed" in page
    assert str((run / "report.html").resolve()) in done.stdout.replace("\n", "")
    assert "killed on purpose" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "bug in windlass" not in done.stderr
    assert list(read_json_lines(run / "eval.jsonl"))
    # what it leaves is what recipes/tiny_cpu.toml trains on
    listing = subprocess.run(
        [sys.executable, "-m", "windlass", "data", str(run / "data"), "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert json.loads(listing.stdout)["vocab_size"] == 4096


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="holds other files"):
        clear(Story(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_another_run_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "gptnl-8b"}')
    with pytest.raises(RunError, match="holds the run 'gptnl-8b'"):
        clear(Story(tmp_path))


def test_the_recipe_of_the_demo_loads(tmp_path):
    from windlass.config import load_recipe

    story = Story(tmp_path / "demo")
    write_recipe(story)
    recipe = load_recipe(story.recipe_file).recipe
    assert recipe.train.steps == story.steps
    assert story.save_every < story.kill_after < story.steps


def test_what_is_missing_is_said_before_the_first_chapter(tmp_path, monkeypatch):
    from windlass.cli import demo
    from windlass.errors import WindlassError

    monkeypatch.setattr(demo, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(WindlassError) as caught:
        demo.demo(tmp_path / "demo")
    assert caught.value.code == "cli.demo-package-missing"
    assert "windlass[train,data]" in caught.value.hint
    assert not (tmp_path / "demo").exists()


def test_the_next_commands_can_be_typed_as_they_stand(tmp_path, monkeypatch):
    import shlex
    from pathlib import Path

    from windlass.cli.demo import next_lines

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    lines = [shlex.split(line) for line in next_lines(Path("my runs/demo"))]
    assert lines[0][0] == "export", "windlass is not on the path of this shell"
    assert ["windlass", "watch", "my runs/demo"] in lines
    files = [words[2] for words in lines if words[1:2] in (["train"], ["plan"])]
    assert len(files) == 2 and all(Path(f).is_file() for f in files), "there are no recipes in this folder"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny_cpu.toml").touch()
    assert "windlass train recipes/tiny_cpu.toml" in next_lines(Path("runs/demo"))
