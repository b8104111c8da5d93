"""How are profiles shown? As plain tables and charts, the same for the terminal, `--html`, the report and the dashboard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from windlass.figures import Chart, DataTable, Item, Note, Section, bars, line
from windlass.profile.compare import Change, KernelChange, OperatorChange, ScalingRow
from windlass.profile.find import find_target
from windlass.profile.job import JobProfile, profile_traces
from windlass.profile.operators import KernelRow, OperatorRow
from windlass.profile.roles import CATEGORIES, Mode
from windlass.profile.runs import Difference, LossTest, Performance
from windlass.runs import Run
from windlass.units import print_bytes, print_joules, print_tokens

NOT_AVAILABLE = "not available on this trace"
NOT_MEASURED = "not measured"
_COMMUNICATION_ROWS = (
    ("Communication, total", "total_us"), ("Communication, exposed", "exposed_us"), ("Communication behind computation", "overlap_us"),
    ("Computation", "computation_us"), ("Neither", "other_us"),
)  # fmt: skip

_IDLE_ROWS = (
    ("Device idle", "idle_us"), ("  waiting for the host", "host_wait_us"),
    ("  launched, not started", "kernel_wait_us"), ("  unknown", "other_us"),
)  # fmt: skip
_SHARES = (
    ("GPU utilisation", "gpu_utilization"),
    ("Est. SM efficiency", "sm_efficiency"),
    ("Kernel time on tensor cores", "tensor_core_share"),
)

Measure = Callable[[JobProfile], float]
T = TypeVar("T")


def us(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:,.0f}"


def pct(value: float | None, digits: int = 2) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f} %"


def share(value: float | None) -> str:
    return pct(None if value is None else value * 100)


# -- one profile --------------------------------------------------------------------------------------------------------


def summary_table(job: JobProfile) -> DataTable:
    """The execution summary. "incl. hidden" tells a category that is absent from one that other work covers."""
    pcts, running = job.categories_pct, job.running_us
    rows: list[Sequence[object]] = [("Average step", us(job.step_us), "100.00 %", "")]
    rows += [(name, us(job.categories_us[name]), pct(pcts[name]), _hidden(running.get(name))) for name in CATEGORIES]
    total = sum(job.categories_us.values())
    caption = f"mean of {job.steps} steps and {len(job.ranks)} ranks; mode {job.mode.value}; the rows add up to {total / job.step_us * 100 if job.step_us else 0:.2f} %"
    return DataTable(("category", "us per step", "share", "us incl. hidden"), rows, right=(1, 2, 3), caption=caption)


def _hidden(value: float | None) -> str:
    return "" if value is None else "none in the trace" if value == 0 else us(value)


def device_table(job: JobProfile) -> DataTable:
    communication = job.communication
    idle = [r.idle for r in job.ranks if r.idle]
    rows: list[Sequence[object]] = [(name, us(getattr(communication, key))) for name, key in _COMMUNICATION_ROWS]
    rows.append(
        (
            "Overlap of communication",
            "no communication" if communication.overlap_pct is None else pct(communication.overlap_pct, 1),
        )
    )
    rows += [
        ("GPU utilisation", share(job.gpu_utilization)),
        ("Est. SM efficiency", share(job.sm_efficiency)),
        ("Est. achieved occupancy", pct(job.occupancy_pct)),
        ("Kernel time on tensor cores", share(job.tensor_core_share)),
    ]
    if not idle:
        rows.append(("Device idle", NOT_AVAILABLE))
    for name, key in _IDLE_ROWS if idle else ():
        rows.append((name, us(sum(getattr(i, key) for i in idle) / len(idle))))
    return DataTable(("measure", "us per step or share"), rows, right=(1,))


def collectives_table(job: JobProfile) -> DataTable:
    """Empty where nobody talked."""
    rows = [
        (c.name, f"{c.calls:,.4g}", us(c.total_us), f"{c.mean_us:,.1f}", us(c.exposed_us), _known(c.message_bytes, print_bytes), _known(c.group, str),
         _known(c.bus_gb_per_second, lambda v: f"{v:,.3g}"))
        for c in job.collectives
    ]  # fmt: skip
    caption = (
        "per step, mean of the ranks; a call on a device also waits there for the slowest rank, so the bus bandwidth (what each link must carry, as NCCL's tests "
        "count it) is a lower bound"
        if rows
        else "no collectives in the trace"
    )
    return DataTable(
        ("collective", "calls", "us", "mean us", "exposed us", "message", "ranks", "bus GB/s"),
        rows,
        right=(1, 2, 3, 4, 5, 6, 7),
        caption=caption,
    )


def _known(value: T | None, show: Callable[[T], str]) -> str:
    return "not in the trace" if value is None else show(value)


def ranks_table(job: JobProfile) -> DataTable:
    rows = [
        (r.rank, r.steps, us(r.step_us), us(r.busy_us), us(r.communication.total_us), us(r.communication.exposed_us), share(r.gpu_utilization), r.device_name or "unknown", Path(r.file).name)
        for r in job.ranks
    ]  # fmt: skip
    slow = [i for i, r in enumerate(job.ranks) if job.spread and r.rank == job.spread.straggler]
    caption = ""
    if job.spread:
        caption = f"steps {us(job.spread.step_us_min)} to {us(job.spread.step_us_max)} us; busiest: rank {job.spread.straggler}, {job.spread.excess_pct:+.1f} % against the median"
    columns = ("rank", "steps", "step us", "busy us", "comm us", "exposed us", "GPU util.", "device", "file")
    return DataTable(columns, rows, right=(0, 1, 2, 3, 4, 5, 6), caption=caption, strong=slow)


def operators_table(rows: Sequence[OperatorRow], top: int) -> DataTable:
    """Columns that hold nothing (shapes, device times of a CPU trace) are left out."""
    shaped, device = any(o.shape for o in rows), any(o.device_us for o in rows)
    columns = ["operator", *(["shapes"] if shaped else []), "calls", "host us", "self host us"]
    columns += ["device us", "self device us", "tensor cores"] if device else []
    cells = []
    for o in rows[:top]:
        cell = [o.name, *([o.shape or ""] if shaped else []), f"{o.calls:,}", us(o.host_us), us(o.self_host_us)]
        used = "" if o.tensor_core_pct is None else f"{o.tensor_core_pct:.0f} %"
        cells.append([*cell, *([us(o.device_us), us(o.self_device_us), used] if device else [])])
    return DataTable(
        columns, cells, right=tuple(range(2 if shaped else 1, len(columns))), caption=_of(top, len(rows), "operators")
    )


def kernels_table(rows: Sequence[KernelRow], top: int) -> DataTable:
    cells = [
        (short(k.name), f"{k.calls:,}", us(k.total_us), f"{k.mean_us:,.1f}", f"{k.max_us:,.1f}", pct(k.share_pct), _marks(k))
        for k in rows[:top]
    ]  # fmt: skip
    return DataTable(
        ("kernel", "calls", "total us", "mean us", "max us", "share", "kind"),
        cells,
        right=(1, 2, 3, 4, 5),
        caption=_of(top, len(rows), "kernels"),
    )


def _marks(kernel: KernelRow) -> str:
    marks = (
        "communication" if kernel.communication else "",
        "tensor cores" if kernel.tensor_cores else "",
        "triton" if kernel.triton else "",
    )
    return ", ".join(m for m in marks if m)


def short(name: str, length: int = 90) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _of(top: int, count: int, what: str) -> str:
    return f"the first {top} of {count} {what}" if count > top else f"{count} {what}"


def step_bars(jobs: Sequence[JobProfile]) -> Chart:
    """Stacked bars: one per rank of one profile, or one per profile."""
    if len(jobs) == 1 and len(jobs[0].ranks) > 1:
        labels = rank_labels(jobs[0])
        values = [r.categories_us for r in jobs[0].ranks]
    else:
        labels, values = [j.label for j in jobs], [j.categories_us for j in jobs]
    # A category keeps its colour from page to page, whichever others are drawn.
    series = tuple(
        bars(name, labels, [v[name] / 1e3 for v in values], colour=place)
        for place, name in enumerate(CATEGORIES)
        if any(v[name] > 0 for v in values)
    )
    return Chart(
        title="Where an average step's time goes", series=series, y_title="ms per step", stacked=True, from_zero=True
    )


def rank_labels(job: JobProfile) -> list[str]:
    """Unique ones: several captures of one rank are told apart by their place."""
    twice = {rank for rank, count in Counter(r.rank for r in job.ranks).items() if count > 1}
    return [f"rank {r.rank}" + (f" ({i + 1})" if r.rank in twice else "") for i, r in enumerate(job.ranks)]


def step_line(job: JobProfile) -> Chart:
    series = tuple(
        line(label, list(r.step_numbers) if len(r.step_numbers) == r.steps else list(range(1, r.steps + 1)), [v / 1e3 for v in r.per_step_us])
        for label, r in zip(rank_labels(job), job.ranks, strict=True)
    )  # fmt: skip
    return Chart(title="Step by step", series=series, x_title="step", y_title="ms", from_zero=True, height=280)


def sections(job: JobProfile, *, top: int = 20) -> list[Section]:
    """A whole page about one profile."""
    items: list[Item] = [step_bars([job]), summary_table(job)]
    if job.steps > 1:
        items.insert(1, step_line(job))
    items += [Note(a.text, "warning") for a in job.advice]
    items += [Note(text) for text in dict.fromkeys(n for r in job.ranks for n in r.notes)]
    first = job.ranks[0]
    made = [
        Section(f"Execution summary of {job.label}", tuple(items)),
        Section("Communication and device", (device_table(job),)),
    ]
    if job.collectives:
        made.append(Section("Collectives", (collectives_table(job),)))
    if len(job.ranks) > 1:
        made.append(Section("Ranks", (ranks_table(job),)))
    made.append(Section(f"Operators (rank {first.rank})", (operators_table(first.operators, top),)))
    if first.kernels:
        made.append(Section(f"Kernels (rank {first.rank})", (kernels_table(first.kernels, top),)))
    return made


def run_sections(run: Run, *, mode: Mode = Mode.FIXED, top: int = 15, max_ranks: int = 8) -> list[Section]:
    """For the report and the dashboard: the newest window of a run; nothing when it was never profiled.

    A page that is drawn again and again reads each trace once; of a large job it shows the first ranks.
    """
    target = find_target(run.path)
    if not target.traces:
        return []
    chosen = target.traces[:max_ranks]
    stamps = tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in chosen)
    made = sections(_profiled(stamps, mode, target.label), top=top)
    if len(chosen) < len(target.traces):
        left = Note(
            f"{len(chosen)} of {len(target.traces)} traced ranks are shown; `windlass profile {target.label}` reads all"
        )
        made[0] = Section(made[0].title, (*made[0].items, left))
    return made


@lru_cache(maxsize=4)
def _profiled(stamps: tuple[tuple[str, int, int], ...], mode: Mode, label: str) -> JobProfile:
    return profile_traces([path for path, _, _ in stamps], mode, label=label)


# -- several profiles -----------------------------------------------------------------------------------------------------


def side_by_side(jobs: Sequence[JobProfile]) -> DataTable:
    """Each category on all sides; with two, also delta and per cent."""
    two = len(jobs) == 2
    columns = ["category"]
    for job in jobs:
        columns += [f"{job.label} us", "share"]
    measures: list[tuple[str, Measure]] = [("Average step", lambda j: j.step_us)]
    measures += [(name, lambda j, n=name: j.categories_us[n]) for name in CATEGORIES]  # type: ignore[misc]
    measures += [(title, lambda j, k=key: float(getattr(j.communication, k))) for title, key in _COMMUNICATION_ROWS[:3]]  # type: ignore[misc]
    rows: list[list[object]] = [
        [title, *_pairs(jobs, value), *(_delta(jobs, value) if two else ())] for title, value in measures
    ]
    for title, key in _SHARES:
        rows.append([title, *[cell for j in jobs for cell in ("", share(getattr(j, key)))], *(("", "") if two else ())])
    rows.append(
        [
            "Est. achieved occupancy",
            *[cell for j in jobs for cell in ("", pct(j.occupancy_pct))],
            *(("", "") if two else ()),
        ]
    )
    columns += ["delta us", "delta"] if two else []
    return DataTable(columns, rows, right=tuple(range(1, len(columns))))


def _pairs(jobs: Sequence[JobProfile], value: Measure) -> list[object]:
    return [cell for j in jobs for cell in (us(value(j)), pct(value(j) / j.step_us * 100 if j.step_us else 0.0))]


def _delta(jobs: Sequence[JobProfile], value: Measure) -> tuple[str, str]:
    change = Change(value(jobs[0]), value(jobs[1]))
    return f"{change.delta:+,.0f}", percent(change)


def percent(change: Change) -> str:
    """As in the plugin: two decimals; what has no baseline is new, or N/A when both sides are 0."""
    if change.percent is None:
        return "new" if change.experiment else "N/A"
    return f"{change.percent:.2f} %"


def operator_diff_table(rows: Sequence[OperatorChange], top: int, *, device: bool) -> DataTable:
    groups = (
        ("calls", "calls"),
        ("host us", "host"),
        *((("device us", "device"),) if device else (("self host us", "self_host"),)),
    )
    columns = ["operator"]
    for title, _ in groups:
        columns += [f"{title} base", "exp", "delta", "%"]
    cells = [[r.name, *(cell for _, key in groups for cell in _change(getattr(r, key)))] for r in rows[:top]]
    return DataTable(columns, cells, right=tuple(range(1, len(columns))), caption=_of(top, len(rows), "operators"))


def kernel_diff_table(rows: Sequence[KernelChange], top: int) -> DataTable:
    cells = [[short(r.name, 70), *_change(r.calls), *_change(r.total)] for r in rows[:top]]
    columns = ["kernel", "calls base", "exp", "delta", "%", "us base", "exp", "delta", "%"]
    return DataTable(columns, cells, right=tuple(range(1, len(columns))), caption=_of(top, len(rows), "kernels"))


def _change(change: Change) -> tuple[str, str, str, str]:
    return f"{change.baseline:,.0f}", f"{change.experiment:,.0f}", f"{change.delta:+,.0f}", percent(change)


def scaling_table(rows: Sequence[ScalingRow]) -> DataTable:
    cells = [
        (r.label, r.devices if r.devices is not None else "unknown", us(r.step_us), f"{r.efficiency * 100:.1f} %", f"{r.lost_us:+,.0f}", r.main_loss or "-", _losses(r))
        for r in rows
    ]  # fmt: skip
    known = all(r.work_per_device for r in rows)
    caption = "efficiency: work per device and second, against the first row" + (
        "" if known else "; the work per device is taken as equal (no run folder says)"
    )
    return DataTable(
        ("run", "devices", "step us", "efficiency", "us lost", "most to", "lost time by category (us)"),
        cells,
        right=(1, 2, 3, 4),
        caption=caption,
    )


def _losses(row: ScalingRow) -> str:
    parts = sorted(((v, k) for k, v in row.lost_to.items() if abs(v) >= 0.5), key=lambda p: -abs(p[0]))
    return ", ".join(f"{name} {value:+,.0f}" for value, name in parts[:4])


def scaling_chart(rows: Sequence[ScalingRow]) -> Chart:
    return Chart(
        title="Scaling efficiency", series=(bars("efficiency", [r.label for r in rows], [r.efficiency * 100 for r in rows]),),
        y_title="% of the first run", from_zero=True, height=300,
    )  # fmt: skip


def differences_table(rows: Sequence[Difference], labels: Sequence[str]) -> DataTable:
    cells = [(r.key, *("not set" if v is None else str(v) for v in r.values)) for r in rows]
    return DataTable(("key", *labels), cells, caption=f"{len(rows)} differences" if rows else "no differences")


def performance_table(rows: Sequence[Performance]) -> DataTable:
    def number(value: float | None, digits: int = 0) -> str:
        return NOT_MEASURED if value is None else f"{value:,.{digits}f}"

    lines = [
        ("devices", [str(p.devices) if p.devices is not None else "unknown" for p in rows]),
        ("tokens", [print_tokens(p.tokens) for p in rows]),
        ("tokens/s", [number(p.tokens_per_second) for p in rows]),
        ("tokens/s per device", [number(p.tokens_per_second_per_device) for p in rows]),
        ("step seconds", [number(p.step_seconds, 4) for p in rows]),
        ("MFU", [NOT_MEASURED if p.mfu is None else f"{p.mfu * 100:.2f} %" for p in rows]),
        ("memory peak", [print_bytes(p.memory_bytes) for p in rows]),
        ("energy", [print_joules(p.energy_joules) for p in rows]),
        ("J per token", [number(p.joules_per_token, 4) for p in rows]),
        ("mean power, W", [number(p.watts) for p in rows]),
        ("last loss", [number(p.final_loss, 4) for p in rows]),
    ]
    return DataTable(
        ("measure", *(p.label for p in rows)),
        [(name, *cells) for name, cells in lines],
        right=tuple(range(1, len(rows) + 1)),
    )


def loss_chart(tests: Sequence[LossTest], labels: Sequence[str]) -> Chart | None:
    known = [(t, label) for t, label in zip(tests, labels[1:], strict=True) if t.tokens]
    if not known:
        return None
    first = known[0][0]
    series = (
        line(labels[0], first.tokens, first.baseline),
        *(line(label, t.tokens, t.experiment) for t, label in known),
    )
    return Chart(
        title="Loss, mean per bin of tokens", series=series, x_title="tokens", y_title="nats per token", height=320
    )
