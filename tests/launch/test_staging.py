"""Copies to a faster file system: parallel, resumable, and checkpoints behind a link."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from windlass.errors import LaunchError, RunError
from windlass.launch import staging
from windlass.launch.staging import MARKER, copy_folder, is_staged, link_checkpoints, part_of
from windlass.runs import Run
from windlass.runs.lock import locked
from windlass.units import print_bytes


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    (folder / "part").mkdir(parents=True)
    for number in range(20):
        (folder / "part" / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_copy_is_complete_and_is_not_repeated(store, tmp_path):
    target, seen = tmp_path / "fast" / "store", []
    first = copy_folder(store, target, lambda done, total: seen.append((done, total)))
    assert (first.files, first.bytes, first.kept_files) == (21, 20_002, 0) and seen[-1] == (20_002, 20_002)
    assert (target / "part" / "7.bin").read_bytes() == bytes([7]) * 1000 and is_staged(store, target)
    assert copy_folder(store, target).files == 0
    (store / "part" / "3.bin").write_bytes(b"new")
    assert not is_staged(store, target)
    assert copy_folder(store, target).files == 1 and (target / "part" / "3.bin").read_bytes() == b"new"


def test_a_copy_that_was_cut_off_goes_on(store, tmp_path, monkeypatch):
    target, copy, count = tmp_path / "fast", staging.shutil.copy2, iter(range(100))

    def fail_late(source, destination):
        if next(count) >= 12:
            raise OSError("the job was killed")
        return copy(source, destination)

    monkeypatch.setattr(staging.shutil, "copy2", fail_late)
    with pytest.raises(OSError):
        copy_folder(store, target)
    assert not (target / MARKER).exists()
    left = target / "part" / ".9.bin.node-1.part"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))  # of a job that is long gone
    monkeypatch.undo()
    second = copy_folder(store, target)
    assert second.kept_files == 12 and second.files == 9 and is_staged(store, target) and not left.exists()


def test_no_room_and_no_source(store, tmp_path, monkeypatch):
    with pytest.raises(LaunchError) as caught:
        copy_folder(tmp_path / "none", tmp_path / "fast")
    assert caught.value.code == "launch.staging-source"
    usage = staging.shutil.disk_usage(tmp_path)._replace(free=20_001)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LaunchError) as caught:
        copy_folder(store, tmp_path / "fast")
    assert caught.value.code == "launch.staging-space"


def test_a_disk_that_fills_up_during_the_copy_is_named_with_numbers_and_the_copy_goes_on(store, tmp_path, monkeypatch):
    target, copy = tmp_path / "fast", staging.shutil.copy2

    def fill_up(source, destination):
        if source.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(source, destination)

    monkeypatch.setattr(staging.shutil, "copy2", fill_up)
    with pytest.raises(LaunchError) as caught:
        copy_folder(store, target)
    assert (
        caught.value.code == "launch.staging-space" and f"of {print_bytes(20_002)} are copied" in caught.value.message
    )
    assert not (target / MARKER).exists() and not list(target.rglob("*.part"))
    monkeypatch.undo()
    assert copy_folder(store, target).kept_files > 0 and is_staged(store, target)


def test_checkpoints_move_behind_a_link(tmp_path):
    run, target = Run(tmp_path / "run"), tmp_path / "fast" / "checkpoints"
    step = run.checkpoint(10)
    step.mkdir(parents=True)
    (step / "rank-0.bin").write_bytes(b"weights")
    moved = link_checkpoints(run, target)
    assert moved.files == 1 and run.checkpoints.is_symlink() and run.checkpoints.resolve() == target.resolve()
    assert (run.checkpoint(10) / "rank-0.bin").read_bytes() == b"weights"
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints"]
    assert sorted(p.name for p in target.iterdir()) == [step.name]
    assert link_checkpoints(run, target).files == 0  # again: nothing to do
    with pytest.raises(LaunchError) as caught:
        link_checkpoints(run, tmp_path / "other")
    assert caught.value.code == "launch.checkpoints-elsewhere"


def test_a_move_that_was_cut_off_before_the_link_is_repeated(tmp_path):
    run, target = Run(tmp_path / "run"), tmp_path / "fast"
    run.checkpoint(10).mkdir(parents=True)
    (run.checkpoint(10) / "a").write_text("a")
    copy_folder(run.checkpoints, target)
    run.checkpoints.rename(run.path / "checkpoints.moved")  # killed here
    link_checkpoints(run, target)
    assert (run.checkpoint(10) / "a").read_text() == "a" and not (run.path / "checkpoints.moved").exists()


def test_links_are_followed_and_a_loop_is_refused(store, tmp_path):
    (store / "part").rename(tmp_path / "other-disk")
    (store / "part").symlink_to(tmp_path / "other-disk")
    assert copy_folder(store, tmp_path / "fast").files == 21
    assert (tmp_path / "fast" / "part" / "7.bin").read_bytes() == bytes([7]) * 1000
    (tmp_path / "other-disk" / "loop").symlink_to(store)  # store/part/loop is store
    (tmp_path / "other-disk" / "self").symlink_to(tmp_path / "other-disk")
    with pytest.raises(LaunchError) as caught:
        copy_folder(store, tmp_path / "again")
    assert caught.value.code == "launch.staging-loop" and not (tmp_path / "again" / MARKER).exists()


def test_a_file_that_is_written_during_the_copy_is_not_taken(store, tmp_path, monkeypatch):
    copy, target = staging.shutil.copy2, tmp_path / "fast"

    def write_meanwhile(source, destination):
        if source.name == "3.bin":
            source.write_bytes(b"x" * 1000)  # of the same size: only its time differs
            os.utime(source, ns=(0, 10**18))
        return copy(source, destination)

    monkeypatch.setattr(staging.shutil, "copy2", write_meanwhile)
    with pytest.raises(LaunchError) as caught:
        copy_folder(store, target)
    assert caught.value.code == "launch.staging-changed" and not (target / MARKER).exists()
    assert not list(target.rglob("*.part")) and not (target / "part" / "3.bin").exists()
    monkeypatch.undo()
    copy_folder(store, target)
    assert (target / "part" / "3.bin").read_bytes() == b"x" * 1000 and is_staged(store, target)


def test_a_move_goes_on_to_another_target_and_not_under_a_training_run(tmp_path):
    run = Run(tmp_path / "run")
    run.checkpoint(10).mkdir(parents=True)
    (run.checkpoint(10) / "a").write_text("a")
    with locked(run.lock_file), pytest.raises(RunError) as caught:
        link_checkpoints(run, tmp_path / "fast")
    assert caught.value.code == "runs.locked" and not run.checkpoints.is_symlink()
    copy_folder(run.checkpoints, tmp_path / "fast")
    run.checkpoints.rename(run.path / "checkpoints.moved")  # killed here
    link_checkpoints(run, tmp_path / "faster")
    assert (run.checkpoint(10) / "a").read_text() == "a" and run.checkpoints.resolve() == tmp_path / "faster"


def test_parts_of_a_killed_process_of_this_node_are_removed_at_once(store, tmp_path, monkeypatch):
    """Eight shards half copied may be all the room that was left there."""
    target = tmp_path / "fast"
    ended = subprocess.Popen(["true"])
    ended.wait()
    target.mkdir()
    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    part_of(target / "7.bin").write_bytes(b"half")
    monkeypatch.setattr(os, "getpid", lambda: 1)  # a process that lives
    living = part_of(target / "7.bin")
    living.write_bytes(b"half")
    monkeypatch.undo()
    copy_folder(store, target)
    assert list(target.rglob("*.part")) == [living] and is_staged(store, target)
