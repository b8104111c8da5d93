"""Files are written whole and renamed, or appended by line; readers tolerate what a crash leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.config.sources import DataSource
from windlass.data.inputs import find_files
from windlass.errors import ConfigError, DataError
from windlass.files import (
    append_line,
    private_folder,
    read_json,
    read_json_lines,
    read_last_json_line,
    set_compile_cache,
    write_atomic,
    write_json,
)
from windlass.report.columns import Columns


def test_whole_files_replace_each_other_and_leave_nothing_beside(tmp_path):
    target = tmp_path / "a" / "x.json"
    write_json(target, {"n": 1})
    write_json(target, {"n": float("nan"), "deep": [float("inf"), {"y": 2}]})
    assert read_json(target) == {"n": None, "deep": [None, {"y": 2}]}
    assert [p.name for p in target.parent.iterdir()] == ["x.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "x.txt"
    write_atomic(target, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space") as error:
        write_atomic(target, "new")
    assert error.value.filename == str(target)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_a_torn_last_line_is_passed_over_and_the_next_line_is_whole(tmp_path):
    file = tmp_path / "m.jsonl"
    append_line(file, {"step": 1})
    with file.open("ab") as f:
        f.write(b'{"step": 2, "lo')
    assert [v["step"] for v in read_json_lines(file)] == [1]
    append_line(file, {"step": 3})
    assert [v["step"] for v in read_json_lines(file)] == [1, 3]
    assert read_last_json_line(file) == {"step": 3}


DAMAGED = {
    "5,000 digits": b'{"step": ' + b"9" * 5000 + b"}",
    "deep lists": b'{"step": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "65 objects": b'{"a":' * 65 + b"1" + b"}" * 65,
    "Latin-1": b'{"name": "caf\xe9"}',
    "cut": b'{"step": 1, "lo',
}


@pytest.mark.parametrize("raw", DAMAGED.values(), ids=list(DAMAGED))
def test_a_line_that_cannot_be_right_is_passed_over(tmp_path, raw):
    file = tmp_path / "m.jsonl"
    file.write_bytes(b'{"step": 1}\n' + raw + b'\n{"step": 3}\n')
    assert [line["step"] for line in read_json_lines(file)] == [1, 3]
    file.write_bytes(raw)
    assert read_json(file) is None and read_last_json_line(file) is None


def test_a_number_that_json_does_not_have_is_unknown(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text(
        '{"loss": 1e400, "lr": -1e400, "mfu": NaN, "step": 7}\n{"parts": {"node": [1e400, 2.5]}, "step": 8}\n'
    )
    first, second = read_json_lines(file)
    assert first == {"loss": None, "lr": None, "mfu": None, "step": 7}
    assert second == {"parts": {"node": [None, 2.5]}, "step": 8} == read_last_json_line(file)


def test_a_name_that_is_not_utf8_can_be_written_about(tmp_path):
    write_atomic(tmp_path / "report.html", os.fsdecode(b"x\xff.json"))
    assert (tmp_path / "report.html").read_text() == "x\\udcff.json"


def test_reading_what_is_not_there(tmp_path):
    assert list(read_json_lines(tmp_path / "no")) == []
    assert read_last_json_line(tmp_path / "no") is None
    assert read_json(tmp_path / "no") is None


def test_lines_of_several_processes_stay_whole(tmp_path):
    file = tmp_path / "m.jsonl"
    code = "import sys; from pathlib import Path; from windlass.files import append_line\nfor i in range(200): append_line(Path(sys.argv[1]), {'who': sys.argv[2], 'i': i, 'pad': 'x' * 500})"
    workers = [subprocess.Popen([sys.executable, "-c", code, str(file), str(n)]) for n in range(3)]
    assert [w.wait() for w in workers] == [0, 0, 0]
    assert sum(1 for _ in read_json_lines(file)) == 600 == len(file.read_text().splitlines())


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/bin/mount").exists(), reason="needs root to mount a small file system"
)
def test_a_full_disk_damages_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this system may not mount a tmpfs")
    try:
        file, target = disk / "m.jsonl", disk / "x.json"
        write_json(target, {"kept": True})
        with pytest.raises(OSError):
            for i in range(1000):
                append_line(file, {"i": i, "pad": "x" * 200})
        lines = file.read_bytes().splitlines()
        assert len(lines) > 50
        assert all(json.loads(line) for line in lines)
        with pytest.raises(OSError, match="No space"):
            write_atomic(target, "y" * 100_000)
        assert read_json(target) == {"kept": True}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_private_folder_is_for_its_owner_alone(tmp_path, monkeypatch):
    old_umask = os.umask(0)
    try:
        assert private_folder(tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
        (tmp_path / "open").mkdir(mode=0o777)
        assert private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old_umask)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError) as error:
        private_folder(tmp_path / "open")
    assert error.value.code == "files.foreign-folder" and f" {owner}," in error.value.message


def test_compiled_kernels_never_lie_under_a_name_that_others_can_make_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/named/by/the/user")
    set_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/named/by/the/user"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    set_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "windlass" / "compile")
    # Where the cache cannot be made: a new folder of our own.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    set_compile_cache()
    [folder] = tmp_path.glob("windlass-compile-*")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder) and folder.stat().st_mode & 0o777 == 0o700


def test_a_named_pipe_in_a_folder_of_others_is_not_waited_for(tmp_path):
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    assert read_json(pipe) is None and list(read_json_lines(pipe)) == []
    columns = Columns(pipe)
    assert columns.refresh() and len(columns) == 0
    with pytest.raises(DataError) as error:
        find_files("s", DataSource(paths=[str(tmp_path)]))
    assert error.value.code == "data.source-unreadable"
