"""How does a chart become a PNG or SVG on a node without browser or network? matplotlib draws it; see docs/decisions on why not Chrome."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from windlass.errors import WindlassError
from windlass.figures.model import Chart, Heat, Series, marked_cells, whole_ticks
from windlass.figures.theme import HEAT, LIGHT, NO_VALUE, colour

_STYLE = {
    "font.size": 12, "axes.titlesize": 14, "axes.titlelocation": "left", "axes.edgecolor": LIGHT["soft"], "axes.labelcolor": LIGHT["ink"],
    "text.color": LIGHT["ink"], "xtick.color": LIGHT["ink"], "ytick.color": LIGHT["ink"], "axes.grid": True, "grid.color": LIGHT["grid"],
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none",
    "figure.facecolor": LIGHT["paper"], "svg.hashsalt": "windlass",
}  # fmt: skip


def save_picture(item: Chart | Heat, path: Path, *, width: float = 10.0) -> Path:
    """Write a `.png` (200 dpi), `.svg` or `.pdf`, by the file's ending; whole, then renamed."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise WindlassError(
            "figures.pictures-written-png-svg",
            f"{path}: pictures are written as .png, .svg or .pdf, not {path.suffix or 'without an ending'!r}",
            hint=f"name it {path.stem}.png",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(_render(item, kind, width))
    part.replace(path)
    return path


def to_svg(item: Chart | Heat, *, width: float = 10.0) -> str:
    """The picture as SVG text, to be put into a page or a document."""
    text = _render(item, "svg", width).decode()
    return text[text.index("<svg") :]


def _render(item: Chart | Heat, kind: str, width: float) -> bytes:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise WindlassError(
            "figures.pictures-need-matplotlib-installed",
            "pictures need matplotlib, which is not installed",
            hint="pip install 'windlass[png]'; --html and --json need nothing more",
        ) from None
    from matplotlib.figure import Figure  # not pyplot: no display, no global state, safe in a server

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, item.height / 76), layout="constrained")
        axes = figure.add_subplot()
        crowded = isinstance(item, Chart) and any((m.axis == "x") != item.horizontal and m.label for m in item.marks)
        axes.set_title(item.title, pad=24 if crowded else 10)
        _heat(item, figure, axes) if isinstance(item, Heat) else _chart(item, axes)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _chart(chart: Chart, axes: Any) -> None:
    categories = _categories(chart)
    places = {name: i for i, name in enumerate(categories)}
    if any(s.kind == "bar" for s in chart.series):
        _bars(chart, axes, places)
    for index, series in enumerate(chart.series):
        if series.kind != "bar":
            _line(series, colour(index if series.colour is None else series.colour), axes, places)
    for mark in chart.marks:
        _mark(mark.axis, mark.at, mark.label, chart.horizontal, axes)
    _axes(chart, axes, categories)  # last: the limits include the marks
    if sum(not s.quiet for s in chart.series) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _categories(chart: Chart) -> list[str]:
    """The x values in order when they are names; empty for a numeric axis. Bars always stand on names."""
    named = any(isinstance(x, str) for s in chart.series for x in s.x) or any(s.kind == "bar" for s in chart.series)
    return list(dict.fromkeys(str(x) for s in chart.series for x in s.x)) if named else []


def _bars(chart: Chart, axes: Any, places: dict[str, int]) -> None:
    shown = [(i, s) for i, s in enumerate(chart.series) if s.kind == "bar"]
    width = 0.75 if chart.stacked else 0.8 / len(shown)
    tops = dict.fromkeys(places, 0.0)
    for rank, (index, series) in enumerate(shown):
        shift = 0.0 if chart.stacked else (rank - (len(shown) - 1) / 2) * width
        names = [str(x) for x in series.x]
        values = [0.0 if y is None else float(y) for y in series.y]
        bases = [tops[n] for n in names] if chart.stacked else [0.0] * len(names)
        draw, start = (axes.barh, "left") if chart.horizontal else (axes.bar, "bottom")
        tint = colour(index if series.colour is None else series.colour)
        draw(
            [places[n] + shift for n in names],
            values,
            width,
            color=tint,
            label=None if series.quiet else series.name,
            **{start: bases},
        )
        for name, value in zip(names, values, strict=True):
            tops[name] += value


def _line(series: Series, tint: str, axes: Any, places: dict[str, int]) -> None:
    x = [places[str(v)] if places else float(v) for v in series.x]
    y = [float("nan") if v is None else float(v) for v in series.y]
    if series.low is not None and series.high is not None:
        low, high = ([float("nan") if v is None else float(v) for v in side] for side in (series.low, series.high))
        axes.fill_between(x, low, high, color=tint, alpha=0.18, linewidth=0)
    style = (
        {"linestyle": "none", "marker": "o"}
        if series.kind == "points"
        else {"linestyle": "--" if series.dashed else "-", "linewidth": 2.2}
    )
    axes.plot(x, y, color=tint, label=None if series.quiet else series.name, **style)


def _axes(chart: Chart, axes: Any, categories: list[str]) -> None:
    x_label, y_label = (axes.set_ylabel, axes.set_xlabel) if chart.horizontal else (axes.set_xlabel, axes.set_ylabel)
    x_label(chart.x_title), y_label(chart.y_title)
    if not categories:
        axes.margins(x=0.02)
    if categories and chart.horizontal:
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(categories)), categories)
        axes.invert_yaxis()
    elif categories:
        turned = {"rotation": 30, "ha": "right"} if max(map(len, categories)) * len(categories) > 70 else {}
        axes.set_xticks(range(len(categories)), categories, **turned)
    if chart.log_x and not categories:
        axes.set_xscale("log")
        _ticks(chart, axes)
    elif not categories and (ticks := whole_ticks(chart)):
        axes.set_xticks(ticks, [f"{v:,}" for v in ticks])
    if chart.log_y:
        (axes.set_xscale if chart.horizontal else axes.set_yscale)("log")
        (axes.xaxis if chart.horizontal else axes.yaxis).set_major_formatter(lambda value, _: _short(value))
    elif chart.from_zero:
        (axes.set_xlim if chart.horizontal else axes.set_ylim)(0)


def _ticks(chart: Chart, axes: Any) -> None:
    """A few numbers of devices, say, are better labels than powers of ten."""
    values = sorted({float(x) for series in chart.series for x in series.x})
    if len(values) <= 12:
        axes.set_xticks(values, [f"{v:,g}" for v in values])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def _short(value: float) -> str:
    """`100B` instead of a power of ten, as the pages write it."""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"


def _mark(axis: str, at: float, label: str, horizontal: bool, axes: Any) -> None:
    upright = (axis == "x") != horizontal
    (axes.axvline if upright else axes.axhline)(at, color=LIGHT["soft"], linestyle=":", linewidth=1.4)
    if upright:
        axes.text(
            at,
            1.0,
            label,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=10,
            color=LIGHT["soft"],
        )
    else:
        axes.text(
            1.0,
            at,
            label,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=10,
            color=LIGHT["soft"],
        )


def _heat(heat: Heat, figure: Any, axes: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    scale = LinearSegmentedColormap.from_list("windlass", list(HEAT))
    values = [[float("nan") if v is None else float(v) for v in row] for row in heat.values]
    low, high = heat.scale or (None, None)
    image = axes.imshow(values, cmap=scale, aspect="auto", vmin=low, vmax=high)
    axes.grid(visible=False)
    axes.set_xticks(range(len(heat.x)), heat.x)
    axes.set_yticks(range(len(heat.y)), heat.y)
    axes.set_xlabel(heat.x_title), axes.set_ylabel(heat.y_title)
    figure.colorbar(image, ax=axes, label=heat.unit)
    for row, column in ((r, c) for r, cells in enumerate(marked_cells(heat)) for c, said in enumerate(cells) if said):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=NO_VALUE, edgecolor="none"))
    for row, texts in enumerate(heat.labels or ()):
        for column, text in enumerate(texts):
            share = image.norm(values[row][column])
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                color="#12161c" if share > 0.6 or share != share else "white",
            )
