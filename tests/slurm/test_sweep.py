"""Do points share allocations on a real scheduler, as an array of packs; and does its word become a point's outcome?"""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]  # one scheduler, one worker

SWEEP = """
name = "packed"
time_limit = "100s"
allocation = "200s"
startup = "60s"
recipe = "base.toml"
[matrix]
seed = [1, 2, 3]
[[include]]
name = "two-nodes"
seed = 4
nodes = 2
[[include]]
name = "failing"
seed = 5
"data.store" = "no/such/store"
[[include]]
name = "illegal"
seed = 6
"layout.tensor" = 3
"""


@pytest.mark.timeout(600)
def test_points_run_packed_in_an_array_and_are_reported(site):
    site.recipe("base", nodes=1, train__steps=4, save__every=1000, save__at_end=False)
    (site.folder / "sweep.toml").write_text(SWEEP)
    said = site.json("sweep", "sweep.toml", "--slurm")
    shapes = [(pack["nodes"], len(pack["points"])) for pack in said["packs"]]
    assert shapes == [(1, 2), (1, 2), (2, 1)], said
    assert len({pack["job"].split("_")[0] for pack in said["packs"]}) == 2  # one array per shape
    file = site.folder / "runs" / "packed" / "outcomes.jsonl"
    site.wait("all outcomes", lambda: file.exists() and len(file.read_text().splitlines()) == 6, 240.0)
    found = {line["point"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert {n: o["outcome"] for n, o in found.items()} == {
        "seed-1": "ok", "seed-2": "ok", "seed-3": "ok", "two-nodes": "ok", "failing": "error", "illegal": "error"
    }, found  # fmt: skip
    assert "no/such/store" in found["failing"]["detail"] and found["illegal"]["evidence"] == "plan"
    report = site.json("sweep", "sweep.toml", "--report")
    rows = {r["point"]: r for r in report["rows"]}
    assert rows["two-nodes"]["nodes"] == 2 and rows["two-nodes"]["tokens_per_second"] > 0


@pytest.mark.timeout(600)
def test_a_cancelled_allocation_leaves_the_schedulers_word(site):
    site.recipe("base", nodes=1, train__steps=100000, save__every=1000000)
    (site.folder / "sweep.toml").write_text('name = "cut"\ntime_limit = "300s"\nrecipe = "base.toml"\n[matrix]\nseed = [1, 2]\n')  # fmt: skip
    (pack,) = site.json("sweep", "sweep.toml", "--slurm")["packs"]
    run = site.folder / "runs" / "cut" / "points" / "seed-1"
    site.wait("first steps", (run / "metrics.jsonl").exists, 120.0)
    site.tool("scancel", pack["job"])
    job = pack["job"].split("_")[0]
    site.wait("end", lambda: not site.tool("squeue", "-h", "-j", job, "-t", "PD,R,CG").strip(), 90.0)
    rows = {r["point"]: r for r in site.json("sweep", "sweep.toml", "--report")["rows"]}
    assert (rows["seed-1"]["outcome"], rows["seed-1"]["evidence"]) == ("error", "scheduler"), rows["seed-1"]
    assert "CANCELLED" in rows["seed-1"]["detail"] and rows["seed-2"]["outcome"] is None
