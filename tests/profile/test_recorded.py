"""Traces of our own engine on a GPU (`benchmarks/gpu_profile.py`), stored as test data: what must hold of any real trace, and of these pairs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from windlass.profile.compare import compare_jobs, diff_operators
from windlass.profile.job_profile import profile_traces
from windlass.profile.view import comparison_sections, comparison_tables

DATA = Path(__file__).parent / "data"


@cache
def recorded(name: str, mode: str = "fixed"):
    path = DATA / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} has not been recorded")
    return profile_traces([path], mode, label=name)


@pytest.mark.parametrize("name", ["llama-eager", "llama-compiled", "retnet-parallel", "retnet-chunkwise"])
def test_a_recorded_trace_adds_up(name):
    job = recorded(name)
    rank = job.ranks[0]
    assert job.steps >= 1
    assert sum(job.categories_pct.values()) == pytest.approx(100)
    assert job.categories_us["Communication"] == 0
    assert 0 < job.sm_efficiency <= job.gpu_utilization <= 1
    assert 0 < job.occupancy_pct <= 100
    assert rank.tensor_cores.used_share > 0
    # every kernel was launched by something: device time of the operators is (nearly) that of the kernels and copies
    work = sum(k.total_us for k in rank.kernels)
    assert sum(o.self_device_us for o in rank.operators) >= 0.5 * work
    idle = rank.idle
    assert idle.host_wait_us + idle.kernel_wait_us + idle.other_us == pytest.approx(idle.idle_us)


@pytest.mark.parametrize("name", ["llama-eager", "retnet-parallel"])
def test_both_modes_agree_on_one_device_without_triton(name):
    fixed, tb = recorded(name), recorded(name, "tb")
    # The plugin takes the device's own annotation of a step for one more step: the span and its kernels agree, the mean does not.
    assert tb.step_us * tb.steps == pytest.approx(fixed.step_us * fixed.steps, rel=0.02)
    assert tb.categories_us["Kernel"] * tb.steps == pytest.approx(fixed.categories_us["Kernel"] * fixed.steps, rel=0.02)


def _triton(job):
    return sum(k.triton for k in job.ranks[0].kernels)


def test_compiling_fuses_kernels():
    eager, compiled = recorded("llama-eager"), recorded("llama-compiled")
    assert compiled.ranks[0].launches_per_step < eager.ranks[0].launches_per_step
    # The optimizer and the loss are compiled in both: blocks are what differs.
    assert _triton(compiled) > 2 * _triton(eager) > 0


def test_the_chunkwise_form_changes_the_products():
    parallel, chunkwise = recorded("retnet-parallel"), recorded("retnet-chunkwise")
    rows = diff_operators(parallel.ranks[0].operators, chunkwise.ranks[0].operators)
    assert any(r.name in ("aten::bmm", "aten::matmul", "aten::mul") and r.columns["calls"].delta > 0 for r in rows)


def test_the_mi250_trace_gives_the_plugins_numbers():
    job = recorded("mi250", "tb")
    names = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other")
    assert round(job.step_us) == 9288
    assert [round(job.categories_us[name]) for name in names] == [111, 38, 0, 0, 6699, 0, 1902, 538]
    assert round(job.gpu_utilization, 5) == 0.01194
    assert (job.sm_efficiency, job.occupancy_pct) == (None, None)  # ROCm writes neither


def test_time_by_group_is_the_time_of_the_kernels():
    for name in ("llama-eager", "mi250"):
        rank = recorded(name).ranks[0]
        assert sum(g.total_us for g in rank.kernel_groups) == pytest.approx(sum(k.total_us for k in rank.kernels))
        assert sum(g.share_pct for g in rank.kernel_groups) == pytest.approx(100)
    groups = {g.name: g for g in recorded("mi250").ranks[0].kernel_groups}
    # Two products of 30.2 us on matrix cores, of 110.9 us in 14 kernels.
    assert (groups["GEMM"].calls, round(groups["GEMM"].total_us, 1), groups["GEMM"].tensor_core_pct) == (2, 30.2, 100)
    assert round(groups["GEMM"].share_pct, 1) == 27.3
    llama = {g.name: g for g in recorded("llama-eager").ranks[0].kernel_groups}
    assert llama["attention"].tensor_core_pct > 80 and "collective" not in llama


def test_kernels_of_two_vendors_meet_in_their_groups():
    jobs = [recorded("llama-eager"), recorded("mi250")]
    comparison = compare_jobs([job.label for job in jobs], jobs, None, per_step=True)
    shared = {r.name for r in comparison.kernels if r.columns["calls"].baseline and r.columns["calls"].experiment}
    assert not shared  # not one name is common
    both = {r.name for r in comparison.kernel_groups if r.columns["calls"].baseline and r.columns["calls"].experiment}
    assert both == {"GEMM", "norm and element-wise", "copy", "reduction", "optimizer"}
    gemm = next(r for r in comparison.kernel_groups if r.name == "GEMM").columns
    nvidia = next(g for g in jobs[0].ranks[0].kernel_groups if g.name == "GEMM")
    assert gemm["total_us"].baseline == pytest.approx(nvidia.total_us / jobs[0].steps)
    assert gemm["share_pct"].baseline == pytest.approx(nvidia.share_pct)  # a share is not divided
    assert {row["group"] for row in comparison.to_json()["kernels"]} == both | {"attention", "other"}


def test_the_tables_of_a_comparison_list_kernels_by_group():
    jobs = [recorded("llama-eager"), recorded("mi250")]
    comparison = compare_jobs([job.label for job in jobs], jobs, None)
    tables = dict(comparison_tables(comparison, top=12))
    assert [title.split(":")[0] for title in tables] == [
        "Execution summary",
        "Scaling",
        "Operator diff",
        "Kernels by group",
        "Kernel diff",
    ]
    groups = [row[0].split(":")[0] for row in tables["Kernel diff"].rows]
    assert len(groups) == 12 and groups == sorted(groups, key=[r.name for r in comparison.kernel_groups].index)
    charts = [item.title for item in comparison_sections(comparison, 12)[0].items if hasattr(item, "series")]
    assert "Kernel time by group" in charts
