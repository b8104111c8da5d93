"""A real browser opens the page from disk, without network, and draws every chart."""

import shutil
import subprocess

import pytest

from windlass.figures import Chart, Heat, Mark, Section, bars, line, page, save_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


def test_every_chart_is_drawn_from_disk(tmp_path):
    charts = [
        Chart(
            title="lines",
            series=(line("a", (1, 2, 4), (1.0, None, 3.0)),),
            log_x=True,
            log_y=True,
            marks=(Mark(axis="x", at=2.0, label="here"),),
        ),
        Chart(
            title="bars",
            series=(bars("w", ("x", "y"), (1, 2)), bars("s", ("x", "y"), (3, 4))),
            stacked=True,
            horizontal=True,
        ),
        Heat(title="heat", x=("1", "2"), y=("a",), values=((1.0, None),), labels=(("1", "OOM"),)),
    ]
    path = save_page(tmp_path / "page.html", page("Page", [Section("Charts", charts)]))
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=8000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    # Plotly makes a box a js-plotly-plot once it is drawn; each has a title and its marks inside.
    assert dom.count("js-plotly-plot") >= len(charts)
    drawn = dom[dom.index("<main>") : dom.index("</main>")]
    assert drawn.count('class="main-svg"') >= len(charts)
    for word in ("here", "OOM", "bars"):
        assert f">{word}</t" in drawn
