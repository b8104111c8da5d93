"""Diffs and scaling, with the numbers of the Polish team's LUMI slides as golden input."""

from __future__ import annotations

import pytest

from windlass.profile.compare import ScalingInput, change_between, diff_kernels, diff_operators, mean_step, scaling_rows
from windlass.profile.job_profile import percent_of_step
from windlass.profile.tables import KernelRow, OperatorRow

# us per step: step, Kernel, Memcpy, Memset, Communication, CPU Exec, Other; Runtime and DataLoader are 0 everywhere.
SLIDES = {
    "AMD 1x1": (502_881, 448_876, 0, 0, 0, 45_121, 8_884),
    "NVIDIA 1x1": (747_560, 723_056, 415, 205, 0, 10_749, 13_136),
    "AMD 1x4": (564_770, 468_972, 0, 0, 1_046, 85_340, 9_412),
    "NVIDIA 1x4": (759_516, 733_888, 436, 201, 365, 11_786, 12_840),
    "AMD 2x8": (696_563, 452_455, 0, 0, 978, 56_189, 186_940),
}
SHARES = {
    "AMD 1x1": (89.26, 8.97, 1.77), "NVIDIA 1x1": (96.72, 1.44, 1.76), "AMD 1x4": (83.04, 15.11, 1.67),
    "NVIDIA 1x4": (96.63, 1.55, 1.69), "AMD 2x8": (64.96, 8.07, 26.84),
}  # fmt: skip


def point(label: str, **more) -> ScalingInput:
    step, kernel, memcpy, memset, comm, cpu, other = SLIDES[label]
    parts = {
        "Kernel": kernel,
        "Memcpy": memcpy,
        "Memset": memset,
        "Communication": comm,
        "Runtime": 0,
        "DataLoader": 0,
        "CPU Exec": cpu,
        "Other": other,
    }
    return ScalingInput(label=label, step_us=step, categories_us=parts, **more)


@pytest.mark.parametrize("label", SLIDES)
def test_the_slides_five_execution_tables(label):
    given = point(label)
    shares = percent_of_step(given.categories_us, given.step_us)
    assert tuple(round(shares[name], 2) for name in ("Kernel", "CPU Exec", "Other")) == SHARES[label]
    # One slide is a microsecond short of its own total; the rest add up exactly.
    assert sum(given.categories_us.values()) == pytest.approx(given.step_us, abs=1)


def test_the_slides_scaling_and_where_the_time_went():
    amd = scaling_rows([point("AMD 1x1", devices=1), point("AMD 1x4", devices=4), point("AMD 2x8", devices=16)])
    assert [round(r.efficiency * 100, 1) for r in amd] == [100.0, 89.0, 72.2]
    assert [r.main_loss for r in amd] == [None, "CPU Exec", "Other"]  # the price of the second node sits in "Other"
    assert amd[2].lost_to["Other"] == 186_940 - 8_884
    for row in amd:
        assert sum(row.lost_to.values()) == pytest.approx(row.lost_us, abs=1)
    nvidia = scaling_rows([point("NVIDIA 1x1"), point("NVIDIA 1x4")])
    assert round(nvidia[1].efficiency * 100, 1) == 98.4


def test_known_work_changes_the_efficiency():
    rows = scaling_rows([point("AMD 1x1", work_per_device=1000), point("AMD 1x4", work_per_device=500)])
    assert rows[1].efficiency == pytest.approx(0.5 * 502_881 / 564_770)


@pytest.mark.parametrize(
    ("baseline", "experiment", "delta", "percent"),
    [
        (2786, 3147, 361, 12.96), (1901, 1170, -731, -38.45),  # aten::as_strided: calls, host us
        (1517, 1517, 0, 0.00), (42825, 3727, -39098, -91.30),  # aten::empty_strided
        (1402, 1534, 132, 9.42), (213, 70, -143, -67.14),  # aten::result_type
        (1293, 934, -359, -27.76), (50375, 3124, -47251, -93.80),  # aten::empty
    ],
)  # fmt: skip
def test_the_slides_eight_diff_rows(baseline, experiment, delta, percent):
    change = change_between(baseline, experiment)
    assert (change.delta, change.percent) == (delta, percent)


def test_nothing_to_relate_to_is_not_available():
    assert [change_between(*pair).percent for pair in ((0, 5), (0, 0), (4, 0))] == [None, None, -100]


def row(name: str, calls: int, host: float, device: float = 0.0) -> OperatorRow:
    return OperatorRow(
        name=name, calls=calls, host_us=host, self_host_us=host, device_us=device, self_device_us=device, tensor_core_eligible=False, tensor_core_pct=None
    )  # fmt: skip


def test_a_missing_side_counts_as_zero():
    rows = {r.name: r.columns for r in diff_operators([row("gone", 3, 10)], [row("new", 2, 7)])}
    assert (rows["gone"]["calls"].delta, rows["gone"]["host"].percent) == (-3, -100)
    assert (rows["new"]["host"].delta, rows["new"]["host"].percent) == (7, None)


def test_rows_are_sorted_by_what_matters():
    host = diff_operators([row("a", 1, 10), row("b", 1, 10)], [row("a", 90, 11), row("b", 1, 20)])
    assert [r.name for r in host] == ["b", "a"]
    device = diff_operators([row("a", 1, 10, 5), row("b", 1, 10, 5)], [row("a", 1, 10, 50), row("b", 1, 900, 5)])
    assert [r.name for r in device] == ["a", "b"]
    assert [r.name for r in diff_operators([row("a", 1, 10), row("b", 9, 10)], [], sort="calls")] == ["b", "a"]
    assert [r.name for r in diff_operators([row("z", 1, 10), row("b", 9, 10)], [], sort="name")] == ["b", "z"]


def test_windows_of_different_length_compare_per_step():
    (mean,) = mean_step([row("a", 12, 60, 30)], 6)
    assert (mean.calls, mean.device_us) == (2, 5)


def test_kernels_are_compared_by_name():
    def kernel(name, total):
        return KernelRow(
            name=name, group="GEMM", calls=1, total_us=total, mean_us=total, min_us=total, max_us=total, share_pct=1, communication=False,
            tensor_cores=False, triton=False, blocks_per_sm=None, occupancy_pct=None,
        )  # fmt: skip

    rows = diff_kernels([kernel("a", 5), kernel("b", 100)], [kernel("a", 50)])
    assert [(r.name, r.columns["total_us"].delta) for r in rows] == [("b", -100), ("a", 45)]
