"""How do charts and tables become one HTML file that opens from disk, with no network, in ten years' time? Everything is inside it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from windlass.figures.interactive import spec
from windlass.figures.model import Cards, Chart, Heat, Html, Item, Note, Section, Table
from windlass.figures.theme import css

# Colours named var(--x) in a figure are looked up in the style sheet, so charts follow a change from light to dark.
_DRAW = """
(function () {
  function resolve(value, style) {
    if (typeof value === "string") {
      var m = /^var\\((--[a-z]+)\\)$/.exec(value);
      return m ? style.getPropertyValue(m[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map(function (v) { return resolve(v, style); });
    if (value && typeof value === "object") {
      var out = {};
      Object.keys(value).forEach(function (k) { out[k] = resolve(value[k], style); });
      return out;
    }
    return value;
  }
  // In a narrow window a legend beside the chart would leave it no room: it goes below, and the chart grows by that much.
  function narrow(box, layout, entries) {
    if (!layout.showlegend || !layout.legend || box.clientWidth >= 860 || !box.clientWidth) return;
    var across = layout.yaxis.type === "category" ? 1 : Math.max(1, Math.floor(box.clientWidth / 230)); // long labels leave room for one
    var room = 10 + 22 * Math.ceil(entries / across);
    Object.assign(layout.legend, { orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom" });
    layout.margin.b += room;
    layout.height += room;
    box.style.height = layout.height + "px";
  }
  function draw() {
    var style = getComputedStyle(document.documentElement);
    document.querySelectorAll(".plot").forEach(function (box) {
      var figure = resolve(JSON.parse(box.nextElementSibling.textContent), style);
      narrow(box, figure.layout, figure.data.length);
      Plotly.react(box, figure.data, figure.layout, { responsive: true, displaylogo: false, displayModeBar: false });
    });
  }
  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.windlassDraw = draw;
})();
"""


def page(title: str, sections: Sequence[Section], *, subtitle: str = "", footer: str = "") -> str:
    """One self-contained document. `title`, `subtitle` and all texts are escaped; only `Html` items pass as they are."""
    body = "\n".join(fragment(section) for section in sections)
    charts = any(isinstance(item, Chart | Heat) for section in sections for item in section.items)
    script = f"<script>{_library()}</script>\n<script>{_DRAW}</script>" if charts else ""
    under = f'<p class="sub">{escape(subtitle)}</p>' if subtitle else ""
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
{under}
{body}
<footer>{escape(footer)}</footer>
</main>
{script}
</body>
</html>
"""


def save_page(path: Path, html: str) -> Path:
    """Write whole, then rename: a reader never sees half a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(html, encoding="utf-8")
    part.replace(path)
    return path


def fragment(section: Section) -> str:
    """A section without the page around it (the live dashboard puts several into one page of its own)."""
    anchor = f' id="{escape(section.id, quote=True)}"' if section.id else ""
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return f"<section{anchor}>{heading}\n" + "\n".join(_item(item) for item in section.items) + "\n</section>"


def _item(item: Item) -> str:
    if isinstance(item, Html):
        return item.html
    if isinstance(item, Note):
        return f'<p class="{item.kind}">{escape(item.text)}</p>'
    if isinstance(item, Cards):
        return '<div class="cards">' + "".join(_card(c.value, c.label, c.note) for c in item.cards) + "</div>"
    if isinstance(item, Table):
        return _table(item)
    return _plot(item)


def _card(value: str, label: str, note: str) -> str:
    extra = f"<i>{escape(note)}</i>" if note else ""
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span>{extra}</div>'


def _table(table: Table) -> str:
    named = any(table.columns)
    head = f"<thead><tr>{_cells('th', table.columns, table)}</tr></thead>" if named else ""
    rows = "".join(
        f"<tr{_class('strong', i in table.strong)}>{_cells('td', row, table)}</tr>" for i, row in enumerate(table.rows)
    )
    return f'<div class="wide"><table{_class("pairs", not named)}>{head}<tbody>{rows}</tbody></table></div>{_caption(table.caption)}'


def _cells(tag: str, row: Sequence[object], table: Table) -> str:
    texts = (escape("" if cell is None else str(cell)) for cell in row)
    kinds = ("n" if i in table.right else "whole" if i in table.whole else "" for i in range(len(row)))
    return "".join(f"<{tag}{_class(kind, bool(kind))}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))


def _class(name: str, wanted: bool) -> str:
    return f' class="{name}"' if wanted else ""


def _plot(item: Chart | Heat) -> str:
    # "</" inside a script element would end it; JSON allows the escaped form.
    figure = json.dumps(spec(item), allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    box = f'<div class="plot" style="height:{item.height}px" role="img" aria-label="{escape(item.title, quote=True)}"></div>'
    return f'<div class="chart">{box}<script type="application/json">{figure}</script>{_caption(item.caption)}</div>'


def _caption(text: str) -> str:
    return f'<p class="caption">{escape(text)}</p>' if text else ""


def _library() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")
