"""Wheel and sdist build, and the wheel works in a clean environment."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def run(*argv, cwd, env=None):
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, env=env or os.environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, built by the project's build backend."""
    folder = tmp_path_factory.mktemp("built")
    tools = folder / "tools"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "hatchling>=1.24", cwd=folder)
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-d",
        folder / "dist",
        cwd=TOP,
        env={**os.environ, "PYTHONPATH": str(tools)},
    )
    return next((folder / "dist").glob("*.whl")), next((folder / "dist").glob("*.tar.gz"))  # fmt: skip


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """A virtual environment with only the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    run(folder / "venv/bin/pip", "install", "--quiet", built[0], cwd=folder)
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(built):
    tracked = run("git", "ls-files", "src/windlass", cwd=TOP).split()
    inside = set(zipfile.ZipFile(built[0]).namelist())
    missing = [f for f in tracked if (TOP / f).is_file() and f.removeprefix("src/") not in inside]
    assert not missing
    assert "windlass/clusters/data/lumi-g.toml" in inside
    assert "windlass/docs/reference/recipe.md" in inside
    assert {"windlass/recipes/tiny_cpu.toml", "windlass/recipes/sweeps/cpu_grid.toml"} <= inside


@pytest.mark.slow
def test_the_sdist_has_what_a_build_and_its_tests_need(built):
    with tarfile.open(built[1]) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {"pyproject.toml", "LICENSE", "Makefile", "constraints.txt", "recipes/tiny_cpu.toml"} <= names
    assert "src/windlass/cli/__init__.py" in names and "tests/docs/test_packaging.py" in names
    assert not [n for n in names if n.startswith((".venv", "runs/", "site/"))]


@pytest.mark.slow
def test_torch_free_commands_run_in_a_clean_environment(clean, tmp_path):
    installed = {p["name"].lower() for p in json.loads(run(clean / "pip", "list", "--format", "json", cwd=tmp_path))}
    assert "windlass" in installed and not {"torch", "transformers", "pyarrow", "tokenizers"} & installed
    windlass = clean / "windlass"
    assert "launch" in run(windlass, "--help", cwd=tmp_path)
    assert "lumi-g" in run(windlass, "clusters", cwd=tmp_path)
    run(windlass, "init", "a.toml", "--cluster", "lumi-g", "--size", "7B", "--account", "P1", "--yes", cwd=tmp_path)
    assert json.loads(run(windlass, "plan", "a.toml", "--json", cwd=tmp_path))["plans"][0]["fits"]
    assert "seven steps" in run(windlass, cwd=tmp_path)
    run(windlass, "plan", "a.toml", "--html", "plan.html", cwd=tmp_path)
    assert "lumi-g" in run(windlass, "budget", "--cluster", "lumi-g", "--days", "30", "--nodes", "8", cwd=tmp_path)
    assert "#SBATCH" in run(windlass, "launch", "a.toml", "--dry-run", "launch.venv=/project/venv", cwd=tmp_path)


@pytest.mark.slow
def test_an_error_names_the_page_that_came_with_the_wheel(clean, tmp_path):
    (tmp_path / "a.toml").write_text('name = "a"\n[model]\nlayer = 3\n')
    done = subprocess.run([clean / "windlass", "show", "a.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    page = next(w for w in done.stderr.split() if w.endswith("docs/reference/recipe.md"))
    assert Path(page).is_file() and str(clean.parent) in page


@pytest.mark.slow
def test_a_command_that_needs_torch_says_how_to_get_it(clean, tmp_path):
    run(clean / "windlass", "init", "a.toml", "--cluster", "workstation", "--yes", cwd=tmp_path)
    done = subprocess.run([clean / "windlass", "train", "a.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs torch" in done.stderr and "windlass[train]" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_recipe_of_the_readme_is_found_in_the_wheel_and_plans(clean, tmp_path):
    argv = [clean / "windlass", "plan", "recipes/gptnl_8b_snellius.toml"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    path = next(
        w.rstrip(";:")
        for w in done.stderr.split()
        if w.rstrip(";:").endswith("gptnl_8b_snellius.toml") and w.startswith("/")
    )
    assert done.returncode == 2 and str(clean.parent) in path
    assert json.loads(run(clean / "windlass", "plan", path, "--json", cwd=tmp_path))["plans"][0]["fits"]


@pytest.mark.slow
def test_the_demo_says_at_once_what_it_needs(clean, tmp_path):
    done = subprocess.run([clean / "windlass", "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "torch" in done.stderr and "windlass[train,data]" in done.stderr
    assert not list(tmp_path.iterdir()), "the demo checks its requirements before it writes anything"


@pytest.mark.slow
def test_a_wheelhouse_installs_without_an_index(tmp_path):
    script = TOP / "scripts" / "wheelhouse.sh"
    run("bash", script, "wheels", "--extras", "png", cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable})
    names = [p.name.split("-")[0].lower() for p in (tmp_path / "wheels").glob("*.whl")]
    assert {"windlass", "typer", "matplotlib"} <= set(names) and "torch" not in names
    run(sys.executable, "-m", "venv", "venv", cwd=tmp_path)
    run("venv/bin/pip", "install", "--quiet", "--no-index", "--find-links", "wheels", "windlass[png]", cwd=tmp_path)
    assert "lumi-g" in run("venv/bin/windlass", "clusters", cwd=tmp_path)


def test_every_extra_that_an_error_names_brings_that_package():
    import tomllib

    from windlass.cli import EXTRAS

    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        brings = [re.split(r"[<>=;\s]", d)[0].replace("-", "_") for d in extras[extra]]
        assert any(name == package or name.startswith(f"{package}_") for name in brings), (package, brings)
