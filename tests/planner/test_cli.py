"""The commands as a user types them."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass.cli import main

RECIPES = Path(__file__).parents[2] / "recipes"
EIGHT = RECIPES / "gptnl_8b_snellius.toml"


@pytest.fixture
def windlass(monkeypatch, capsys):
    """Run a command in this process, through the same entry point as the shell."""

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["windlass", *map(str, argv)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run


def test_table_with_reasons_and_conventions(windlass):
    done = windlass("plan", EIGHT, "--top", "3")
    assert done.returncode == 0, done.stderr
    for word in (
        "tokens/s",
        "MFU",
        "CO2e",
        "that fit",
        "MFU counts 6N",
        "989 TFLOP/s dense bf16 peak of h100-94",
        "SBUs",
        "node-hours",
        "PUE 1.19",
    ):
        assert word in done.stdout


def test_plan_for_another_engine(windlass):
    shards = {}
    for name in ("torch", "deepspeed", "megatron"):
        plans = json.loads(windlass("plan", EIGHT, "--engine-profile", name, "--json").stdout)["plans"]
        shards[name] = {p["layout"]["shard"] for p in plans}
        assert name == "megatron" or all(p["layout"]["tensor"] == p["layout"]["pipeline"] == 1 for p in plans)
        own = json.loads(windlass("plan", EIGHT, "--json").stdout)["plans"][0]
        assert plans[0]["tokens_per_second"] < own["tokens_per_second"]
    assert shards == {
        "torch": {"zero2", "full", "hybrid", "hybrid_zero2"}, "deepspeed": {"zero1", "zero2", "full"}, "megatron": {"none", "zero1"},
    }  # fmt: skip
    done = windlass("plan", EIGHT, "--engine-profile", "nemo")
    assert done.returncode == 2 and "torch, megatron, deepspeed" in done.stderr


def test_json_and_overrides_and_nodes(windlass):
    done = windlass("plan", EIGHT, "data.tokens=100B", "--nodes", "10", "--json")
    value = json.loads(done.stdout)
    assert value["nodes"] == 10 and value["plans"][0]["days"] > 0
    again = json.loads(windlass("plan", EIGHT, "data.tokens=200B", "--nodes", "10", "--json").stdout)
    assert again["plans"][0]["days"] == pytest.approx(2 * value["plans"][0]["days"])


def test_another_cluster(windlass):
    value = json.loads(
        windlass("plan", RECIPES / "viking_7b_lumi.toml", "--cluster", "leonardo-booster", "--json").stdout
    )
    assert value["cluster"] == "leonardo-booster" and value["device"] == "a100-64"


def test_why_in_words_and_json(windlass):
    done = windlass("plan", EIGHT, "--why", "shard=full,micro_batch=8")
    assert done.returncode == 0 and "does not fit" in done.stdout and "memory per device, GiB" in done.stdout
    value = json.loads(windlass("plan", EIGHT, "--why", "tensor=3", "--json").stdout)
    assert value["why"]["verdict"] == "illegal"


@pytest.mark.integration
def test_html(windlass, tmp_path):
    done = windlass("plan", EIGHT, "--html", tmp_path / "plan.html")
    assert done.returncode == 0 and "page:" in done.stdout
    assert "What fills the memory" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("argv", "code", "details"),
    [
        (["plan"], 2, "RECIPE"),
        (["plan", EIGHT, "--nodes", "0"], 2, "0"),
        (["plan", EIGHT, "--cluster", "snelius"], 2, "snelius"),
        (["plan", EIGHT, "layout.tensor=3"], 2, "2 or 4"),
        (["plan", EIGHT, "--why", "shards=full"], 2, "shards"),
        (["plan", RECIPES / "study_140b_lumi.toml", "--nodes", "1"], 3, "295.5 GiB of 63.9 GiB"),
        (["plan", "--calibrate"], 2, "--calibrate"),
        (["plan", "--calibrate", "absent.csv"], 4, "planner_accuracy.py"),
        (["budget", "--cluster", "snellius-h100"], 2, "--node-hours"),
        (["budget", "--cluster", "snellius-h100", "--days", "3", "--devices", "90"], 2, "88 or 92"),
        (["budget", "--cluster", "snellius-h100", "--days", "3", "--sizes", "7X"], 2, "X"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_without_traceback(windlass, argv, code, details):
    done = windlass(*argv)
    assert done.returncode == code, done.stderr
    assert details in done.stderr and "Traceback" not in done.stderr


def test_no_fit_with_json_prints_the_rejected_and_fails(windlass):
    done = windlass("plan", RECIPES / "study_140b_lumi.toml", "--nodes", "1", "--json")
    assert done.returncode == 3
    value = json.loads(done.stdout)
    assert value["plans"] == [] and value["rejected"]
    (change,) = value["changes"]
    assert change["values"] == {"nodes": 4} and change["memory_gib"] < 63.9


def test_an_awkward_batch_and_its_adjustment(windlass):
    done = windlass("plan", EIGHT, "--nodes", "22")
    assert done.returncode == 0 and "data.batch_tokens=5406720: " in done.stdout.splitlines()[0]
    value = json.loads(windlass("plan", EIGHT, "--nodes", "22", "--json").stdout)
    assert value["adjusted"] is None and value["plans"][0]["batch_tokens"] == 5_242_880
    change = value["changes"][0]
    assert change["values"] == {"data.batch_tokens": 5_406_720} and change["gain"] == pytest.approx(0.35, abs=0.1)
    adjusted = json.loads(windlass("plan", EIGHT, "--nodes", "22", "--json", "--adjust").stdout)
    assert "5,242,880 -> 5,406,720" in adjusted["adjusted"]
    assert adjusted["plans"][0]["batch_tokens"] == 5_406_720
    speeds = [result["plans"][0]["tokens_per_second"] for result in (value, adjusted)]
    assert speeds[1] / speeds[0] - 1 == pytest.approx(change["gain"], abs=0.001)


def test_budget_table_json_picture_and_page(windlass, tmp_path):
    argv = [
        "budget",
        "--cluster",
        "snellius-h100",
        "--days",
        "34",
        "--devices",
        "88",
        "--mfu",
        "0.317",
        "--tokens",
        "450B",
    ]
    done = windlass(*argv, "--png", tmp_path / "b.png", "--html", tmp_path / "b.html")
    assert done.returncode == 0, done.stderr
    assert "30B 34.0 days" in done.stdout and "expected loss" in done.stdout and "extrapolated" in done.stdout
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG") and "What fits" in (tmp_path / "b.html").read_text()
    value = json.loads(windlass(*argv, "--json").stdout)
    assert value["devices"] == 88 and value["pairs"][0]["fits"] in (True, False)


def test_plan_and_budget_never_load_torch():
    code = (
        "import sys, runpy; sys.argv = ['windlass', *sys.argv[1:]]\n"
        "try: runpy.run_module('windlass', run_name='__main__')\nexcept SystemExit as e: assert not e.code, e.code\n"
        "assert not {'torch', 'matplotlib', 'plotly'} & set(sys.modules)"
    )
    for argv in (["plan", EIGHT], ["budget", "--cluster", "lumi-g", "--days", "3", "--nodes", "8", "--mfu", "0.4"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


def test_planning_for_this_machine_takes_its_gpu(windlass, monkeypatch, tmp_path):
    monkeypatch.setattr("windlass.clusters.here.DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number in (1, 2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0" / "information").write_text("Model: \t\t NVIDIA H200\n")
    plans = json.loads(windlass("plan", RECIPES / "tiny_cpu.toml", "--json").stdout)
    assert (plans["device"], plans["devices"]) == ("h200", 2)
    assert "planned for the 2 x NVIDIA H200" in " ".join(windlass("plan", RECIPES / "tiny_cpu.toml").stdout.split())


def test_planning_for_this_machine_says_what_is_here(windlass, monkeypatch, tmp_path):
    monkeypatch.setattr("windlass.clusters.here.DRIVER", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 48)
    assert "this machine has 48 cores, the workstation file has 2" in windlass("plan", RECIPES / "tiny_cpu.toml").stdout


def test_an_invalid_layout_of_the_recipe_is_named_before_the_ranking(windlass):
    done = windlass("plan", EIGHT, "layout.pipeline=7", "--top", "2")
    first = done.stdout.splitlines()[0]
    assert "pipeline 7" in first and "80 devices" in first and "5 or 8" in first


def test_an_empty_question_is_asked_back(windlass):
    done = windlass("plan", EIGHT, "--why", "")
    assert done.returncode == 2 and "--why" in done.stderr
