"""Several ranks as one set: means, spread, straggler and advice."""

from __future__ import annotations

import pytest

from windlass.errors import ProfileError
from windlass.profile.job_profile import profile_traces


def rank_trace(builder, folder, rank, compute, comm, *, named=True, gpu=True, **meta):
    """A step of 100 us: `compute` us of kernels, then `comm` us of all-reduce."""
    trace = builder()
    if named:
        trace.meta["distributedInfo"] = {"rank": rank, "world_size": 4, "backend": "nccl"}
    trace.meta.update(meta)
    trace.step(1, 0, 100)
    trace.launch("gemm_h884", 1, 5, 5 + compute)
    if comm:
        trace.launch("ncclKernel_AllReduce", 2, 5 + compute, 5 + compute + comm, stream=9)
    return trace.write(folder / f"rank-{rank:05d}.json.gz")


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
    with pytest.raises(ProfileError) as error:
        profile_traces([])
    assert error.value.code == "profile.no-traces-given"


def rules(job):
    return {a.rule: a for a in job.advice}


def test_advice_names_its_threshold(tmp_path, builder):
    job = profile_traces([rank_trace(builder, tmp_path, 0, 20, 30)])
    result = rules(job)
    assert result["communication"].value == pytest.approx(30)
    assert "more than 10 %" in result["communication"].text
    assert result["overlap"].value == 0
    assert "utilisation" not in result  # 50 % is the threshold
    assert "tensor cores" not in result


def test_advice_on_data_loading_utilisation_host_and_tensor_cores(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 30)
    op = trace.op("aten::mm", 40, 60)
    trace.launch("sgemm", 45, 50, 60, external=op)
    result = rules(profile_traces([trace.write(tmp_path / "t.json")]))
    assert result["data loading"].value == pytest.approx(30)
    assert result["utilisation"].value == pytest.approx(0.1)
    assert result["host wait"].value == pytest.approx(45)
    assert "train in bf16" in result["tensor cores"].text


def test_advice_on_memory_data_parallel_and_backend(tmp_path, builder):
    trace = builder()
    trace.meta["deviceProperties"] = [{"id": 0, "name": "GPU", "totalGlobalMem": 100}]
    trace.meta["distributedInfo"] = {"rank": 0, "world_size": 2, "backend": "gloo"}
    trace.step(1, 0, 100)
    trace.op("DataParallel.forward", 0, 50)
    trace.launch("gemm", 1, 5, 90)
    trace.device = 1
    trace.launch("gemm", 3, 5, 90)
    trace.events.append(
        {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Device Type": 1, "Device Id": 0, "Total Allocated": 95}}
    )
    result = rules(profile_traces([trace.write(tmp_path / "t.json")]))
    assert result["memory"].value == pytest.approx(0.95)
    assert "DataParallel" in result
    assert "gloo" in result["backend"].text


def test_a_healthy_step_gets_no_advice(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch("sm90_xmma_gemm", 0, 3, 99)
    assert profile_traces([trace.write(tmp_path / "t.json")]).advice == []


HOUR_US = 3600e6


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"rank": 0}, "rank-twice", ["rank 0"]),
        ({"world_size": 8}, "traces-of-different-jobs", ["4 and 8"]),
        ({"step": 30}, "traces-of-different-jobs", ["1 to 1", "30 to 30"]),
        ({"later_us": HOUR_US}, "traces-of-different-jobs", ["3,600 s"]),
    ],
)
def test_traces_of_different_jobs_are_refused_with_files_and_values(tmp_path, builder, change, code, values):
    def trace(name, *, rank, world_size=4, step=1, later_us=0.0):
        trace = builder()
        trace.meta["distributedInfo"] = {"rank": rank, "world_size": world_size, "backend": "nccl"}
        trace.meta["baseTimeNanoseconds"] = 1_790_000_000 * 10**9
        trace.step(step, later_us, later_us + 100)
        trace.launch("gemm", later_us + 1, later_us + 5, later_us + 50)
        return trace.write(tmp_path / f"{name}.json")

    assert len(profile_traces([trace("a", rank=0), trace("b", rank=1, later_us=2e6)]).ranks) == 2
    with pytest.raises(ProfileError) as error:
        profile_traces([trace("a", rank=0), trace("c", **{"rank": 1, **change})])
    assert error.value.code == f"profile.{code}"
    assert all(text in error.value.message for text in ("a.json", "c.json", *values))
    assert error.value.hint


def test_windows_a_few_seconds_apart_are_noted(tmp_path, builder):
    paths = []
    for rank, later_us in enumerate((0.0, 26e6)):
        trace = builder()
        trace.meta["baseTimeNanoseconds"] = 1_790_000_000 * 10**9
        trace.step(1, later_us, later_us + 100)
        trace.launch("gemm", later_us + 1, later_us + 5, later_us + 50)
        paths.append(trace.write(tmp_path / f"{rank}.json"))
    first, second = profile_traces(paths).ranks
    assert not [n for n in first.notes if "apart" in n]
    assert [n for n in second.notes if "26 s apart" in n and "0.json" in n and "1.json" in n]


def test_kernels_that_start_before_their_launch_are_noted_and_their_waits_are_unknown(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch("gemm", 1, 5, 20)
    trace.launch("gemm", 55, 40, 60)  # the device's clock is 15 us or more ahead
    trace.launch("gemm", 62, 80, 90)
    rank = profile_traces([trace.write(tmp_path / "t.json")]).ranks[0]
    assert [note.split()[0] for note in rank.notes if "15 us" in note] == ["1"]
    # gaps: 0-5 (launched at 1), 20-40 (unknown), 60-80 (launched at 62), 90-100 (nothing follows)
    assert (rank.idle.host_wait_us, rank.idle.kernel_wait_us, rank.idle.other_us) == (3, 22, 30)
