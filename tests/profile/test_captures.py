"""The trace files that a run, a folder or a file stands for."""

from __future__ import annotations

import pytest

from windlass.errors import ProfileError
from windlass.files import write_json
from windlass.profile.captures import find_target, rank_of_name, require_traces
from windlass.runs import Run


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    write_json(run.config_file, {"name": "run"})
    return run


def put(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    return [(folder / name) for name in names if (folder / name).write_text("{}") or True]


def test_a_file_is_itself(tmp_path):
    (path,) = put(tmp_path, "host_12.1700000000.pt.trace.json")
    target = find_target(path)
    assert (target.traces, target.label, target.run) == ([path], "host_12.1700000000", None)


def test_a_folder_gives_its_traces_by_rank(tmp_path):
    put(tmp_path, "rank_10.json", "rank_2.json.gz", "summary.json", "notes.txt")
    assert [p.name for p in find_target(tmp_path).traces] == [
        "rank_2.json.gz",
        "rank_10.json",
    ]


def test_a_run_gives_its_newest_window(run):
    put(run.profile / "step-000000020", "rank-00000.json.gz")
    put(run.profile / "step-000000100", "rank-00001.json.gz", "rank-00000.json.gz", "memory-00000.pickle")
    assert [p.name for p in find_target(run.path).traces] == ["rank-00000.json.gz", "rank-00001.json.gz"]
    assert find_target(run.path, step=20).traces[0].parent.name == "step-000000020"
    with pytest.raises(ProfileError) as error:
        find_target(run.path, step=7)
    assert error.value.code == "profile.window-missing"
    assert "20, 100" in error.value.hint


def test_a_window_that_is_being_written_is_not_taken(run):
    put(run.profile / "step-000000020", "rank-00000.json.gz")
    put(run.profile / "step-000000100")
    assert find_target(run.path).traces[0].parent.name == "step-000000020"


def test_a_run_without_traces_says_how_to_get_one(run):
    with pytest.raises(ProfileError) as error:
        require_traces(find_target(run.path))
    assert error.value.code == "profile.run-without-traces"
    assert "--now" in error.value.hint


def test_what_is_not_there_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, code in (("nowhere", "profile.path-missing"), ("empty", "profile.folder-without-traces")):
        with pytest.raises(ProfileError) as error:
            find_target(tmp_path / name)
        assert error.value.code == code


@pytest.mark.parametrize(
    ("name", "rank"), [("rank-00003.json", 3), ("rank_12.json.gz", 12), ("trace_rank7.json", 7), ("worker0.json", None)]
)
def test_ranks_in_file_names(tmp_path, name, rank):
    assert rank_of_name(tmp_path / name) == rank
