"""Several ranks as one set: means, spread, straggler and advice."""

from __future__ import annotations

import pytest

from windlass.errors import ProfileError
from windlass.profile import advice
from windlass.profile.job import profile_traces


def rank_trace(builder, folder, rank, compute, comm, *, named=True, gpu=True, **meta):
    """A step of 100 us: `compute` us of kernels, then `comm` us of all-reduce."""
    made = builder()
    if named:
        made.meta["distributedInfo"] = {"rank": rank, "world_size": 4, "backend": "nccl"}
    made.meta.update(meta)
    made.step(1, 0, 100)
    made.launch("gemm_h884", 1, 5, 5 + compute)
    if comm:
        made.launch("ncclKernel_AllReduce", 2, 5 + compute, 5 + compute + comm, stream=9)
    return made.write(folder / f"rank-{rank:05d}.json.gz")


def test_means_over_ranks_and_each_rank_in_the_contract(tmp_path, builder):
    paths = [rank_trace(builder, tmp_path, 1, 40, 50), rank_trace(builder, tmp_path, 0, 60, 30)]
    job = profile_traces(paths)
    value = job.to_json()
    assert {
        "steps",
        "step_us",
        "categories_us",
        "communication",
        "gpu_utilization",
        "sm_efficiency",
        "occupancy_pct",
        "ranks",
    } <= set(value)
    assert list(value["categories_us"]) == [
        "Kernel",
        "Memcpy",
        "Memset",
        "Communication",
        "Runtime",
        "DataLoader",
        "CPU Exec",
        "Other",
    ]
    assert {"total_us", "exposed_us", "overlap_us"} <= set(value["communication"])
    assert value["categories_us"]["Kernel"] == 50
    assert value["communication"]["total_us"] == 40
    assert [r["rank"] for r in value["ranks"]] == [0, 1]
    assert [r["categories_us"]["Kernel"] for r in value["ranks"]] == [60, 40]
    assert value["sm_efficiency"] is None


def test_the_straggler_is_the_rank_that_waits_least(tmp_path, builder):
    paths = [rank_trace(builder, tmp_path, r, compute, 90 - compute) for r, compute in enumerate((40, 40, 70, 42))]
    job = profile_traces(paths)
    assert job.spread.straggler == 2
    # busy = step - communication: 50, 50, 80, 52; median 51
    assert job.spread.excess_pct == pytest.approx((80 - 51) / 51 * 100)
    assert any(a.rule == "straggler" and "rank 2" in a.text for a in job.advice)


def test_ranks_come_from_metadata_then_name_then_order(tmp_path, builder):
    named = [rank_trace(builder, tmp_path, r, 50, 0, named=False) for r in (7, 3)]
    assert [r.rank for r in profile_traces(named).ranks] == [3, 7]
    plain = [p.rename(tmp_path / f"{chr(97 + i)}.json.gz") for i, p in enumerate(named)]
    assert [r.rank for r in profile_traces(plain).ranks] == [0, 1]


def test_one_rank_has_no_spread(tmp_path, builder):
    assert profile_traces([rank_trace(builder, tmp_path, 0, 50, 0)]).spread is None


def test_no_files_are_refused():
    with pytest.raises(ProfileError, match="no trace files"):
        profile_traces([])


def rules(job):
    return {a.rule: a for a in job.advice}


def test_advice_names_its_threshold(tmp_path, builder):
    job = profile_traces([rank_trace(builder, tmp_path, 0, 20, 30)])
    found = rules(job)
    assert found["communication"].value == pytest.approx(30)
    assert "more than 10 %" in found["communication"].text
    assert found["overlap"].value == 0
    assert "utilisation" not in found  # 50 % is the threshold
    assert "tensor cores" not in found


def test_advice_on_data_loading_utilisation_host_and_tensor_cores(tmp_path, builder):
    made = builder()
    made.step(1, 0, 100)
    made.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 30)
    op = made.op("aten::mm", 40, 60)
    made.launch("sgemm", 45, 50, 60, external=op)
    found = rules(profile_traces([made.write(tmp_path / "t.json")]))
    assert found["data loading"].value == pytest.approx(30)
    assert found["utilisation"].value == pytest.approx(0.1)
    assert found["host wait"].value == pytest.approx(45)
    assert "train in bf16" in found["tensor cores"].text


def test_advice_on_memory_data_parallel_and_backend(tmp_path, builder):
    made = builder()
    made.meta["deviceProperties"] = [{"id": 0, "name": "GPU", "totalGlobalMem": 100}]
    made.meta["distributedInfo"] = {"rank": 0, "world_size": 2, "backend": "gloo"}
    made.step(1, 0, 100)
    made.op("DataParallel.forward", 0, 50)
    made.launch("gemm", 1, 5, 90)
    made.device = 1
    made.launch("gemm", 3, 5, 90)
    made.events.append(
        {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Device Type": 1, "Device Id": 0, "Total Allocated": 95}}
    )
    found = rules(profile_traces([made.write(tmp_path / "t.json")]))
    assert found["memory"].value == pytest.approx(0.95)
    assert "DataParallel" in found
    assert "gloo" in found["backend"].text


def test_a_healthy_step_gets_no_advice(tmp_path, builder):
    made = builder()
    made.step(1, 0, 100)
    made.launch("sm90_xmma_gemm", 0, 3, 99)
    assert profile_traces([made.write(tmp_path / "t.json")]).advice == []
    assert advice.COMMUNICATION_PCT == 10
