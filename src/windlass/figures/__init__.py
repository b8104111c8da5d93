"""How does windlass draw? Plain values in; one self-contained HTML page, an SVG or a PNG out, all without network.

chart = Chart(title="Loss", x_title="tokens", y_title="loss", series=(line("train", xs, ys),))
html = page("My run", [Section("Training", (chart, Table(("step", "loss"), rows)))])
save_picture(chart, Path("loss.png"))
"""

from windlass.figures.model import (
    Card,
    Cards,
    Chart,
    Heat,
    Html,
    Item,
    Mark,
    Note,
    Section,
    Series,
    Table,
    bars,
    line,
    points,
)
from windlass.figures.page import fragment, page, save_page
from windlass.figures.picture import save_picture, to_svg

__all__ = [
    "Card", "Cards", "Chart", "Heat", "Html", "Item", "Mark", "Note", "Section", "Series", "Table",
    "bars", "fragment", "line", "page", "points", "save_page", "save_picture", "to_svg",
]  # fmt: skip
