"""A dvc.yaml as a sweep and back. What DVC makes of these files was seen with DVC 3.67: the same commands, the same files, the same keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.small_recipe import recipe_tables

from windlass.config.sweep import load_sweep
from windlass.errors import ConfigError, RunError
from windlass.launch.sweep.dvc import read_dvc, write_dvc
from windlass.launch.sweep.execute import choose_points, run_points
from windlass.launch.sweep.expect import expect_all
from windlass.launch.sweep.folder import SweepRun, open_sweep_folder
from windlass.launch.sweep.points import make_points
from windlass.launch.sweep.results import collect_rows

yaml = pytest.importorskip("yaml")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def work_of(file: Path, stage: str | None = None) -> SweepRun:
    loaded = read_dvc(file, stage)
    points = make_points(loaded)
    folder = open_sweep_folder(file.parent / "sweep", loaded, points)
    return SweepRun(loaded=loaded, folder=folder, points=points, expected=expect_all(loaded.sweep, points)[0])


def run_all(work: SweepRun) -> dict[str, str]:
    return run_points(work, choose_points(work, None))


LEPISZCZE = """
vars:
- more.toml:common
stages:
  prepare:
    cmd: echo prepared
  evaluate:
    matrix:
      dataset: ${datasets}
      shape:
      - {nodes: 1, devices: 4}
      - {nodes: 2, devices: 4}
      flag: [true]
    wdir: inner
    cmd: echo '{"f1":${item.shape.nodes}, "nodes":"x", "text":"${item.dataset} ${train.lr} ${item.flag} ${common.word} \\${HOME}"}' > "${key}.json"
    metrics:
    - ${key}.json:
        cache: false
"""


def test_a_benchmark_with_parameters_a_folder_and_shapes_runs_as_under_dvc(here):
    (here / "inner").mkdir()
    (here / "dvc.yaml").write_text(LEPISZCZE)
    (here / "params.yaml").write_text('datasets: [polemo2, "abusive clauses"]\ntrain: {lr: 1e-3}\n')
    (here / "more.toml").write_text('[common]\nword = "shared"\n[other]\nword = "not asked for"\n')
    work = work_of(here / "dvc.yaml")
    assert set(run_all(work).values()) == {"ok"}
    items = sorted(p.name for p in (here / "inner").iterdir())
    assert items == [f"{d}-shape{i}-true.json" for d in ("abusive clauses", "polemo2") for i in (0, 1)]
    rows = collect_rows(work)
    assert [r["text"] for r in rows[:3:2]] == ["polemo2 0.001 true shared ${HOME}", "abusive clauses 0.001 true shared ${HOME}"]  # fmt: skip
    assert rows[1]["point"] == "dataset-polemo2.nodes-2-devices-4.flag"
    assert (rows[1]["nodes"], rows[1]["devices"], rows[1]["f1"]) == (2, 8, 2), (
        "what a job needs, not what the file says"
    )


def test_yaml_is_read_by_the_rules_of_dvc(here):
    (here / "dvc.yaml").write_text(
        'stages:\n  y:\n    matrix:\n      v: [no, yes, 1e-3, 1E5, .5, 010, 0x1F, 1_000, ~, 12:30, +1, 1.0, True, 0o17, "a\'b", no]\n'
        "    cmd: echo ${item.v}\n    metrics: ['${key}.json']\n"
    )
    loaded = read_dvc(here / "dvc.yaml")
    keys = [p.results_file(here, loaded.sweep.results).name.removesuffix(".json") for p in make_points(loaded)]
    assert keys == ["no", "yes", "0.001", "100000.0", "0.5", "10", "31", "1000", "None", "12:30", "1", "1.0", "true", "15", "a'b"]  # fmt: skip


def test_lines_lists_tables_and_nested_parts_of_a_matrix(here):
    (here / "dvc.yaml").write_text("""stages:
  a:
    matrix:
      conf:
      - {layers: 2, deep: {x: [7, 8]}}
      - {layers: 3, deep: {x: [9, 9], fast: true, slow: false, word: two words}}
    cmd:
    - cd / ; false || true
    - echo ${item.conf} > ${key}.txt
    - |
      echo ${item.conf.deep.x[1]} {brace} >> ${key}.txt
""")
    assert set(run_all(work_of(here / "dvc.yaml")).values()) == {"ok"}
    assert (here / "conf0.txt").read_text() == "--layers 2 --deep.x 7 8\n8 {brace}\n"
    assert (here / "conf1.txt").read_text() == "--layers 3 --deep.x 9 9 --deep.fast --deep.word two words\n9 {brace}\n"


def test_hostile_values_in_the_folder_of_a_stage_are_not_executed(here):
    """Values in `cmd` are shell text, as in DVC; a folder's name is a name."""
    values = ["a b", "$(touch canary)", "`touch canary`", ";touch canary", "x'; touch canary; '", '"; touch canary; "']
    for value in values:
        (here / f"in{value}").mkdir()
    (here / "dvc.yaml").write_text(
        "stages:\n  a:\n    matrix:\n      v: " + json.dumps(values) + "\n    wdir: in${item.v}\n    cmd: touch here\n"
    )
    assert set(run_all(work_of(here / "dvc.yaml")).values()) == {"ok"}
    assert all((here / f"in{value}" / "here").is_file() for value in values)
    assert not list(here.rglob("canary"))


def test_a_line_that_fails_ends_the_point(here):
    (here / "dvc.yaml").write_text("stages:\n  a:\n    matrix: {n: [1]}\n    cmd:\n    - exit 3\n    - touch made\n")
    assert run_all(work_of(here / "dvc.yaml")) == {"n-1": "error"} and not (here / "made").exists()


def test_numbers_of_an_earlier_run_are_not_this_points(here):
    """DVC removes a stage's outputs first; we touch nothing that is not ours, and say so."""
    (here / "m.json").write_text('{"f1": 9}')
    (here / "dvc.yaml").write_text("stages:\n  a:\n    matrix: {n: [1]}\n    cmd: ls m.json\n    metrics: [m.json]\n")
    work = work_of(here / "dvc.yaml")
    assert run_all(work) == {"n-1": "error"}
    assert work.folder.outcomes()["n-1"]["evidence"] == "results"
    assert (here / "m.json").read_text() == '{"f1": 9}'


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("stages: {a: {cmd: x}}", "sweep.dvc-stage", "none"),
        ("stages: {a: {matrix: {n: [1]}, cmd: x}, b: {matrix: {n: [1]}, cmd: x}}", "sweep.dvc-stage", "a, b"),
        ("stages: {a: {matrix: {n: [1]}, cmd: 'x ${lr}'}}", "sweep.dvc-value-missing", "${lr}"),
        ("stages: {a: {matrix: {n: [1]}, cmd: 'x ${item.m}'}}", "sweep.dvc-value-missing", "no m"),
        ("stages: {a: {matrix: {n: [{x: 1}, {y: 2}]}, cmd: 'x ${item.n.x}'}}", "sweep.dvc-value-missing", "no x"),
        ("stages: {a: {matrix: '${n}', cmd: x}}\nvars: [{n: 3}]", "sweep.dvc-matrix", "stage a"),
        ("stages: {a: {matrix: {n: []}, cmd: x}}", "sweep.invalid-file", "matrix.n"),
        ("stages: {a: {matrix: {loss: [1]}, cmd: x}}", "sweep.invalid-file", "loss"),
        ("stages: {a: {matrix: {n: [1]}, cmd: x}}\nvars: [gone.yaml]", "sweep.dvc-values-unreadable", "gone.yaml"),
        ("stages: {a: {matrix: {n: [1]}, cmd: x}}\nvars: [p.py]", "sweep.dvc-values-format", "p.py"),
        ("stages: [", "sweep.dvc-invalid", "dvc.yaml"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(here, text, code, part):
    (here / "dvc.yaml").write_text(text)
    (here / "p.py").write_text("x = 1")
    with pytest.raises(ConfigError) as caught:
        read_dvc(here / "dvc.yaml")
    assert caught.value.code == code and part in caught.value.message and caught.value.hint


def test_an_unknown_stage_is_named(here):
    (here / "dvc.yaml").write_text("stages: {a: {matrix: {n: [1]}, cmd: x}}")
    with pytest.raises(ConfigError) as caught:
        read_dvc(here / "dvc.yaml", "train")
    assert caught.value.code == "sweep.dvc-stage"


def sweep_file(here: Path) -> Path:
    file = here / "sweep.toml"
    file.write_text(f"name = 'cmd'\ncommand = '{sys.executable} -c pass {{n}}'\n[matrix]\nn = [1, 2]\n")
    return file


def test_to_dvc_writes_a_matrix_over_the_points(here):
    loaded = load_sweep(sweep_file(here))
    write_dvc(loaded, make_points(loaded), here / "dvc.yaml")
    stage = yaml.safe_load((here / "dvc.yaml").read_text())["stages"]["cmd"]
    assert stage["matrix"]["point"] == ["n-1", "n-2"] and "wdir" not in stage
    assert stage["cmd"].endswith("--point ${item.point}")
    with pytest.raises(RunError) as caught:
        write_dvc(loaded, make_points(loaded), here / "dvc.yaml")
    assert caught.value.code == "sweep.file-exists"


def test_a_dvc_file_in_another_folder_runs_the_sweep_from_here(here):
    sweep_file(here)
    loaded = load_sweep("sweep.toml")
    write_dvc(loaded, make_points(loaded), here / "pipelines" / "dvc.yaml")
    stage = yaml.safe_load((here / "pipelines" / "dvc.yaml").read_text())["stages"]["cmd"]
    assert stage["wdir"] == ".." and stage["deps"] == ["sweep.toml"]


def test_every_point_leaves_the_folder_that_dvc_expects(here):
    """Also one that cannot be: DVC stops at a stage whose output is missing."""
    (here / "s.toml").write_text('name = "s"\n' + recipe_tables() + '[matrix]\n"layout.tensor" = [3]\n')
    loaded = load_sweep("s.toml")
    points = make_points(loaded)
    folder = open_sweep_folder(here / "run", loaded, points)
    run_all(SweepRun(loaded=loaded, folder=folder, points=points, expected=expect_all(loaded.sweep, points)[0]))
    assert (here / "run" / "points" / "tensor-3" / "outcome.json").is_file()
