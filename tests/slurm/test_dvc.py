"""The Polish hackathon's DVC file on a real scheduler: its own srun on the login node, and packed jobs with --slurm.

Charliecloud stands in for Singularity, and a small program for the evaluation; the file itself has only its masks corrected.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.launch.sweep.test_hackathon import FORMS, SCRIPT, SHAPES, corrected
from tests.slurm.conftest import HERE

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]  # one scheduler, one worker
pytest.importorskip("yaml")

# singularity exec -B FOLDER:/myrun IMAGE COMMAND -> ch-run, with the system and Python of this host in an empty root
SINGULARITY = """#!/bin/bash
while [ "$1" != -B ]; do shift; done
folder=$2; shift 3
exec ch-run {binds} --bind="$folder" --set-env=PATH=/opt/bin:/usr/bin:/bin {image} -- "$@"
"""


@pytest.fixture
def team(site, monkeypatch):
    """The team's folder on the login node of a machine with eight devices per node that wants an account."""
    if shutil.which("ch-run") is None:
        pytest.skip("Charliecloud is not installed here")
    image, python = site.folder.parent / "image", Path(sys.base_prefix).resolve()
    system = [p for p in ("/usr", "/lib", "/lib64", "/bin", "/sbin") if Path(p).exists()]
    binds = [*system, *([] if python.is_relative_to("/usr") else [str(python)])]
    for name in ("etc", "dev", "proc", "sys", "tmp", "run", "var", "root", "home", "opt/bin", "myrun", *binds):
        (image / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("passwd", "group", "hosts", "resolv.conf", "nsswitch.conf"):
        (image / "etc" / name).touch()
    (image / "opt" / "image-name").touch()  # how the program knows that it runs inside
    (image / "opt/bin/python").symlink_to(python / "bin/python3")
    programs = site.folder / "bin"
    programs.mkdir()
    flags = " ".join(f"--bind={place}" for place in binds)
    (programs / "singularity").write_text(SINGULARITY.format(binds=flags, image=image))
    (programs / "singularity").chmod(0o755)
    (site.folder / SCRIPT).parent.mkdir(parents=True)
    shutil.copy(FORMS / "evaluate.py", site.folder / SCRIPT)
    (site.folder / "setup_envs.sh").touch()
    (site.folder / "dvc.yaml").write_text(corrected("flat"))
    text = (HERE / "dev.toml").read_text().replace("devices = 1", "devices = 8")
    text = text.replace("[slurm]\n", "[slurm]\naccount_required = true\n", 1)
    text = text.replace('{ name = "low"', '{ name = "standard-g", max_time = "2d" },\n  { name = "low"', 1)
    (Path(os.environ["XDG_CONFIG_HOME"]) / "windlass/clusters/eight.toml").write_text(text)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("WITH_CONDA", ":")
    monkeypatch.setenv("USER", "root")  # ch-run wants it
    return site


def ranks(site) -> dict[tuple[int, int], list[dict]]:
    """(nodes, devices) of a point -> what each of its ranks wrote; the files are taken away."""
    result: dict[tuple[int, int], list[dict]] = {}
    for file in sorted((site.folder / "data").rglob("rank-*.json")):
        value = json.loads(file.read_text())
        result.setdefault((int(value["num_nodes"]), int(value["devices"])), []).append(value)
    shutil.rmtree(site.folder / "data")
    return result


@pytest.mark.timeout(300)
def test_the_file_runs_from_the_login_node_and_in_packed_jobs(team):
    path = f"launch.env.PATH={team.folder}/bin:$PATH"  # a login shell on the nodes begins with its own
    packs = team.json("sweep", "dvc.yaml", path, "--slurm", "--cluster", "eight", "--run", "runs/packed")["packs"]
    assert [(p["nodes"], p["devices"], len(p["points"])) for p in packs] == [(1, 8, 2), (1, 8, 2), (2, 8, 1)]
    outcomes = team.folder / "runs/packed/outcomes.jsonl"
    team.wait("all outcomes", lambda: outcomes.exists() and len(outcomes.read_text().splitlines()) == 5, 120.0)
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    logs = "\n".join(p.read_text() for p in (team.folder / "runs/packed/points").rglob("point.log"))
    assert {line["outcome"] for line in lines} == {"ok"}, logs
    packed = ranks(team)
    # From the login node each point's own srun asks for an allocation; the largest shows it.
    team.windlass("sweep", "dvc.yaml", "--run", "runs/local", "--point", packs[-1]["points"][0])
    local = ranks(team)
    assert sorted(packed) == SHAPES and sorted(local) == SHAPES[-1:]
    for (nodes, devices), values in [*packed.items(), *local.items()]:
        assert len(values) == nodes * devices and len({v["host"] for v in values}) == nodes, values
        assert len({v["job"] for v in values}) == 1 and all(v["image"] for v in values)
    assert len({v["job"] for values in packed.values() for v in values}) == 3, "five points in three jobs"
    scripts = [p.read_text() for p in (team.folder / "runs/packed/packs").rglob("sweep.sh")]
    assert len(scripts) == 2 and all("--account=project_465000858" in text for text in scripts)
