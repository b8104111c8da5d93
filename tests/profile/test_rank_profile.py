"""The execution summary in both modes, on steps worked out by hand."""

from __future__ import annotations

import pytest

from windlass.profile.event_names import Mode
from windlass.profile.job_profile import profile_rank
from windlass.profile.trace import read_trace


def profile(trace, tmp_path, mode=Mode.FIXED, **more):
    return profile_rank(read_trace(trace.write(tmp_path / "t.json")), mode, **more)


def rounded(result):
    return {name: round(value, 6) for name, value in result.categories_us.items() if value}


# Of each step of 100 us: GEMM 10-50, all-reduce 40-80, copy 85-90, calls 2-4 (and two hidden ones), operator 0-30.
def test_fixed_knows_communication_by_the_kernels_name(tmp_path, overlapped):
    result = profile(overlapped, tmp_path)
    assert (result.steps, result.step_us, result.step_numbers) == (2, 100, [5, 6])
    assert rounded(result) == {"Kernel": 40, "Memcpy": 5, "Communication": 30, "Runtime": 2, "CPU Exec": 8, "Other": 15}
    comm = result.communication
    assert (comm.total_us, comm.exposed_us, comm.overlap_us, comm.computation_us, comm.other_us) == (40, 30, 10, 40, 30)
    assert comm.overlap_pct == 25


def test_tb_counts_the_same_collective_as_computation(tmp_path, overlapped):
    result = profile(overlapped, tmp_path, Mode.TB)
    assert rounded(result) == {"Kernel": 70, "Memcpy": 5, "Runtime": 2, "CPU Exec": 8, "Other": 15}
    assert result.communication.total_us == 0
    assert result.communication.overlap_pct is None


def test_hidden_time_is_told_from_absent_time(tmp_path, overlapped):
    result = profile(overlapped, tmp_path)
    assert result.running_us["Runtime"] == 6  # two of the three calls are trace while the GEMM runs
    assert result.running_us["DataLoader"] == 0
    assert result.running_us["CPU Exec"] == 30


def test_device_use_of_the_worked_example(tmp_path, overlapped):
    result = profile(overlapped, tmp_path)
    assert result.gpu_utilization == pytest.approx(0.70)  # kernels, communication included, copies not
    assert result.sm_efficiency == pytest.approx(0.5 * 40 / 100)
    assert result.occupancy_pct == pytest.approx(40)
    assert result.tensor_cores.used_share == pytest.approx(1.0)  # of the computing kernels
    assert profile(overlapped, tmp_path, Mode.TB).tensor_cores.used_share == pytest.approx(0.5)


def test_idle_time_is_split_at_the_launch_of_what_ends_it(tmp_path, overlapped):
    idle = profile(overlapped, tmp_path).idle
    # holes: 0-10 (launched at 2), 80-85 twice (launched long before), 90-110 (launched at 102), 190-200 (nothing follows)
    assert (idle.idle_us, idle.host_wait_us, idle.kernel_wait_us, idle.other_us) == (
        25,
        (2 + 12) / 2,
        (8 + 5 + 8 + 5) / 2,
        5,
    )


def test_what_the_trace_does_not_carry_is_unknown_not_zero(tmp_path, builder):
    amd = builder(device=None)
    amd.step(1, 0, 100)
    amd.launch("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1", 5, 10, 60)
    result = profile(amd, tmp_path)
    assert (result.sm_efficiency, result.occupancy_pct) == (None, None)
    assert result.gpu_utilization == pytest.approx(0.5)  # the process id is the device
    assert result.tensor_cores.used_share == 1.0
    assert profile(amd, tmp_path, Mode.TB).gpu_utilization is None


def test_kernels_that_cover_the_step_do_not_make_200_per_cent(tmp_path, builder):
    full = builder()
    full.step(1, 0, 100)
    full.span("kernel", "gemm", 0, 100, pid=0, tid=7, device=0)
    full.span("gpu_memcpy", "Memcpy HtoD", 20, 30, pid=0, tid=8, device=0)
    full.op("aten::mm", 30, 70)
    assert rounded(profile(full, tmp_path)) == {"Kernel": 100}
    # The plugin takes "nothing left" for "not begun" and hands out the step twice.
    assert rounded(profile(full, tmp_path, Mode.TB)) == {"Kernel": 100, "Memcpy": 10, "CPU Exec": 40, "Other": 50}


def test_device_copies_of_step_marks_are_no_steps(tmp_path, builder):
    trace = builder()
    for n in (1, 2):
        trace.step(n, n * 100, n * 100 + 100)
        trace.span("gpu_user_annotation", f"ProfilerStep#{n}", n * 100 + 20, n * 100 + 110, pid=0, tid=7)
        trace.launch("gemm", n * 100 + 5, n * 100 + 20, n * 100 + 90)
    assert profile(trace, tmp_path).steps == 2
    doubled = profile(trace, tmp_path, Mode.TB)
    assert len(doubled.per_step_us) + doubled.steps_dropped == 4
    assert any("as separate steps" in note for note in doubled.notes)


def test_a_trace_of_the_device_alone_uses_its_marks(tmp_path, builder):
    trace = builder()
    for n in (1, 2):
        trace.span("gpu_user_annotation", f"ProfilerStep#{n}", n * 100, n * 100 + 100, pid=0, tid=7)
        trace.span("kernel", "gemm", n * 100 + 10, n * 100 + 60, pid=0, tid=7, device=0)
    result = profile(trace, tmp_path)
    assert (result.step_numbers, rounded(result)) == ([1, 2], {"Kernel": 50, "Other": 50})


def test_gpu_annotations_are_no_host_time(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch("gemm", 5, 10, 40)
    trace.span("gpu_user_annotation", "forward", 10, 90, pid=0, tid=7)
    assert rounded(profile(trace, tmp_path)).get("CPU Exec", 0) == 0
    assert rounded(profile(trace, tmp_path, Mode.TB))["CPU Exec"] == 50


def test_a_cpu_trace_shows_communication_by_its_host_ranges(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.op("aten::mm", 0, 40)
    trace.annotation("gloo:all_reduce", 30, 70, tid=4001)
    result = profile(trace, tmp_path)
    # 30-40 hides behind the operator: computation; 40-70 is exposed
    assert rounded(result) == {"Communication": 30, "CPU Exec": 40, "Other": 30}
    assert (result.communication.total_us, result.communication.exposed_us, result.communication.overlap_us) == (
        40,
        30,
        10,
    )
    assert (result.gpu_utilization, result.idle, result.tensor_cores.used_share) == (None, None, None)
    assert rounded(profile(trace, tmp_path, Mode.TB)) == {"Communication": 40, "CPU Exec": 30, "Other": 30}


def test_without_marks_the_window_is_one_step(tmp_path, builder):
    trace = builder()
    op = trace.op("aten::mm", 10, 60)
    trace.launch("gemm", 20, 70, 110, external=op)
    result = profile(trace, tmp_path)
    assert (result.steps, result.step_us) == (1, 100)
    assert any("marks no steps" in note for note in result.notes)


def test_steps_last_until_their_last_kernel(tmp_path, builder):
    trace = builder()
    for n, t in ((1, 0), (2, 100), (3, 200)):
        trace.step(n, t, t + 100)
        trace.launch("gemm", t + 10, t + 50, t + 130)
    # 0-130, 130-230, 230-330: each begins where the kernels of the one before ended
    assert profile(trace, tmp_path).per_step_us == [130, 100, 100]


def test_kernels_from_before_the_window_push_the_first_step(tmp_path, builder):
    trace = builder()
    trace.launch("early", -50, -20, 25)
    trace.step(1, 0, 100)
    trace.launch("gemm", 10, 30, 90)
    assert profile(trace, tmp_path).per_step_us == [75]


def test_a_last_step_that_the_window_cut_off_is_left_out(tmp_path, builder):
    trace = builder()
    for n, t in ((1, 0), (2, 100), (3, 200)):
        trace.step(n, t, t + 100)
        for i in range(10 if n < 3 else 7):
            trace.launch("gemm", t + i, t + 20 + i, t + 21 + i)
    result = profile(trace, tmp_path)
    assert (result.steps, result.steps_dropped, result.step_numbers) == (2, 1, [1, 2])
    assert any("not counted" in note for note in result.notes)


def test_triton_kernels_launched_by_the_driver_count_in_fixed_only(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch("triton_poi_fused_add_0", 10, 90, 140, runtime="cuda_driver")
    assert profile(trace, tmp_path).step_us == 140
    assert (
        profile(trace, tmp_path, Mode.TB).step_us == 100
    )  # the plugin did not know the call, so the step is not stretched
    assert profile(trace, tmp_path).kernels[0].triton


def test_data_loading_and_old_categories(tmp_path, builder):
    trace = builder(old=True)
    trace.step(1, 0, 100)
    trace.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 40)
    trace.launch("gemm", 50, 60, 100)
    for mode in Mode:
        assert rounded(profile(trace, tmp_path, mode)) == {"Kernel": 40, "Runtime": 2, "DataLoader": 40, "Other": 18}


def test_a_collective_with_another_name_is_known_by_its_operator(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    op = trace.op("c10d::allreduce_", 0, 20)
    trace.launch("my_transport_kernel", 5, 30, 50, external=op)
    trace.launch("my_transport_kernel", 60, 70, 90, external=op)  # the id lies: the call is not inside the operator
    assert rounded(profile(trace, tmp_path))["Communication"] == 20


def test_a_lookalike_is_no_collective(tmp_path, builder):
    trace = builder()
    trace.step(1, 0, 100)
    trace.launch("void at::native::hipcub_kernel<synccls>(float*)", 5, 10, 60)
    assert "Communication" not in rounded(profile(trace, tmp_path))


@pytest.mark.parametrize(
    ("name", "golden", "use"),
    [
        ("resnet50_v100_workers0", (177592, 98589, 1915, 89, 0, 2908, 59262, 13674, 1156), (0.55514, 0.54679, 49.128)),
        ("resnet50_v100_workers4", (141068, 99145, 3160, 98, 0, 10564, 1186, 22665, 4251), (0.70270, 0.69225, 48.910)),
        ("mi250_toy_rocm62", (9288, 111, 38, 0, 0, 6699, 0, 1902, 538), (0.01194, None, None)),
        ("a100_ddp_control", (77502, 61543, 3127, 95, 21, 2466, 70, 10076, 104), None),
    ],
)
def test_public_traces_give_the_plugins_numbers(shipped, name, golden, use):
    result = profile_rank(read_trace(shipped / f"{name}.json.gz"), Mode.TB)
    assert (round(result.step_us), *(round(v) for v in result.categories_us.values())) == golden
    if use:
        measured = (result.gpu_utilization, result.sm_efficiency, result.occupancy_pct)
        assert measured == tuple(None if u is None else pytest.approx(u, rel=2e-5, abs=6e-6) for u in use)


def test_public_trace_by_kernel_name(shipped):
    result = profile_rank(read_trace(shipped / "a100_ddp_control.json.gz"), Mode.FIXED)
    assert [round(result.categories_us[c]) for c in ("Kernel", "Memcpy", "Memset", "Communication")] == [
        46889,
        3254,
        196,
        14446,
    ]
    comm = result.communication
    assert [round(v) for v in (comm.computation_us, comm.total_us, comm.overlap_us, comm.other_us)] == [
        46889,
        27348,
        12674,
        15938,
    ]
    assert sum(result.categories_pct.values()) == pytest.approx(100)


def test_lightning_ranges_are_left_out_as_the_plugin_did(tmp_path, builder):
    trace = builder()
    trace.op("[pl][profile]run_training_batch", 0, 100)
    trace.op("[pl][module]torch.nn.Linear: net", 10, 60)
    trace.op("aten::mm", 20, 50)
    assert profile(trace, tmp_path, Mode.TB).step_us == 100
    trace.meta["Framework"] = "pytorch-lightning"
    result = profile(trace, tmp_path, Mode.TB)
    assert result.step_us == 30
    assert rounded(result) == {"CPU Exec": 30}
    assert [o.name for o in result.operators] == ["aten::mm"]


def test_a_single_empty_event_is_no_crash(tmp_path, builder):
    from windlass.profile.job_profile import profile_traces

    trace = builder()
    trace.op("aten::mm", 5, 5)
    job = profile_traces([trace.write(tmp_path / "t.json")])
    assert (job.step_us, job.advice, job.gpu_utilization) == (0, [], None)
    assert sum(job.categories_pct.values()) == 0
