"""A sweep in the dashboard has the numbers of the sweep's own table, while it runs and after."""

from __future__ import annotations

import csv
import json
import re

import pytest
from tests.report.sample_sweep import end_point, make_sweep
from typer.testing import CliRunner

from windlass.cli import build
from windlass.launch.sweep.results import collect_rows, write_tables
from windlass.report.dash.api import NotFound, answer
from windlass.report.dash.store import Folder
from windlass.report.sweeps import find_sweeps, read_sweep


@pytest.fixture
def work(tmp_path):
    return make_sweep(tmp_path / "runs" / "grid")


def shown(work, **query):
    folder = Folder(work.folder.path.parent)
    return answer(folder, "sweep", {k: [v] for k, v in query.items()})


def table_of(reply):
    section = next(s for s in reply["sections"] if s["id"] == "points")
    return section["items"][0]


@pytest.mark.integration
def test_the_page_has_the_rows_of_the_commands_table(work):
    words = ["sweep", str(work.loaded.path), "--run", str(work.folder.path), "--report"]
    said = CliRunner().invoke(build(), words).output
    # Without the name, which is folded at 160 columns.
    printed = [[c for c in re.split(r"\s{2,}", line.strip()) if c][1:] for line in said.splitlines()]
    rows = table_of(shown(work))["rows"]
    assert len(rows) == 9
    for row in rows:
        assert [c for c in row if c][1:] in printed


def test_the_page_ranks_like_results_csv(work):
    with work.folder.table("csv").open() as file:
        speeds = {r["point"]: float(r["tokens_per_second_per_device"] or 0) for r in csv.DictReader(file)}
    best = max(speeds, key=speeds.get)
    reply = shown(work)
    assert table_of(reply)["rows"][0][0] == best == "beside"
    assert reply["sections"][0]["items"][0]["cards"][0]["note"] == best
    assert [s["id"] for s in reply["sections"]][:5] == ["winner", "heat", "best", "scaling", "pareto"]  # fmt: skip
    assert reply["sweeps"][0]["progress"] == "9 of 9 points have an outcome"


def test_the_map_says_out_of_memory(work):
    maps = [i["figure"]["data"] for i in shown(work)["sections"][1]["items"]]
    assert len(maps) == 2  # one for each number of devices
    for one in maps:
        assert "OOM" in json.dumps(one) and one[-1]["x"][:2] == ["2", "4"]


def test_names_of_points_lead_to_their_runs(work):
    folder = Folder(work.folder.path.parent)
    reply = answer(folder, "sweep", {})
    table = table_of(reply)
    found = {row[0]: link for row, link in zip(table["rows"], table["links"], strict=True)}
    assert folder.get(found["beside"]).run.name == "beside"
    assert [name for name, link in found.items() if link is None] == ["shard-none.micro_batch-4.devices-1", "shard-none.micro_batch-4.devices-2"]  # fmt: skip


def test_it_follows_a_sweep_that_runs(tmp_path):
    work = make_sweep(tmp_path / "runs" / "grid", unfinished=2)
    assert shown(work)["sweeps"][0]["progress"] == "7 of 9 points have an outcome"
    end_point(work, work.points[-2])
    write_tables(work, collect_rows(work))
    assert shown(work)["sweeps"][0]["progress"] == "8 of 9 points have an outcome"


def test_several_sweeps_the_newest_first_and_all_runs_on_request(work, tmp_path):
    second = make_sweep(tmp_path / "runs" / "later" / "grid2", unfinished=8)
    reply = shown(work)
    assert [s["progress"][:1] for s in reply["sweeps"]] == ["1", "9"] and reply["id"] == read_sweep(
        second.folder.path
    ).id
    older = shown(work, id=read_sweep(work.folder.path).id)
    assert len(table_of(older)["rows"]) == 9
    assert "All runs" in [s["title"] for s in shown(work, id="runs")["sections"]]
    with pytest.raises(NotFound):
        shown(work, id="../../x")


def test_a_folder_that_is_not_whole_says_so(work):
    work.folder.table("json").write_text('{"rows": [')
    assert "is written after each point" in json.dumps(shown(work))
    record = json.loads(work.folder.record.read_text())
    work.folder.record.write_text(json.dumps({**record, "sweep": {"goal": "sideways"}}))
    assert "cannot be read" in json.dumps(shown(work))


def test_a_record_of_an_earlier_version_falls_back_to_the_file(work):
    record = json.loads(work.folder.record.read_text())
    work.folder.record.write_text(json.dumps({k: v for k, v in record.items() if k not in ("sweep", "grid")}))
    (found,) = find_sweeps(work.folder.path.parent)
    assert found.sweep.scaling == "strong" and found.grid is None and found.sections()


def test_what_is_shown_may_change_after_the_first_call(work):
    from windlass.config.sweep import load_sweep
    from windlass.launch.sweep.folder import open_sweep_folder

    work.loaded.path.write_text(work.loaded.path.read_text().replace("Sharding on", "Sharding, again, on"))
    created = json.loads(work.folder.record.read_text())["created_at"]
    open_sweep_folder(work.folder.path, load_sweep(work.loaded.path), work.points)
    assert read_sweep(work.folder.path).title.startswith("Sharding, again")
    assert json.loads(work.folder.record.read_text())["created_at"] == created


def test_a_sweep_joins_into_one_report_with_its_own_table_first(work):
    text = CliRunner().invoke(build(), ["report", str(work.folder.path), "--markdown"]).output
    assert text.startswith("# Sharding on one and two devices")
    row = table_of(shown(work))["rows"][0]
    assert "| " + " | ".join(row).strip() in text
    assert text.index("## grid: All points") < text.index("## 7 runs") < text.index("## beside: Overview")


def test_a_sweep_of_commands_has_a_report_too(tmp_path):
    """Its points are no runs: the sweep's own rows are the report, in every form."""
    file, folder = tmp_path / "a.toml", tmp_path / "runs" / "a"
    file.write_text('name = "a"\ncommand = "true {x}"\n[matrix]\nx = [1, 2]\n')
    said = CliRunner().invoke(build(), ["sweep", str(file), "--run", str(folder)])
    assert said.exit_code == 0, said.output
    text = CliRunner().invoke(build(), ["report", str(folder), "--markdown"])
    assert text.exit_code == 0 and "| x-1 | ok |" in text.stdout and "runs\n" not in text.stdout
    found = json.loads(CliRunner().invoke(build(), ["report", str(folder), "--json"]).stdout)
    assert found["runs"] == [] and [r["point"] for r in found["sweeps"][0]["rows"]] == ["x-1", "x-2"]


def test_a_sweeps_figures_and_rows_are_in_the_joint_report(work, tmp_path, monkeypatch):
    found = json.loads(CliRunner().invoke(build(), ["report", str(work.folder.path), "--json"]).stdout)
    assert len(found["sweeps"][0]["rows"]) == 9 and found["together"]["runs"] == len(found["runs"]) > 1
    drawn = []  # fifty pictures take half a minute; tests/figures draws some of every kind
    monkeypatch.setattr("windlass.report.write.save_picture", lambda item, path: drawn.append(path) or path)
    argv = ["report", str(work.folder.path), "-o", str(tmp_path / "r.md"), "--figures", str(tmp_path / "figures")]
    assert CliRunner().invoke(build(), argv).exit_code == 0
    assert any(path.name.startswith("sweep-") for path in drawn) and len({p.name for p in drawn}) == len(drawn)
