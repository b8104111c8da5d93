"""The report's first page: what a funder asks, worked by hand; nothing is invented where a run lacks it."""

from __future__ import annotations

import json

import pytest

from windlass.files import append_line
from windlass.report.collect import collect
from windlass.report.funder import MAX_LANGUAGES, funder_items
from windlass.report.write import markdown_report
from windlass.runs.events import Evaluated
from windlass.runs.folder import Run

PROJECT = {"title": "GPT-NL", "id": "EHPC-123", "grant": "NWO 2025.001", "funder": "a ministry"}


def rows(run: Run) -> dict[str, tuple[str, ...]]:
    tables = [item for item in funder_items(collect(run)) if hasattr(item, "rows")]
    return {row[0]: tuple(row[1:]) for table in tables for row in table.texts()}


def change_config(run: Run, **tables) -> None:
    config = json.loads(run.config_file.read_text())
    run.config_file.write_text(json.dumps(config | {key: config.get(key, {}) | value for key, value in tables.items()}))


def test_project_compute_energy_and_incidents(run):
    change_config(run, project=PROJECT, launch={"budget_node_hours": 0.5, "account": "gptnl"})
    page = rows(run)
    assert page["project"] == ("GPT-NL", "project EHPC-123; grant NWO 2025.001; funder a ministry; account gptnl")
    hours = collect(run).node_hours
    assert page["compute"][0] == f"{hours:.3g} node-hours"
    assert f"of 0.5 node-hours allocated ({200 * hours:.1f} %)" in page["compute"][1]
    assert page["energy"][0] == "363.61 Wh"
    assert "not measured on 1 of 2 nodes" in page["energy"][1] and "PUE 1.19" in page["energy"][1]
    assert page["CO2e, location-based"][0] == "97.3 g CO2e" and "267.6 g/kWh" in page["CO2e, location-based"][1]
    assert page["data"] == ("39.32M of 40M tokens", "languages: code, nl")
    assert page["incidents"][0] == "1 fault, goodput 67.7 %"
    assert page["incidents"][1].startswith("30 steps (37.5 s) repeated, 1 min 30 s between attempts")


def test_outcome_by_language_is_the_newest_of_each(run):
    for step, loss in ((150, 3.0), (300, 2.0)):
        languages = {f"l{i}": {"loss": loss + i, "bits_per_byte": 0.5} for i in range(MAX_LANGUAGES + 2)}
        run.record(Evaluated(step=step, val_loss=loss, languages=languages))
        append_line(run.eval_file, {"task": "mmlu", "group": "language l0", "metric": "accuracy", "value": loss / 10})
    page = rows(run)
    assert page["l0"] == ("2", "0.5", "mmlu accuracy 0.2") and page["l1"] == ("3", "0.5", "none")
    assert f"l{MAX_LANGUAGES}" not in page and "2 more languages" in markdown_report([run]).split("## Overview")[0]


def test_texts_without_a_language_have_one_outcome(run):
    run.record(Evaluated(step=300, val_loss=2.5, bits_per_byte=0.8))
    append_line(run.eval_file, {"task": "mmlu", "group": "language unknown", "metric": "accuracy", "value": 0.2})
    page = rows(run)
    assert page["all"] == ("2.5", "0.8", "none") and page["unknown"] == ("unknown", "unknown", "mmlu accuracy 0.2")


def test_the_plan_stands_beside_what_was_measured_of_the_whole_run(run):
    run.plan_file.write_text(json.dumps({"device": "H100", "plan": {"node_hours": 0.5, "mwh": 0.001, "mfu": 0.5}}))
    page, hours = rows(run), collect(run).node_hours
    assert page["compute of the whole run"] == (
        "0.5 node-hours", f"{hours:.3g} node-hours", f"{100 * (hours / 0.5 - 1):+.1f} %"
    )  # fmt: skip
    # A node without a sensor: the energy of the other is not that of the run.
    assert page["energy of the whole run"] == ("1 kWh", "not measured", "")


@pytest.mark.parametrize("has_recipe", [True, False])
def test_a_run_that_lacks_everything_says_so(run, has_recipe):
    for file in (run.metrics_file, run.events_file, run.energy_file, run.manifest_file, run.recipe_file):
        file.unlink()
    if not has_recipe:
        run.config_file.write_text('{"name": "x"}')
    page, text = rows(run), markdown_report([run]).split("## Overview")[0]
    assert {page[key][0] for key in ("project", "energy", "CO2e", "incidents")} == {"unknown"}
    assert page["where and when"][1] == "dates unknown"
    assert "resume" not in text and "peak" not in text  # nothing is known of either
    assert page["compute"] == ("unknown", "allocation unknown; attempts unknown")
    assert "Outcome by language: unknown." in text and "Plan: unknown" in text
    assert page["trained"][1].endswith("from random weights" if has_recipe else "unknown")
    numbers = [cell for row in page.values() for cell in row if any(c.isdigit() for c in cell)]
    allowed = ("56,369,664 parameters", "of 40M", "snellius-h100", "CO2e") if has_recipe else ("CO2e",)
    assert not [cell for cell in numbers if not any(part in cell for part in allowed)]
