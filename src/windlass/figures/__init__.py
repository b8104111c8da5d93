"""Charts as plain values, one renderer to a self-contained HTML page and one to PNG, SVG and PDF; no network.

chart = Chart(title="Loss", x_title="tokens", y_title="loss", series=(line("train", xs, ys),))
html = page("My run", [Section("Training", (chart, DataTable(("step", "loss"), rows)))])
save_picture(chart, Path("loss.png"))
"""

from windlass.figures.charts import (
    Card,
    Cards,
    Chart,
    DataTable,
    Heat,
    Html,
    Item,
    Mark,
    Note,
    Section,
    Series,
    bars,
    line,
    points,
)
from windlass.figures.html import fragment, page, save_page
from windlass.figures.picture import save_picture

__all__ = [
    "Card", "Cards", "Chart", "DataTable", "Heat", "Html", "Item", "Mark", "Note", "Section", "Series",
    "bars", "fragment", "line", "page", "points", "save_page", "save_picture",
]  # fmt: skip
