"""Charts, tables and number cards as frozen plain values; `html` and `picture` decide how they look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

X = float | int | str
Y = float | int | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, one row of bars or one cloud of points. A y of None leaves a gap: unknown is not 0."""

    name: str
    x: Sequence[X]
    y: Sequence[Y]
    kind: Literal["line", "bar", "points"] = "line"
    # Index in the palette; None: the next one.
    colour: int | None = None
    dashed: bool = False
    # One text per point, instead of the plain numbers.
    hover: Sequence[str] | None = None
    low: Sequence[Y] | None = None
    # With `low`: a shaded range around the line.
    high: Sequence[Y] | None = None
    # Not in the legend.
    quiet: bool = False


def line(name: str, x: Sequence[X], y: Sequence[Y], **options: Any) -> Series:
    return Series(name=name, x=tuple(x), y=tuple(y), **options)


def bars(name: str, x: Sequence[X], y: Sequence[Y], **options: Any) -> Series:
    return line(name, x, y, kind="bar", **options)


def points(name: str, x: Sequence[X], y: Sequence[Y], **options: Any) -> Series:
    return line(name, x, y, kind="points", **options)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A straight line across the chart: a limit (`axis="y"`) or an event (`axis="x"`)."""

    axis: Literal["x", "y"]
    at: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    series: Sequence[Series]
    x_title: str = ""
    y_title: str = ""
    # Bars of one x stand on each other.
    stacked: bool = False
    # Bars are horizontal: the categories (x) run down the left edge, the first on top.
    horizontal: bool = False
    log_x: bool = False
    log_y: bool = False
    # The value axis begins at 0.
    from_zero: bool = False
    marks: Sequence[Mark] = ()
    caption: str = ""
    height: int = 420

    def is_upright(self, mark: Mark) -> bool:
        return (mark.axis == "x") != self.horizontal

    @property
    def has_legend(self) -> bool:
        return sum(not s.quiet for s in self.series) > 1

    @property
    def integer_ticks(self) -> list[int]:
        """The x values themselves (1, 2, 4 devices) where they are few integers; those too close are left out."""
        values = {x for s in self.series for x in s.x if s.kind != "bar"}
        if not 1 < len(values) <= 12 or not all(isinstance(x, int) for x in values):
            return []
        ordered = sorted((int(x) for x in values), reverse=True)
        kept = ordered[:1]
        for value in ordered[1:]:
            if kept[-1] - value >= 0.05 * (ordered[0] - ordered[-1]):
                kept.append(value)
        return kept[::-1]


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A table of numbers as colours; None is an empty cell, `labels` (same shape) writes into the cells."""

    title: str
    x: Sequence[str]
    y: Sequence[str]
    # One row per y.
    values: Sequence[Sequence[Y]]
    labels: Sequence[Sequence[str]] | None = None
    x_title: str = ""
    y_title: str = ""
    unit: str = ""
    caption: str = ""
    height: int = 420
    # Lowest and highest value of the colours, where several maps are compared; None: its own.
    scale: tuple[float, float] | None = None

    @property
    def labelled_gaps(self) -> list[list[bool]]:
        """Cells with a label instead of a number ("OOM"); they are filled, so that nobody takes them for not run."""
        labels = self.labels or [[""] * len(row) for row in self.values]
        return [[v is None and bool(t) for v, t in zip(*r, strict=True)] for r in zip(self.values, labels, strict=True)]


@dataclass(frozen=True)
class DataTable:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    # Columns with numbers.
    right: Sequence[int] = ()
    caption: str = ""
    # Rows that stand out.
    strong: Sequence[int] = ()
    # Columns whose cells stay on one line.
    unbroken: Sequence[int] = ()

    def texts(self) -> list[list[str]]:
        return [["" if cell is None else str(cell) for cell in row] for row in self.rows]


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
    text: str
    kind: Literal["plain", "warning"] = "plain"


@dataclass(frozen=True)
class Html:
    """Ready-made HTML that is not escaped; escape what came from outside with `html.escape`."""

    html: str


Item = Chart | Heat | DataTable | Cards | Note | Html


@dataclass(frozen=True)
class Section:
    title: str
    items: Sequence[Item]
    id: str = ""
    # In print it has one page of its own.
    is_page: bool = False
