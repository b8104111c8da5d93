"""Can every shipped recipe be looked at before anything is submitted? Script, plan, cost, checks; and nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.config import load_recipe
from windlass.launch.checks import refusals
from windlass.launch.submit import prepare

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*_*.toml"))


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem != "tiny_cpu"], ids=lambda p: p.stem)
def test_every_recipe_would_be_submitted(path, tmp_path):
    loaded = load_recipe(path, ["launch.account=project_1"])
    found = prepare(loaded, run_dir=tmp_path / "run", dry_run=True)
    assert refusals(found.findings) == []
    assert (
        found.script.startswith("#!/bin/bash")
        and "#SBATCH --nodes=" in found.script
        and "windlass train" in found.script
    )
    assert found.plan.run_seconds and found.cost.node_hours > 0 and found.cost.expected_links
    assert subprocess.run(["bash", "-n"], input=found.script, text=True, capture_output=True).stderr == ""
    assert not (tmp_path / "run").exists()


def test_the_command_itself(tmp_path):
    recipe = next(p for p in RECIPES if p.stem == "italia_9b_leonardo")
    words = [
        sys.executable,
        "-m",
        "windlass",
        "launch",
        str(recipe),
        "--dry-run",
        "--chain",
        "4",
        "--nodes",
        "32",
        "--sbatch",
        "exclude=lrdn0001",
        "launch.account=EUHPC_A01",
    ]
    text = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (
        text.returncode == 0
        and "#SBATCH --exclude=lrdn0001" in text.stdout
        and "nothing was written or submitted" in text.stdout
    ), text.stderr
    value = json.loads(subprocess.run([*words, "--json"], cwd=tmp_path, capture_output=True, text=True).stdout)
    assert value["would_submit"] and value["links"] == 4 and value["nodes"] == 32
    assert (
        value["cost"]["node_hours"] == 32 * 4 * 24 and value["cost"]["units"] == 32 * 4 * 24 * 32
    )  # 32 core-hours per node-hour
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_tokenizing_jobs_before_the_training(tmp_path):
    recipe = next(p for p in RECIPES if p.stem == "italia_9b_leonardo")
    words = [sys.executable, "-m", "windlass", "launch", str(recipe), "--dry-run", "--pretokenize", "data.toml", "--array", "12",
             "launch.account=EUHPC_A01"]  # fmt: skip
    text = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert text.returncode == 0, text.stderr
    assert "#SBATCH --array=0-11" in text.stdout and "--array-task auto" in text.stdout
    assert text.stdout.index("--array-task") < text.stdout.index("after it, training")
    scripts = json.loads(subprocess.run([*words, "--json"], cwd=tmp_path, capture_output=True, text=True).stdout)
    for script in scripts["pretokenize"].values():
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_does_not_fit_is_refused_with_the_planners_words(tmp_path):
    recipe = next(p for p in RECIPES if p.stem == "italia_9b_leonardo")
    loaded = load_recipe(recipe, ["launch.account=x", "layout.shard=none"])
    found = [f for f in refusals(prepare(loaded, run_dir=tmp_path / "run", dry_run=True).findings) if f.rule == "fit"]
    assert found and "GiB" in found[0].message and found[0].source == "windlass plan"


def test_unknown_cluster(tmp_path):
    recipe = next(p for p in RECIPES if p.stem == "italia_9b_leonardo")
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "launch", str(recipe), "--dry-run", "cluster=leonardo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "unknown cluster 'leonardo'" in done.stderr and "leonardo-booster" in done.stderr
