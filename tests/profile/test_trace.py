"""What is kept of an event, in all the ways that PyTorch 1.8 to 2.13 and others write it."""

from __future__ import annotations

import json

import pytest

from windlass.errors import ProfileError
from windlass.profile.event_names import Mode
from windlass.profile.job_profile import profile_rank
from windlass.profile.timeline import find_launches
from windlass.profile.trace import MISSING, Kind, kind_of_event, read_trace


def saved(tmp_path, events, **meta):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**meta, "traceEvents": events}))
    return path


def event(**change):
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 10, "dur": 5, **change}


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("Operator", Kind.OPERATOR), ("cpu_op", Kind.OPERATOR), ("Runtime", Kind.RUNTIME), ("cuda_runtime", Kind.RUNTIME), ("xpu_runtime", Kind.RUNTIME),
        ("Kernel", Kind.KERNEL), ("gpu_memcpy", Kind.MEMCPY), ("Memset", Kind.MEMSET), ("cuda_driver", Kind.DRIVER), ("hip_runtime", Kind.DRIVER),
        ("gpu_user_annotation", Kind.GPU_ANNOTATION), ("ac2g", None), ("overhead", None), ("cuda_sync", None),
    ],
)  # fmt: skip
def test_categories_of_all_versions(category, kind):
    assert kind_of_event(category, 0) is kind


def test_the_old_autograd_profiler_writes_no_category(tmp_path):
    events = [
        {"ph": "X", "name": "mm", "pid": "CPU functions", "tid": 1, "ts": 1.0, "dur": 2.0, "args": {}},
        {"ph": "X", "name": "gemm", "pid": "CUDA functions", "tid": 0, "ts": 2.0, "dur": 4.0, "args": {}},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    assert read_trace(path).kind.tolist() == [Kind.OPERATOR, Kind.KERNEL]


def test_rows_stand_in_order_of_time(tmp_path):
    trace = read_trace(saved(tmp_path, [event(ts=30), event(ts=10, name="first"), event(ts=20)]))
    assert trace.start.tolist() == [10, 20, 30]
    assert trace.name_of(0) == "first"
    assert trace.end.tolist() == [15, 25, 35]


def test_text_stamps_and_ids_are_numbers_too(tmp_path):
    args = {"External id": "17", "correlation": "a-b"}
    trace = read_trace(
        saved(tmp_path, [event(ts="10.5", dur="2.25", args=args), event(ts=20, args={"correlation": "a-b"})])
    )
    assert (trace.start[0], trace.end[0], trace.external[0]) == (10.5, 12.75, 17)
    assert trace.correlation[0] == trace.correlation[1] != MISSING


def test_missing_durations_count_as_zero_and_are_reported(tmp_path):
    whole, cut = event(), event()
    del cut["dur"]
    timeless = event()
    del timeless["ts"]
    trace = read_trace(saved(tmp_path, [whole, cut, timeless]))
    assert trace.incomplete == 2
    assert (trace.end - trace.start).tolist() == [5, 0]


def test_nanosecond_stamps_become_microseconds(tmp_path):
    base = 1_735_632_360_000_000_000
    trace = read_trace(
        saved(
            tmp_path, [event(ts=base, dur=2_000_000), event(ts=base + 4_000_001, dur=1_000_000)], displayTimeUnit="ns"
        )
    )
    assert (trace.end - trace.start).tolist() == [2000, 1000]
    assert trace.start[1] - trace.start[0] == 4000.001  # a single nanosecond is kept


def test_fractions_of_a_microsecond_are_kept(tmp_path):
    trace = read_trace(
        saved(
            tmp_path,
            [event(ts=4203669604595.407, dur=340.024)],
            displayTimeUnit="ms",
            baseTimeNanoseconds=1735632360000000000,
        )
    )
    assert trace.end[0] - trace.start[0] == pytest.approx(340.024, abs=1e-3)


def test_begin_and_end_events_are_paired_by_thread(tmp_path):
    events = [
        {"ph": "B", "cat": "cpu_op", "name": "outer", "pid": 1, "tid": 1, "ts": 0}, {"ph": "B", "cat": "cpu_op", "name": "inner", "pid": 1, "tid": 1, "ts": 2},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 3}, {"ph": "E", "pid": 1, "tid": 1, "ts": 9}, {"ph": "E", "pid": 1, "tid": 2, "ts": 99},
    ]  # fmt: skip
    trace = read_trace(saved(tmp_path, events))
    assert [(trace.name_of(i), trace.end[i] - trace.start[i]) for i in range(2)] == [("outer", 9), ("inner", 1)]


def test_of_python_frames_only_modules_are_kept(tmp_path):
    frames = [event(cat="python_function", name=f"f{i}") for i in range(5)]
    module = event(cat="python_function", name="nn.Module: Linear_0", args={"Python module id": 0})
    trace = read_trace(saved(tmp_path, [event(), *frames, module]))
    assert trace.kind.tolist() == [Kind.OPERATOR, Kind.MODULE]


def test_memory_events_give_the_peak_of_each_device(tmp_path):
    def note(device, total, kind=1):
        args = {"Device Type": kind, "Device Id": device, "Total Allocated": total, "Bytes": 1}
        return {"ph": "i", "name": "[memory]", "ts": 1, "args": args}

    trace = read_trace(saved(tmp_path, [event(), note(0, 10), note(0, 30), note(0, 20), note(-1, 99, kind=0)]))
    assert trace.peak_bytes == {0: 30}


def test_rank_and_device_come_from_the_metadata(tmp_path, overlapped):
    trace = read_trace(overlapped.write(tmp_path / "t.json.gz"))
    info = [trace.distributed_info(*key) for key in (("rank", int), ("world_size", int), ("backend", str))]
    assert (info, trace.device_name) == ([2, 4, "nccl"], "Test GPU")


def test_odd_events_are_passed_over(tmp_path):
    trace = read_trace(
        saved(tmp_path, [event(), 7, None, {"ph": "X"}, event(cat=["x"]), event(args=[1]), event(name=None)])
    )
    assert len(trace.kind) == 3


@pytest.mark.parametrize(
    ("events", "code", "detail"),
    [([], "no-events", "t.json"), ([event(cat="gc"), event(cat="v8")], "not-pytorch", "categories: gc, v8")],
)
def test_a_trace_of_another_tool_is_refused(tmp_path, events, code, detail):
    with pytest.raises(ProfileError) as error:
        read_trace(saved(tmp_path, events))
    assert error.value.code == f"profile.trace-{code}"
    assert detail in error.value.message


@pytest.mark.parametrize(
    "number", [2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63), "18446744073709551615", 1.5e300]
)
def test_ids_of_any_size_still_pair_launch_and_kernel(tmp_path, number):
    ids = {"External id": number, "correlation": number}
    events = [
        event(args=ids), event(cat="cuda_runtime", name="cudaLaunchKernel", ts=11, dur=1, args=ids),
        event(cat="kernel", name="gemm", ts=13, dur=4, args={**ids, "device": 0}), event(cat="kernel", name="other", ts=18, dur=1, args={"correlation": 7}),
    ]  # fmt: skip
    trace = read_trace(saved(tmp_path, events))
    assert find_launches(trace, Mode.FIXED).call_of.tolist() == [0, MISSING]
    assert [profile_rank(trace, mode).kernels[0].name for mode in Mode] == ["gemm", "gemm"]


def test_times_that_are_not_finite_and_negative_durations_are_counted_and_never_summed(tmp_path):
    nan, infinite = float("nan"), float("inf")
    events = [
        event(),
        event(ts=nan),
        event(ts=infinite),
        event(ts=10**30),
        event(dur=nan),
        event(dur=-3),
        event(dur=-infinite),
    ]
    trace = read_trace(saved(tmp_path, events))
    assert (trace.not_finite, trace.negative) == (4, 2)
    assert (trace.end - trace.start).tolist() == [5, 0, 0, 0]
    notes = profile_rank(trace).notes
    assert [note.split()[0] for note in notes if "duration" in note] == ["4", "2"]


def test_odd_process_and_step_numbers_are_not_numbers(tmp_path):
    events = [
        event(name="ProfilerStep#²", cat="user_annotation", ts=0, dur=100), event(name="ProfilerStep#" + "9" * 5000, cat="user_annotation", ts=100, dur=50),
        event(cat="kernel", name="gemm", pid="²", ts=13, dur=4), event(cat="kernel", name="gemm", pid="9" * 5000, ts=23, dur=4),
    ]  # fmt: skip
    trace = read_trace(saved(tmp_path, events, deviceProperties=[{"id": [], "totalGlobalMem": "x"}]))
    assert profile_rank(trace).step_numbers == [MISSING, MISSING]
