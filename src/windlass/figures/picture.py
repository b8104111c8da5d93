"""The one renderer to PNG, SVG and PDF: matplotlib, which needs neither browser nor network (see docs/decisions)."""

import io
from pathlib import Path
from typing import Any

from windlass.errors import WindlassError
from windlass.figures.charts import Chart, Heat
from windlass.figures.theme import HEAT, LIGHT, NO_VALUE, colour
from windlass.files import write_atomic

INK, SOFT = LIGHT["ink"], LIGHT["soft"]
_STYLE = {
    "font.size": 12, "axes.titlesize": 14, "axes.titlelocation": "left", "axes.edgecolor": SOFT, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": LIGHT["grid"],
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "svg.fonttype": "none", "figure.facecolor": LIGHT["paper"], "svg.hashsalt": "windlass",
}  # fmt: skip


def save_picture(item: Chart | Heat, path: Path, *, width: float = 10.0) -> Path:
    """Write a `.png` (200 dpi), `.svg` or `.pdf`, by the file's suffix; `width` in inches."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise WindlassError(
            "figures.format-unknown",
            f"{path}: images are written as .png, .svg or .pdf, not {path.suffix or 'without a suffix'!r}",
            hint=f"name it {path.stem}.png",
        )
    write_atomic(path, draw_picture(item, kind, width))
    return path


def draw_picture(item: Chart | Heat, kind: str, width: float = 10.0) -> bytes:
    """`kind`: png, svg or pdf."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise WindlassError(
            "figures.matplotlib-missing",
            "images need matplotlib, which is not installed",
            hint="pip install 'windlass[png]'; --html and --json do not need it",
        ) from None
    from matplotlib.figure import Figure  # not pyplot: no display, no global state, safe in a server

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, item.height / 76), layout="constrained")
        axes = figure.add_subplot()
        has_labels = isinstance(item, Chart) and any(item.is_upright(m) and m.label for m in item.marks)
        axes.set_title(item.title, pad=24 if has_labels else 10)
        _heat(item, figure, axes) if isinstance(item, Heat) else _chart(item, axes)
        content = io.BytesIO()
        figure.savefig(content, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def _chart(chart: Chart, axes: Any) -> None:
    # Bars always stand on names; a numeric axis has no categories.
    is_named = any(s.kind == "bar" or isinstance(x, str) for s in chart.series for x in s.x)
    names = list(dict.fromkeys(str(x) for s in chart.series for x in s.x)) if is_named else []
    places = {name: i for i, name in enumerate(names)}
    with_bars = [i for i, s in enumerate(chart.series) if s.kind == "bar"]
    width = 0.75 if chart.stacked else 0.8 / max(1, len(with_bars))
    tops = dict.fromkeys(names, 0.0)
    draw_bars, base = (axes.barh, "left") if chart.horizontal else (axes.bar, "bottom")
    for index, series in enumerate(chart.series):
        style: dict[str, Any] = {"color": colour(index if series.colour is None else series.colour)}
        style["label"] = None if series.quiet else series.name
        x = [places[str(v)] if places else float(v) for v in series.x]
        if series.kind == "bar":
            shift = 0.0 if chart.stacked else (with_bars.index(index) - (len(with_bars) - 1) / 2) * width
            style[base] = [tops[str(v)] if chart.stacked else 0.0 for v in series.x]
            heights = [float(y or 0.0) for y in series.y]
            draw_bars([at + shift for at in x], heights, width, **style)
            for name, height in zip(series.x, heights, strict=True):
                tops[str(name)] += height
            continue
        if series.low is not None and series.high is not None:
            low, high = _numbers(series.low), _numbers(series.high)
            axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
        stroke = {"linestyle": "--" if series.dashed else "-", "linewidth": 2.2}
        style |= stroke if series.kind == "line" else {"linestyle": "none", "marker": "o"}
        axes.plot(x, _numbers(series.y), **style)
    for mark in chart.marks:
        upright = chart.is_upright(mark)
        (axes.axvline if upright else axes.axhline)(mark.at, color=SOFT, linestyle=":", linewidth=1.4)
        place = {"x": mark.at, "y": 1.0, "ha": "center", "transform": axes.get_xaxis_transform()}
        if not upright:
            place = {"x": 1.0, "y": mark.at, "ha": "right", "transform": axes.get_yaxis_transform()}
        axes.text(s=mark.label, va="bottom", fontsize=10, color=SOFT, **place)
    _axes(chart, axes, names)  # last: the limits include the marks
    if chart.has_legend:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _numbers(values: Any) -> list[float]:
    return [float("nan") if v is None else float(v) for v in values]


def _axes(chart: Chart, axes: Any, names: list[str]) -> None:
    titles = (chart.y_title, chart.x_title) if chart.horizontal else (chart.x_title, chart.y_title)
    axes.set(xlabel=titles[0], ylabel=titles[1])
    if names and chart.horizontal:
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
    elif names:
        turned = {"rotation": 30, "ha": "right"} if max(map(len, names)) * len(names) > 70 else {}
        axes.set_xticks(range(len(names)), names, **turned)
    else:
        axes.margins(x=0.02)
        values = sorted({float(x) for series in chart.series for x in series.x})
        if chart.log_x:
            axes.set_xscale("log")
            if len(values) <= 12:  # a few numbers of devices, say, are better labels than powers of ten
                axes.set_xticks(values, [f"{v:,g}" for v in values])
                axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            else:
                _log_ticks(axes.xaxis, values)
        elif ticks := chart.integer_ticks:
            axes.set_xticks(ticks, [f"{v:,}" for v in ticks])
    value_axis = "x" if chart.horizontal else "y"
    if chart.log_y:
        axes.set(**{f"{value_axis}scale": "log"})
        heights = [y for series in chart.series for y in _numbers(series.y) if y > 0]
        _log_ticks(getattr(axes, f"{value_axis}axis"), heights)
    elif chart.from_zero:
        axes.set(**{f"{value_axis}lim": (0, None)})


def _log_ticks(axis: Any, values: list[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if values and max(values) < 30 * min(values):  # powers of ten alone would leave one tick or two
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: _short(value))
    axis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    """`100B` instead of a power of ten, as the pages print it."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (0.0, ""))
    size, name = next(pair for pair in sizes if value >= pair[0])
    return f"{value / (size or 1.0):g}{name}"


def _heat(heat: Heat, figure: Any, axes: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    values = [_numbers(row) for row in heat.values]
    low, high = heat.scale or (None, None)
    colours = LinearSegmentedColormap.from_list("windlass", list(HEAT))
    image = axes.imshow(values, cmap=colours, aspect="auto", vmin=low, vmax=high)
    axes.grid(visible=False)
    axes.set_xticks(range(len(heat.x)), heat.x)
    axes.set_yticks(range(len(heat.y)), heat.y)
    axes.set(xlabel=heat.x_title, ylabel=heat.y_title)
    figure.colorbar(image, ax=axes, label=heat.unit)
    gaps = heat.labelled_gaps
    for row, cells in enumerate(values):
        for column, value in enumerate(cells):
            if gaps[row][column]:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=NO_VALUE, edgecolor="none"))
            share = image.norm(value)
            tint = "#12161c" if share > 0.6 or share != share else "white"
            text = heat.labels[row][column] if heat.labels else ""
            axes.text(column, row, text, ha="center", va="center", color=tint)
