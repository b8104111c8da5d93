"""sbatch queues the job and its answer is lost: the job is found by its mark, recorded, and not submitted twice."""

from __future__ import annotations

import json
import os
import shutil

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]  # one scheduler, one worker

LOST = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


@pytest.fixture
def sbatch(site, monkeypatch):
    """`sbatch(after)`: from now on sbatch queues the job, answers nothing and does this; --test-only works."""
    real, folder = shutil.which("sbatch"), site.folder.parent / "wrapper"
    folder.mkdir()

    def install(after: str) -> None:
        path = folder / "sbatch"
        path.write_text(
            f'#!/bin/bash\ncase "$*" in *--test-only*) exec {real} "$@";; esac\n{real} "$@" > /dev/null || exit\n{after}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return install


def queue(site) -> dict[str, str]:
    lines = site.tool("squeue", "-h", "-o", "%i|%k").splitlines()
    return {job: comment for job, _, comment in (line.partition("|") for line in lines)}


def test_the_job_is_recorded_and_a_second_launch_refused(site, sbatch):
    sbatch(LOST)
    # `hold`: it stays in the queue. The comment also shows how sbatch reads our quotes.
    launch = {"sbatch": {"hold": True, "comment": "team 7; $(x) 'y'"}}
    recipe = site.recipe("lost", launch=launch)
    (job,) = site.launch(recipe)
    ((queued, comment),) = queue(site).items()
    assert job == queued and comment.startswith("team 7; $(x) 'y' windlass:")
    assert [entry["job"] for entry in site.json("jobs", "lost")["jobs"]] == [job]
    again = site.windlass("launch", recipe, check=False)
    assert again.returncode == 6 and job in again.stderr and list(queue(site)) == [job]
    assert json.loads(site.windlass("cancel", "lost", "--json").stdout)["cancelled"] == [job]


def test_a_launch_that_dies_after_sbatch_leaves_a_job_that_jobs_and_cancel_know(site, sbatch):
    sbatch("kill -9 $PPID")
    recipe = site.recipe("dead", launch={"sbatch": {"hold": True}})
    assert site.windlass("launch", recipe, check=False).returncode == -9
    (job,) = queue(site)
    assert not [r for r in site.records("dead") if r["record"] == "submitted"]
    again = site.windlass("launch", recipe, check=False)
    assert again.returncode == 6 and list(queue(site)) == [job]
    assert [(r["job"], r["adopted"]) for r in site.records("dead") if r["record"] == "submitted"] == [(job, True)]
    assert [entry["nodes"] for entry in site.json("jobs", "dead")["jobs"]] == [2]
    assert json.loads(site.windlass("cancel", "dead", "--json").stdout)["cancelled"] == [job]


def test_sbatch_reads_the_quotes_of_a_directive(site):
    """The script itself, submitted by hand: the comment is that of its #SBATCH line."""
    comment = "team 7; $(x) 'y' \"z\" # a|b"
    site.launch(site.recipe("quotes", launch={"sbatch": {"hold": True, "comment": comment}}))
    job = site.tool("sbatch", "--parsable", str(site.folder / "runs" / "quotes" / "job.sh")).strip()
    assert queue(site)[job] == comment
