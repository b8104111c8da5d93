"""A real Chromium, headless, with a profile of its own. Without one the tests are skipped, except in CI, where that is a failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.sample_run import make_run

from windlass.report.dash.server import DashServer, make_server, serve_in_background

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


def chromium() -> str | None:
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or chromium() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("the browser tests need Chromium and the package playwright")
        pytest.skip("Chromium or the package playwright is not installed")
    with sync_playwright() as made:
        yield made


@pytest.fixture
def open_page(playwright, tmp_path) -> Iterator[Any]:
    """`open_page("dark")` -> a page that fails the test when its console reports an error or it asks another host."""
    contexts: list[Any] = []
    problems: list[str] = []

    def make(scheme: str = "light", width: int = 1280, height: int = 900) -> Any:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path / f"profile{len(contexts)}"), executable_path=chromium(), headless=True, args=FLAGS, color_scheme=scheme,
            viewport={"width": width, "height": height},
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on(
            "request",
            lambda request: problems.append(f"foreign request {request.url}") if not _local(request.url) else None,
        )
        page.on(
            "dialog", lambda dialog: (problems.append("a dialog opened: something was run as script"), dialog.dismiss())
        )
        return page

    yield make
    for context in contexts:
        context.close()
    assert problems == []


def _local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file://", "data:", "blob:", "about:"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    make_run(root / "first", name="first")
    make_run(root / "second", name="second", steps=420, crash_at=260, resume_from=200)
    make_run(root / "going", name="going", finished=False, steps=220)
    return root


@pytest.fixture
def server(folder: Path) -> Iterator[DashServer]:
    made = make_server(folder)
    serve_in_background(made)
    yield made
    made.shutdown()
    made.server_close()
