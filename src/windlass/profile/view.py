"""Profiles and comparisons as tables and charts, for the terminal, HTML pages, the report and the dashboard."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from windlass.energy.totals import print_energy_basis
from windlass.figures import Chart, DataTable, Item, Note, Section, bars, line
from windlass.profile.captures import find_target
from windlass.profile.compare import (
    Change,
    Comparison,
    KeyDifference,
    RowChange,
    RunPerformance,
    ScalingRow,
    change_between,
)
from windlass.profile.event_names import KERNEL_GROUPS, Mode, kernel_group
from windlass.profile.job_profile import JobProfile, profile_traces
from windlass.profile.tables import KernelGroupRow, KernelRow, OperatorRow
from windlass.profile.timeline import CATEGORIES
from windlass.runs import Run
from windlass.units import (
    counted,
    print_bytes,
    print_figure,
    print_joules,
    print_node_hours,
    print_rate,
    print_seconds,
    print_share,
    print_tokens,
    print_watts,
)

NOT_AVAILABLE = "not available"
NOT_MEASURED = "not measured"
NOT_IN_TRACE = "not in the trace"
_COMMUNICATION_ROWS = (
    ("Communication, total", "total_us"), ("Communication, exposed", "exposed_us"),
    ("Communication behind computation", "overlap_us"), ("Computation", "computation_us"), ("Neither", "other_us"),
)  # fmt: skip
_IDLE_ROWS = (
    ("Device idle", "idle_us"), ("  waiting for the host", "host_wait_us"),
    ("  launched, not started", "kernel_wait_us"), ("  unknown", "other_us"),
)  # fmt: skip


def us(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:,.0f}"


def pct(value: float | None, digits: int = 2) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f} %"


def share(value: float | None) -> str:
    return pct(None if value is None else value * 100)


def _device_shares(job: JobProfile) -> list[tuple[str, str]]:
    return [
        ("GPU utilisation", share(job.gpu_utilization)),
        ("Est. SM efficiency", share(job.sm_efficiency)),
        ("Est. achieved occupancy", pct(job.occupancy_pct)),
        ("Kernel time on tensor cores", share(job.tensor_core_share)),
    ]


def _row_count(top: int, count: int, rows: str) -> str:
    return f"the first {top} of {count} {rows}s" if count > top else counted(count, rows)


def _shorten(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


# -- one profile -----------------------------------------------------------------------------------------------------


def summary_table(job: JobProfile) -> DataTable:
    """The execution summary. The last column tells a category that is absent from one that other work hides."""
    hidden = {name: us(value) if value else "none in the trace" for name, value in job.running_us.items()}
    categories = [
        (name, us(job.categories_us[name]), pct(job.categories_pct[name]), hidden.get(name, "")) for name in CATEGORIES
    ]
    total_pct = sum(job.categories_us.values()) / job.step_us * 100 if job.step_us else 0
    return DataTable(
        ("category", "us per step", "share", "us incl. overlapped"),
        [("Average step", us(job.step_us), "100.00 %", ""), *categories],
        right=(1, 2, 3),
        caption=f"mean of {counted(job.steps, 'step')} and {counted(len(job.ranks), 'rank')}; mode {job.mode.value}; "
        f"the rows add up to {total_pct:.2f} %",
    )


def device_table(job: JobProfile) -> DataTable:
    overlap_pct = job.communication.overlap_pct
    idle = [r.idle for r in job.ranks if r.idle]
    rows = [
        *((title, us(getattr(job.communication, key))) for title, key in _COMMUNICATION_ROWS),
        ("Overlap of communication", "no communication" if overlap_pct is None else pct(overlap_pct, 1)),
        *_device_shares(job),
        *((title, us(sum(getattr(i, key) for i in idle) / len(idle))) for title, key in _IDLE_ROWS if idle),
        *([] if idle else [(_IDLE_ROWS[0][0], NOT_AVAILABLE)]),
    ]
    return DataTable(("measure", "us per step or share"), rows, right=(1,))


def collectives_table(job: JobProfile) -> DataTable:
    return DataTable(
        ("collective", "calls", "us", "mean us", "exposed us", "message", "ranks", "bus GB/s"),
        [
            (
                c.name,
                f"{c.calls:,.4g}",
                us(c.total_us),
                f"{c.mean_us:,.1f}",
                us(c.exposed_us),
                NOT_IN_TRACE if c.message_bytes is None else print_bytes(c.message_bytes),
                NOT_IN_TRACE if c.group is None else str(c.group),
                NOT_IN_TRACE if c.bus_gb_per_second is None else f"{c.bus_gb_per_second:,.3g}",
            )
            for c in job.collectives
        ],
        right=tuple(range(1, 8)),
        caption="per step, mean of the ranks; on a device a call also waits for the slowest rank, so the bus bandwidth "
        "(what each link must carry, as NCCL's tests count it) is a lower bound",
    )


def ranks_table(job: JobProfile) -> DataTable:
    spread = job.spread
    return DataTable(
        ("rank", "steps", "step us", "busy us", "comm us", "exposed us", "GPU util.", "device", "file"),
        [
            (
                r.rank,
                r.steps,
                us(r.step_us),
                us(r.busy_us),
                us(r.communication.total_us),
                us(r.communication.exposed_us),
                share(r.gpu_utilization),
                r.device_name or "unknown",
                Path(r.file).name,
            )
            for r in job.ranks
        ],
        right=tuple(range(7)),
        strong=[i for i, r in enumerate(job.ranks) if spread and r.rank == spread.straggler],
        caption=f"steps {us(spread.step_us_min)} to {us(spread.step_us_max)} us; "
        f"busiest: rank {spread.straggler}, {spread.excess_pct:+.1f} % compared with the median"
        if spread
        else "",
    )


def operators_table(rows: Sequence[OperatorRow], top: int) -> DataTable:
    """Columns without values (shapes, device times of a CPU trace) are left out."""
    shape: dict[str, Callable[[OperatorRow], str]] = {"shapes": lambda o: o.shape or ""}
    device: dict[str, Callable[[OperatorRow], str]] = {
        "device us": lambda o: us(o.device_us),
        "self device us": lambda o: us(o.self_device_us),
        "tensor cores": lambda o: "" if o.tensor_core_pct is None else f"{o.tensor_core_pct:.0f} %",
    }
    columns: dict[str, Callable[[OperatorRow], str]] = {
        "operator": lambda o: o.name,
        **(shape if any(o.shape for o in rows) else {}),
        "calls": lambda o: f"{o.calls:,}",
        "host us": lambda o: us(o.host_us),
        "self host us": lambda o: us(o.self_host_us),
        **(device if any(o.device_us for o in rows) else {}),
    }
    return DataTable(
        list(columns),
        [[show(o) for show in columns.values()] for o in rows[:top]],
        right=tuple(range(2 if "shapes" in columns else 1, len(columns))),
        caption=_row_count(top, len(rows), "operator"),
    )


def kernel_groups_table(rows: Sequence[KernelGroupRow]) -> DataTable:
    cells = [(g.name, f"{g.calls:,}", us(g.total_us), pct(g.share_pct), pct(g.tensor_core_pct, 0)) for g in rows]
    return DataTable(("group", "calls", "total us", "share", "tensor cores"), cells, right=(1, 2, 3, 4))


def kernels_table(rows: Sequence[KernelRow], top: int) -> DataTable:
    kinds = {"communication": "communication", "tensor cores": "tensor_cores", "triton": "triton"}
    return DataTable(
        ("kernel", "group", "calls", "total us", "mean us", "max us", "share", "kind"),
        [
            (
                _shorten(k.name, 70),
                k.group,
                f"{k.calls:,}",
                us(k.total_us),
                f"{k.mean_us:,.1f}",
                f"{k.max_us:,.1f}",
                pct(k.share_pct),
                ", ".join(kind for kind, key in kinds.items() if getattr(k, key)),
            )
            for k in rows[:top]
        ],
        right=tuple(range(2, 7)),
        caption=_row_count(top, len(rows), "kernel"),
    )


def step_bars(jobs: Sequence[JobProfile]) -> Chart:
    """Stacked bars: one per rank of a single profile, or one per profile."""
    labels, values = [j.label for j in jobs], [j.categories_us for j in jobs]
    if len(jobs) == 1 and len(jobs[0].ranks) > 1:
        labels, values = _rank_labels(jobs[0]), [r.categories_us for r in jobs[0].ranks]
    return Chart(
        title="Where an average step's time goes",
        series=tuple(
            # A category has the same colour on every page, whichever others are drawn.
            bars(name, labels, [v[name] / 1e3 for v in values], colour=place)
            for place, name in enumerate(CATEGORIES)
            if any(v[name] > 0 for v in values)
        ),
        y_title="ms per step",
        stacked=True,
        from_zero=True,
    )


def step_line(job: JobProfile) -> Chart:
    series = tuple(
        line(
            label,
            r.step_numbers if len(r.step_numbers) == r.steps else list(range(1, r.steps + 1)),
            [v / 1e3 for v in r.per_step_us],
        )
        for label, r in zip(_rank_labels(job), job.ranks, strict=True)
    )
    return Chart(title="Step by step", series=series, x_title="step", y_title="ms", from_zero=True, height=280)


def _rank_labels(job: JobProfile) -> list[str]:
    """Unique ones: several captures of one rank are numbered."""
    counts = Counter(r.rank for r in job.ranks)
    return [f"rank {r.rank}" + (f" ({i + 1})" if counts[r.rank] > 1 else "") for i, r in enumerate(job.ranks)]


def profile_tables(job: JobProfile, top: int) -> list[tuple[str, DataTable]]:
    first = job.ranks[0]
    tables = [
        (f"Execution summary of {job.label}", summary_table(job)),
        ("Communication and device", device_table(job)),
        ("Collectives", collectives_table(job) if job.collectives else None),
        ("Ranks", ranks_table(job) if len(job.ranks) > 1 else None),
        (f"Operators (rank {first.rank})", operators_table(first.operators, top)),
        (
            f"Kernels by group (rank {first.rank})",
            kernel_groups_table(first.kernel_groups) if first.kernels else None,
        ),
        (f"Kernels (rank {first.rank})", kernels_table(first.kernels, top) if first.kernels else None),
    ]
    return [(title, table) for title, table in tables if table is not None]


def profile_notes(job: JobProfile) -> list[str]:
    return list(dict.fromkeys(note for r in job.ranks for note in r.notes))


def profile_sections(job: JobProfile, *, top: int = 20) -> list[Section]:
    (title, summary), *others = profile_tables(job, top)
    items: tuple[Item, ...] = (
        step_bars([job]),
        *([step_line(job)] if job.steps > 1 else []),
        summary,
        *(Note(advice.text, "warning") for advice in job.advice),
        *(Note(text) for text in profile_notes(job)),
    )
    return [Section(title, items), *(Section(name, (table,)) for name, table in others)]


def run_sections(run: Run, *, mode: Mode = Mode.FIXED, top: int = 15, max_ranks: int = 8) -> list[Section]:
    """For the report and the dashboard: the newest window of a run; empty when it was never profiled.

    A page that is drawn repeatedly reads each trace once; of a large job it shows the first ranks.
    """
    target = find_target(run.path)
    if not target.traces:
        return []
    paths = target.traces[:max_ranks]
    stamps = tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths)
    sections = profile_sections(_cached_profile(stamps, mode, target.label), top=top)
    if len(paths) < len(target.traces):
        text = (
            f"{len(paths)} of {len(target.traces)} traced ranks are shown; `windlass profile {target.label}` reads all"
        )
        sections[0] = Section(sections[0].title, (*sections[0].items, Note(text)))
    return sections


@lru_cache(maxsize=4)
def _cached_profile(stamps: tuple[tuple[str, int, int], ...], mode: Mode, label: str) -> JobProfile:
    return profile_traces([path for path, _, _ in stamps], mode, label=label)


# -- several profiles ------------------------------------------------------------------------------------------------


def side_by_side(jobs: Sequence[JobProfile]) -> DataTable:
    """Each category of all profiles; for two profiles also the difference."""
    two = len(jobs) == 2
    measures: list[tuple[str, list[float]]] = [("Average step", [j.step_us for j in jobs])]
    measures += [(name, [j.categories_us[name] for j in jobs]) for name in CATEGORIES]
    measures += [(title, [getattr(j.communication, key) for j in jobs]) for title, key in _COMMUNICATION_ROWS[:3]]
    rows: list[list[str]] = []
    for title, values in measures:
        change = change_between(values[0], values[-1])
        percents = [value / job.step_us * 100 if job.step_us else 0.0 for value, job in zip(values, jobs, strict=True)]
        cells = [cell for value, percent in zip(values, percents, strict=True) for cell in (us(value), pct(percent))]
        rows.append([title, *cells, *([f"{change.delta:+,.0f}", print_percent(change)] if two else [])])
    rows += [
        [shares[0][0], *(cell for _, text in shares for cell in ("", text)), *(["", ""] if two else [])]
        for shares in zip(*(_device_shares(job) for job in jobs), strict=True)
    ]
    columns = ["category", *(cell for job in jobs for cell in (f"{job.label} us", "share"))]
    columns += ["delta us", "delta"] if two else []
    return DataTable(columns, rows, right=tuple(range(1, len(columns))))


def print_percent(change: Change) -> str:
    """As in the plugin: two decimals; without a baseline "new", or "N/A" when both sides are 0."""
    without_baseline = "new" if change.experiment else "N/A"
    return without_baseline if change.percent is None else f"{change.percent:.2f} %"


def diff_table(first_column: str, rows: Sequence[RowChange], columns: dict[str, str], top: int) -> DataTable:
    """`columns`: heading of each group of four columns -> key of the change."""

    def change_cells(change: Change) -> tuple[str, str, str, str]:
        return f"{change.baseline:,.0f}", f"{change.experiment:,.0f}", f"{change.delta:+,.0f}", print_percent(change)

    headings = [
        first_column,
        *(cell for heading in columns for cell in (f"{heading} base", "exp", "delta", f"{heading} %")),
    ]
    return DataTable(
        headings,
        [
            [_shorten(row.name, 70), *(cell for key in columns.values() for cell in change_cells(row.columns[key]))]
            for row in rows[:top]
        ],
        right=tuple(range(1, len(headings))),
        caption=_row_count(top, len(rows), first_column),
    )


def scaling_table(rows: Sequence[ScalingRow]) -> DataTable:
    caption = "efficiency: work per device and second, compared with the first row"
    if not all(r.work_per_device for r in rows):
        caption += "; the work per device is assumed to be equal (no run folder has it)"

    def largest_losses(row: ScalingRow) -> str:
        losses = sorted(row.lost_to.items(), key=lambda loss: -abs(loss[1]))[:4]
        return ", ".join(f"{category} {lost_us:+,.0f}" for category, lost_us in losses if abs(lost_us) >= 0.5)

    return DataTable(
        ("run", "devices", "step us", "efficiency", "us lost", "most to", "lost time by category (us)"),
        [
            (
                r.label,
                "unknown" if r.devices is None else r.devices,
                us(r.step_us),
                f"{r.efficiency * 100:.1f} %",
                f"{r.lost_us:+,.0f}",
                r.main_loss or "-",
                largest_losses(r),
            )
            for r in rows
        ],
        right=(1, 2, 3, 4),
        caption=caption,
    )


def kernel_group_diff_table(rows: Sequence[RowChange]) -> DataTable:
    cells = []
    for row in rows:
        calls, time_us, group_share = (row.columns[key] for key in ("calls", "total_us", "share_pct"))
        cells.append(
            (
                row.name,
                f"{calls.baseline:,.0f}",
                f"{calls.experiment:,.0f}",
                us(time_us.baseline),
                us(time_us.experiment),
                f"{time_us.delta:+,.0f}",
                print_percent(time_us),
                pct(group_share.baseline, 1),
                pct(group_share.experiment, 1),
            )
        )
    columns = ("group", "calls base", "exp", "us base", "exp", "delta", "us %", "share base", "exp")
    return DataTable(columns, cells, right=tuple(range(1, len(columns))))


def kernel_group_bars(jobs: Sequence[JobProfile]) -> Chart:
    """Stacked bars of the lowest rank of each profile; shares, because windows and machines differ."""
    shares = [{group.name: group.share_pct for group in job.ranks[0].kernel_groups} for job in jobs]
    return Chart(
        title="Kernel time by group",
        series=tuple(
            bars(name, [job.label for job in jobs], [side.get(name, 0.0) for side in shares], colour=place)
            for place, name in enumerate(KERNEL_GROUPS)
            if any(name in side for side in shares)
        ),
        y_title="% of the kernel time",
        stacked=True,
        from_zero=True,
    )


def differences_table(rows: Sequence[KeyDifference], labels: Sequence[str]) -> DataTable:
    cells = [(r.key, *("not set" if v is None else str(v) for v in r.values)) for r in rows]
    return DataTable(("key", *labels), cells, caption=counted(len(rows), "difference") if rows else "no differences")


def performance_table(rows: Sequence[RunPerformance]) -> DataTable:
    """The figures of the runs' reports, printed as there."""
    lines: dict[str, Callable[[RunPerformance], str]] = {
        "devices": lambda p: "unknown" if p.devices is None else str(p.devices),
        "tokens": lambda p: print_tokens(p.tokens),
        "throughput": lambda p: print_rate(p.tokens_per_second),
        "throughput per device": lambda p: print_rate(p.tokens_per_second_per_device),
        "step time": lambda p: print_seconds(p.step_seconds),
        "MFU": lambda p: print_share(p.mfu),
        "memory, highest device": lambda p: print_bytes(p.memory_bytes),
        "training loss": lambda p: NOT_MEASURED if p.final_loss is None else print_figure(p.final_loss, 4),
        "goodput": lambda p: print_share(p.goodput),
        "node-hours": lambda p: print_node_hours(p.node_hours),
        "energy": lambda p: print_energy_basis(p.energy),
        "energy per token": lambda p: print_joules(p.joules_per_token),
        "mean power": lambda p: print_watts(p.watts),
    }
    return DataTable(
        ("measure", *(p.label for p in rows)),
        [(title, *(show(p) for p in rows)) for title, show in lines.items()],
        right=tuple(range(1, len(rows) + 1)),
    )


def comparison_tables(comparison: Comparison, top: int) -> list[tuple[str, DataTable]]:
    labels, jobs, runs, operators = comparison.labels, comparison.jobs, comparison.runs, comparison.operators
    on_device = any(row.columns["device"].baseline or row.columns["device"].experiment for row in operators)
    operator_columns = {"calls": "calls", "host us": "host"}
    operator_columns |= {"device us": "device"} if on_device else {"self host us": "self_host"}
    group_order = [row.name for row in comparison.kernel_groups]
    kernels = sorted(comparison.kernels[:top], key=lambda row: group_order.index(kernel_group(row.name)))
    kernels = [replace(row, name=f"{kernel_group(row.name)}: {row.name}") for row in kernels]
    tables = [
        ("Execution summary", side_by_side(jobs) if jobs else None),
        ("Scaling", scaling_table(comparison.scaling) if jobs else None),
        (
            f"Operator diff: {labels[0]} -> {labels[-1]} (lowest rank of each)",
            diff_table("operator", operators, operator_columns, top) if operators else None,
        ),
        ("Kernels by group", kernel_group_diff_table(comparison.kernel_groups) if kernels else None),
        (
            "Kernel diff",
            diff_table("kernel", [*kernels, *comparison.kernels[top:]], {"calls": "calls", "us": "total_us"}, top)
            if kernels
            else None,
        ),
        ("Throughput, memory and energy", performance_table(runs.performance) if runs else None),
        ("Config", differences_table(runs.config, labels) if runs else None),
        ("Packages", differences_table(runs.packages, labels) if runs else None),
        ("Machine", differences_table(runs.machine, labels) if runs else None),
    ]
    return [(title, table) for title, table in tables if table is not None]


def loss_verdicts(comparison: Comparison) -> list[str]:
    """One sentence per run after the first: whether its loss curve is the same."""
    pairs = zip(comparison.labels[1:], comparison.runs.loss if comparison.runs else [], strict=False)
    return [f"loss of {comparison.labels[0]} and {label}: {loss.reason}" for label, loss in pairs]


def comparison_notes(comparison: Comparison) -> list[str]:
    """The notes of every profile, with its label."""
    return [f"{job.label}: {note}" for job in comparison.jobs for note in profile_notes(job)]


def comparison_sections(comparison: Comparison, top: int) -> list[Section]:
    sections = [Section(title, (table,)) for title, table in comparison_tables(comparison, top)]
    if comparison.jobs:
        scaling = comparison.scaling
        efficiency = bars("efficiency", [r.label for r in scaling], [r.efficiency * 100 for r in scaling])
        chart = Chart(
            title="Scaling efficiency", series=(efficiency,), y_title="% of the first run", from_zero=True, height=300
        )
        notes = [Note(text) for text in comparison_notes(comparison)]
        groups = [kernel_group_bars(comparison.jobs)] if any(job.ranks[0].kernels for job in comparison.jobs) else []
        sections.insert(0, Section("Step time", (step_bars(comparison.jobs), *groups, chart, *notes)))
    if comparison.runs:
        items: list[Item] = [Note(text) for text in loss_verdicts(comparison)]
        losses = zip(comparison.runs.loss, comparison.labels[1:], strict=True)
        if compared := [(loss, label) for loss, label in losses if loss.tokens]:
            first = compared[0][0]
            curves = [line(label, loss.tokens, loss.experiment) for loss, label in compared]
            series = (line(comparison.labels[0], first.tokens, first.baseline), *curves)
            title, y_title = "Loss, mean per bin of tokens", "nats per token"
            items.insert(0, Chart(title=title, series=series, x_title="tokens", y_title=y_title, height=320))
        sections.append(Section("Loss", tuple(items)))
    return sections
