"""Rows of a table of published runs with one cell broken each: refused with the reason, or priced with a note."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
EXPERTS = {"experts": "8", "top_k": "2", "params_b": "", "arch": "mixtral"}
# Changed cells, and what the reason of the refusal holds; the row is Llama 3 8B on 8 H100.
REFUSED = {
    "experts of another size": ({"experts": "8", "top_k": "2"}, "params_b '8.03' contradicts the 47.5"),
    "more than all experts": ({"experts": "8", "top_k": "9"}, "top_k 9"),
    "experts that ep does not divide": ({**EXPERTS, "ep": "16"}, "ep 16 does not divide 8 experts"),
    "expert degrees": ({**EXPERTS, "ep": "8", "etp": "2"}, "ep 8 x etp 2 does not divide 8 devices"),
    "experts beside a state space": ({**EXPERTS, "arch": "hybrid-ssm-moe"}, "'hybrid-ssm-moe'"),
    "active parameters": ({"params_b": "46.7", "active_params_b": "12.9"}, "active_params_b 12.9 of 46.7"),
    "expert parallelism": ({"ep": "8"}, "ep 8"),
    "latent attention": ({"mla": "1"}, "mla"),
    "another architecture": ({"arch": "mamba"}, "'mamba'"),
    "a family with experts": ({"arch": "qwen3-moe"}, "'qwen3-moe'"),
    "more key heads than heads": ({"kv_heads": "64"}, "kv_heads 64"),
    "key heads that do not divide": ({"kv_heads": "5"}, "kv_heads 5 does not divide heads 32"),
    "a tenth of the layers": ({"layers": "3"}, "params_b '8.03'"),
    "another batch": ({"global_batch_tokens": "1000000000"}, "global_batch_tokens"),
    "degrees": ({"tp": "3"}, "tp 3"),
    "more stages than layers": ({"pp": "64", "gpus": "64"}, "pp 64"),
    "more chunks than layers": ({"pp": "2", "vp": "1000000000"}, "vp 1000000000 is more than 32 layers"),
    "a billion layers": ({**EXPERTS, "layers": "1e9"}, "layers 1000000000"),
    "a range of devices": ({"gpus": "8-16"}, "'8-16'"),
}
# Time needs a known device; memory does not.
WITHOUT_TIME = ({"gpu": "XPU-96GB"}, "XPU")
NOTED = {
    "dispatcher": ({**EXPERTS, "ep": "8"}, "dispatcher=alltoall"),
    "routing": ({**EXPERTS, "ep": "8"}, "force_balance=1"),
    "size of an expert": (EXPERTS, "expert_ffn=14336"),
    "label": ({"params_b": "12"}, "params_b=8.03 (not '12')"),
    "a dense family": ({"arch": "mistral"}, "arch=llama (not 'mistral')"),
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    with (TOP / "benchmarks/published/sample_runs.csv").open() as file:
        sample = next(csv.DictReader(file))
    broken = {**REFUSED, **NOTED, "device": WITHOUT_TIME, "good": ({}, "")}
    rows = [{**sample, "id": name, **cells} for name, (cells, _) in broken.items()]
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    argv = [TOP / "benchmarks/planner_accuracy.py", "--rows", folder / "rows.csv", "--rows-out", folder / "out.csv"]
    subprocess.run([sys.executable, *map(str, argv), "--json"], check=True, capture_output=True, cwd=TOP)
    with (folder / "out.csv").open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_is_not_a_dense_model_or_contradicts_itself_is_refused(scored, name):
    assert REFUSED[name][1] in scored[name]["refused"]
    assert scored[name]["predicted_tokens_per_second_per_device"] == scored[name]["predicted_memory_gib"] == ""


@pytest.mark.parametrize("name", NOTED)
def test_a_label_that_disagrees_a_little_is_named(scored, name):
    assert NOTED[name][1] in scored[name]["assumed"] and scored[name]["refused"] == ""


def test_an_unknown_device_has_memory_and_no_time(scored):
    row, good = scored["device"], scored["good"]
    assert row["refused"] and row["predicted_tokens_per_second_per_device"] == ""
    assert float(row["predicted_memory_gib"]) == pytest.approx(float(good["predicted_memory_gib"]), rel=0.05)
    assert good["refused"] == "" and float(good["predicted_tokens_per_second_per_device"]) > 0
