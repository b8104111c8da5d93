"""What can be drawn? Charts, tables and number cards as frozen plain values; how they look is decided in one other place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

X = float | int | str
Y = float | int | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, one row of bars or one cloud of points. A y of None leaves a gap: unknown is not 0."""

    name: str
    x: tuple[X, ...]
    y: tuple[Y, ...]
    kind: Literal["line", "bar", "points"] = "line"
    colour: int | None = None
    """Place in the palette; None: the next one."""
    dashed: bool = False
    hover: tuple[str, ...] | None = None
    """One text per point, instead of the plain numbers."""
    low: tuple[Y, ...] | None = None
    high: tuple[Y, ...] | None = None
    """With `low`: a shaded range around the line."""
    quiet: bool = False
    """Not in the legend."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A straight line across the chart: a limit (`axis="y"`) or an event (`axis="x"`)."""

    axis: Literal["x", "y"]
    at: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines, points and bars over two axes."""

    title: str
    series: tuple[Series, ...]
    x_title: str = ""
    y_title: str = ""
    stacked: bool = False
    """Bars of one x stand on each other."""
    horizontal: bool = False
    """Bars lie: the categories (x) run down the left edge, the first on top."""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    """The value axis begins at 0."""
    marks: tuple[Mark, ...] = ()
    caption: str = ""
    height: int = 420


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A table of numbers as colours; None is an empty cell, `labels` (same shape) writes into the cells."""

    title: str
    x: tuple[str, ...]
    y: tuple[str, ...]
    values: tuple[tuple[Y, ...], ...]
    """One row per y."""
    labels: tuple[tuple[str, ...], ...] | None = None
    x_title: str = ""
    y_title: str = ""
    unit: str = ""
    caption: str = ""
    height: int = 420
    scale: tuple[float, float] | None = None
    """Lowest and highest value of the colours, where several maps are to be compared; its own when None."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Sequence[int] = ()
    """Columns with numbers."""
    caption: str = ""
    strong: Sequence[int] = ()
    """Rows that stand out."""
    whole: Sequence[int] = ()
    """Columns whose cells stay on one line: names that one reads at a glance."""


@dataclass(frozen=True)
class Card:
    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Cards:
    """A row of key numbers."""

    cards: Sequence[Card]


@dataclass(frozen=True)
class Note:
    """A paragraph of plain text."""

    text: str
    kind: Literal["plain", "warning"] = "plain"


@dataclass(frozen=True)
class Html:
    """Ready-made HTML, trusted as it is; escape what came from outside with `html.escape`."""

    html: str


Item = Chart | Heat | Table | Cards | Note | Html


@dataclass(frozen=True)
class Section:
    title: str
    items: Sequence[Item]
    id: str = ""


def marked_cells(heat: Heat) -> list[list[bool]]:
    """Cells that say a word instead of a number ("OOM"): they are filled, so that nobody takes them for not asked."""
    labels = heat.labels or tuple(("",) * len(row) for row in heat.values)
    return [
        [v is None and bool(t) for v, t in zip(*rows, strict=True)] for rows in zip(heat.values, labels, strict=True)
    ]


def whole_ticks(chart: Chart) -> list[int]:
    """1, 2, 4 devices rather than 1.2 and 1.4: the values themselves, where they are few whole numbers; those too close to label are left out."""
    values = {x for s in chart.series for x in s.x if s.kind != "bar"}
    if not 1 < len(values) <= 12 or not all(isinstance(x, int) for x in values):
        return []
    found = sorted(int(x) for x in values)
    kept = found[-1:]
    for value in reversed(found[:-1]):
        if kept[-1] - value >= 0.05 * (found[-1] - found[0]):
            kept.append(value)
    return kept[::-1]


def line(
    name: str,
    x: Sequence[X],
    y: Sequence[Y],
    *,
    dashed: bool = False,
    colour: int | None = None,
    hover: Sequence[str] | None = None,
) -> Series:
    return Series(
        name=name,
        x=tuple(x),
        y=tuple(y),
        dashed=dashed,
        colour=colour,
        hover=tuple(hover) if hover is not None else None,
    )


def bars(
    name: str, x: Sequence[X], y: Sequence[Y], *, colour: int | None = None, hover: Sequence[str] | None = None
) -> Series:
    return Series(
        name=name, x=tuple(x), y=tuple(y), kind="bar", colour=colour, hover=tuple(hover) if hover is not None else None
    )


def points(
    name: str, x: Sequence[X], y: Sequence[Y], *, colour: int | None = None, hover: Sequence[str] | None = None
) -> Series:
    return Series(
        name=name,
        x=tuple(x),
        y=tuple(y),
        kind="points",
        colour=colour,
        hover=tuple(hover) if hover is not None else None,
    )
