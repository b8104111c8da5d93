"""Time, bytes and bandwidth by collective, worked by hand."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.profile.job_profile import profile_traces
from windlass.profile.tables import bus_share, collective_kind
from windlass.profile.view import collectives_table, profile_sections

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def said(name: str, elements_in: int, elements_out: int, *, group: int = 4, dtype: str = "BFloat16"):
    return {
        "Collective name": name,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "Group size": group,
        "dtype": dtype,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GATHER, "all-gather"), (SCATTER, "reduce-scatter"), ("_reduce_scatter_base", "reduce-scatter"), ("allreduce", "all-reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all-reduce"), ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send and receive"),
        ("nccl:all_to_all", "all-to-all"), ("alltoallv", "all-to-all"), ("gloo:broadcast", "broadcast"), ("nccl:reduce", "reduce"), ("rccl_thing", "other"),
    ],
)  # fmt: skip
def test_kinds_by_name(name, kind):
    assert collective_kind(name) == kind


def test_an_all_reduce_moves_everything_twice():
    assert bus_share("all-reduce", 4) == 1.5 and bus_share("all-gather", 4) == 0.75 and bus_share("broadcast", 4) == 1.0


def test_half_behind_computation(overlapped, tmp_path):
    """40 us of all-reduce from 40 to 80, a product until 50: 30 us are bare. The trace has no sizes, and says so."""
    job = profile_traces([overlapped.write(tmp_path / "trace.json")])
    (row,) = job.collectives
    assert (row.name, row.calls, row.total_us, row.exposed_us, row.mean_us) == ("all-reduce", 1, 40, 30, 40)
    assert row.message_bytes is None and row.group is None and row.bus_gb_per_second is None
    assert row.exposed_us == job.communication.exposed_us
    assert collectives_table(job).rows[0][5:] == ("not in the trace",) * 3


def make(builder, path, *, seconds_factor: float = 1.0):
    """One step of 200 us: a gather of 4 M elements in all (8 MB) takes 60 us, two reduce-scatters of 2 M (4 MB each) 40 us each, half bare."""
    trace = builder()
    trace.step(1, 0, 200)
    op = trace.op("aten::mm", 0, 100)
    trace.launch("sm90_xmma_gemm_bf16", 2, 10, 120, external=op)
    trace.launch(
        GATHER, 4, 20, 20 + 60 * seconds_factor, external=90, stream=20, **said("_allgather_base", 1_000_000, 4_000_000)
    )
    for at in (100, 140):
        trace.launch(
            SCATTER, at - 10, at, at + 40, external=91, stream=20, **said("_reduce_scatter_base", 2_000_000, 500_000)
        )
    return trace.write(path)


def test_bytes_and_bus_bandwidth(builder, tmp_path):
    job = profile_traces([make(builder, tmp_path / "trace.json")])
    rows = {row.name: row for row in job.collectives}
    gather, scatter = rows["all-gather"], rows["reduce-scatter"]
    assert (gather.calls, gather.total_us, gather.exposed_us, gather.message_bytes, gather.group) == (1, 60, 0, 8e6, 4)
    assert gather.bus_gb_per_second == pytest.approx(8e6 * 0.75 / 60e-6 / 1e9)
    assert (scatter.calls, scatter.total_us, scatter.exposed_us, scatter.message_bytes) == (2, 80, 60, 8e6)
    assert scatter.bus_gb_per_second == pytest.approx(75.0)
    assert [r.name for r in job.collectives] == ["reduce-scatter", "all-gather"]


def test_ranks_are_averaged(builder, tmp_path):
    paths = [make(builder, tmp_path / f"rank{i}.json", seconds_factor=f) for i, f in enumerate((1.0, 0.5))]
    gather = next(r for r in profile_traces(paths).collectives if r.name == "all-gather")
    assert gather.total_us == 45 and gather.bus_gb_per_second == pytest.approx((100 + 200) / 2)


def test_a_range_tells_what_sends_and_receives_are_part_of(builder, tmp_path):
    trace = builder()
    trace.step(1, 0, 100)
    number = trace.annotation("nccl:all_to_all", 1, 9)
    trace.launch("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 3, 20, 50, external=number, stream=20)
    assert [r.name for r in profile_traces([trace.write(tmp_path / "t.json")]).collectives] == ["all-to-all"]


def test_without_a_device_the_ranges_of_the_library_count(builder, tmp_path):
    trace = builder(device=None)
    trace.step(1, 0, 100)
    trace.op("aten::mm", 0, 50)
    trace.annotation("gloo:all_reduce", 40, 70)
    (row,) = profile_traces([trace.write(tmp_path / "t.json")]).collectives
    assert (row.name, row.total_us, row.exposed_us) == ("all-reduce", 30, 20)


def test_no_collectives_no_section(builder, tmp_path):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch("gemm", 2, 10, 50)
    job = profile_traces([trace.write(tmp_path / "t.json")])
    assert job.collectives == [] and "Collectives" not in [s.title for s in profile_sections(job)]


@pytest.mark.parametrize(
    "bad", [{"dtype": "Strange"}, {"In msg nelems": "x", "Out msg nelems": None}, {"Group size": "all"}]
)
def test_odd_arguments_are_unknown_not_zero(builder, tmp_path, bad):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch(GATHER, 4, 20, 80, external=90, stream=20, **{**said("allgather", 1, 4), **bad})
    (row,) = profile_traces([trace.write(tmp_path / "t.json")]).collectives
    assert row.bus_gb_per_second is None


def test_the_command_prints_the_table_and_json_has_it(builder, tmp_path):
    path = make(builder, tmp_path / "trace.json")
    assert "reduce-scatter" in CliRunner().invoke(build(), ["profile", str(path)]).output
    result = json.loads(CliRunner().invoke(build(), ["profile", str(path), "--json"]).output)
    assert result["collectives"][0]["name"] == "reduce-scatter" and result["collectives"][0]["mean_us"] == 40
    assert result["ranks"][0]["collectives"] == result["collectives"]
