"""What train.instruments measured, in watch, report and dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from tests.report.sample_run import make_run

from windlass.figures import Chart, DataTable
from windlass.report.collect import collect
from windlass.report.columns import Columns
from windlass.report.dash.api import run_json
from windlass.report.dash.store import Folder
from windlass.report.sections import life, sections, stability_sections
from windlass.report.watch import Watch
from windlass.runs.events import LayersMeasured
from windlass.runs.folder import Run


def look(step: int, gradient: float) -> LayersMeasured:
    return LayersMeasured(
        step=step,
        gradient_norm=[1.0, gradient, 1.1, 2.0],
        weight_norm=[10.0, 11.0, 12.0, 40.0],
        update_norm=[0.1, 0.1, 0.1, None],
        activation_rms=[1.0, 1.2, 1.3, None],
        max_logit=[8.0, None, 20.0, None],
    )


@pytest.fixture
def measured(tmp_path: Path) -> Run:
    run = Run(make_run(tmp_path / "run", steps=20, crash_at=12, resume_from=10))
    run.record(look(10, 1.2))
    run.record(look(20, 50.0))
    return run


def test_the_event_survives_the_file_and_names_the_layer_that_stands_out(measured: Run) -> None:
    calm, spike = (e for e in measured.events() if isinstance(e, LayersMeasured))
    assert spike.largest("gradient_norm") == (1, 50.0, pytest.approx(50 / 1.1))
    assert spike.largest("max_logit") == (2, 20.0, pytest.approx(20 / 14))
    assert spike.largest("activation_rms") == (1, 1.2, pytest.approx(1.2))
    assert spike.describe().startswith("layers at step 20: gradient norm 50 (layer 1, x45.5), ")
    assert calm.max_logit == [8.0, None, 20.0, None]
    assert LayersMeasured(step=3).describe() == "layers at step 3: not measured"


def test_watch_shows_one_line(measured: Run) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(Watch(measured).picture(100))
    lines = [line for line in console.export_text().splitlines() if "layers at step" in line]
    assert len(lines) == 1 and "gradient norm 50 (layer 1" in lines[0]


def test_report_and_dashboard_show_charts_and_the_last_look(measured: Run) -> None:
    columns = Columns(measured.metrics_file)
    columns.refresh()
    summary = collect(measured, columns=columns)
    (section,) = stability_sections(summary)
    charts = [item for item in section.items if isinstance(item, Chart)]
    assert next(chart.series[0].y for chart in charts) == (1.2, 50.0) and len(charts) == 5
    table = section.items[-1]
    assert isinstance(table, DataTable)
    assert table.rows[1][:2] == ("layer 1", "50") and table.rows[3][0].startswith("embedding")
    assert "layers" in [part.id for part in sections(summary, columns)]
    assert "layers at step" not in str(life(summary, columns))
    folder = Folder(measured.path.parent)
    page = run_json(folder, {"id": [next(iter(folder.views())).id]})
    assert "Layers" in [part["title"] for part in page["sections"]]


def test_a_run_without_instruments_has_no_section(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "run", steps=20, crash_at=12, resume_from=10))
    assert stability_sections(collect(run)) == []
