"""The dashboard as a person uses it: look, filter, compare, follow a live run, move the planner's controls."""

from __future__ import annotations

import json
import time

import pytest
from tests.report.sample_run import BEGIN, metric
from tests.report.sample_sweep import end_point, make_sweep
from tests.report.test_report import HOSTILE

from windlass.files import append_line
from windlass.launch.sweep.results import collect_rows, write_tables
from windlass.runs.events import FaultEvent, Finished
from windlass.runs.folder import Run

pytestmark = pytest.mark.browser


def until(page, expression: str, seconds: float = 60.0) -> None:
    """Ask from outside until it is true: the page's own policy forbids evaluating text inside it."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(100)


def names(page) -> list[str]:
    return [a.inner_text() for a in page.query_selector_all("#rows td a")]


def test_filter_sort_and_compare_on_four_axes(server, open_page):
    page = open_page()
    page.goto(server.url)
    page.wait_for_selector("#rows tr")
    assert "token" not in page.url
    assert sorted(names(page)) == ["first", "going", "second"]
    page.fill("#filter", "finished seco")
    assert names(page) == ["second"]
    page.fill("#filter", "")
    page.click("#runs th a:text('tokens')")
    assert names(page) == ["second", "first", "going"]
    for box in page.query_selector_all("#rows input[type=checkbox]"):
        box.click()
    until(page, "document.querySelectorAll('#compare .legend .traces').length === 3")
    for axis, title in (("tokens", "tokens"), ("time", "hours"), ("kwh", "kWh"), ("step", "step")):
        page.select_option("#axis", axis)
        until(page, f"document.querySelector('#compare .xtitle')?.textContent === {title!r}")
    page.select_option("#key", "mfu")
    until(page, "document.querySelector('#compare .gtitle')?.textContent === 'mfu'")
    page.check("#log")
    page.click("#none")
    page.wait_for_selector("#comparison", state="hidden")


def test_an_update_of_the_list_leaves_unchanged_rows_alone(server, folder, open_page):
    page = open_page()
    page.goto(server.url)
    page.wait_for_selector("#rows tr")
    page.evaluate("for (const tr of document.querySelectorAll('#rows tr')) tr.mine = true")
    append_line(Run(folder / "going").metrics_file, metric(221, BEGIN + 1300, None))
    until(page, "[...document.querySelectorAll('#rows tr')].filter((tr) => tr.mine).length === 2")
    page.wait_for_timeout(4500)
    assert page.evaluate("[...document.querySelectorAll('#rows tr')].filter((tr) => tr.mine).length") == 2


def test_a_live_run_moves_without_reload(server, folder, open_page):
    run = Run(folder / "going")
    page = open_page()
    page.goto(server.url)
    page.click("#rows a:text('going')")
    page.wait_for_selector(".plot[data-key=loss] .main-svg")
    page.evaluate("window.same = 'this page'")
    last = "Math.max(...document.querySelector('.plot[data-key=loss]').data.flatMap((t) => t.x))"
    assert page.evaluate(last) == 220
    assert page.inner_text("#eta").startswith("no new line since")
    zoom(page, 0.5, 0.9)
    shown = "[...document.querySelectorAll('.plots .plot')].filter((p) => p.layout).map((p) => p.layout.xaxis.range.map(Math.round).join())"
    until(page, f"new Set({shown}).size === 1 && {shown}[0] !== '1,220'")
    zoomed = page.evaluate(shown)
    for step in range(221, 231):
        append_line(run.metrics_file, metric(step, BEGIN + 1000 + step, None))
    append_line(run.metrics_file, metric(231, time.time(), None))
    until(page, "document.getElementById('eta').textContent.includes(' left, ends ')")
    assert page.evaluate(shown) == zoomed
    assert page.get_attribute("[role=progressbar]", "aria-valuenow") == "76"  # 231 steps of 131,072 tokens, of 40M
    page.click("#unzoom")
    until(page, f"{last} === 231")
    run.record(Finished(step=230, tokens=230 * 131072, loss=2.0))
    until(page, "document.getElementById('state').textContent === 'finished'")
    assert page.evaluate("window.same") == "this page"
    assert page.inner_text("#live").startswith("live,")


def zoom(page, low: float, high: float) -> None:
    """Drag over a part of the loss chart's width."""
    area = page.locator(".plot[data-key=loss] .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + low * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + high * box["width"], box["y"] + 55, steps=3)
    page.mouse.up()


def test_keys_crosshair_notes_and_downloads(server, folder, open_page):
    page = open_page()
    page.goto(server.url)
    page.wait_for_selector("#rows tr")
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("first")
    assert names(page) == ["first"]
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.wait_for_selector("#compare .main-svg")
    assert "run=first" in page.url
    page.keyboard.press("Enter")
    page.wait_for_selector(".plot[data-key=loss] .main-svg")
    assert page.url.endswith("#/run/first")
    page.locator(".plot[data-key=loss] .nsewdrag").first.hover()
    hovered = "[...document.querySelectorAll('.plots .plot')].filter((p) => p.querySelector('.spikeline')).map((p) => p.querySelector('.axistext').textContent)"
    until(page, f"{hovered}.length >= 2 && new Set({hovered}).size === 1")
    page.select_option("#mean", "10")
    page.check("#log")
    until(page, "document.querySelector('.plot[data-key=loss]').layout.yaxis.type === 'log'")
    assert page.url.endswith("?mean=10&log=1")
    # The repeated steps, the lines as logged, their mean, and the validation.
    drawn = page.evaluate("document.querySelector('.plot[data-key=loss]').data.map((t) => Math.max(...t.x))")
    assert drawn == [180, 300, 300, 300]
    for kind, begins in (("PNG", b"\x89PNG"), ("SVG", b"<svg"), ("CSV", b"run,step,tokens,hours,kwh,loss,repeated\n")):
        with page.expect_download() as download:
            page.click(f".plots .tools button:text('{kind}') >> nth=0")
        assert download.value.suggested_filename == f"first-loss.{kind.lower()}"
        assert download.value.path().read_bytes().startswith(begins)
    page.click("#edit-notes")
    page.fill("#note-tags", f"baseline, {HOSTILE[:30]}")
    page.fill("#note-text", HOSTILE)
    page.click("#save-notes")
    page.wait_for_selector("#notes .tag")
    assert json.loads(Run(folder / "first").notes_file.read_text())["tags"] == ["baseline", HOSTILE[:30]]
    page.keyboard.press("Escape")
    page.wait_for_selector("#rows .tag")
    assert HOSTILE in page.inner_text("#rows") and page.query_selector_all("#page img") == []


def test_one_run_shows_the_interruption_energy_and_saves(server, open_page):
    page = open_page("dark")
    page.goto(server.url)
    page.click("#rows a:text('first')")
    page.wait_for_selector("#life")
    text = page.inner_text("#page")
    for words in (
        "rank 5 failed (node)",
        "resumed at step 150",
        "363.61 Wh",
        "not measured on 1 of 2 nodes",
        "67.7 %",
        "Checkpoints",
        "dutch-news",
    ):
        assert words in text
    page.select_option("#axis", "time")
    until(page, "document.querySelector('.plot[data-key=loss]').layout.shapes.length >= 5")
    page.select_option("#more", "spread_seconds")
    page.wait_for_selector(".plot[data-key=other] .main-svg")
    held: list = []
    page.route("**/api/series*", lambda route: held.append(route))
    page.select_option("#axis", "step")
    page.select_option("#more", "data_seconds")  # while the curves of the other choice are on their way
    while len(held) < 2:
        page.wait_for_timeout(50)
    for route in held:
        route.continue_()
    page.unroute("**/api/series*")
    until(page, "document.querySelector('.plot[data-key=other]').layout.title.text.includes('data_seconds')")


def test_planner_takes_numbers_saves_a_recipe_and_is_shared_by_its_address(server, open_page):
    page = open_page()
    page.goto(server.url)
    page.click("nav a[data-page=planner]")
    page.wait_for_selector("#answer .card")
    page.wait_for_selector("#memory .main-svg")
    days = "document.querySelector('#answer .card b')?.textContent"
    before = page.evaluate(days)
    page.fill("#nodes", "40")
    until(page, f"{days} !== {before!r}")
    assert float(page.evaluate(days).split()[0].replace(",", "")) < float(before.split()[0].replace(",", ""))
    page.click("#shape summary")
    page.fill("#width", "2048")
    page.fill("#layers", "16")
    page.fill("#tokens", "20B")
    until(page, "document.getElementById('model')?.textContent.startsWith('1.43B parameters: layers 16, width 2,048')")
    assert page.get_attribute("#heads", "placeholder") == "16"
    ranking = page.inner_text("#ranking tbody")
    with page.expect_download() as download:
        page.click("#save-recipe")
    recipe = download.value.path().read_text()
    assert download.value.suggested_filename == "what-if-1.43B.toml" and "nodes = 40" in recipe
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#ranking")
    assert page.inner_text("#ranking tbody") == ranking and page.input_value("#tokens") == "20B"
    page.fill("#nodes", "1")
    page.fill("#size", "180B")
    page.fill("#width", "")
    page.fill("#layers", "")
    until(page, "document.getElementById('answer').textContent.includes('no layout of')")


def test_sweep_data_and_profile_pages(server, open_page):
    page = open_page()
    page.goto(server.url)
    page.click("nav a[data-page=sweep]")
    page.wait_for_selector("#pareto .main-svg")
    page.click("nav a[data-page=data]")
    page.wait_for_selector("text=CC-BY-4.0")
    page.click("nav a[data-page=runs]")
    page.click("#rows a:text('first')")
    page.click("a:text('profile')")
    page.wait_for_selector("h1:text('Profile')")


def test_a_sweep_is_drawn_followed_and_leads_to_its_runs(server, folder, open_page):
    work = make_sweep(folder / "grid", unfinished=1)
    server.folder._listed_at = -1e9
    page = open_page()
    page.goto(server.url)
    page.click("nav a[data-page=sweep]")
    for name in ("heat", "scaling", "pareto"):
        page.wait_for_selector(f"#{name} .main-svg")
    assert "OOM" in page.inner_text("#heat") and "8 of 9 points" in page.inner_text(".sub")
    end_point(work, work.points[-1])
    write_tables(work, collect_rows(work))
    until(page, "document.querySelector('.sub').textContent.includes('9 of 9 points')")
    assert page.inner_text("#points tbody tr td") == "beside"
    page.select_option("#which", "runs")
    page.wait_for_selector("h1:text('Comparison of all runs')")
    page.go_back()
    page.click("#points a:text('beside')")
    page.wait_for_selector(".plot[data-key=loss] .main-svg")
    assert page.evaluate("window.scrollY") == 0
    assert page.inner_text("h1").startswith("grid.beside")


def test_hostile_names_stay_text(server, folder, open_page):
    run = Run(folder / "first")
    config = json.loads(run.config_file.read_text())
    config["notes"] = HOSTILE
    run.config_file.write_text(json.dumps(config))
    run.record(FaultEvent(rank=0, kind=HOSTILE, error=HOSTILE))
    append_line(run.metrics_file, {"step": 301, HOSTILE: 1.0, "loss": 2.0, "time": BEGIN + 5000})
    manifest = json.loads(run.manifest_file.read_text())
    manifest["data"]["sources"][0]["name"] = HOSTILE
    run.manifest_file.write_text(json.dumps(manifest))
    page = open_page()
    page.goto(server.url)
    page.click("#rows a:text('first')")
    page.wait_for_selector("#life")
    assert HOSTILE in page.inner_text("#page")
    page.select_option("#more", HOSTILE)
    page.wait_for_selector(".plot[data-key=other] .main-svg")
    assert page.query_selector_all("#page img") == []
    page.click("nav a[data-page=data]")
    page.wait_for_selector("h2")
    assert page.query_selector_all("#page img, #page script") == []


def test_without_the_token_there_is_nothing_to_see(server, open_page):
    page = open_page()
    page.request.get(f"http://127.0.0.1:{server.server_port}/")
    answer = page.request.get(f"http://127.0.0.1:{server.server_port}/api/runs")
    assert answer.status == 403


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_contrast_and_the_switch_works(server, open_page, scheme):
    page = open_page(scheme)
    page.goto(server.url)
    page.click("#rows a:text('first')")
    page.wait_for_selector(".plot[data-key=loss] .main-svg")
    assert contrast(page) > 7
    first = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    until(page, f"getComputedStyle(document.body).backgroundColor !== {first!r}")
    assert contrast(page) > 7
    ink = page.evaluate("document.querySelector('.plot[data-key=loss] .gtitle').style.fill")
    assert ink == page.evaluate("getComputedStyle(document.body).color")


def contrast(page) -> float:
    """WCAG contrast of text on paper; 7 is its highest demand."""
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    light, dark = sorted((_luminance(ink), _luminance(paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_in_a_narrow_window_legends_go_below_and_numbers_stay_whole(server, open_page):
    """Beside a chart of long labels, ten legend entries would leave the bars an inch."""
    page = open_page(width=800)
    page.goto(server.url)
    page.goto(f"{server.url.split('?')[0]}#/planner")
    page.wait_for_selector("#memory .main-svg .legend")
    until(page, "document.querySelector('#memory .main-svg .legend .traces') !== null")
    plot, legend = (
        page.locator(f"#memory .main-svg {part}").first.bounding_box()
        for part in (".bglayer rect, .cartesianlayer .plot", ".legend")
    )
    assert legend["y"] > plot["y"] + plot["height"] - 1
    assert plot["width"] > 200
    heights = page.evaluate(
        "[...document.querySelectorAll('.card:not(.long) b')].map((b) => b.getClientRects()[0].height)"
    )
    assert max(heights) < 40, "a value is broken over two lines"
