"""The tables of operators and kernels, nested and repeated."""

from __future__ import annotations

import pytest

from windlass.profile.event_names import Mode
from windlass.profile.job_profile import profile_rank
from windlass.profile.trace import read_trace


def tables(trace, tmp_path, mode=Mode.FIXED, **more):
    result = profile_rank(read_trace(trace.write(tmp_path / "t.json"), shapes=bool(more)), mode, **more)
    return {o.name: o for o in result.operators}, {k.name: k for k in result.kernels}


def test_calls_belong_to_the_operator_that_was_open(tmp_path, overlapped):
    mm = tables(overlapped, tmp_path)[0]["aten::mm"]
    assert (mm.calls, mm.host_us, mm.self_host_us) == (2, 60, 2 * (30 - 6))
    assert (mm.device_us, mm.self_device_us) == (2 * (40 + 40 + 5), 2 * (40 + 40 + 5))


def test_tb_goes_by_the_external_id(tmp_path, overlapped):
    mm = tables(overlapped, tmp_path, Mode.TB)[0]["aten::mm"]
    assert (mm.self_host_us, mm.device_us) == (2 * (30 - 4), 2 * 45)  # the all-reduce has another id
    assert mm.tensor_core_eligible


@pytest.fixture
def nested(builder):
    """linear 0-100 holds addmm 10-60, which launches a kernel of 200 us and holds a view 12-20."""
    trace = builder()
    trace.step(1, 0, 400)
    trace.op("aten::linear", 0, 100)
    addmm = trace.op("aten::addmm", 10, 60)
    trace.op("aten::view", 12, 20)
    trace.launch("volta_h884gemm", 30, 100, 300, external=addmm, call_us=5)
    return trace


@pytest.mark.parametrize("mode", list(Mode))
def test_self_time_leaves_children_and_calls_out(tmp_path, nested, mode):
    ops = tables(nested, tmp_path, mode)[0]
    assert (ops["aten::linear"].host_us, ops["aten::linear"].self_host_us) == (100, 50)
    assert (ops["aten::addmm"].host_us, ops["aten::addmm"].self_host_us) == (50, 50 - 8 - 5)
    assert (ops["aten::linear"].device_us, ops["aten::linear"].self_device_us) == (200, 0)
    assert (ops["aten::addmm"].device_us, ops["aten::addmm"].tensor_core_pct) == (200, 100)
    assert ops["aten::view"].device_us == 0
    assert ops["aten::view"].tensor_core_pct is None


def test_an_operator_that_only_calls_itself_is_one_call(tmp_path, builder):
    trace = builder()
    trace.op("aten::to", 0, 50)
    inner = trace.op("aten::to", 5, 40)
    trace.launch("copy", 10, 60, 80, external=inner)
    op = tables(trace, tmp_path)[0]["aten::to"]
    assert (op.calls, op.host_us, op.self_host_us, op.device_us) == (1, 50, 48, 20)


def test_recursion_counts_time_once_in_fixed_and_twice_in_tb(tmp_path, builder):
    trace = builder()
    trace.op("call", 0, 100)
    trace.op("other", 0, 10)
    trace.op("call", 20, 60)
    assert tables(trace, tmp_path)[0]["call"].host_us == 100
    assert tables(trace, tmp_path, Mode.TB)[0]["call"].host_us == 140
    assert tables(trace, tmp_path)[0]["call"].calls == 2


def test_threads_have_trees_of_their_own(tmp_path, builder):
    trace = builder()
    trace.op("outer", 0, 100)
    trace.op("elsewhere", 10, 50, tid=4001)
    ops = tables(trace, tmp_path)[0]
    assert ops["outer"].self_host_us == 100


def test_a_span_that_leaves_its_parent_cannot_be_placed(tmp_path, builder):
    trace = builder()
    trace.op("outer", 0, 100)
    trace.op("crossing", 50, 150)
    assert set(tables(trace, tmp_path)[0]) == {"outer"}


def test_shapes_split_a_row(tmp_path, builder):
    trace = builder()
    for i, dims in enumerate(([[8, 8]], [[16, 16]], [[8, 8]])):
        trace.op("aten::mm", i * 10, i * 10 + 5, **{"Input Dims": dims})
    result = profile_rank(read_trace(trace.write(tmp_path / "t.json"), shapes=True), by_shape=True)
    assert {(o.shape, o.calls) for o in result.operators} == {("[[8, 8]]", 2), ("[[16, 16]]", 1)}


def test_wrappers_are_not_listed(tmp_path, builder):
    trace = builder()
    trace.op("DistributedDataParallel.forward", 0, 100)
    trace.op("Optimizer.zero_grad#AdamW.zero_grad", 110, 120)
    trace.op("aten::mm", 10, 20)
    assert set(tables(trace, tmp_path)[0]) == {"aten::mm"}


def test_kernels_with_their_statistics(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch("gemm", 1, 10, 20, **{"blocks per SM": 2.0, "est. achieved occupancy %": 50})
    trace.launch("gemm", 2, 30, 60, **{"blocks per SM": 1.0, "est. achieved occupancy %": 100})
    trace.launch("ncclKernel_AllReduce", 3, 60, 100)
    kernels = tables(trace, tmp_path)[1]
    gemm = kernels["gemm"]
    assert (gemm.calls, gemm.total_us, gemm.mean_us, gemm.min_us, gemm.max_us, gemm.share_pct) == (
        2,
        40,
        20,
        10,
        30,
        50,
    )
    assert gemm.blocks_per_sm == pytest.approx((2 * 10 + 1 * 30) / 40)
    assert gemm.occupancy_pct == pytest.approx(87.5)
    assert kernels["ncclKernel_AllReduce"].communication
    assert kernels["ncclKernel_AllReduce"].occupancy_pct is None
