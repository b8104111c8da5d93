"""The one renderer to HTML: a self-contained page that opens from disk without a network.

Charts become Plotly's JSON, written by hand: that needs no plotly, and its script is copied into the page.
"""

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windlass.figures.charts import Cards, Chart, DataTable, Heat, Html, Item, Note, Section, Series
from windlass.figures.picture import draw_picture
from windlass.figures.theme import FONT, HEAT, NO_VALUE, colour, css
from windlass.files import json_safe, write_atomic

# Draws figures: colours named var(--x) are looked up in the style sheet, so charts follow a change from light to dark.
PLOTS = Path(__file__).with_name("plots.js")
_DRAW = """
for (const box of document.querySelectorAll(".plot")) plot(box, JSON.parse(box.nextElementSibling.textContent));
"""


def page(title: str, sections: Sequence[Section], *, subtitle: str = "", footer: str = "") -> str:
    """One self-contained document. All texts are escaped; only `Html` items pass as they are."""
    body, script = "", ""
    for section in sections:
        anchor = f' id="{escape(section.id, quote=True)}"' if section.id else ""
        heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
        kind = ' class="page"' if section.is_page else ""
        body += f"<section{anchor}{kind}>{heading}\n" + "\n".join(map(_item, section.items)) + "\n</section>\n"
    if any(isinstance(item, Chart | Heat) for section in sections for item in section.items):
        from plotly.offline import get_plotlyjs

        plotly = str(get_plotlyjs()).replace("</script", "<\\/script")
        script = f"<script>{plotly}</script>\n<script>{PLOTS.read_text()}{_DRAW}</script>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{css()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{_paragraph("sub", subtitle)}
{body}{f"<footer>{escape(footer)}</footer>" if footer else ""}
</main>
{script}
</body>
</html>
"""


# Cards and tables inside the page of a notebook, whose own style sheet decides fonts and colours.
_FRAGMENT_CSS = """
.windlass .cards { display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0; }
.windlass .card { border: 1px solid #8886; border-radius: 8px; padding: 6px 12px; max-width: 210px; }
.windlass .card b, .windlass .card span, .windlass .card i { display: block; font-style: normal; }
.windlass .card b { font-size: 1.3em; }
.windlass .card i { font-size: 0.85em; opacity: 0.75; }
.windlass img { max-width: 640px; width: 100%; display: block; margin: 8px 0; }
"""


def fragment(title: str, items: Sequence[Item]) -> str:
    """Items for the page of a notebook: no script, charts as pictures, which need matplotlib."""
    parts = []
    for item in items:
        if not isinstance(item, Chart | Heat):
            parts.append(_item(item))
        elif find_spec("matplotlib") is None:
            parts.append(_paragraph("caption", f"{item.title}: charts need matplotlib (pip install 'windlass[png]')"))
        else:
            data = b64encode(draw_picture(item, "svg", 8.0)).decode()
            parts.append(f'<img alt="{escape(item.title, quote=True)}" src="data:image/svg+xml;base64,{data}">')
    body = "\n".join(parts)
    return f'<div class="windlass"><style>{_FRAGMENT_CSS}</style><h3>{escape(title)}</h3>\n{body}</div>'


def save_page(path: Path, html: str) -> Path:
    write_atomic(path, html)
    return path


def _paragraph(kind: str, text: str) -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def _item(item: Item) -> str:
    if isinstance(item, Html):
        return item.html
    if isinstance(item, Note):
        return _paragraph(item.kind, item.text)
    if isinstance(item, Cards):
        cards = (
            f'<div class="card"><b>{escape(c.value)}</b><span>{escape(c.label)}</span>'
            + (f"<i>{escape(c.note)}</i></div>" if c.note else "</div>")
            for c in item.cards
        )
        return f'<div class="cards">{"".join(cards)}</div>'
    if isinstance(item, DataTable):
        classes = dict.fromkeys(item.unbroken, ' class="whole"') | dict.fromkeys(item.right, ' class="n"')
        header, *rows = (
            "".join(f"<{tag}{classes.get(i, '')}>{escape(text)}</{tag}>" for i, text in enumerate(row))
            for tag, row in [("th", item.columns), *(("td", row) for row in item.texts())]
        )
        begins = ['<tr class="strong">' if i in item.strong else "<tr>" for i in range(len(rows))]
        body = "".join(f"{begin}{row}</tr>" for begin, row in zip(begins, rows, strict=True))
        head = f"<table><thead><tr>{header}</tr></thead>" if any(item.columns) else '<table class="pairs">'
        return f'<div class="wide">{head}<tbody>{body}</tbody></table></div>' + _paragraph("caption", item.caption)
    # "</" inside a script element would end it; JSON allows the escaped form.
    figure = json.dumps(spec(item), allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    label = escape(item.title, quote=True)
    box = f'<div class="plot" style="height:{item.height}px" role="img" aria-label="{label}"></div>'
    data = f'<script type="application/json">{figure}</script>'
    return f'<div class="chart">{box}{data}{_paragraph("caption", item.caption)}</div>'


# Replaced by the page's script with the colours of the reader's light or dark setting.
INK, SOFT, GRID, CLEAR = "var(--ink)", "var(--soft)", "var(--grid)", "rgba(0,0,0,0)"
# Plotly reads <b> and <a href> in the texts it draws; names from files must stay text.
_TEXT_KEYS = {"name", "text", "hovertext", "title", "x", "y"}


def spec(item: Chart | Heat) -> dict[str, Any]:
    """`{"data": [...], "layout": {...}}` for Plotly.newPlot."""

    def plain(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: plain(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v, key) for v in value]
        return escape(value, quote=False) if isinstance(value, str) and key in _TEXT_KEYS else value

    figure: dict[str, Any] = plain(json_safe(_heat(item) if isinstance(item, Heat) else _chart(item)))
    return figure


def _chart(chart: Chart) -> dict[str, Any]:
    layout = _layout(chart)
    x_axis, y_axis = layout["xaxis"], layout["yaxis"]
    if chart.horizontal:
        layout["xaxis"], layout["yaxis"] = y_axis, x_axis
        x_axis |= {"autorange": "reversed", "type": "category", "showgrid": False}
    if chart.log_x:
        # With few values, those values are the ticks: 4, 16, 80 devices say more than powers of ten.
        spaced: list[float] = []
        for value in sorted({float(x) for s in chart.series for x in s.x if not isinstance(x, str) and x > 0}):
            if not spaced or value >= 1.3 * spaced[-1]:
                spaced.append(value)
        listed = {"tickmode": "array", "tickvals": spaced, "ticktext": [f"{v:,.6g}" for v in spaced]}
        layout["xaxis"] |= {"type": "log", **(listed if 0 < len(spaced) <= 16 else {"dtick": 1})}
    elif ticks := chart.integer_ticks:
        layout["xaxis"] |= {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{v:,}" for v in ticks]}
    if chart.log_y:
        y_axis |= {"type": "log", "dtick": "D2"}
    elif chart.from_zero:
        y_axis["rangemode"] = "tozero"
    data: list[dict[str, Any]] = []
    for index, series in enumerate(chart.series):
        data += _traces(series, colour(index if series.colour is None else series.colour), chart.horizontal)
    layout |= {"barmode": "stack" if chart.stacked else "group", "showlegend": chart.has_legend}
    layout |= {"shapes": [], "annotations": []}
    for mark in chart.marks:
        upright = chart.is_upright(mark)
        along, across = "xy" if upright else "yx"
        place = {f"{along}0": mark.at, f"{along}1": mark.at, f"{across}0": 0, f"{across}1": 1, f"{across}ref": "paper"}
        layout["shapes"].append({"type": "line", "line": {"color": SOFT, "width": 1.5, "dash": "dot"}, **place})
        if mark.label:
            # A mark's line is placed by its value, its label on a log axis by the exponent.
            is_log = (chart.log_x if upright else chart.log_y) and mark.at > 0
            label = {along: math.log10(mark.at) if is_log else mark.at, across: 1, f"{across}ref": "paper"}
            align = {"xanchor": "center" if upright else "right", "yanchor": "bottom"}
            font = {"size": 13, "color": SOFT}
            layout["annotations"].append({"text": mark.label, "showarrow": False, "font": font, **label, **align})
    return {"data": data, "layout": layout}


def _traces(series: Series, tint: str, horizontal: bool) -> list[dict[str, Any]]:
    """The series, after its shaded range where it has one."""
    x, y = list(series.x), list(series.y)
    trace: dict[str, Any] = {"name": series.name, "x": x, "y": y, "showlegend": not series.quiet}
    if series.kind == "bar":
        trace |= {"type": "bar", "marker": {"color": tint}}
        trace |= {"x": y, "y": x, "orientation": "h"} if horizontal else {}
    else:
        # SVG traces, not WebGL: a projector's old laptop draws them too, and printing keeps them sharp.
        lines = "lines+markers" if len(x) <= 12 else "lines"
        trace |= {"type": "scatter", "mode": "markers" if series.kind == "points" else lines}
        stroke = {"color": tint, "width": 2.5, "dash": "dash" if series.dashed else "solid"}
        trace |= {"line": stroke, "marker": {"color": tint, "size": 8}}
    if series.hover is not None:
        trace |= {"hovertext": list(series.hover), "hovertemplate": "%{hovertext}<extra>%{fullData.name}</extra>"}
    if series.low is None or series.high is None:
        return [trace]
    edges = zip(series.x, series.low, series.high, strict=True)
    shaded = [(at, low, high) for at, low, high in edges if low is not None and high is not None]
    around = [(at, high) for at, _, high in shaded] + [(at, low) for at, low, _ in reversed(shaded)]
    red, green, blue = (int(tint[i : i + 2], 16) for i in (1, 3, 5))
    outline = {
        "x": [at for at, _ in around], "y": [value for _, value in around], "fill": "toself", "type": "scatter",
        "fillcolor": f"rgba({red},{green},{blue},0.18)", "line": {"width": 0}, "hoverinfo": "skip",
        "showlegend": False, "mode": "lines",
    }  # fmt: skip
    return [outline, trace]


def _heat(heat: Heat) -> dict[str, Any]:
    shared = {"type": "heatmap", "x": list(heat.x), "y": list(heat.y), "xgap": 2, "ygap": 2}
    values: dict[str, Any] = {
        **shared,
        "z": [list(row) for row in heat.values],
        "colorscale": [list(stop) for stop in HEAT],
        "colorbar": {
            "title": {"text": heat.unit, "font": {"color": INK}},
            "tickfont": {"color": INK},
            "separatethousands": True,
        },
        "hoverongaps": False,
    }
    if heat.scale is not None:
        values |= {"zmin": heat.scale[0], "zmax": heat.scale[1]}
    if heat.labels is not None:
        values |= {"text": [list(row) for row in heat.labels], "texttemplate": "%{text}"}
    gaps = heat.labelled_gaps
    filled = {
        **shared,
        "z": [[1 if is_gap else None for is_gap in row] for row in gaps],
        "colorscale": [[0, NO_VALUE], [1, NO_VALUE]],
        "showscale": False,
        "hoverinfo": "skip",
    }
    layout = _layout(heat)
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    layout["yaxis"] |= {"type": "category", "showgrid": False, "autorange": "reversed"}  # the first row on top
    return {"data": [filled, values] if any(map(any, gaps)) else [values], "layout": layout}


def _layout(item: Chart | Heat) -> dict[str, Any]:
    ink = {"color": INK}
    axis = {
        "gridcolor": GRID, "zerolinecolor": GRID, "linecolor": SOFT, "tickfont": {"size": 14, **ink},
        "automargin": True, "separatethousands": True,
    }  # fmt: skip
    corner = {"x": 0, "xanchor": "left", "xref": "container", "y": 0.98, "yref": "container", "yanchor": "top"}
    return {
        "title": {"text": item.title, "font": {"size": 18, **ink}, **corner},
        "font": {"family": FONT, "size": 14, **ink},
        "height": item.height,
        "margin": {"l": 70, "r": 24, "t": 64, "b": 56},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "hovermode": "closest",
        "xaxis": {**axis, "title": {"text": item.x_title, "font": ink}},
        "yaxis": {**axis, "title": {"text": item.y_title, "font": ink, "standoff": 12}},
        "legend": {"orientation": "v", "font": {"size": 14, **ink}, "bgcolor": CLEAR, "traceorder": "normal"},
    }
