"""The public Python API, and the page that shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.report.sample_run import make_run

import windlass
from windlass.config import load_recipe
from windlass.errors import ConfigError, RunError
from windlass.runs.events import Finished, Resumed

TOP = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook") / "runs" / "sample"
    make_run(folder)
    return folder


def test_every_block_of_the_page_runs(path, monkeypatch, capsys):
    monkeypatch.chdir(path.parents[1])
    (path.parents[1] / "recipes").symlink_to(TOP / "recipes")
    text = (TOP / "docs" / "guides" / "notebook.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(block, "notebook.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "days" in printed and "rank 5" not in printed and "[150, 300]" in printed


def test_metrics_have_each_step_once_in_every_form(path):
    run = windlass.open_run(path)
    columns = run.metrics(as_="dict")
    assert columns["step"] == list(range(1, 301)) and len(columns["loss"]) == 300
    frame, table = run.metrics(as_="pandas"), run.metrics(as_="arrow")
    assert frame["step"].tolist() == table["step"].to_pylist() == columns["step"]
    assert type(run.metrics()) is type(frame) and "z_loss" not in columns
    with pytest.raises(ConfigError) as caught:
        run.metrics(as_="excel")
    assert caught.value.code == "notebook.table-kind-unknown"


def test_without_pandas_and_pyarrow_there_are_lists(path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert windlass.open_run(path).metrics()["step"][:2] == [1, 2]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError) as caught:
        windlass.open_run(path).metrics(as_="pandas")
    assert caught.value.code == "notebook.package-missing"


def test_events_are_typed_and_the_summary_is_the_reports(path):
    run = windlass.open_run(path)
    assert [e.step for e in run.events(Resumed)] == [150] and [e.step for e in run.events(Finished)] == [300]
    assert run.summary().step == 300
    with pytest.raises(RunError):
        windlass.open_run(path.parent / "none")


def test_jupyter_shows_the_reports_figures_and_charts(path, tmp_path, monkeypatch):
    html = windlass.open_run(path)._repr_html_()
    for text in ("finished", "104.85k tokens/s", "363.61 Wh", "67.7 %", 'alt="Loss"', 'alt="Throughput"'):
        assert text in html
    assert "<script" not in html and html.count("data:image/svg+xml;base64,") == 3 and len(html) < 400_000
    hostile = tmp_path / "run"
    shutil.copytree(path, hostile)
    config = json.loads((hostile / "config.json").read_text())
    config["model"] |= {"family": "hf", "config": "<img src=x onerror=alert(1)>\x1b[2J"}
    (hostile / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("windlass.figures.html.find_spec", lambda name: None)
    html = windlass.open_run(hostile)._repr_html_()
    assert "&lt;img src=x" in html and "<img" not in html and "\x1b" not in html and "charts need matplotlib" in html
    (hostile / "metrics.jsonl").unlink()
    assert "finished" in windlass.open_run(hostile)._repr_html_()


def test_a_plan_takes_a_file_or_a_recipe():
    file = TOP / "recipes" / "gptnl_1b_snellius.toml"
    assert windlass.plan(file, nodes=2).days > windlass.plan(load_recipe(file).recipe, nodes=4).days
    best = windlass.plan(file, nodes=2)
    html = best._repr_html_()
    assert best.candidate.describe() in html and f"{best.node_hours:,.0f} node-hours" in html and "<script" not in html
    with pytest.raises(ConfigError) as caught:
        windlass.plan(load_recipe(file).recipe, "nodes=2")
    assert caught.value.code == "notebook.overrides-need-a-file"
    with pytest.raises(AttributeError):
        windlass.nothing_like_this  # noqa: B018


def test_the_import_is_cheap():
    code = "import sys, windlass; assert not {'pydantic', 'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
