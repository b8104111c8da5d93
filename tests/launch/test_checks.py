"""Bad requests are refused with their rule, numbers and source; good ones pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windlass.clusters import load_cluster
from windlass.errors import LaunchError
from windlass.launch import checks
from windlass.launch.job import expected_store_bytes, train_job


def findings(recipe, **changes):
    cluster = load_cluster(recipe.cluster)
    job = replace(train_job(recipe, cluster, "/project/runs/x", workdir="/project"), **changes)
    return checks.check_request(job, cluster)


def refused(result) -> dict[str, str]:
    return {f.rule: f.message for f in checks.refusals(result)}


@pytest.mark.parametrize(
    "name", ["lumi-g", "leonardo-booster", "snellius-h100", "marenostrum5-acc", "juwels-booster", "jupiter-booster"]
)
def test_a_sensible_request_passes_everywhere(name, make_recipe):
    assert refused(findings(make_recipe(cluster=name, launch={"account": "project_1"}))) == {}


CASES = [
    ("wall_time", {"launch": {"time": "30h"}}, {}, ["30 h", "24 h", "boost_usr_prod"]),
    ("nodes", {"nodes": 65, "launch": {"qos": "normal"}}, {}, ["65", "64"]),
    ("nodes", {"nodes": 8, "launch": {"qos": "boost_qos_bprod"}}, {}, ["65 to 256"]),
    ("account", {"launch": {"account": None}}, {}, []),
    ("partition", {"launch": {"partition": "gpu"}}, {}, ["'gpu'"]),
    ("qos", {"launch": {"qos": "vip"}}, {}, ["'vip'"]),
    ("account", {"cluster": "lumi-g", "launch": {"account": None, "stage_data": False}}, {}, ["AssocMaxSubmitJobLimit"]),
    ("cores", {"cluster": "lumi-g"}, {"cpus_per_task": 8}, ["8 tasks x 8", "64", "56"]),
    ("whole_nodes", {"cluster": "snellius-h100"}, {"devices_per_node": 2, "tasks_per_node": 2}, ["4 GPUs"]),
    ("mem_zero", {"cluster": "snellius-h100", "launch": {"sbatch": {"mem": 0}}}, {}, ["--mem=0"]),
    ("mem", {"cluster": "marenostrum5-acc", "launch": {"sbatch": {"mem": "100G"}}}, {}, ["--mem=100G"]),
    ("mem", {"cluster": "lumi-g", "launch": {"sbatch": {"mem": "900G"}}}, {}, ["480 GiB"]),
    ("cores_per_gpu", {"cluster": "marenostrum5-acc"}, {"cpus_per_task": 10}, ["20 cores"]),
    ("tasks", {"cluster": "juwels-booster"}, {"tasks_per_node": 2}, ["2 tasks", "4 devices"]),
    ("devices", {"cluster": "juwels-booster"}, {"devices_per_node": 8, "tasks_per_node": 8, "cpus_per_task": 6}, ["8 devices", "has 4"]),
    ("max_jobs", {"cluster": "lumi-g", "launch": {"chain": 300}}, {}, ["300", "210"]),
]  # fmt: skip


@pytest.mark.parametrize("rule, recipe, job, parts", CASES)
def test_each_rule_refuses_with_numbers_and_a_source(rule, recipe, job, parts, make_recipe, monkeypatch):
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    recipe.setdefault("launch", {}).setdefault("account", "project_1")
    result = [f for f in checks.refusals(findings(make_recipe(**recipe), **job)) if f.rule == rule]
    assert result and all(part in result[0].message for part in parts) and result[0].source


def test_overlapping_masks_are_found(make_recipe):
    """The masks of a published tutorial: its second entry repeats the first, so two ranks share seven cores."""
    cluster = load_cluster("lumi-g")
    masks = [cluster.binding.masks[0], cluster.binding.masks[0], *cluster.binding.masks[2:]]
    wrong = cluster.model_copy(update={"binding": cluster.binding.model_copy(update={"masks": masks})})
    job = train_job(make_recipe(cluster="lumi-g"), wrong, "/x", workdir="/x")
    result = [f.message for f in checks.check_request(job, wrong) if f.rule == "masks"]
    assert any("ranks 0 and 1 share cores 49-55" in text for text in result)


@pytest.mark.parametrize(
    "launch",
    [
        {"env": {"SLURM_CPU_BIND": "mask_cpu:0xfe,0xfe00,0xfe"}},
        {"sbatch": {"cpu-bind": "mask_cpu:0xfe,0xfe00,0xfe"}},
    ],
)
def test_masks_of_a_recipe_are_checked_in_the_rendered_script(make_recipe, launch):
    recipe = make_recipe(cluster="lumi-g", launch={"account": "project_1", **launch})
    result = [f for f in checks.refusals(findings(recipe)) if f.rule == "masks"]
    assert any("ranks 0 and 2 share cores 1-7" in f.message for f in result), result
    assert all("0xfe00000000000000" in f.hint and f.source for f in result)
    assert not [f for f in findings(make_recipe(cluster="lumi-g", launch={"account": "p"})) if f.rule == "masks"]


def test_a_short_job_is_warned_that_the_signal_may_come_too_early(make_recipe):
    result = findings(make_recipe(launch={"time": "2m"}))
    assert [f.rule for f in result if f.level == "warn"] == ["signal_lead"]


def test_a_disk_that_only_some_nodes_have(make_recipe):
    result = findings(make_recipe(cluster="snellius-h100", launch={"stage_data": True}))
    assert [f.hint for f in result if f.rule == "local_disk"] == ["set launch.sbatch.constraint=scratch-node"]
    asked = make_recipe(cluster="snellius-h100", launch={"stage_data": True, "sbatch": {"constraint": "scratch-node"}})
    assert not [f for f in findings(asked) if f.rule == "local_disk"]


def test_refusals_come_together_and_force_overrides(make_recipe):
    result = findings(make_recipe(launch={"time": "30h", "account": None}))
    with pytest.raises(LaunchError) as caught:
        checks.refuse(result, force=False)
    assert caught.value.code == "launch.checks-failed"
    assert (
        "wall_time" in caught.value.message and "account" in caught.value.message and "CINECA" in caught.value.message
    )
    checks.refuse(result, force=True)


# -- this machine -------------------------------------------------------------------------------------------------------


def site(recipe, run_dir="/nowhere/runs/x", **more):
    cluster = load_cluster(recipe.cluster)
    job = train_job(recipe, cluster, run_dir, workdir="/project")
    result = checks.check_site(job, recipe, cluster, checkpoint_bytes=more.get("bytes", 100), steps=10)
    return {f.rule: f for f in result}


def test_a_folder_of_this_node_only(make_recipe):
    result = site(make_recipe(), "/dev/shm/runs/x")
    assert result["shared_folder"].level == "refuse" and "/dev/shm/runs/x" in result["shared_folder"].message
    assert "shared_folder" not in site(make_recipe(), "/nowhere/runs/x")


def test_no_room_for_the_forecast_checkpoints(make_recipe):
    assert site(make_recipe(), bytes=10**18)["disk"].level == "refuse"
    quota = make_recipe(save={"quota": "1 GB", "keep_last": 3})
    assert "save.quota" in site(quota, bytes=5 * 10**8)["disk"].message
    assert site(make_recipe(), bytes=1000)["disk"].level == "ok"


def test_missing_image_venv_and_store(make_recipe, tmp_path):
    result = site(make_recipe(cluster="lumi-g", launch={"container": str(tmp_path / "no.sif"), "account": "project_1"}))
    assert result["image"].level == "refuse" and "no.sif" in result["image"].message
    assert result["store"].level == "refuse"
    assert site(make_recipe(launch={"venv": str(tmp_path)}))["venv"].level == "refuse"


def test_budget():
    (ok,) = checks.check_budget(100.0, 200.0, 1000.0)
    assert ok.level == "ok" and "800 of 1,000 left" in ok.message
    (bad,) = checks.check_budget(900.0, 200.0, 1000.0)
    assert bad.level == "refuse" and bad.source
    assert checks.check_budget(1.0, 0.0, None)[0].level == "note"
    (short,) = checks.check_budget(100.0, 200.0, 1000.0, 801.0)  # one job fits, but not all that the run needs
    assert short.level == "refuse" and "801" in short.message and "800 of 1,000 left" in short.message
    assert checks.check_budget(100.0, 200.0, 1000.0, 800.0)[0].level == "ok"


def quotas(recipe, store_bytes=None, checkpoint_bytes=110 * 10**9, run_dir="/nowhere/runs/x"):
    cluster = load_cluster(recipe.cluster)
    job = train_job(recipe, cluster, run_dir, workdir="/project", store_bytes=store_bytes)
    size = store_bytes or expected_store_bytes(recipe)
    return [
        f
        for f in checks.check_quotas(job, recipe, cluster, size, checkpoint_bytes, 1000, on_site=True)
        if f.level != "ok"
    ]


def test_a_store_larger_than_the_quota_is_refused_with_numbers(make_recipe):
    """1.2T tokens of 2 bytes against the 1 TB of Leonardo's $FAST."""
    italia = make_recipe(data={"tokens": "1.2T"}, launch={"stage_data": True})
    (refusal,) = quotas(italia)
    assert (refusal.rule, refusal.level) == ("quota", "refuse") and refusal.source
    assert "2.4 TB are more than its quota of 1 TB" in refusal.message
    assert "launch.stage_data = false" in refusal.hint and "$SCRATCH (20 TB)" in refusal.hint
    (note,) = quotas(
        make_recipe(data={"tokens": "1.2T"})
    )  # not asked for: it stays where it is, and the numbers say why
    assert note.level == "note" and "2.4 TB" in note.message and "1 TB" in note.message
    assert quotas(italia, store_bytes=9 * 10**11) == []  # measured: it is smaller than one pass


def test_store_and_checkpoints_share_a_quota(make_recipe):
    recipe = make_recipe(data={"tokens": "200B"}, launch={"checkpoints_on": "fast"}, save={"keep_last": 3})
    assert quotas(recipe) == []  # 400 GB and four checkpoints of 110 GB in 1 TB, by hand
    (refusal,) = quotas(recipe, checkpoint_bytes=160 * 10**9)  # 400 + 640 GB
    assert refusal.level == "refuse" and "1.04 TB" in refusal.message and "640 GB" in refusal.message
    assert "keep_last" in refusal.hint


def test_the_quota_of_the_run_folders_own_file_system(make_recipe, monkeypatch):
    monkeypatch.setenv("WORK", "/leonardo_work/x")
    recipe = make_recipe(launch={"stage_data": False})
    assert quotas(recipe, run_dir="/leonardo_work/x/runs/a") == []
    (refusal,) = quotas(recipe, checkpoint_bytes=3 * 10**11, run_dir="/leonardo_work/x/runs/a")  # four of 300 GB
    assert refusal.rule == "quota" and "1.2 TB" in refusal.message and "$WORK" in refusal.message
    assert quotas(recipe, checkpoint_bytes=3 * 10**11, run_dir="/leonardo_work/xy/runs/a") == []
