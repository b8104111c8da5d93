"""Every page at the width of a desk and of a phone, light and dark: nothing overflows, overlaps or is cut, no error.

`WINDLASS_SCREENSHOTS=folder pytest tests/browser/test_pages.py` keeps the pictures, for people to look at.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.report.sample_run import make_run, metric
from tests.report.sample_sweep import make_sweep
from tests.report.test_report import HOSTILE

from windlass.clusters import load_cluster
from windlass.config import load_recipe
from windlass.planner import plan
from windlass.planner.budget import Budget, budget
from windlass.planner.budget_page import budget_page
from windlass.planner.page import plan_page
from windlass.report.dash.server import make_server, serve_in_background
from windlass.report.write import write_report
from windlass.runs.events import FaultEvent
from windlass.runs.folder import Run

pytestmark = pytest.mark.browser

# Boxes of what a person reads, and what is wrong with them. Tables may be wider than the window inside `.wide`, which
# scrolls. Labels of one chart must not meet each other; text in a page must not meet text beside it.
CHECK = """() => {
  const problems = [];
  const name = (n) => `${n.tagName.toLowerCase()}${n.id ? '#' + n.id : ''}.${n.getAttribute('class') || ''} "${n.textContent.trim().slice(0, 40)}"`;
  const seen = (n) => { if (!n.checkVisibility()) return false; const r = n.getBoundingClientRect(); return r.width > 0 && r.height > 0 && getComputedStyle(n).visibility !== 'hidden'; };
  const meet = (a, b, slack) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > slack && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > slack;
  const turned = (n) => /rotate\\((?!0[, )])/.test(n.getAttribute('transform') || ''); /* its box says little */
  const top = document.documentElement;
  if (top.scrollWidth > top.clientWidth) problems.push(`page is ${top.scrollWidth} wide in a window of ${top.clientWidth}`);
  const texts = [...document.querySelectorAll('header a, header button, h1, h2, p, label, .card b, .card span, .card i, td, th, button, select, input:not([type=checkbox]), .progress span, summary')].filter(seen).filter((n) => !n.closest('dialog:not([open])'));
  for (const n of texts) {
    const r = n.getBoundingClientRect();
    if (!n.closest('.wide') && (r.left < -1 || r.right > top.clientWidth + 1)) problems.push(`out of the window: ${name(n)}`);
    if (n.scrollWidth > n.clientWidth + 1 && n.clientWidth && getComputedStyle(n).display !== 'inline' && !n.matches('input')) problems.push(`cut: ${name(n)}`);
  }
  const placed = texts.map((n) => [n, n.getBoundingClientRect()]).sort((a, b) => a[1].top - b[1].top);
  placed.forEach(([a, ra], i) => {
    for (const [b, rb] of placed.slice(i + 1)) {
      if (rb.top >= ra.bottom) break;
      if (!a.contains(b) && !b.contains(a) && !a.closest('header') && !b.closest('header') && meet(ra, rb, 2)) problems.push(`overlap: ${name(a)} and ${name(b)}`);
    }
  });
  for (const plot of document.querySelectorAll('.plot')) {
    if (!seen(plot) || !plot.querySelector('.main-svg')) continue;
    const box = plot.getBoundingClientRect();
    const labels = [...plot.querySelectorAll('.xtick text, .ytick text, .gtitle, .xtitle, .ytitle, .legendtext, .annotation-text')].filter(seen);
    for (const n of labels) { const r = n.getBoundingClientRect(); if (r.left < box.left - 2 || r.right > box.right + 2 || r.top < box.top - 2 || r.bottom > box.bottom + 2) problems.push(`label cut in "${plot.getAttribute('aria-label')}": ${name(n)}`); }
    labels.forEach((a, i) => { for (const b of labels.slice(i + 1)) if (!(turned(a) && turned(b)) && meet(a.getBoundingClientRect(), b.getBoundingClientRect(), 3)) problems.push(`labels overlap in "${plot.getAttribute('aria-label')}": ${name(a)} and ${name(b)}`); });
  }
  return problems;
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A live run, a finished one with notes, a hostile one, half-written ones, and a sweep."""
    root = tmp_path_factory.mktemp("pages") / "runs"
    make_run(root / "finished", name="finished")
    (root / "finished" / "notes.json").write_text(json.dumps({"text": HOSTILE, "tags": [HOSTILE[:40], "\x1b[31mred"]}))
    live = Run(make_run(root / "live", name="live", finished=False, steps=220))
    with live.metrics_file.open("a") as file:
        file.write(json.dumps(metric(221, time.time(), None)) + "\n")
    hostile = Run(make_run(root / "a <b>bold\x07</b> name & more %2e", name="hostile"))
    hostile.record(FaultEvent(rank=0, kind=HOSTILE, error=HOSTILE))
    # A gap, a clock that jumps back, an unknown loss and a metric with a hostile name.
    odd = [
        metric(900, 1.0, None),
        metric(901, 1.8e9, None),
        {**metric(902, 1.79e9, None), "loss": None, HOSTILE: 1.0},
        {"step": 903, "loss": 2.0},
    ]
    with hostile.metrics_file.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in odd))
    for name, files in {"empty": {}, "torn": {"config.json": '{"na', "metrics.jsonl": '{"step": 1, "lo'}}.items():
        (root / name).mkdir()
        for file_name, text in {"config.json": "{}", "events.jsonl": "", **files}.items():
            (root / name / file_name).write_text(text)
    make_sweep(root / "grid", unfinished=1)
    return root


def test_every_page_at_both_widths_light_and_dark(runs, open_page):
    server = make_server(runs)
    serve_in_background(server)
    base, names = server.url.split("?")[0], {view.run.name: view.name for view in server.folder.views()}
    hostile = next(name for name in names.values() if "bold" in name)
    pages = {
        "runs": "#/", "compare": "#/?run=finished&run=live&x=tokens&log=1", "live": "#/run/live", "finished": "#/run/finished?mean=10&log=1",
        "hostile": f"#/run/{quote(hostile, safe='')}?more={quote(HOSTILE, safe='')}", "empty": "#/run/empty", "torn": "#/run/torn",
        "sweep": "#/sweep", "all-runs": "#/sweep/runs", "planner": "#/planner?layers=16&width=2048", "planner-refuses": "#/planner?nodes=0", "data": "#/data",
        "profile": "#/profile/finished",
    }  # fmt: skip
    kept = os.environ.get("WINDLASS_SCREENSHOTS")
    page, problems = open_page(), []
    try:
        page.goto(server.url)
        for name, address in pages.items():
            page.goto("about:blank")
            page.set_viewport_size({"width": 1440, "height": 900})
            page.goto(base + address)
            page.wait_for_selector("#page[data-ready]")
            for width in (1440, 390):
                page.set_viewport_size({"width": width, "height": 900})
                page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
                for _ in range(20):  # charts follow the window after a moment
                    page.wait_for_timeout(250)
                    if not (found := page.evaluate(CHECK)):
                        break
                problems += [f"{name} at {width}: {problem}" for problem in found]
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
                        "rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 22, 28)"
                    )
                    if kept:
                        page.evaluate("window.scrollTo(0, 0)")
                        page.wait_for_timeout(300)
                        path = Path(kept) / f"{name}-{width}-{scheme}.png"
                        page.screenshot(path=str(path), full_page=True)
        assert page.query_selector_all("#page img, #page script") == []
    finally:
        server.shutdown()
        server.server_close()
    assert not problems, "\n".join(problems)


def test_pages_that_are_files_at_both_widths(runs, open_page, tmp_path):
    """Report, plan and budget, as they open from disk."""
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "gptnl_8b_snellius.toml").recipe
    h100 = load_cluster("snellius-h100")
    pages = {
        "plan": plan_page(plan(recipe, h100)),
        "budget": budget_page(budget(Budget(cluster=h100, nodes=88, days=30, mfu=0.4), [1e9, 7e9, 70e9]), 450e9),
        "report": write_report(Run(runs / "finished")).read_text(),
    }
    kept = os.environ.get("WINDLASS_SCREENSHOTS")
    problems = []
    for name, html in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(html)
        for width in (1440, 390):
            page = open_page("light", width)
            page.goto(path.as_uri())
            page.wait_for_selector(".plot .main-svg")
            problems += [f"{name} at {width}: {problem}" for problem in page.evaluate(CHECK)]
            if kept:
                page.screenshot(path=str(Path(kept) / f"file-{name}-{width}.png"), full_page=True)
            page.close()
    assert not problems, "\n".join(problems)
