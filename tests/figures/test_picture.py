"""Pictures come out without browser, display or network, and say the same as the page."""

import sys

import pytest

from windlass.errors import WindlassError
from windlass.figures import Chart, Heat, Mark, Series, bars, line, points, save_picture

LINES = Chart(
    title="tokens against days", x_title="days", y_title="tokens", from_zero=True,
    series=(line("1B", (0, 50, 100), (0, 5e11, 1e12)), Series(name="7B", x=(0, 50, 100), y=(0, None, 2e11), low=(0, None, 1e11), high=(0, None, 3e11))),
    marks=(Mark(axis="y", at=4.5e11, label="450B"), Mark(axis="x", at=34, label="34 days")),
)  # fmt: skip


def svg(item, path):
    return save_picture(item, path / "x.svg").read_text()


def test_png_is_a_png_with_ink_on_it(tmp_path):
    path = save_picture(LINES, tmp_path / "a" / "lines.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    assert [p.name for p in path.parent.iterdir()] == ["lines.png"]


def test_svg_carries_titles_series_and_marks_as_text_and_is_the_same_twice(tmp_path):
    text = svg(LINES, tmp_path)
    assert all(word in text for word in ("tokens against days", "7B", "450B", "34 days"))
    assert svg(LINES, tmp_path) == text


def test_bars_stacked_and_lying_and_heat_map(tmp_path):
    stacked = Chart(
        title="memory",
        series=(bars("weights", ("a", "b"), (1, 2)), bars("states", ("a", "b"), (3, None))),
        stacked=True,
        horizontal=True,
        log_y=False,
    )
    grouped = Chart(
        title="rate", series=(bars("x", ("a", "b"), (1, 2)), bars("y", ("a", "b"), (3, 4)), points("p", ("a",), (2,)))
    )
    heat = Heat(
        title="grid",
        x=("1", "2"),
        y=("4", "8"),
        values=((1.0, None), (2.0, 3.0)),
        labels=(("1", "OOM"), ("2", "3")),
        unit="tokens/s",
    )
    for item in (stacked, grouped, heat):
        assert item.title in svg(item, tmp_path)


def test_unknown_ending_is_refused(tmp_path):
    with pytest.raises(WindlassError) as error:
        save_picture(LINES, tmp_path / "x.jpeg")
    assert error.value.code == "figures.format-unknown" and "x.png" in (error.value.hint or "")


def test_missing_matplotlib_is_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WindlassError) as error:
        save_picture(LINES, tmp_path / "x.png")
    assert error.value.code == "figures.matplotlib-missing" and "windlass[png]" in (error.value.hint or "")
