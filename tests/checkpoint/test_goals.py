"""The recorded measurements of saving, loading and evaluating meet their goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def measured(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_saving_and_loading_on_the_h200() -> None:
    found = measured("checkpoint_speed")
    assert found["device"] == "NVIDIA H200" and found["page_locked"] and found["cached_after_forgetting"] == 0.0
    assert max(found["stall_seconds"]) < 1.0 and found["stall_and_slowing_share"] < 0.02
    assert abs(found["size_error"]) < 0.03
    assert found["cold_load_share"] >= 0.6 and found["warm_load_share"] >= 0.6


def test_evaluation_keeps_up_with_the_training_code() -> None:
    found = measured("retnet_vs_llama")
    assert found["about"]["device"] == "NVIDIA H200"
    assert all(row["share"] >= 0.9 for row in found["evaluate"].values())


def test_retnet_decodes_with_the_same_state_at_every_context() -> None:
    rows = measured("retnet_vs_llama")["decode"]
    assert [row["context"] for row in rows["retnet"]] == [1024, 4096, 16_384, 65_536]
    assert len({row["state_bytes"] for row in rows["retnet"]}) == 1
    first, last = rows["retnet"][0], rows["retnet"][-1]
    assert last["token_seconds"] < 1.2 * first["token_seconds"] and last["peak_bytes"] < 1.1 * first["peak_bytes"]
    assert rows["llama"][-1]["state_bytes"] > 50 * rows["llama"][0]["state_bytes"]


def test_every_fault_of_the_long_suite_has_an_outcome() -> None:
    rows = measured("faults")["rows"]
    assert sum(row["times"] for row in rows if row["fault"].startswith("SIGKILL")) >= 25
    assert all(row["outcome"] and row["ok"] for row in rows)
