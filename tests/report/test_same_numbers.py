"""`windlass energy`, `watch`, `dash` and `report` on one run: the same numbers in every form, and none obeys what a file says."""

from __future__ import annotations

import http.client
import json
import re

import pytest
from tests.report.sample_run import make_run
from typer.testing import CliRunner

from windlass.cli import build
from windlass.report.dash.server import make_server, serve_in_background
from windlass.runs.events import FaultEvent, UnknownEvent
from windlass.runs.folder import Run

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def windlass(*words: str) -> str:
    done = CliRunner(env=WIDE).invoke(build(), list(words), prog_name="windlass")
    assert done.exit_code == 0, done.output
    return done.stdout


def asked(run: Run, path: str) -> dict:
    """What the dashboard's page gets."""
    server = make_server(run.path)
    serve_in_background(server)
    try:
        line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        line.request(
            "GET",
            f"/api/{path.format(id=server.folder.views()[0].id)}",
            headers={"Cookie": f"{server.cookie}={server.token}"},
        )
        return json.loads(line.getresponse().read())
    finally:
        server.shutdown()
        server.server_close()


def cells(page: dict, section: str) -> dict[str, str]:
    """First column -> second column of a section's tables."""
    part = next(s for s in page["sections"] if s["id"] == section)
    return {row[0]: row[1] for item in part["items"] if item["kind"] == "table" for row in item["rows"]}


class TestTheNumbers:
    """Worked by hand: 1.1 MJ measured, PUE 1.19, 267.6 g/kWh, 300 steps of 131,072 tokens."""

    def test_as_values(self, run):
        energy = json.loads(windlass("energy", str(run.path), "--json"))
        watch = json.loads(windlass("watch", str(run.path), "--json"))
        report = json.loads(windlass("report", str(run.path), "--json"))["runs"][0]
        row = asked(run, "runs")["runs"][0]
        assert energy["joules"] == watch["energy"]["joules"] == report["energy"]["joules"] == row["joules"] == 1.1e6
        assert energy["carbon"] == watch["energy"]["carbon"] == report["energy"]["carbon"]
        assert energy["carbon"]["location_kg"] == pytest.approx(1.1e6 / 3.6e6 * 1.19 * 0.2676)
        assert energy["coverage"] == watch["energy"]["ledger"]["coverage"] == report["energy"]["ledger"]["coverage"]
        assert energy["tokens"] == watch["tokens"] == report["tokens"] == row["tokens"] == 300 * 131_072
        for name in ("loss", "tokens_per_second", "mfu", "memory_bytes", "step", "status"):
            assert watch[name] == report[name] == row[name], name
        assert watch["life"]["goodput"] == report["life"]["goodput"] == row["goodput"]

    def test_as_words(self, run):
        page, row = asked(run, "run?id={id}"), asked(run, "runs")["runs"][0]
        table, markdown = windlass("energy", str(run.path)), windlass("report", str(run.path), "--markdown")
        shown, html = cells(page, "energy"), run.path / "report.html"
        windlass("report", str(run.path))
        for what in ("IT energy", "with PUE", "CO2e, location-based", "per billion tokens", "mean power", "per step"):
            value = shown[what]
            assert f"| {what} | {value} |" in markdown
            assert f'<td>{what}</td><td class="whole">{value}</td>' in html.read_text()
            assert re.search(rf"{what}\s+{re.escape(value)}\s", table), what
        assert row["energy"] == shown["with PUE"] == "363.61 Wh"
        assert re.search(r"energy\s+363\.61 Wh, measured", windlass("watch", str(run.path), "--once"))

    def test_another_factor_is_for_one_table_and_says_so(self, run):
        """As much as the run used, at a PUE of 2 and 100 g/kWh; every other view stays as it is."""
        found = json.loads(windlass("energy", str(run.path), "--json", "--pue", "2", "--grid", "100"))
        assert found["carbon"]["location_kg"] == pytest.approx(1.1e6 / 3.6e6 * 2 * 0.1)
        assert found["kwh_per_billion_tokens"] == pytest.approx(1.1e6 / 3.6e6 * 2 / (300 * 131_072 / 1e9))
        assert found["carbon"]["pue"]["source"] == "given on the command line, for this table only"
        assert found["carbon"]["market"]["value"] == 0  # not given: the cluster file's
        assert json.loads(windlass("watch", str(run.path), "--json"))["energy"]["carbon"]["pue"]["value"] == 1.19

    def test_a_part_that_is_not_measured_is_said_in_all_four(self, run):
        gap = "not measured on 1 of 2 nodes"
        assert gap in windlass("energy", str(run.path)) and gap in windlass("report", str(run.path), "--markdown")
        assert gap in json.dumps(asked(run, "run?id={id}")) and gap in windlass("watch", str(run.path), "--json")


ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"


class TestControlCharacters:
    """A run folder may come from anybody: what its files say never clears, colours, renames or turns around a terminal."""

    @pytest.fixture
    def evil(self, tmp_path) -> Run:
        run = Run(make_run(tmp_path / "runs" / "evil"))
        config = json.loads(run.config_file.read_text())
        run.config_file.write_text(json.dumps({**config, "name": f"[/bold]{ESCAPES}\nnext", "notes": ESCAPES}))
        run.record(FaultEvent(rank=1, kind=f"x{ESCAPES}", error=f"boom {ESCAPES}\nrest", host=ESCAPES))
        run.record(UnknownEvent(kind=f"{{0}} {{time.__class__}} {ESCAPES}", fields={}))
        manifest = json.loads(run.manifest_file.read_text())
        run.manifest_file.write_text(json.dumps({**manifest, "host": ESCAPES, f"key{ESCAPES}": 1}))
        with run.energy_file.open("a") as file:
            fields = {
                "session": "1-1",
                "job": "4711",
                "scope": "cpu",
                "method": "counter",
                "joules": 1.0,
                "seconds": 1.0,
            }
            file.write(
                json.dumps({"time": 1.0, "node": "n", "source": f"s{ESCAPES}", "note": ESCAPES, **fields}) + "\n"
            )
            file.write(json.dumps({"missing": {f"a{ESCAPES}": f"b{ESCAPES}"}}) + "\n")
        return run

    @pytest.mark.parametrize(
        "words", [("watch", "--once"), ("energy",), ("report", "--markdown"), ("compare", "{run}")]
    )
    def test_in_the_terminal(self, evil, words):
        text = windlass(words[0], str(evil.path), *(word.format(run=evil.path) for word in words[1:]))
        assert not set(text) & set(ESCAPES) - set("[2J]0;owned31m")

    def test_in_pages(self, evil):
        windlass("report", str(evil.path))
        pages = [
            evil.report_file.read_text().split("<main>")[1],
            json.dumps(asked(evil, "run?id={id}"), ensure_ascii=False),
        ]
        for page in pages:
            assert not set(page) & {"\x1b", "\x07", "\x9b", "\u202e"}

    def test_an_unknown_event_is_text_and_no_pattern(self, evil):
        assert "{0} {time.__class__}" in windlass("report", str(evil.path), "--markdown")
