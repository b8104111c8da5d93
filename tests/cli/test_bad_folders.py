"""A run folder that cannot be used ends training with one message, a hint and nothing damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = 'name = "r"\n[model]\nlayers = 1\nwidth = 32\nffn = 64\nheads = 2\nvocab = 128\n[data]\nseq_len = 16\nbatch_tokens = 32\n[train]\nsteps = 2\nprecision = "fp32"\n[layout]\nmicro_batch = 2\n'


@pytest.fixture
def small_disk(tmp_path):
    """A real little file system, so that a full disk is a full disk."""
    mounted = []

    def mount(options):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        if (
            os.geteuid() != 0
            or subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
            ).returncode
        ):
            pytest.skip("only root may mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def train(recipe: Path, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "windlass", "train", str(recipe), "--run", str(run), "-q", *more]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def one_message(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode not in (0, 70), done.stderr
    assert said in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    return path


def test_a_read_only_folder(recipe, small_disk):
    disk = small_disk("size=1m,ro")
    one_message(train(recipe, disk / "run"), "cannot be created")


def test_a_disk_that_is_full_from_the_start(recipe, small_disk):
    disk = small_disk("size=64k")
    (disk / "ballast").write_bytes(b"x" * 61_440)
    done = train(recipe, disk / "run")
    one_message(done, "No space left")
    assert (disk / "ballast").stat().st_size == 61_440


def test_the_folder_of_another_recipe(recipe, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(
        subprocess.run([sys.executable, "-c", f"from windlass.config import load_recipe; print(load_recipe({str(recipe)!r}, ['model.layers=7']).recipe.model_dump_json())"], capture_output=True, text=True, check=True).stdout
    )  # fmt: skip
    (folder / "events.jsonl").write_text('{"time": 1.0, "event": "started"}\n')
    before = (folder / "config.json").read_bytes()
    one_message(train(recipe, folder), "model.layers: 7 -> 1")
    assert (folder / "config.json").read_bytes() == before


def test_a_folder_with_other_files(recipe, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    one_message(train(recipe, folder), "holds other files")
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]
