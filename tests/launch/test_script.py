"""The batch scripts: golden files for every cluster, and the rules one by one."""

from __future__ import annotations

import subprocess

import pytest

from windlass.clusters import cluster_names, load_cluster
from windlass.errors import LaunchError
from windlass.launch.job import BatchJob, train_job
from windlass.launch.script import LINK_AGAIN, LINK_STOP, REQUEUE, directives, render

CLUSTERS = [name for name in cluster_names() if load_cluster(name).slurm is not None]
ACCOUNTS = {
    "lumi-g": "project_462000123",
    "marenostrum5-acc": "ehpc01",
    "juwels-booster": "trustllm",
    "jupiter-booster": "jup-llm",
}


def make_job(recipe, cluster_name, **more):
    return train_job(recipe, load_cluster(cluster_name), "/project/runs/nine-b", workdir="/project", **more)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_has_a_golden_script(name, make_recipe, golden):
    recipe = make_recipe(cluster=name, launch={"account": ACCOUNTS.get(name, "EUHPC_A01_006")})
    golden(f"{name}.sh", render(make_job(recipe, name), load_cluster(name)))


def test_lumi_in_a_container(make_recipe, golden):
    image = "/appl/local/laifs/containers/lumi-multitorch-latest.sif"
    recipe = make_recipe(
        cluster="lumi-g", launch={"account": "project_462000123", "container": image, "venv": None, "chain": 4}
    )
    golden("lumi-g-container.sh", render(make_job(recipe, "lumi-g"), load_cluster("lumi-g")))


def test_snellius_in_apptainer_with_torchrun_and_self_chain(make_recipe, golden):
    launch = {"container": "/projects/0/x/windlass.sif", "starter": "torchrun", "chain": "self", "stage_data": True}
    recipe = make_recipe(cluster="snellius-h100", launch=launch)
    golden("snellius-h100-torchrun.sh", render(make_job(recipe, "snellius-h100"), load_cluster("snellius-h100")))


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("chain", [0, 3, "self"])
def test_bash_can_read_every_script(name, chain, make_recipe):
    text = render(make_job(make_recipe(cluster=name, launch={"chain": chain}), name), load_cluster(name))
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_the_sites_own_ways(make_recipe):
    lumi = directives(make_job(make_recipe(cluster="lumi-g"), "lumi-g"), load_cluster("lumi-g"))
    assert "--gpus-per-node=8" in lumi and "--ntasks-per-node=8" in lumi and "--cpus-per-task=7" in lumi
    mn5 = directives(
        make_job(make_recipe(cluster="marenostrum5-acc"), "marenostrum5-acc"), load_cluster("marenostrum5-acc")
    )
    assert "--gres=gpu:4" in mn5 and not any(d.startswith("--mem") for d in mn5)
    snellius = directives(
        make_job(make_recipe(cluster="snellius-h100"), "snellius-h100"), load_cluster("snellius-h100")
    )
    assert "--ear=on" in snellius


def test_any_sbatch_option_passes_through_and_wins(make_recipe):
    recipe = make_recipe(launch={"sbatch": {"exclude": "lrdn0001", "exclusive": False, "mem": 0, "hold": True}})
    lines = directives(make_job(recipe, "leonardo-booster"), load_cluster("leonardo-booster"))
    assert "--exclude=lrdn0001" in lines and "--hold" in lines and "--mem=0" in lines and "--mem=494000" not in lines
    assert "--exclusive" not in lines


@pytest.mark.parametrize("key", ["ear-policy", "ear_policy", "--ear-policy"])
def test_the_recipes_ear_policy_replaces_the_sites(key, make_recipe):
    recipe = make_recipe(cluster="snellius-h100", launch={"sbatch": {key: "min_energy", "ear-verbose": False}})
    lines = directives(make_job(recipe, "snellius-h100"), load_cluster("snellius-h100"))
    assert [line for line in lines if line.startswith("--ear")] == ["--ear-policy=min_energy", "--ear=on"]


def test_every_option_is_printed_once(make_recipe):
    cluster = load_cluster("snellius-h100")
    slurm = cluster.slurm.model_copy(update={"extra": {"ear_policy": "monitoring", "exclusive": "user", "hint": ""}})
    sbatch = {"hint": "nomultithread", "requeue": True, "exclusive": "mcs", "time": "01:00:00", "ear": "off"}
    job = make_job(make_recipe(cluster="snellius-h100", launch={"sbatch": sbatch}), "snellius-h100")
    lines = directives(job, cluster.model_copy(update={"slurm": slurm}))
    names = [line.partition("=")[0] for line in lines]
    assert len(names) == len(set(names)) and "--no-requeue" not in names
    assert {"--hint=nomultithread", "--requeue", "--exclusive=mcs", "--time=01:00:00", "--ear=off"} <= set(lines)


def test_a_large_run_goes_to_the_queue_that_takes_it(make_recipe):
    job = make_job(make_recipe(nodes=128), "leonardo-booster")
    assert (job.partition, job.qos) == ("boost_usr_prod", "boost_qos_bprod")


def test_the_signal_comes_earlier_when_saves_are_slow(make_recipe):
    assert make_job(make_recipe(), "leonardo-booster").lead_seconds == 300
    assert make_job(make_recipe(), "leonardo-booster", save_seconds=200.0).lead_seconds == 660  # 60 + 3 x 200, by hand
    assert (
        make_job(make_recipe(launch={"time": "3m"}), "leonardo-booster").lead_seconds == 60
    )  # a third of three minutes


def test_juwels_meets_on_the_infiniband_name(make_recipe):
    text = render(make_job(make_recipe(cluster="juwels-booster"), "juwels-booster"), load_cluster("juwels-booster"))
    assert "head -n1)i " in text


def test_recipe_environment_wins_over_the_clusters(make_recipe):
    text = render(
        make_job(make_recipe(launch={"env": {"NCCL_IB_TIMEOUT": "22"}}), "leonardo-booster"),
        load_cluster("leonardo-booster"),
    )
    assert text.count("export NCCL_IB_TIMEOUT=") == 1 and "NCCL_IB_TIMEOUT=22" in text


def test_staging_changes_what_training_reads(make_recipe):
    small = {"data": {"tokens": "100B"}}
    job = make_job(make_recipe(**small), "leonardo-booster")
    assert job.staging and not job.staging.per_node and job.command[-2:] == ("--store", "$FAST/windlass/shards")
    text = render(job, load_cluster("leonardo-booster"))
    assert "$fast/.staged" in text and "cp -r" not in text  # a CPU job has copied it: no device waits for a copy
    assert make_job(make_recipe(**small, launch={"stage_data": False}), "leonardo-booster").staging is None
    assert make_job(make_recipe(), "leonardo-booster").staging is None  # 1T tokens of 2 bytes, and $FAST holds 1 TB
    assert make_job(make_recipe(), "leonardo-booster", store_bytes=10**12).staging is not None  # as measured
    assert (
        make_job(make_recipe(cluster="snellius-h100"), "snellius-h100").staging is None
    )  # a node's own disk only when asked


@pytest.mark.parametrize("key, value", [
    ("account", "p1\ncanary"), ("partition", "a b"), ("run_dir", "/runs/$(x)"), ("workdir", "/a\nb"),
    ("command", ("windlass", "eval", "a\nb")), ("env", {"A B": "1"}),
])  # fmt: skip
def test_values_of_the_command_line_are_held_to_the_same_rules(key, value):
    valid = {"name": "x", "run_dir": "/runs/x", "workdir": "/", "command": ()}
    with pytest.raises(LaunchError) as caught:
        BatchJob(**{**valid, key: value})
    assert caught.value.code == "launch.unsafe-value" and caught.value.message.startswith(key)


def test_modules_are_loaded_where_they_are_known(make_recipe):
    module = {"launch": {"environment": "module", "venv": None}}
    text = render(make_job(make_recipe(**module), "leonardo-booster"), load_cluster("leonardo-booster"))
    assert text.index("module purge") < text.index("module load python/3.11.6") < text.index("module load cuda/12.1")
    over = make_job(make_recipe(launch={"environment": "module", "venv": "/project/venv"}), "leonardo-booster")
    text = render(over, load_cluster("leonardo-booster"))  # a virtual environment made on top of the modules
    assert text.index("module load cuda/12.1") < text.index("source /project/venv/bin/activate")
    assert "module load" not in render(make_job(make_recipe(), "leonardo-booster"), load_cluster("leonardo-booster"))


@pytest.mark.parametrize("name", [n for n in CLUSTERS if not load_cluster(n).modules])
def test_unknown_modules_are_refused(name, make_recipe):
    with pytest.raises(LaunchError) as caught:
        make_job(make_recipe(cluster=name, launch={"environment": "module", "venv": None}), name)
    assert caught.value.code == "launch.modules-unknown" and "launch.modules" in caught.value.hint
    named = make_recipe(cluster=name, launch={"environment": "module", "modules": ["pytorch/2.11"], "venv": None})
    assert "module load pytorch/2.11" in render(make_job(named, name), load_cluster(name))


def test_the_python_of_a_lumi_image_is_activated(make_recipe, tmp_path):
    """Every command runs the image's own $WITH_CONDA first; an image without it starts the command at once."""
    recipe = make_recipe(cluster="lumi-g", launch={"account": "project_1", "container": "/x.sif", "venv": None})
    text = render(make_job(recipe, "lumi-g"), load_cluster("lumi-g"))
    lines = [line for line in text.splitlines() if "singularity exec" in line]
    assert len(lines) == 3 and all(r"""bash -c '$WITH_CONDA; exec "$@"' windlass """ in line for line in lines)
    command = r"""bash -c '$WITH_CONDA; exec "$@"' windlass printenv ACTIVE"""
    (tmp_path / "activate").write_text("export ACTIVE=pytorch\n")
    for value, output in ((f"source {tmp_path}/activate", "pytorch\n"), (None, "")):
        env = {"PATH": "/usr/bin:/bin", **({"WITH_CONDA": value} if value else {})}
        assert subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True).stdout == output


def test_checkpoints_can_go_to_the_fast_file_system(make_recipe):
    job = make_job(make_recipe(launch={"checkpoints_on": "fast"}), "leonardo-booster")
    assert job.checkpoints_target.startswith("$FAST/windlass/checkpoints/nine-b-")
    lumi = make_recipe(cluster="lumi-g", launch={"checkpoints_on": "flash"})
    assert make_job(lumi, "lumi-g").checkpoints_target.startswith("/flash/$PROJECT/windlass/checkpoints/nine-b-")
    assert make_job(make_recipe(), "leonardo-booster").checkpoints_target is None
    for cluster, name in (("snellius-h100", "fast"), ("snellius-h100", "node"), ("lumi-g", "floppy")):
        with pytest.raises(LaunchError) as caught:
            make_job(make_recipe(cluster=cluster, launch={"checkpoints_on": name}), cluster)
        assert caught.value.code == "launch.unknown-storage" and "scratch" in caught.value.hint


@pytest.mark.parametrize(
    ("answer", "code", "requeued"),
    [
        (LINK_AGAIN, 75, True),
        (LINK_AGAIN, 138, True),  # a rank got the warning before it had a handler
        (LINK_AGAIN, 1, False),
        (LINK_STOP, 75, False),
    ],
)
def test_a_job_that_a_signal_stopped_is_requeued(answer, code, requeued):
    script = f"scontrol() {{ echo requeued; }}; SLURM_JOB_ID=7 answer={answer} code={code}\n{REQUEUE}"
    assert (subprocess.check_output(["bash", "-c", script], text=True) == "requeued\n") is requeued
