"""Takes the browser screenshots of README and guides from a folder of runs: docs/images/dash-*.png and report.png. Needs Chromium and playwright.

python scripts/make_screens.py runs demo                   # the folder, and the run whose own page and report are shown
python scripts/make_screens.py runs demo dash-run report   # only these images
windlass sweep recipes/sweeps/cpu_grid.toml && python scripts/make_screens.py runs one-process dash-sweep dash-planner
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from windlass.report.dash.server import make_server, serve_in_background
from windlass.report.write import write_report

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 1320
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
]


def screenshot(page: Any, address: str, name: str, height: int, wait_for: str) -> None:
    if len(sys.argv) > 3 and name not in sys.argv[3:]:
        return
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.goto(address)
    page.wait_for_selector(wait_for)
    page.wait_for_timeout(1500)  # the last chart's labels
    page.screenshot(path=str(IMAGES / f"{name}.png"))
    print(f"wrote docs/images/{name}.png")


def main() -> int:
    from playwright.sync_api import sync_playwright

    folder, name = Path(sys.argv[1]), sys.argv[2]
    server = make_server(folder)
    serve_in_background(server)
    view = next(v for v in server.folder.views() if v.run.name == name)
    base = server.url.split("?")[0]
    browser = next(b for n in ("chromium", "chromium-browser", "google-chrome") if (b := shutil.which(n)))
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=browser, headless=True, args=FLAGS
        )
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(server.url)
        page.wait_for_selector("#rows tr")
        for box in page.query_selector_all("#rows input[type=checkbox]")[-3:]:
            box.click()
        page.evaluate("window.scrollTo(0, 0)")
        screenshot(page, f"{base}#/", "dash-runs", 860, "#compare .main-svg")
        screenshot(page, f"{base}#/run/{view.name}", "dash-run", 1000, ".plot[data-key=loss] .main-svg")
        screenshot(page, f"{base}#/sweep", "dash-sweep", 1000, "#page[data-ready=sweep]")
        screenshot(page, f"{base}#/planner", "dash-planner", 860, "#memory .main-svg")
        screenshot(page, write_report(view.run).resolve().as_uri(), "report", 1000, ".plot .main-svg")
        context.close()
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
