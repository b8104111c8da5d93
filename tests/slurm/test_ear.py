"""EAR's sbatch options on a real scheduler: a small SPANK plugin registers them, as EAR's own does on Snellius."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]  # one scheduler, one worker

HERE = Path(__file__).parent
# Debian's plugstack.conf includes every file of this folder.
PLUGSTACK = Path("/etc/slurm/plugstack.conf.d/windlass-ear.conf")
FLAGS = ["--ear=on", "--ear-policy=monitoring", "--ear-verbose=1"]


@pytest.fixture
def ear_record(site, tmp_path):
    """The file to which the plugin writes job, step and the values of the three options."""
    if not Path("/usr/include/slurm/spank.h").is_file() or shutil.which("gcc") is None:
        reason = "SLURM's headers or gcc are not installed here (Debian: libslurm-dev, gcc)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    plugin, record = tmp_path / "ear.so", tmp_path / "ear.txt"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(HERE / "ear.c")], check=True)
    cluster = Path(os.environ["XDG_CONFIG_HOME"]) / "windlass/clusters/dev.toml"
    cluster.write_text(cluster.read_text().replace("[billing]", f"[energy]\near_flags = {FLAGS}\n\n[billing]"))
    PLUGSTACK.write_text(f"required {plugin} {record}\n")
    try:
        yield record
    finally:
        PLUGSTACK.unlink(missing_ok=True)


@pytest.mark.timeout(300)
def test_the_users_policy_wins_and_every_option_is_printed_once(site, ear_record):
    launch = {"venv": str(site.standin), "env": {"STANDIN": "finish"}}
    jobs = site.launch(site.recipe("default", nodes=1, energy__enabled=True, launch=launch))
    launch["sbatch"] = {"ear-policy": "min_energy"}
    jobs += site.launch(site.recipe("own", nodes=1, energy__enabled=True, launch=launch))
    for job, run, policy in zip(jobs, ("default", "own"), ("monitoring", "min_energy"), strict=True):
        assert site.wait_over(run) == ["COMPLETED"], site.log(run)
        script = (site.folder / "runs" / run / "job.sh").read_text()
        assert [script.count(f"#SBATCH {flag.partition('=')[0]}=") for flag in FLAGS] == [1, 1, 1]
        seen = [line.split() for line in ear_record.read_text().splitlines()]
        assert {tuple(values[2:]) for values in seen if values[0] == job} == {("on", policy, "1")}
    # The plugin is real: without it sbatch refuses the option.
    PLUGSTACK.unlink()
    refused = subprocess.run(
        ["sbatch", "--test-only", str(site.folder / "runs/own/job.sh")], capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0 and "ear" in refused.stderr
