"""Do the worked examples for newcomers work? Each block of CONTRIBUTING.md is tried as its text says."""

import json
import re
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

TOP = Path(__file__).resolve().parents[2]
TEXT = (TOP / "CONTRIBUTING.md").read_text()


def example(title, kind):
    """The first block of a kind below a heading."""
    part = TEXT.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    return re.search(rf"^```{kind}\n(.*?)^```", part, re.M | re.S).group(1)


def names_in(code):
    found = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), found)
    return found


def test_the_map_names_what_is_there():
    rows = re.findall(r"^\| .* \| `(\w+)/`(?:, `\w+/`)? \| `([^`]+)` \| (.*) \|$", TEXT, re.M)
    assert len(rows) >= 14
    rooms = {p.name for p in (TOP / "src" / "windlass").iterdir() if p.is_dir() and not p.name.startswith("_")}
    # cli and runs are written for in the examples below the map
    assert {room for room, _, _ in rows} | {"cli", "runs", "figures"} == rooms | {"docs"}
    for _, file, tests in rows:
        assert (TOP / file).is_file(), file
        assert all((TOP / t).is_dir() for t in re.findall(r"`([^`]+)`", tests)), tests


def test_the_cluster(tmp_path, monkeypatch):
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.planner import plan

    folder = tmp_path / "windlass" / "clusters"
    folder.mkdir(parents=True)
    (folder / "hal.toml").write_text(example("A cluster", "toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    hal = load_cluster("hal")
    assert hal.node.devices == 4
    recipe = load_recipe(TOP / "recipes" / "gptnl_1b_snellius.toml", ["nodes=2"]).recipe
    assert plan(recipe, hal).best.fits


def test_the_sensor(tmp_path):
    from windlass.energy.sensors.base import SensorMissing

    sensor = names_in(example("A sensor", "python"))["ShelfSensor"]
    with pytest.raises(SensorMissing, match="hangs on no power shelf"):
        sensor(tmp_path / "watts")
    (tmp_path / "watts").write_text("812.5\n")
    assert [s.watts for s in sensor(tmp_path / "watts").read()] == [812.5]
    (tmp_path / "watts").write_text("")
    assert sensor(tmp_path / "watts").read() == []


def test_the_command(tmp_path):
    from windlass.errors import RunError

    app = typer.Typer()
    app.callback()(lambda: None)
    names_in(example("A command", "python"))["register"](app)
    with pytest.raises(RunError, match="has no metrics yet"):
        CliRunner().invoke(app, ["age", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": time.time() - 90}) + "\n")
    done = CliRunner().invoke(app, ["age", str(tmp_path), "--json"])
    assert json.loads(done.stdout)["seconds"] == pytest.approx(90, abs=10)


def test_the_metric():
    hook = names_in(example("A metric", "python"))["Waiting"]()
    assert hook.share is None
    hook.on_log(None, {"data_seconds": None, "step_seconds": 3.0})
    hook.on_log(None, {"data_seconds": 1.0, "step_seconds": 1.0})
    assert hook.share == 0.25
