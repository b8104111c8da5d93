"""The live view of a run in a terminal of 80 columns, drawn from files only."""

import time

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.energy.totals import print_energy_basis
from windlass.report.collect import HIDDEN_EVENTS, RunSummary, collect, sample_columns
from windlass.report.columns import LONG_FILE_BYTES, Columns
from windlass.report.tables import figure, number, progress, silence, state
from windlass.runs.events import LayersMeasured, Saved
from windlass.runs.folder import Run
from windlass.runs.measured import Numbers, known, last_known
from windlass.units import counted, print_seconds, print_watts

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"finished": "green", "running": "cyan", "failed": "red"}


class Watch:
    """Keeps the columns between looks, so that a look reads only what was appended.

    `sample_first`: the first look at a long file takes a sample of it. Its figures are those of all lines, but for
    goodput (within a thousandth) and the curves.
    """

    def __init__(self, run: Run, *, sample_first: bool = False) -> None:
        self.run, self._looked, file = run, False, run.metrics_file
        is_long = file.exists() and file.stat().st_size > LONG_FILE_BYTES
        self.columns = sample_columns(run, run.events()) if sample_first and is_long else Columns(file)

    def look(self) -> RunSummary:
        if self._looked and self.columns.is_sample:  # the second look reads the whole file
            self.columns = Columns(self.run.metrics_file)
        self._looked = True
        if not self.columns.is_sample:
            self.columns.refresh()
        return collect(self.run, columns=self.columns)

    def picture(self, width: int = 80, now: float | None = None, height: int | None = None) -> RenderableType:
        return picture(self.look(), self.columns, width, time.time() if now is None else now, height)


def spark(values: Numbers, width: int) -> str:
    """`▇▅▃▂▁`: the mean of each piece of the known values."""
    numbers = known(values)
    if not len(numbers):
        return ""
    means = np.array([p.mean() for p in np.array_split(numbers, min(width, len(numbers)))])
    low, span = means.min(), max(means.max() - means.min(), 1e-12)
    return "".join(BARS[min(7, int((m - low) / span * 7.999))] for m in means)


def band(values: Numbers, last: int = 50) -> str:
    """Lowest to highest of the newest values, in percent."""
    numbers = known(values)[-last:]
    if not len(numbers):
        return "not measured"
    low, high = (f"{100 * value:.0f}" for value in (numbers.min(), numbers.max()))
    return f"{low} %" if low == high else f"{low}–{high} %"


def facts(s: RunSummary, columns: Columns, now: float) -> list[tuple[str, str]]:
    saves = [e.time for e in s.events if isinstance(e, Saved) and e.time is not None]
    status = state(s, now)
    return [
        ("recent loss", figure(s, "training loss")),
        ("tokens", progress(s)),
        ("val loss", "none yet" if s.val_loss is None else figure(s, "validation loss")),
        ("time left", print_seconds(s.eta_seconds) if status == "running" else status),
        ("tokens/s", figure(s, "throughput").removesuffix(" tokens/s")),
        ("step", "none yet" if s.step is None else f"{figure(s, 'step')} ({figure(s, 'step time')})"),
        ("MFU", figure(s, "MFU")),
        ("goodput", figure(s, "goodput")),
        ("memory", figure(s, "memory, highest device")),
        ("utilisation", band(columns.get("utilization"))),
        ("power", print_watts(s.watts)),
        ("energy", print_energy_basis(s.energy)),
        ("last save", f"{print_seconds(max(0.0, now - saves[-1]))} ago" if saves else "none yet"),
        (
            "slowest",
            "unknown" if s.slowest_rank is None else f"rank {s.slowest_rank}, +{print_seconds(s.spread_seconds)}",
        ),
        *routing(columns),
    ]


def routing(columns: Columns) -> list[tuple[str, str]]:
    """Of a mixture of experts: the newest imbalance and entropy."""
    imbalance, entropy = (last_known(columns.get(key)) for key in ("expert_imbalance", "router_entropy"))
    if imbalance is None:
        return []
    return [("experts", f"fullest {imbalance:.2f} x the mean"), ("router", f"entropy {number(entropy, 3)} nats")]


def picture(s: RunSummary, columns: Columns, width: int, now: float, height: int | None = None) -> RenderableType:
    """Every part is lines of at most `width`; in a low window the last parts are left out, never the first."""
    width = max(40, min(width, 120))
    status, quiet = state(s, now), silence(s, now)
    silent = (
        f"no new line for {print_seconds(quiet)}: `windlass jobs` shows whether the job is in the queue"
        if quiet
        else ""
    )
    warnings = [text for text in (silent, f"the folder is incomplete: {s.problem}" if s.problem else "") if text]
    bar = Text("")
    if s.target_tokens and s.tokens is not None:
        share, room = min(1.0, s.tokens / s.target_tokens), width - 9
        filled = round(room * share)
        bar = Text.assemble(("━" * filled, "cyan"), ("━" * (room - filled), "dim"), f" {100 * share:5.1f} %")
    rows, pairs = facts(s, columns, now), 2 if width >= 72 else 1
    lines_left = 100 if height is None else height - 3 - len(warnings)
    grid = Table.grid(padding=(0, 2))
    for _ in range(pairs):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=width // pairs - 16)
    for at in range(0, min(len(rows), max(1, lines_left) * pairs), pairs):
        grid.add_row(*(Text(cell) for row in rows[at : at + pairs] for cell in row))
    lines_left -= -(-len(rows) // pairs)
    curves = [
        Text.assemble((f"{name:9}", "dim"), (spark(columns.get(key), width - 10), "cyan"))
        for name, key in (("loss", "loss"), ("tokens/s", "tokens_per_second"))
    ]
    looks = [e for e in s.events if isinstance(e, LayersMeasured)]
    # Of the newest five events as many as there is room for.
    events = (
        [e for e in s.events if e.event not in HIDDEN_EVENTS][-min(5, lines_left - 2 - bool(looks)) :]
        if lines_left > 2 + bool(looks)
        else []
    )
    ages = ["?" if e.time is None else print_seconds(max(0.0, now - e.time)) for e in events]

    def cut(text: str, style: str) -> Text:
        return Text(text if len(text) <= width else text[: width - 1] + "…", style=style)

    head = Text.assemble(
        (s.name[: width - 30], "bold"),
        "  ",
        (status, f"bold {COLOURS.get(status, 'yellow')}"),
        f"  {s.cluster}, {counted(s.world_size, 'device')}",
    )
    return Group(
        head,
        *(cut(text, "yellow") for text in warnings),
        bar,
        grid,
        *curves[: max(0, lines_left)],
        *(cut(e.describe(), "") for e in looks[-1:] if lines_left > 2),
        *(cut(f"  {age:>12} ago  {e.describe()}", "dim") for age, e in zip(ages, events, strict=True)),
    )
