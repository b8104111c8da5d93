"""CPU jobs, the doctor and the probe on a real scheduler."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]  # one scheduler, one worker

PATIENT = 240.0


@pytest.fixture
def corpus(site):
    """Eight small text files, a byte-level tokenizer and a data file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [[f"document {i} of file {n} tells of many hands at one windlass" for i in range(20)] for n in range(8)]
    for number, lines in enumerate(texts):
        (site.folder / f"part-{number}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([line for lines in texts for line in lines], trainer)
    tokenizer.save(str(site.folder / "tokenizer.json"))
    data = site.folder / "data.toml"
    data.write_text(
        'output = "store"\ntokenizer = "tokenizer.json"\neos = "<eos>"\nengine = "tokenizers"\n[sources.tale]\npaths = ["part-*.jsonl"]\n'
    )
    return data


def store_counts(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    return {name: source["tokens"] for name, source in manifest["sources"].items()}


@pytest.mark.timeout(600)
def test_tokenise_as_an_array_then_train(site, corpus):
    """Array -> merge -> training, each waiting for the one before; the store is the same as one process makes."""
    recipe = site.recipe("after", nodes=1, data__store="store", model__vocab=400, train__steps=4, save__every=4)
    site.json("launch", recipe, "--pretokenize", corpus, "--array", 2)
    assert site.wait_over("after", PATIENT) == ["COMPLETED"], site.tool("squeue", "-t", "all")
    (folder,) = (site.folder / "runs").glob("tokenize-data-*")
    kinds = [r["kind"] for r in site.records(folder.name) if r["record"] == "submitted"]
    assert kinds == ["array", "merge"] and site.states(folder.name) == ["COMPLETED", "COMPLETED"]
    site.windlass("tokenize", corpus, "output=alone")
    assert store_counts(site.folder / "store") == store_counts(site.folder / "alone")
    ledger = site.json("jobs", "--ledger")
    assert {s["name"] for s in ledger["runs"]} == {"after", folder.name}
    assert (
        ledger["projects"][0]["jobs"] == 3
        and ledger["projects"][0]["units"] > 0
        and ledger["projects"][0]["energy_joules"] is None
    )


def test_a_task_that_fails_leaves_no_job_waiting(site):
    """The merge is cancelled, not pending for ever with DependencyNeverSatisfied."""
    from windlass.launch.array import submit_array

    submitted = submit_array(["false"], count=2, then=["true"], cluster="dev", folder=site.folder / "runs/bad")
    site.wait_over("bad")
    states = dict(zip(("array", "merge"), site.states("bad"), strict=True))
    assert states == {"array": "FAILED", "merge": "CANCELLED"} and submitted.array_job != submitted.merge_job


def test_any_command_as_a_cpu_job(site):
    site.windlass("submit", "--cluster", "dev", "--folder", "runs/plain", "--", "clusters", "dev", "--json")
    assert site.wait_over("plain") == ["COMPLETED"]
    assert "Development cluster" in site.log("plain")


@pytest.mark.timeout(600)
def test_the_doctor_visits_two_nodes(site):
    result = site.json("doctor", "--cluster", "dev", "--nodes", 2, "--path", site.folder)
    assert result["verdict"].startswith("fit")
    topics = {check["topic"]: check for check in result["checks"]}
    assert "2 ranks on 2 nodes" in topics["ranks"]["text"]
    assert topics["all-reduce over all"]["values"]["busbw_gbs"] > 0 and topics["clocks"]["values"]["skew_seconds"] < 30
    assert {c["where"] for c in result["checks"] if c["topic"] == "disk"} == {"node01", "node02"}


def test_the_probe_sees_what_the_file_has_wrong(site):
    own = Path(os.environ["XDG_CONFIG_HOME"]) / "windlass/clusters/dev.toml"
    text = own.read_text().replace('max_time = "5m"', 'max_time = "10m"').replace("cores = 8", "cores = 16")
    own.write_text(text.replace('{ name = "low",', '{ name = "old",'))
    result = {d["key"]: d for d in site.json("clusters", "dev", "--probe")["differences"]}
    assert (
        result["partition short max_time"]["verdict"] == "differs"
        and result["partition short max_time"]["machine"] == "5 min"
    )
    assert result["node.cores"]["verdict"] == "differs" and result["node.cores"]["machine"] == "8"
    assert (
        result["partition old"]["verdict"] == "not on the machine"
        and result["partition low"]["verdict"] == "not in the file"
    )
    assert result["nodes"]["verdict"] == "same"
