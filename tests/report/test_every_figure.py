"""Every figure of one run has the same text in every view that shows it, and each view shows what it is said to show."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape

import pytest
from tests.report.sample_run import RECIPE, make_run
from typer.testing import CliRunner

from windlass.cli import build
from windlass.config.sweep import load_sweep
from windlass.launch.sweep.expect import Expectation
from windlass.launch.sweep.folder import SweepRun, open_sweep_folder
from windlass.launch.sweep.points import make_points
from windlass.launch.sweep.results import collect_rows, page_sections, write_tables
from windlass.report.collect import collect
from windlass.report.dash.api import answer
from windlass.report.dash.store import Folder
from windlass.report.tables import FIGURES, figure
from windlass.runs.events import Evaluated
from windlass.runs.folder import Run

# Figure -> what stands before it in the report, the dashboard's page, `watch`, `compare` and the model card, and the
# column of the sweep's table; "" is not shown there. `--json` has all of them.
SHOWN = {
    "step": ("step", "step", "step", "", "", ""),
    "tokens": ("tokens", "tokens", "tokens", "tokens", "trained on", ""),
    "planned tokens": ("trained on", "tokens", "tokens", "", "trained on", ""),
    "training loss": ("training loss", "training loss", "recent loss", "training loss", "final training loss", ""),
    "validation loss": ("Validation loss", "Validation loss", "val loss", "", "validation loss", ""),
    "throughput": ("throughput", "throughput", "tokens/s", "throughput", "throughput", "tokens/s"),
    "throughput per device": ("throughput per device", "throughput per device", "", "throughput per device", "", "tokens/s per device"),
    "MFU": ("MFU", "MFU", "MFU", "MFU", "", "MFU"),
    "step time": ("step time", "step time", "step", "step time", "", "step time"),
    "memory, highest device": ("memory, highest device", "memory, highest device", "memory", "memory, highest device", "", "memory"),
    "parameters": ("parameters", "parameters", "", "", "parameters", ""),
    "devices": ("cluster", "cluster", "sample finished", "devices", "hardware", "devices"),
    "goodput": ("goodput", "goodput", "goodput", "goodput", "", ""),
    "goodput without waits": ("goodput without waits between jobs", "goodput without waits between jobs", "", "", "", ""),
    "wall time": ("wall time", "wall time", "", "", "", ""),
    "node-hours": ("node-hours used", "node-hours used", "", "node-hours", "compute", ""),
    "lost steps": ("steps lost to faults", "steps lost to faults", "", "", "", ""),
    "IT energy": ("IT energy", "IT energy", "", "", "", ""),
    "energy with PUE": ("with PUE", "with PUE", "energy", "energy", "energy", ""),
    "CO2e, location-based": ("CO2e, location-based", "CO2e, location-based", "", "", "CO2e, location-based", ""),
    "CO2e, market-based": ("CO2e, market-based", "CO2e, market-based", "", "", "", ""),
    "energy per billion tokens": ("per billion tokens", "per billion tokens", "", "", "", ""),
    "energy per token": ("per token", "per token", "", "energy per token", "", ""),
    "energy per step": ("per step", "per step", "", "", "", ""),
    "mean power": ("mean power", "mean power", "", "mean power", "", ""),
}  # fmt: skip
VIEWS = ("report", "dash", "watch", "compare", "card", "sweep")


def windlass(*argv: str) -> str:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(build(), list(argv), prog_name="windlass")
    assert result.exit_code == 0, result.output
    return result.stdout


def dash(run: Run, path: str) -> dict:
    folder = Folder(run.path)
    return answer(folder, path, {"id": [folder.views()[0].id]})


def sweep_columns(run: Run, path) -> str:
    """The table of a sweep whose only point is this run, as `column: text` lines."""
    file = path / "sweep.toml"
    (path / "recipe.toml").write_text(RECIPE)
    file.write_text('name = "one"\nrecipe = "recipe.toml"\n[matrix]\n"layout.micro_batch" = [4]\n')
    loaded = load_sweep(file)
    points = make_points(loaded)
    expected = [Expectation(verdict="fits", reason="", devices=8, nodes=2)]
    work = SweepRun(
        loaded=loaded, folder=open_sweep_folder(path / "one", loaded, points), points=points, expected=expected
    )
    shutil.copytree(run.path, work.folder.point(points[0].name).path, dirs_exist_ok=True)
    work.folder.add_outcome(
        {"point": points[0].name, "outcome": "ok", "evidence": "exit", "detail": "", "seconds": 9.0}
    )
    rows = collect_rows(work)
    write_tables(work, rows)
    table = page_sections(work, rows, "tokens_per_second")[-1].items[-1]
    return "\n".join(f"{name}: {text}" for name, text in zip(table.columns, table.texts()[0], strict=True))


def lines_of_page(page: dict) -> str:
    """Cards and table rows of a dashboard page, one `label: value` line each."""
    lines = []
    for item in (item for section in page["sections"] for item in section["items"]):
        if item["kind"] == "cards":
            lines += [f"{card['label']}: {card['value']} {card['note']}" for card in item["cards"]]
        elif item["kind"] == "table":
            lines += [f"{row[0]}: {' | '.join(row[1:])}" for row in item["rows"]]
        elif item["kind"] == "note":
            lines.append(item["text"])
    return "\n".join(lines)


def lines_of_html(html: str) -> str:
    body = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    cards = re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span>(?:<i>(.*?)</i>)?', body)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body)
    lines = [f"{label}: {value} {note}" for value, label, note in cards]
    lines += [": ".join(re.findall(r"<td[^>]*>(.*?)</td>", row)) for row in rows]
    lines += re.findall(r"<p[^>]*>(.*?)</p>", body)
    return unescape("\n".join(lines))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    run = Run(make_run(tmp_path_factory.mktemp("figures") / "runs" / "sample"))
    run.record(Evaluated(step=300, val_loss=2.6125, sources={"nl": {"loss": 2.5}}))
    run.plan_file.write_text(json.dumps({"device": "H100", "plan": {"tokens_per_second": 110_000.0, "mfu": 0.43}}))
    return run


@pytest.fixture(scope="module")
def views(run, tmp_path_factory) -> dict[str, str]:
    windlass("report", str(run.path))
    html = run.report_file.read_text()
    card = windlass("report", str(run.path), "--markdown").split("## Model card")[1].split("\n## ")[0]
    return {
        "report": lines_of_html(html),
        "dash": lines_of_page(dash(run, "run")),
        "watch": windlass("watch", str(run.path), "--once"),
        "compare": windlass("compare", str(run.path), str(run.path)),
        "card": card.replace("| ", "").replace("\\", ""),
        "sweep": sweep_columns(run, tmp_path_factory.mktemp("sweep")),
    }


def test_there_are_25_figures_and_none_is_unknown(run):
    assert list(SHOWN) == list(FIGURES) and len(FIGURES) == 25
    summary = collect(run)
    texts = {name: figure(summary, name) for name in FIGURES}
    assert not [name for name, text in texts.items() if text in ("unknown", "not measured", "not known")]
    # Worked by hand: two attempts of 256 s and 208.5 s (until the event "finished" a second later) on two nodes.
    assert summary.node_hours == pytest.approx((256 + 208.5) * 2 / 3600, rel=0.01)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_reads_the_same_wherever_it_is_shown(run, views, name):
    text = figure(collect(run), name).removesuffix(" tokens/s")
    for view, label in zip(VIEWS, SHOWN[name], strict=True):
        if label:
            lines = [line for line in views[view].splitlines() if label in re.sub(r"\s+", " ", line)]
            assert lines, f"{view} has no line with {label!r}"
            assert any(re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d]|\.\d)", line) for line in lines), (view, lines)


@pytest.mark.parametrize("command", ["report", "watch"])
def test_json_has_the_numbers_behind_the_texts(run, command):
    value = json.loads(windlass(command, str(run.path), "--json"))
    value = value["runs"][0] if command == "report" else value
    summary = collect(run)
    for name, (path, show) in FIGURES.items():
        number = value
        for part in path.split("."):
            number = number[part]
        assert show(number) == figure(summary, name), name


def test_the_dashboards_list_has_the_texts(run):
    row, summary = dash(run, "runs")["runs"][0], collect(run)
    names = {"loss": "training loss", "tokens_per_second": "throughput", "mfu": "MFU", "node_hours": "node-hours"}
    for key, name in names.items():
        assert row["texts"][key] == figure(summary, name).removesuffix(" tokens/s")
    assert (row["texts"]["tokens"], row["texts"]["goodput"]) == ("39.32M of 40M", "67.7 %")
    assert row["energy"] == figure(summary, "energy with PUE") and row["node_hours"] == summary.node_hours


def test_compare_and_sweep_have_the_same_numbers(run, tmp_path):
    compared = json.loads(windlass("compare", str(run.path), str(run.path), "--json"))["runs"]["performance"][0]
    sweep_columns(run, tmp_path)
    row = json.loads((tmp_path / "one" / "results.json").read_text())["rows"][0]
    summary = collect(run)
    for key in ("tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds", "memory_bytes"):
        assert compared[key] == row[key] == getattr(summary, key), key
    assert compared["final_loss"] == row["loss"] == summary.loss
    assert compared["energy_joules"] == row["energy_joules"] == summary.energy.joules == 1.1e6
    assert (compared["goodput"], compared["node_hours"]) == (summary.life.goodput, summary.node_hours)


def test_modelled_energy_is_modelled_in_every_view(tmp_path):
    run = Run(make_run(tmp_path / "sample"))
    lines = [json.loads(line) for line in run.energy_file.read_text().splitlines() if line.endswith("}")]
    run.energy_file.write_text("".join(json.dumps(x) + "\n" for x in lines if x.get("method") in (None, "modelled")))
    text = "211.56 Wh"  # 640 kJ x PUE 1.19
    assert re.search(rf"energy\s+{text}, modelled", windlass("watch", str(run.path), "--once"))
    assert re.search(rf"energy\s+{text}, modelled", windlass("compare", str(run.path), str(run.path)))
    markdown = windlass("report", str(run.path), "--markdown")
    assert f"| energy | {text} (modelled; with PUE) |" in markdown and f"**energy**: {text} (modelled" in markdown
    assert f"energy: {text} modelled" in lines_of_page(dash(run, "run"))
    sweep_columns(run, tmp_path)
    row = json.loads((tmp_path / "one" / "results.json").read_text())["rows"][0]
    assert (row["energy_joules"], row["modelled_joules"]) == (None, 640_000.0)
