"""Traces of our own engine on a GPU (`benchmarks/gpu_profile.py`), stored as test data: what must hold of any real trace, and of these pairs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from windlass.profile.compare import diff_operators
from windlass.profile.job_profile import profile_traces

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
