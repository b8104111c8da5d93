"""Unusual values, numbers and ends of points: a sweep handles them correctly or reports them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from windlass.cli.sweep import sweep as command
from windlass.config.sweep import load_sweep
from windlass.errors import ConfigError
from windlass.figures import sweep as charts
from windlass.figures.sweep import sweep_sections
from windlass.launch.sweep.execute import LiveTables, choose_points, run_points
from windlass.launch.sweep.expect import expect_all
from windlass.launch.sweep.folder import SweepRun, open_sweep_folder
from windlass.launch.sweep.outcome import classify, oom_kills
from windlass.launch.sweep.points import make_points
from windlass.launch.sweep.results import collect_rows, read_results, write_tables
from windlass.runs.folder import Run

ECHO = f"{sys.executable} -c 'import json, sys; json.dump(dict(argv=sys.argv[2:], score=float(sys.argv[2])), open(sys.argv[1], \"w\"))' {{folder}}/o.json"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def work_of(path: Path, run: Path) -> SweepRun:
    loaded = load_sweep(path)
    points = make_points(loaded)
    return SweepRun(loaded=loaded, folder=open_sweep_folder(run, loaded, points), points=points, expected=expect_all(loaded.sweep, points)[0])  # fmt: skip


def echo(folder: Path, axes: str, arguments: str) -> SweepRun:
    head = f"name = 'odd'\nresults = 'o.json'\nrank_by = 'score'\ncommand = '''{ECHO} {arguments}'''\n"
    return work_of(write(folder / "s.toml", head + axes), folder / "run")


def names(folder: Path, text: str) -> list[str]:
    return [p.name for p in make_points(load_sweep(write(folder / "s.toml", text)))]


COMMAND = "name = 's'\ncommand = 'true {a}'\n"


def test_values_that_make_one_word_are_told_apart_and_a_long_name_fits_a_folder(tmp_path):
    assert names(tmp_path, COMMAND + "[matrix]\na = ['x y', 'x/y', \"x'y\", 'Übung', '', '[x]']\n") == [
        "a-x-y", "a-x-y-2", "a-x-y-3", "a-Ubung", "a-x", "a-x-2",
    ]  # fmt: skip
    assert names(tmp_path, COMMAND + "[matrix]\na = [0.1, -0.1, 1e-5, 1]\n") == ["a-0-1", "a-minus-0-1", "a-1e-05", "a-1"]  # fmt: skip
    one, two = names(tmp_path, COMMAND + f"[matrix]\na = ['{'q' * 300}y', '{'q' * 300}z']\n")
    assert one != two and max(len(one), len(two)) <= 180


def test_an_included_name_stays_inside_the_sweeps_folder(tmp_path):
    assert names(tmp_path, COMMAND + "[[include]]\nname = '../../the reference 2.0'\na = 1\n") == ["the-reference-2.0"]


@pytest.mark.parametrize("text", ["[matrix]\na = [1, 2, 1]\n", "[matrix]\na = [1]\n[[include]]\na = 1\n", "[[matrix.a]]\nname = 'x'\nb = 1\n[[matrix.a]]\nname = 'x'\nb = 2\n"])  # fmt: skip
def test_the_same_point_twice_is_refused(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        names(tmp_path, COMMAND.replace("{a}", "{b}" if "b =" in text else "{a}") + text)
    assert caught.value.code == "sweep.duplicate-point"


def test_an_axis_cannot_hide_a_result(tmp_path):
    with pytest.raises(ConfigError) as caught:
        names(tmp_path, "name = 's'\ncommand = 'true {loss}'\n[matrix]\nloss = [1]\n")
    assert caught.value.code == "sweep.invalid-file"


def test_values_reach_the_command_as_they_are_written(tmp_path):
    axes = (
        "[matrix]\nn = [2]\nb = [true, false]\nl = [['a b', 1]]\nlearning-rate = [1e-5]\ns = ['$HOME; {x} \"its\"']\n"
    )
    work = echo(tmp_path, axes, "{n:03d} {b} {l} {learning-rate} {s}")
    assert set(run_points(work, work.points).values()) == {"ok"}
    argvs = [json.loads(r["argv"]) for r in collect_rows(work)]
    assert argvs == [["002", flag, '["a b", 1]', "1e-05", '$HOME; {x} "its"'] for flag in ("true", "false")]


def test_inside_a_shell_a_value_is_quoted_on_request(tmp_path):
    text = "name = 's'\nresults = 'o.csv'\ncommand = '''bash -c \"echo x > {folder!q}/o.csv; echo {s!q} >> {folder!q}/o.csv\"'''\n[matrix]\ns = [\"it's $HOME  two\"]\n"
    work = work_of(write(tmp_path / "s.toml", text), tmp_path / "a run")
    assert list(run_points(work, work.points).values()) == ["ok"]
    assert collect_rows(work)[0]["x"] == "it's $HOME  two"


def test_lists_and_tables_of_them_agree_in_all_three_files(tmp_path):
    work = echo(tmp_path, "[matrix]\nl = [[1, 2], [3]]\nb = [true, false]\n", "4 {l} {b}")
    run_points(work, work.points)
    paths = write_tables(work, collect_rows(work))
    table = list(csv.DictReader(paths[0].open()))
    rows = json.loads(paths[1].read_text())["rows"]
    assert [r["l"] for r in table] == [r["l"] for r in rows] == ["[1, 2]", "[1, 2]", "[3]", "[3]"]
    from pyarrow import parquet

    assert parquet.read_table(paths[2]).to_pylist() == rows
    command(tmp_path / "s.toml", run=tmp_path / "run", report=True, as_json=True)  # with a heat map over both


def test_a_number_that_is_none_is_no_result(tmp_path):
    assert read_results(write(tmp_path / "a.json", '{"f1": NaN, "x": Infinity, "y": 1}')) == {"f1": None, "x": None, "y": 1}  # fmt: skip
    assert read_results(write(tmp_path / "a.csv", "f1,y\nnan,2\n")) == {"f1": None, "y": 2.0}
    assert not charts.known({"outcome": "ok", "f1": float("nan")}, "f1")


def test_a_score_of_zero_is_a_score_and_a_missing_one_is_said(tmp_path, capsys):
    work = echo(tmp_path, "[matrix]\nn = [0, 3]\n", "{n}")
    run_points(work, work.points)
    rows = collect_rows(work)
    head = sweep_sections(work.sweep, rows, "score")[0].items[0]
    assert next(card.value for card in head.cards) == "3" and not any("x" in card.value for card in head.cards)
    note = sweep_sections(work.sweep, rows, "f1")[0].items[1]
    assert "no winner" in note.text and "score" in note.text
    text = (tmp_path / "s.toml").read_text().replace("rank_by = 'score'", "rank_by = 'f1'")
    command(write(tmp_path / "s.toml", text), run=tmp_path / "run", report=True)
    assert "Numbers to rank by" in capsys.readouterr().out


def test_devices_of_a_node_and_of_all_nodes_are_two_columns(tmp_path):
    text = "name = 's'\ncommand = 'true {nodes} {devices}'\nheat = ['nodes', 'devices']\n[matrix]\nnodes = [1, 2]\ndevices = [1, 2]\n"
    work = work_of(write(tmp_path / "s.toml", text), tmp_path / "run")
    rows = [{**r, "outcome": "ok", "speed": float(i)} for i, r in enumerate(collect_rows(work))]
    assert [(r["nodes"], r["devices_per_node"], r["devices"]) for r in rows] == [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 4)]  # fmt: skip
    heat = next(s for s in sweep_sections(work.sweep, rows, "speed") if s.id == "heat").items[0]
    assert heat.values == ((0.0, 1.0), (2.0, 3.0))


def test_the_command_in_the_log_is_no_evidence(tmp_path):
    text = "name = 's'\ncommand = '''bash -c \"# MemoryError: out of memory\n exit {n}\"'''\n[matrix]\nn = [3]\n"
    work = work_of(write(tmp_path / "s.toml", text), tmp_path / "run")
    assert run_points(work, work.points) == {"n-3": "error"}
    assert work.folder.outcomes()["n-3"]["detail"] == "exit code 3"


def test_the_kernels_own_counter_tells_a_kill_for_memory(tmp_path):
    job = tmp_path / "slurm" / "job_7"
    (job / "step_batch").mkdir(parents=True)
    write(job / "memory.events", "low 0\noom 1\noom_kill 2\n")
    assert oom_kills(write(tmp_path / "v2", "0::/slurm/job_7/step_batch/user\n"), tmp_path) == 2
    (tmp_path / "memory" / "mine").mkdir(parents=True)
    write(tmp_path / "memory" / "mine" / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert oom_kills(write(tmp_path / "v1", "9:cpu,memory:/mine\n3:pids:/\n"), tmp_path) == 1
    assert oom_kills(tmp_path / "none", tmp_path) is None
    result = classify(Run(tmp_path), -9, oom_kills=1)
    assert (result.outcome, result.evidence) == ("oom", "kernel") and result.further == (
        "exit: error: ended by SIGKILL",
    )
    assert classify(Run(tmp_path), 0, oom_kills=1).outcome == "ok", "the command lived through it"


def test_a_sweep_killed_before_its_first_file_begins_again(tmp_path):
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / ".sweep.json.123.tmp", "{")
    work = work_of(write(tmp_path / "s.toml", COMMAND + "[matrix]\na = [1]\n"), tmp_path / "run")
    assert choose_points(work, None) == work.points


def test_tables_while_points_run_take_a_share_of_the_time(tmp_path, monkeypatch):
    work = work_of(write(tmp_path / "s.toml", COMMAND + "[matrix]\na = [1]\n"), tmp_path / "run")
    written: list[int] = []
    clock = iter([0.0, 1.0, 1.0, 10.0, 30.0, 31.0, 31.0, 32.0, 33.0, 33.0])
    monkeypatch.setattr("windlass.launch.sweep.execute.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("windlass.launch.sweep.execute.write_tables", lambda work, rows: written.append(1))
    tables = LiveTables(work)
    tables.write(last=False)  # took 1 s: not again for 20 s
    tables.write(last=False)
    assert len(written) == 1
    tables.write(last=False)
    assert len(written) == 2
    tables.write(last=True)
    assert len(written) == 3


def test_maps_to_be_compared_share_their_colours(tmp_path):
    text = "name = 's'\ncommand = 'true {a} {b} {c}'\nheat = ['a', 'b']\n[matrix]\na = [1, 2]\nb = [1, 2]\nc = [true, false]\n"
    work = work_of(write(tmp_path / "s.toml", text), tmp_path / "run")
    rows = [{**r, "outcome": "ok", "speed": float(i)} for i, r in enumerate(collect_rows(work))]
    rows[-1]["outcome"] = "node-failure"
    one, two = charts.heat_maps(rows, ["a", "b", "c"], "speed", work.sweep.heat, work.sweep.goal)
    assert one.scale == two.scale == (0.0, 6.0) and two.labels[1][1] == "node failed"
    assert one.title.endswith("c = true")
