"""A page must open from disk alone: nothing fetched, nothing that breaks out of its place, gaps where numbers are unknown."""

import json
import re

import pytest

from windlass.figures import (
    Card,
    Cards,
    Chart,
    DataTable,
    Heat,
    Html,
    Mark,
    Note,
    Section,
    Series,
    bars,
    line,
    page,
    points,
    save_page,
)
from windlass.figures.html import spec


def chart(**changes):
    return Chart(title="loss", series=(line("run", (1, 2, 3), (3.0, None, 2.0)),), **changes)


def specs_of(html):
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)]


def test_page_is_self_contained_and_holds_the_library_once():
    html = page("Run", [Section("One", [chart(), chart()]), Section("Two", [chart()])])
    outside = html.replace(html[html.index("<script>") :], "")  # plotly's own text mentions addresses it never opens
    assert not re.search(r"(src|href)\s*=\s*[\"']https?:", outside)
    assert html.count("Plotly.react(") == 1
    assert len(re.findall(r"plotly\.js v\d", html)) == 1
    assert len(specs_of(html)) == 3


def test_page_without_charts_stays_small():
    assert len(page("Run", [Section("One", [Note("hello"), DataTable(("a",), [(1,)])])])) < 20_000


def test_unknown_numbers_are_gaps_not_zeros():
    found = spec(chart())["data"][0]
    assert found["y"] == [3.0, None, 2.0]
    assert spec(Chart(title="t", series=(line("a", (1,), (float("nan"),)),)))["data"][0]["y"] == [None]


def test_text_from_outside_is_escaped_and_html_items_pass():
    evil = "</script><b>x"
    html = page(
        evil, [Section(evil, [Note(evil), DataTable((evil,), [(evil,)]), Html("<hr class=mine>"), chart(caption=evil)])]
    )
    assert "<b>x" not in html
    assert "<hr class=mine>" in html
    # Plotly draws entities as the characters they name, and would read tags as markup.
    title = specs_of(page("t", [Section("s", [Chart(title=evil, series=())])]))[0]["layout"]["title"]["text"]
    assert title == "&lt;/script&gt;&lt;b&gt;x"


def test_horizontal_stacked_bars_put_categories_on_the_left():
    found = spec(
        Chart(
            title="t",
            series=(bars("a", ("x", "y"), (1, 2)), bars("b", ("x", "y"), (3, 4))),
            stacked=True,
            horizontal=True,
        )
    )
    assert found["layout"]["barmode"] == "stack"
    assert found["data"][0]["x"] == [1, 2] and found["data"][0]["y"] == ["x", "y"]
    assert found["layout"]["yaxis"]["autorange"] == "reversed"


def test_marks_stand_at_their_value_also_on_a_log_axis():
    found = spec(
        chart(log_y=True, marks=(Mark(axis="y", at=100.0, label="limit"), Mark(axis="x", at=2.0, label="resume")))
    )
    assert found["layout"]["shapes"][0]["y0"] == 100.0  # shapes take data values on a log axis
    assert found["layout"]["annotations"][0]["y"] == pytest.approx(2.0)  # annotations take the logarithm
    assert found["layout"]["annotations"][1]["x"] == 2.0


def test_range_shades_only_where_both_ends_are_known():
    series = Series(name="r", x=(1, 2, 3), y=(1, 2, 3), low=(0, None, 2), high=(2, 3, 4))
    outline = spec(Chart(title="t", series=(series,)))["data"][0]
    assert outline["x"] == [1, 3, 3, 1] and outline["y"] == [2, 4, 2, 0]


def test_heat_map_keeps_empty_cells_and_labels():
    heat = Heat(title="t", x=("1", "2", "3"), y=("a",), values=((1.0, None, None),), labels=(("ok", "OOM", ""),))
    marked, found = spec(heat)["data"]
    assert found["z"] == [[1.0, None, None]] and found["text"] == [["ok", "OOM", ""]]
    assert marked["z"] == [[None, 1, None]], "a cell with a word is filled, one that was not asked for is not"
    assert len(spec(Heat(title="t", x=("1",), y=("a",), values=((None,),)))["data"]) == 1


def test_cards_points_and_numbers_columns_show():
    html = page(
        "t",
        [
            Section(
                "s",
                [
                    Cards([Card("34", "days", "at MFU 0.32")]),
                    DataTable(("n", "d"), [("8B", 1)], right=(1,), strong=(0,)),
                ],
            )
        ],
    )
    assert "34" in html and 'class="n"' in html and 'class="strong"' in html and "at MFU 0.32" in html
    assert spec(Chart(title="t", series=(points("p", (1,), (2,)),)))["data"][0]["mode"] == "markers"


def test_page_is_written_whole(tmp_path):
    path = save_page(tmp_path / "deep" / "page.html", "<p>")
    assert path.read_text() == "<p>"
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]


def test_few_whole_numbers_are_the_ticks_themselves():
    devices = Chart(title="scaling", series=(line("a", [1, 2, 4, 64], [1.0, 2.0, 3.0, 9.0]),))
    assert spec(devices)["layout"]["xaxis"]["tickvals"] == [4, 64]  # 1 and 2 would lie on 4
    assert spec(Chart(title="t", series=(line("a", [1, 2], [1.0, 2.0]),)))["layout"]["xaxis"]["tickvals"] == [1, 2]
    assert "tickvals" not in spec(Chart(title="t", series=(line("a", [1.0, 2.5], [1.0, 2.0]),)))["layout"]["xaxis"]
    assert "tickvals" not in spec(Chart(title="t", series=(line("a", list(range(50)), [0.0] * 50),)))["layout"]["xaxis"]
