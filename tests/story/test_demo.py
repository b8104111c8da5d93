"""The first ride, as a newcomer takes it: every chapter runs, a worker is lost, the run resumes, the report tells it."""

import json
import os
import subprocess
import sys

import pytest

from windlass.config import load_recipe
from windlass.errors import RunError
from windlass.files import read_json_lines
from windlass.launch.demo import Story, clear, measure_core, write_recipe


@pytest.mark.multi
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("demo")
def test_the_whole_story(tmp_path):
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "demo", "--steps", "28"],
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
    assert metrics[-1]["step"] == 28
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
    assert all(0 < m["mfu"] < 1 for m in metrics), "the peak of a core was measured before the run"
    # the plan of the second run was written before its first step
    second = run / "data" / "second"
    assert (second / "plan.json").stat().st_mtime < next(read_json_lines(second / "metrics.jsonl"))["time"]
    closing = done.stdout.split("Results on this machine", 1)[1]
    assert "not measured" not in closing and "unknown" not in closing and "assumed" in closing
    # what it leaves is what recipes/tiny_cpu.toml trains on
    listing = subprocess.run(
        [sys.executable, "-m", "windlass", "data", str(run / "data"), "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert json.loads(listing.stdout)["vocab_size"] == 4096


def test_a_measured_core_gives_cpu_runs_an_mfu(tmp_path, monkeypatch):
    import torch

    from windlass.train.metrics import peak_of

    cpu, story = torch.device("cpu"), Story(tmp_path / "demo")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(story.config))
    assert peak_of(cpu, "fp32")[0] is None, "the shipped figure is an order of magnitude"
    tflops = measure_core(story)
    assert 0.001 < tflops < 2
    assert peak_of(cpu, "fp32")[0] == pytest.approx(tflops, rel=1e-3)
    assert peak_of(cpu, "bf16")[0] is None, "only fp32 was measured"


def test_the_closing_screen_has_the_numbers_of_the_report(tmp_path):
    from windlass.cli.demo import result_rows

    story = Story(tmp_path / "demo")
    for run, rate in ((story.folder, 3000.0), (story.second, 1800.0)):
        run.mkdir(parents=True)
        lines = [{"step": i, "loss": 8.0 - i / 10, "mfu": 0.4, "tokens_per_second": rate, "time": i} for i in range(30)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "plan.json").write_text(json.dumps({"plan": {"tokens_per_second": 2000.0}}))
        write_recipe(story)
        recipe = load_recipe(story.recipe_file).recipe
        (run / "config.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    rows = {name: (value, note) for name, value, note in result_rows(story)}
    assert rows["speed"][0] == "3,000 tokens/s" and rows["MFU"][0] == "40.0 %"
    assert rows["second run"][0] == "1,800 tokens/s, -10 %" and "2,000" in rows["second run"][1]
    assert rows["loss"][0].startswith("8 to 5.")
    assert rows["energy"][0] == rows["held-out text"][0].removesuffix(" bits per byte") == "not measured"


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="contains other files"):
        clear(Story(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_another_run_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "gptnl-8b"}')
    with pytest.raises(RunError, match="holds the run 'gptnl-8b'"):
        clear(Story(tmp_path))


def test_the_recipe_of_the_demo_loads(tmp_path):
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
