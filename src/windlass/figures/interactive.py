"""How does a chart become something a browser draws? Plotly's JSON, written by hand: building it needs no plotly and takes microseconds."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from windlass.figures.model import Chart, Heat, Series, marked_cells, whole_ticks
from windlass.figures.theme import FONT, HEAT, NO_VALUE, colour

# Replaced by the page's script with the colours of the reader's light or dark setting.
INK, SOFT, GRID, CLEAR = "var(--ink)", "var(--soft)", "var(--grid)", "rgba(0,0,0,0)"


def spec(item: Chart | Heat) -> dict[str, Any]:
    """`{"data": [...], "layout": {...}}` for Plotly.newPlot."""
    made: dict[str, Any] = _plain(_heat(item) if isinstance(item, Heat) else _chart(item))
    return made


# Plotly reads <b> and <a href> in the texts it draws; names from files must stay text.
_TEXTS = {"name", "text", "hovertext", "title", "x", "y"}


def _plain(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _plain(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v, key) for v in value]
    return escape(value, quote=False) if isinstance(value, str) and key in _TEXTS else value


def _chart(chart: Chart) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for index, series in enumerate(chart.series):
        tint = colour(index if series.colour is None else series.colour)
        data += _range(series, tint)
        data.append(_trace(series, tint, chart.horizontal))
    layout = _layout(chart.title, chart.x_title, chart.y_title, chart.height)
    layout["barmode"] = "stack" if chart.stacked else "group"
    _axes(chart, layout)
    layout["shapes"], layout["annotations"] = _marks(chart)
    layout["showlegend"] = sum(not s.quiet for s in chart.series) > 1
    return {"data": data, "layout": layout}


def _axes(chart: Chart, layout: dict[str, Any]) -> None:
    if chart.horizontal:
        layout["xaxis"], layout["yaxis"] = layout["yaxis"], layout["xaxis"]
        layout["yaxis"] |= {"autorange": "reversed", "automargin": True, "type": "category", "showgrid": False}
        layout["xaxis"]["automargin"] = True
    value = layout["xaxis" if chart.horizontal else "yaxis"]
    if chart.log_x:
        layout["xaxis"] |= {"type": "log", **_few_ticks(chart)}
    elif ticks := whole_ticks(chart):
        layout["xaxis"] |= {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{v:,}" for v in ticks]}
    if chart.log_y:
        value |= {"type": "log", "dtick": "D2"}
    if chart.from_zero and not chart.log_y:
        value["rangemode"] = "tozero"


def _few_ticks(chart: Chart) -> dict[str, Any]:
    """On a log axis with few values, those values are the ticks: 4, 16, 80 devices say more than powers of ten."""
    values = sorted({float(x) for s in chart.series for x in s.x if not isinstance(x, str) and x > 0})
    kept: list[float] = []
    for value in values:
        if not kept or value >= 1.3 * kept[-1]:
            kept.append(value)
    return (
        {"tickmode": "array", "tickvals": kept, "ticktext": [f"{v:,.6g}" for v in kept]}
        if 0 < len(kept) <= 16
        else {"dtick": 1}
    )


def _trace(series: Series, tint: str, horizontal: bool) -> dict[str, Any]:
    x, y = list(series.x), [_finite(v) for v in series.y]
    trace: dict[str, Any] = {"name": series.name, "x": x, "y": y, "showlegend": not series.quiet}
    if series.kind == "bar":
        trace |= {"type": "bar", "marker": {"color": tint}}
        if horizontal:
            trace |= {"x": y, "y": x, "orientation": "h"}
    else:
        # SVG traces, not WebGL: a projector's old laptop draws them too, and printing keeps them sharp.
        trace |= {"type": "scatter", "mode": "markers" if series.kind == "points" else "lines"}
        trace |= {
            "line": {"color": tint, "width": 2.5, "dash": "dash" if series.dashed else "solid"},
            "marker": {"color": tint, "size": 8},
        }
        if series.kind == "line" and len(x) <= 12:
            trace["mode"] = "lines+markers"
    if series.hover is not None:
        trace |= {"hovertext": list(series.hover), "hovertemplate": "%{hovertext}<extra>%{fullData.name}</extra>"}
    return trace


def _range(series: Series, tint: str) -> list[dict[str, Any]]:
    if series.low is None or series.high is None:
        return []
    known = [
        (x, low, high)
        for x, low, high in zip(series.x, series.low, series.high, strict=True)
        if low is not None and high is not None
    ]
    xs = [x for x, _, _ in known]
    red, green, blue = (int(tint[i : i + 2], 16) for i in (1, 3, 5))
    outline = {
        "x": xs + xs[::-1], "y": [h for _, _, h in known] + [low for _, low, _ in known][::-1], "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.18)", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "type": "scatter", "mode": "lines",
    }  # fmt: skip
    return [outline]


def _marks(chart: Chart) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shapes, notes = [], []
    for mark in chart.marks:
        upright = (mark.axis == "x") != chart.horizontal
        log = chart.log_x if upright else chart.log_y
        at = math.log10(mark.at) if log and mark.at > 0 else mark.at
        place = (
            {"x0": mark.at, "x1": mark.at, "y0": 0, "y1": 1, "yref": "paper"}
            if upright
            else {"y0": mark.at, "y1": mark.at, "x0": 0, "x1": 1, "xref": "paper"}
        )
        shapes.append({"type": "line", "line": {"color": SOFT, "width": 1.5, "dash": "dot"}, **place})
        where = (
            {"x": at, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "center"}
            if upright
            else {"y": at, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
        )
        if mark.label:
            notes.append({"text": mark.label, "showarrow": False, "font": {"size": 13, "color": SOFT}, **where})
    return shapes, notes


def _heat(heat: Heat) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "heatmap", "x": list(heat.x), "y": list(heat.y), "z": [[_finite(v) for v in row] for row in heat.values],
        "colorscale": [list(stop) for stop in HEAT], "colorbar": {"title": {"text": heat.unit, "font": {"color": INK}}, "tickfont": {"color": INK}},
        "hoverongaps": False, "xgap": 2, "ygap": 2,
    }  # fmt: skip
    if heat.scale is not None:
        trace |= {"zmin": heat.scale[0], "zmax": heat.scale[1]}
    if heat.labels is not None:
        trace |= {"text": [list(row) for row in heat.labels], "texttemplate": "%{text}"}
    marked = {
        "type": "heatmap", "x": list(heat.x), "y": list(heat.y), "z": [[1 if said else None for said in row] for row in marked_cells(heat)],
        "colorscale": [[0, NO_VALUE], [1, NO_VALUE]], "showscale": False, "hoverinfo": "skip", "xgap": 2, "ygap": 2,
    }  # fmt: skip
    layout = _layout(heat.title, heat.x_title, heat.y_title, heat.height)
    layout["xaxis"]["type"] = layout["yaxis"]["type"] = "category"
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}  # the first row on top, as in a table
    layout["xaxis"]["showgrid"] = layout["yaxis"]["showgrid"] = False
    return {"data": [marked, trace] if any(map(any, marked_cells(heat))) else [trace], "layout": layout}


def _layout(title: str, x_title: str, y_title: str, height: int) -> dict[str, Any]:
    axis = {
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": SOFT,
        "tickfont": {"color": INK, "size": 14},
        "automargin": True,
    }
    return {
        "title": {"text": title, "font": {"size": 18, "color": INK}, "x": 0, "xanchor": "left", "xref": "container", "y": 0.98, "yref": "container", "yanchor": "top"},
        "font": {"family": FONT, "size": 14, "color": INK}, "height": height, "margin": {"l": 70, "r": 24, "t": 64, "b": 56},
        "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR, "hovermode": "closest",
        "xaxis": {**axis, "title": {"text": x_title, "font": {"color": INK}}},
        "yaxis": {**axis, "title": {"text": y_title, "font": {"color": INK}, "standoff": 12}},
        "legend": {"orientation": "v", "font": {"color": INK, "size": 14}, "bgcolor": CLEAR, "traceorder": "normal"},
    }  # fmt: skip


def _finite(value: float | int | None) -> float | int | None:
    return None if value is None or not math.isfinite(value) else value
