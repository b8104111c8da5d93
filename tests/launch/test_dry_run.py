"""Every shipped recipe can be inspected before anything is submitted: script, plan, cost, checks; nothing is written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from windlass.cli.launch import launch, submit_any
from windlass.config import load_recipe
from windlass.errors import ConfigError
from windlass.launch.checks import refusals
from windlass.launch.submit import prepare
from windlass.units import print_node_hours

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*_*.toml") if not path.stem.endswith("_data"))
ITALIA = next(p for p in RECIPES if p.stem == "italia_9b_leonardo")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Commands run in an empty folder, which must be empty afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def assert_bash_reads(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem != "tiny_cpu"], ids=lambda p: p.stem)
def test_every_recipe_would_be_submitted(path, tmp_path):
    loaded = load_recipe(path, ["launch.account=project_1"])
    prepared = prepare(loaded, run_dir=tmp_path / "run", dry_run=True)
    assert refusals(prepared.findings) == []
    assert prepared.script.startswith("#!/bin/bash") and "#SBATCH --nodes=" in prepared.script
    assert prepared.plan.mfu is not None and 0.05 < prepared.plan.mfu < 0.85
    assert prepared.plan.run_seconds and prepared.cost.node_hours > 0 and prepared.cost.expected_links
    assert_bash_reads(prepared.script)


LAYOUTS = {
    "gptnl_8b_snellius": ["nodes=22"],
    "gptnl_30b_snellius": ["nodes=22"],
    # The team's own layout: 54 layers in stages of 14, 14, 13 and 13, with tied embeddings.
    "poro_34b_lumi": ["layout.tensor=2", "layout.pipeline=4", "layout.shard=zero1", "launch.account=project_1"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_teams_own_nodes_and_layouts_would_be_submitted(name, tmp_path):
    path = next(p for p in RECIPES if p.stem == name)
    prepared = prepare(load_recipe(path, LAYOUTS[name]), run_dir=tmp_path / "run", dry_run=True)
    assert refusals(prepared.findings) == [] and prepared.plan.run_seconds
    if name == "poro_34b_lumi":
        layout = prepared.plan.layout
        assert (layout.tensor, layout.pipeline, prepared.recipe.model.tied) == (2, 4, True)


def test_an_awkward_batch_is_warned_of_and_adjusted(tmp_path):
    loaded = load_recipe(next(p for p in RECIPES if p.stem == "gptnl_8b_snellius"), ["nodes=22"])
    (warning,) = (f for f in prepare(loaded, run_dir=tmp_path, dry_run=True).findings if f.rule == "batch")
    assert warning.level == "warn" and "5,242,880" in warning.message and "5406720" in warning.hint
    adjusted = prepare(loaded, run_dir=tmp_path, dry_run=True, adjust=True)
    (finding,) = (f for f in adjusted.findings if f.rule == "batch")
    assert finding.level == "ok" and "5,406,720" in finding.message
    assert adjusted.recipe.data.batch_tokens == 5_406_720 and adjusted.plan.layout.pipeline <= 2


def test_the_command_prints_script_and_cost(capsys):
    options = {"nodes": 32, "chain": "4", "sbatch": ["exclude=lrdn0001"], "dry_run": True}
    launch(ITALIA, ["launch.account=EUHPC_A01"], **options)
    assert "#SBATCH --exclude=lrdn0001" in capsys.readouterr().out
    launch(ITALIA, ["launch.account=EUHPC_A01"], **options, as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert value["would_submit"] and value["links"] == 4 and value["nodes"] == 32
    assert value["cost"]["node_hours"] == 32 * 4 * 24
    assert value["cost"]["units"] == 32 * 4 * 24 * 32  # 32 core-hours per node-hour


def test_a_dry_run_shows_the_tokenizing_jobs_before_the_training(capsys):
    options = {"dry_run": True, "pretokenize": FOLDER / "italia_data.toml", "array": 12}
    launch(ITALIA, ["launch.account=EUHPC_A01"], **options)
    text = capsys.readouterr().out
    assert "#SBATCH --array=0-11" in text
    assert text.index("--array-task auto") < text.index("link before")
    launch(ITALIA, ["launch.account=EUHPC_A01"], **options, as_json=True)
    scripts = json.loads(capsys.readouterr().out)["pretokenize"]
    assert list(scripts) == ["array", "merge"]
    for script in scripts.values():
        assert_bash_reads(script)
        # 4.8 TB of text by 2 MB/s and core: 96 cores take 6.9 h, the four of lrd_all_serial 6.9 days.
        assert "#SBATCH --partition=dcgp_usr_prod" in script and "normal: 6 h 57 min of at most 24 h" in script
        assert "lrd_all_serial: 6.9 days of at most 4 h" in script


def test_a_layout_that_does_not_fit_is_refused_by_the_planner(tmp_path):
    loaded = load_recipe(ITALIA, ["launch.account=x", "layout.shard=none"])
    refused = refusals(prepare(loaded, run_dir=tmp_path / "run", dry_run=True).findings)
    (fit,) = [finding for finding in refused if finding.rule == "fit"]
    assert "GiB" in fit.message and fit.source == "windlass plan"


def test_unknown_cluster_and_unnamed_sbatch_option():
    with pytest.raises(ConfigError) as caught:
        launch(ITALIA, ["cluster=leonardo"], dry_run=True)
    assert "leonardo-booster" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        launch(ITALIA, sbatch=["=x"], dry_run=True)
    assert caught.value.code == "launch.sbatch-option"


def test_the_wall_time_fits_the_expected_time(tmp_path):
    # 450B tokens of a 1B model take 5.1 days on 4 nodes, so this part of them takes about 19 hours.
    path = FOLDER / "gptnl_1b_snellius.toml"

    def seconds(*overrides):
        prepared = prepare(load_recipe(path, list(overrides)), run_dir=tmp_path / "run", dry_run=True)
        return prepared.job.seconds, prepared

    asked, prepared = seconds("data.tokens=69B")
    assert prepared.plan.run_seconds == pytest.approx(19 * 3600, rel=0.02) and asked == 24 * 3600
    assert prepared.cost.expected_links == 1 and "#SBATCH --time=1-00:00:00" in prepared.script
    assert seconds("data.tokens=1B")[0] == 3600
    assert seconds("data.tokens=10T")[0] == 5 * 86_400  # the limit of the partition
    assert seconds("data.tokens=69B", "launch.time=2d")[0] == 2 * 86_400
    asked, prepared = seconds("data.tokens=69B", "launch.chain=4")  # a quarter of the run each
    assert asked == 7 * 3600 and prepared.cost.expected_links <= 4


def test_cost_of_one_job_and_of_the_whole_run_are_apart(tmp_path, capsys):
    path = FOLDER / "gptnl_8b_snellius.toml"
    prepared = prepare(load_recipe(path, ["launch.chain=2"]), run_dir=tmp_path / "run", dry_run=True)
    cost, hours = prepared.cost, prepared.job.seconds / 3600
    assert cost.job_node_hours == 20 * hours and cost.node_hours == 2 * cost.job_node_hours
    assert cost.expected_node_hours == pytest.approx(20 * prepared.plan.run_seconds / 3600)
    assert cost.node_hours > cost.expected_node_hours > cost.job_node_hours
    assert cost.job_units == cost.job_node_hours * 768 and cost.expected_units == cost.expected_node_hours * 768
    launch(path, chain="2", dry_run=True)
    text = capsys.readouterr().out
    for label, amount in (("one job", cost.job_node_hours), ("2 jobs", cost.node_hours)):
        assert f"cost of {label}" in text and f"at most {print_node_hours(amount)}" in text
    assert print_node_hours(cost.expected_node_hours) in text


def test_one_job_of_several_is_noted_and_the_budget_is_that_of_the_whole_run(tmp_path):
    path = FOLDER / "gptnl_8b_snellius.toml"  # 3,198 node-hours; one job may use 2,400
    findings = prepare(load_recipe(path), run_dir=tmp_path / "run", dry_run=True).findings
    (chain,) = (f for f in findings if f.rule == "chain")
    assert chain.level == "note" and "--chain 2" in chain.hint
    for budget, fits in ((3000, False), (3300, True)):
        loaded = load_recipe(path, [f"launch.budget_node_hours={budget}"])
        refused = refusals(prepare(loaded, run_dir=tmp_path / "run", dry_run=True).findings)
        assert [f.rule for f in refused] == ([] if fits else ["budget"])
        assert fits or ("3,198" in refused[0].message and "3,000" in refused[0].message)


def test_submit_shows_the_script_of_a_command(capsys):
    submit_any(["eval", "runs/x"], cluster="lumi-g", account="project_1", dry_run=True)
    script = capsys.readouterr().out.partition("Dry run OK")[0]
    assert "exec windlass eval runs/x" in script and "#SBATCH --account=project_1" in script
    assert_bash_reads(script)
