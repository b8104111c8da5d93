"""The report opens from disk with no network and draws its charts, light and dark."""

from __future__ import annotations

import json
import re

import pytest

from windlass.files import append_line
from windlass.report.write import write_report
from windlass.runs.events import Evaluated
from windlass.runs.folder import Run

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_from_disk(folder, open_page, scheme):
    path = write_report(Run(folder / "first"))
    page = open_page(scheme)
    page.context.set_offline(True)
    page.goto(path.resolve().as_uri())
    page.wait_for_selector(".plot .main-svg")
    assert page.inner_text("h1") == "first"
    text = page.inner_text("main")
    for words in ("rank 5 failed", "resumed at step 150", "363.61 Wh", "Model card", "Summary of training content"):
        assert words in text
    assert page.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 7
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def pages(page, hidden: str = "") -> int:
    """Pages of the document in print, without the elements that `hidden` selects."""
    if hidden:
        page.add_style_tag(content=f"{hidden} {{ display: none !important; }}")
    return len(re.findall(rb"/Type /Page\b(?!s)", page.pdf(prefer_css_page_size=True)))


def fill_funder_page(run: Run) -> None:
    """As much as the first page can hold, and more: long names, markup, ten languages, a plan."""
    config = json.loads(run.config_file.read_text())
    long = "<script>alert(1)</script> <b>grant</b> \x1b[2J\u202e " + "long text " * 40
    config["project"] = dict.fromkeys(("title", "id", "grant", "funder", "licence", "base_model"), long)
    config["launch"] |= {"budget_node_hours": 1000, "account": "project_465000001"}
    run.config_file.write_text(json.dumps({**config, "name": "a" * 120}))
    languages = {f"language-{i} {long}": {"loss": 2.0 + i / 10, "bits_per_byte": 0.8} for i in range(10)}
    run.record(Evaluated(step=300, val_loss=2.6, sources=languages, languages=languages))
    for name in languages:
        append_line(run.eval_file, {"task": long, "group": f"language {name}", "metric": long, "value": 0.4})
    numbers = {"tokens_per_second": 1e5, "mfu": 0.4, "step_seconds": 1.2, "memory_allocated_gib": 60, "node_hours": 0.3}
    run.plan_file.write_text(json.dumps({"device": "H100", "plan": {**numbers, "mwh": 0.0005}}))


@pytest.mark.parametrize("content", ["usual", "fullest", "empty"])
def test_the_first_page_prints_on_one_sheet(folder, open_page, content):
    """Page 1 is the funder's page and nothing else: hiding the details leaves one page, hiding it leaves one less."""
    run = Run(folder / "first")
    if content == "fullest":
        fill_funder_page(run)
    if content == "empty":
        for file in (run.metrics_file, run.events_file, run.energy_file, run.manifest_file):
            file.unlink()
    path = write_report(run)
    page = open_page()
    page.goto(path.resolve().as_uri())
    every_page = pages(page)
    page.add_style_tag(content=".page { break-after: auto !important; }")  # after it comes nothing
    assert pages(page, "section:not(.page), footer") == 1
    page.reload()
    assert pages(page, "section.page, h1, .sub") == every_page - 1
