"""The report opens from disk with no network and draws its charts, light and dark."""

from __future__ import annotations

import pytest

from windlass.report.write import write_report
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
