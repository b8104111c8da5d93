"""What is the run doing now, in a terminal of 80 columns over ssh? A picture made from files only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from windlass.report.collect import RunSummary, collect
from windlass.report.columns import LONG_FILE, Columns, Numbers, quick
from windlass.report.words import energy_card, event_text, goodput, number, percent, rate, silence, state, watts
from windlass.runs.folder import Run
from windlass.units import print_bytes, print_seconds, print_tokens

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
QUIET = ("removed", "interval")
"""Events that say nothing to somebody who watches."""
COLOURS = {
    "finished": "green",
    "running": "cyan",
    "stopped": "yellow",
    "failed": "red",
    "unknown": "yellow",
    "silent": "yellow",
}


class Watch:
    """Keeps the columns between looks, so that a look costs what was appended. `hasty`: the first look at a long file is at a sample of it."""

    def __init__(self, run: Run, *, hasty: bool = False) -> None:
        self.run, self.columns = run, Columns(run.metrics_file)
        self._hasty = hasty and run.metrics_file.exists() and run.metrics_file.stat().st_size > LONG_FILE

    def look(self) -> RunSummary:
        if self._hasty:
            self._hasty = False
            self.columns = quick(self.run.metrics_file)
            return collect(self.run, columns=self.columns)
        if self.columns.sampled:
            self.columns = Columns(self.run.metrics_file)
        self.columns.refresh()
        return collect(self.run, columns=self.columns)

    def picture(self, width: int = 80, now: float | None = None, height: int | None = None) -> RenderableType:
        return picture(self.look(), self.columns, width, time.time() if now is None else now, height)


def spark(values: Numbers, width: int) -> str:
    """`▇▅▃▂▁`: the mean of each piece; a piece without numbers is a gap."""
    known = values[~np.isnan(values)]
    if not len(known):
        return ""
    pieces = [p for p in np.array_split(known, min(width, len(known))) if len(p)]
    means = np.array([p.mean() for p in pieces])
    low, span = means.min(), max(means.max() - means.min(), 1e-12)
    return "".join(BARS[min(7, int((m - low) / span * 7.999))] for m in means)


def band(values: Numbers, last: int = 50) -> str:
    """Lowest to highest of the newest values, in percent."""
    known = values[~np.isnan(values)][-last:]
    if not len(known):
        return "not measured"
    low, high = (f"{100 * value:.0f}" for value in (known.min(), known.max()))
    return f"{low} %" if low == high else f"{low}–{high} %"


def facts(s: RunSummary, columns: Columns, now: float) -> list[tuple[str, str]]:
    """The numbers of the picture, in reading order."""
    saves = [e["time"] for e in s.events if e["event"] == "saved" and e["time"] is not None]
    used, how = energy_card(s.energy)
    lag = "" if s.slowest_rank is None else f"rank {s.slowest_rank}, +{print_seconds(s.spread_seconds)}"
    progress = f"{print_tokens(s.tokens)}" + (f" of {print_tokens(s.target_tokens)}" if s.target_tokens else "")
    end = print_seconds(s.eta_seconds) if state(s, now) == "running" else state(s, now)
    return [
        ("recent loss", number(s.loss)), ("tokens", progress),
        ("val loss", number(s.val_loss, unknown="none yet")), ("time left", end),
        ("tokens/s", rate(s.tokens_per_second).removesuffix(" tokens/s")), ("step", "none yet" if s.step is None else f"{s.step:,} ({print_seconds(s.step_seconds)})"),
        ("MFU", percent(s.mfu)), ("goodput", percent(goodput(s), "not known")),
        ("memory", print_bytes(s.memory_bytes)), ("utilisation", band(columns.get("utilization"))),
        ("power", watts(s.watts)), ("energy", used if s.energy.carbon is None else f"{used}, {how.split(';')[0]}"),
        ("last save", "none yet" if not saves else f"{print_seconds(max(0.0, now - saves[-1]))} ago"), ("slowest", lag or "unknown"),
    ]  # fmt: skip


def picture(s: RunSummary, columns: Columns, width: int, now: float, height: int | None = None) -> RenderableType:
    """Every part is lines of at most `width`; in a low window the last parts are left out, never the first."""
    from rich.console import Group
    from rich.text import Text

    width = max(40, min(width, 120))
    head = Text.assemble(
        (s.name[: width - 30], "bold"),
        "  ",
        (state(s, now), f"bold {COLOURS.get(state(s, now), 'white')}"),
        f"  {s.cluster}, {s.world_size or '?'} device{'' if s.world_size == 1 else 's'}",
    )
    rows = facts(s, columns, now)
    warnings = _warnings(s, now, width)
    lines = -(-len(rows) // _pairs(width))
    left = 100 if height is None else height - 3 - len(warnings)
    parts: list[RenderableType] = [head, *warnings, _bar(s, width), _table(rows[: max(1, left) * _pairs(width)], width)]
    curves = [_curve("loss", columns.get("loss"), width), _curve("tokens/s", columns.get("tokens_per_second"), width)]
    parts += curves[: max(0, left - lines)]
    told = [e for e in s.events if e["event"] not in QUIET][-5:]
    told = told[len(told) - min(len(told), max(0, left - lines - 2)) :]
    parts += [Text(_cut(f"  {_ago(e['time'], now)}  {event_text(e)}", width), style="dim") for e in told]
    return Group(*parts)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _warnings(s: RunSummary, now: float, width: int) -> list[RenderableType]:
    from rich.text import Text

    found = []
    quiet = silence(s, now)
    if quiet is not None:
        found.append(f"no new line for {print_seconds(quiet)}: is the job in the queue? (windlass jobs)")
    if s.problem:
        found.append(f"the folder is not whole: {s.problem}")
    return [Text(_cut(text, width), style="yellow") for text in found]


def _bar(s: RunSummary, width: int) -> RenderableType:
    from rich.text import Text

    if not s.target_tokens or s.tokens is None:
        return Text("")
    share = min(1.0, s.tokens / s.target_tokens)
    room = width - 9
    return Text.assemble(
        ("━" * round(room * share), "cyan"), ("━" * (room - round(room * share)), "dim"), f" {100 * share:5.1f} %"
    )


def _table(rows: Sequence[tuple[str, str]], width: int) -> RenderableType:
    """Two facts a line where they fit, else one."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    pairs = _pairs(width)
    for _ in range(pairs):
        made.add_column(style="dim", no_wrap=True)
        made.add_column(no_wrap=True, overflow="ellipsis", max_width=width // pairs - 16)
    for at in range(0, len(rows), pairs):
        made.add_row(*(Text(cell) for row in rows[at : at + pairs] for cell in row))
    return made


def _pairs(width: int) -> int:
    """Facts on a line."""
    return 2 if width >= 72 else 1


def _curve(name: str, values: Numbers, width: int) -> RenderableType:
    from rich.text import Text

    return Text.assemble((f"{name:9}", "dim"), (spark(values, width - 10), "cyan"))


def _ago(at: float | None, now: float) -> str:
    return f"{'?' if at is None else print_seconds(max(0.0, now - at)):>12} ago"
