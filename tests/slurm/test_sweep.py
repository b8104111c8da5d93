"""Points share allocations on a real scheduler, as an array of packs, and its states become the points' outcomes."""

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
    output = site.json("sweep", "sweep.toml", "--slurm")
    shapes = [(pack["nodes"], len(pack["points"])) for pack in output["packs"]]
    assert shapes == [(1, 2), (1, 2), (2, 1)], output
    assert len({pack["job"].split("_")[0] for pack in output["packs"]}) == 2  # one array per shape
    file = site.folder / "runs" / "packed" / "outcomes.jsonl"
    site.wait("all outcomes", lambda: file.exists() and len(file.read_text().splitlines()) == 6, 240.0)
    result = {line["point"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert {n: o["outcome"] for n, o in result.items()} == {
        "seed-1": "ok", "seed-2": "ok", "seed-3": "ok", "two-nodes": "ok", "failing": "error", "illegal": "error"
    }, result  # fmt: skip
    assert "no/such/store" in result["failing"]["detail"] and result["illegal"]["evidence"] == "plan"
    report = site.json("sweep", "sweep.toml", "--report")
    rows = {r["point"]: r for r in report["rows"]}
    assert rows["two-nodes"]["nodes"] == 2 and rows["two-nodes"]["tokens_per_second"] > 0


ENDS = """
name = "ends"
command = '''bash -c "test {kind} = bad && echo ValueError: no such data && exit 3; test {kind} = fine || test -e ../go || sleep 300; echo n > {folder}/m.csv; echo 1 >> {folder}/m.csv"'''
results = "m.csv"
rank_by = "n"
allocation = "100s"
[matrix]
kind = ["cancel", "late", "crash", "yield", "fine", "bad"]
"""
"""Four points that sleep until something happens to their allocation, a good and a failing one; once ../go is there, none sleeps."""


@pytest.mark.timeout(600)
def test_every_end_of_an_allocation_is_an_outcome_and_can_be_repeated(site, monkeypatch):
    (site.folder / "sweep.toml").write_text(ENDS.replace("../go", str(site.folder / "go")))
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    monkeypatch.setenv("SBATCH_EXCLUSIVE", "exclusive")  # a node each
    packs = site.json("sweep", "sweep.toml", "--slurm", "--cluster", "dev")["packs"]
    jobs = {pack["points"][0].removeprefix("kind-"): pack["job"] for pack in packs}
    folder = site.folder / "runs" / "ends"
    for kind in ("cancel", "late", "crash", "yield"):
        site.wait(f"{kind} begins", (folder / "points" / f"kind-{kind}" / "logs" / "begun.json").exists, 60.0)
    nodes = {k: site.tool("squeue", "-h", "-j", j, "-o", "%N").strip() for k, j in jobs.items() if k in ("crash", "yield")}  # fmt: skip
    site.tool("scontrol", "update", f"jobid={jobs['late']}", "EndTime=now+5")
    site.tool(str(site.script), "crash", nodes["crash"])
    try:
        site.tool(
            "sbatch", "-p", "main", "-w", nodes["yield"], "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "true"
        )
        site.tool("scancel", jobs["cancel"])
        waiting = ",".join(j.split("_")[0] for j in jobs.values())
        site.wait("all ends", lambda: not site.tool("squeue", "-h", "-j", waiting, "-t", "PD,R,CG").strip(), 150.0)
    finally:
        site.tool(str(site.script), "start", nodes["crash"])
    rows = {r["point"].removeprefix("kind-"): r for r in site.json("sweep", "sweep.toml", "--report")["rows"]}
    assert {k: (r["outcome"], r["evidence"]) for k, r in rows.items()} == {
        "cancel": ("error", "scheduler"), "late": ("timeout", "scheduler"), "crash": ("node-failure", "scheduler"),
        "yield": ("pre-empted", "scheduler"), "fine": ("ok", "exit"), "bad": ("error", "log"),
    }, rows  # fmt: skip
    assert "CANCELLED" in rows["cancel"]["detail"] and rows["bad"]["detail"] == "ValueError: no such data"
    assert json.loads((folder / "points" / "kind-late" / "outcome.json").read_text())["job"] == jobs["late"]

    # The same classes once more: a point that had an outcome is run again by the job, and its new word counts.
    (site.folder / "go").touch()
    monkeypatch.setenv("SBATCH_PARTITION", "main")
    again = site.json("sweep", "sweep.toml", "--slurm", "--cluster", "dev", "--only", "fail")["packs"]
    assert sorted(name for pack in again for name in pack["points"]) == sorted(f"kind-{k}" for k in jobs if k != "fine")
    file = folder / "outcomes.jsonl"
    site.wait("new outcomes", lambda: len(file.read_text().splitlines()) == 6 + 5, 120.0)
    assert site.json("sweep", "sweep.toml", "--report")["counts"] == {"ok": 5, "error": 1}
