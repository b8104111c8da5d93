from __future__ import annotations

import io
import json
import shutil

import pytest
from rich.console import Console
from tests.report.sample_run import BATCH, BEGIN, make_run

from windlass.errors import RunError
from windlass.files import append_line
from windlass.report.collect import collect, find_runs
from windlass.report.tables import energy_rows, life_rows, plan_table
from windlass.report.watch import Watch
from windlass.report.write import html_report, markdown_report
from windlass.runs.events import Saved, WeightsImported
from windlass.runs.folder import Run


def test_the_whole_story_in_one_value(run):
    s = collect(run)
    assert (s.name, s.status, s.step, s.tokens) == ("sample", "finished", 300, 300 * BATCH)
    assert s.parameters == 56_369_664
    assert s.val_loss == 2.61
    assert s.mfu == pytest.approx(0.412, abs=0.005)
    assert s.slowest_rank == 5
    assert [c["state"] for c in s.checkpoints] == ["not in this copy of the folder", "kept"]
    assert [e["event"] for e in s.as_dict()["breaks"]] == ["fault", "resumed"]


def test_goodput_by_hand(run):
    """300 steps of 1.25 s are useful; the run lasted 30 + 225 + 90 + 20 + 187.5 + 1 s."""
    life = collect(run).life
    assert life.useful_seconds == pytest.approx(375, rel=0.01)
    assert life.wall_seconds == pytest.approx(553.5, rel=0.01)
    assert life.goodput == pytest.approx(375 / 553.5, rel=0.01)
    assert (life.lost_steps, [s.last_step for s in life.segments]) == (30, [180, 300])


def test_energy_by_hand(run):
    """600 kJ of the first process and 500 kJ of the second, on one of two nodes; the model of the other stands apart."""
    e = collect(run).energy
    assert e.joules == 1_100_000.0
    assert e.basis == "measured"
    assert e.ledger.modelled_joules == 640_000.0
    assert e.carbon.kwh == pytest.approx(1.1e6 / 3.6e6 * 1.19)
    assert e.joules_per_token == pytest.approx(1.1e6 / (300 * BATCH))
    assert "not measured on 1 of 2 nodes" in e.ledger.coverage
    assert e.ledger.startup_joules == 27_000.0


def test_plan_and_measured_stand_in_units_that_people_read():
    rows = [("tokens/s", 412_345.6, None), ("step, s", 0.0631, 75.0), ("energy of the whole run, kWh", 0.00157, 2500.0)]
    assert plan_table(rows).rows == [
        ("tokens/s", "412.35k", "not measured", ""),
        ("step", "63.1 ms", "1 min 15 s", "+118759.0 %"),
        ("energy of the whole run", "1.57 Wh", "2.5 MWh", "+159235568.8 %"),
    ]


def test_every_view_has_the_same_words(run):
    rows = {a: b for a, b, _ in energy_rows(collect(run))}
    assert rows["IT energy"] == "305.56 Wh"
    assert rows["with PUE"] == "363.61 Wh"
    assert dict(life_rows(collect(run)))["steps lost to faults"] == "30 steps, 3.93M tokens"


@pytest.mark.parametrize(
    ("joules", "step", "words"),
    [(1598.7, 53.0, "; ± 53 J (3.3 %): counter resolution"), (1e6, 53.0, ""), (1598.7, None, "")],
)
def test_a_short_runs_energy_says_how_sure_it_is_and_a_long_ones_need_not(run, joules, step, words):
    fields = {
        "node": "gcn1",
        "session": "1-1",
        "source": "nvml",
        "scope": "device",
        "method": "counter",
        "seconds": 3.0,
    }
    line = {"time": BEGIN, "job": "4711", "joules": joules, "resolution_joules": step, **fields}
    run.energy_file.write_text(json.dumps(line) + "\n")
    run.events_file.write_text("")
    assert energy_rows(collect(run))[0][2] == f"devices only, not the rest of the node{words}"


def test_plan_against_measured(run):
    plan = {
        "tokens_per_second": 100_000.0,
        "mfu": 0.4,
        "step_seconds": 1.3,
        "memory_gib": 60.0,
        "memory_allocated_gib": 55.0,
        "mwh": 0.0005,
    }
    run.plan_file.write_text(json.dumps({"version": 1, "plan": plan}))
    s = collect(run)
    rows = {what: (planned, measured) for what, planned, measured in s.plan_rows}
    assert rows["tokens/s"][0] == 100_000.0
    assert rows["peak memory allocated on a device, bytes"] == (55 * 2**30, s.memory_bytes)
    assert s.energy.forecast_kwh == 0.5


def test_on_a_cpu_the_whole_process_is_compared(run):
    run.plan_file.write_text(json.dumps({"device": "cpu", "plan": {"memory_gib": 60.0, "memory_allocated_gib": 55.0}}))
    s = collect(run)
    assert s.plan_rows == [("memory of a process, bytes", 60 * 2**30, s.memory_bytes)]


def test_memory_is_the_highest_of_the_run_not_the_last(run):
    before = collect(run).memory_bytes
    append_line(run.metrics_file, {"step": 301, "loss": 2.0, "memory_bytes": 5, "time": BEGIN + 9000})
    assert collect(run).memory_bytes == before


@pytest.mark.parametrize("gone", ["metrics.jsonl", "events.jsonl", "energy.jsonl", "manifest.json"])
def test_a_half_copied_folder_is_still_shown(run, gone):
    (run.path / gone).unlink()
    s = collect(run)
    assert s.name == "sample"
    if gone == "energy.jsonl":
        assert (s.energy.basis, s.energy.joules) == ("none", None)


WRONG = ("x", [], {}, [1], {"a": [1]}, True, 1e308, float("nan"), float("inf"), 10**400, -1, None)


@pytest.mark.parametrize("value", WRONG)
def test_a_figure_that_is_none_costs_itself_and_not_the_report(run, value):
    """Every field of an event, an evaluation and an energy line in turn; the numbers of the other lines stand."""
    before = collect(run)
    for path, seen in ((run.events_file, "event"), (run.eval_file, "task"), (run.energy_file, "source")):
        lines = [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []
        keys = {k for x in lines for k in x} - {seen, "missing"}
        wild = [
            {**next(x for x in lines if k in x), "session": "0-0", seen: "evaluated", k: value} for k in sorted(keys)
        ]
        with path.open("a") as file:
            file.writelines(json.dumps(x) + "\n" for x in wild)
    run.manifest_file.write_text(
        json.dumps({**run.manifest(), "started_at": value, "memory_bytes": value, "packages": value})
    )
    after = collect(run)
    assert (after.step, after.tokens, after.loss) == (before.step, before.tokens, before.loss)
    assert "# sample" in markdown_report([run]) and "<main>" in html_report([run])
    Console(file=io.StringIO(), width=80).print(Watch(run).picture(80))


def test_what_a_half_copied_folder_lacks_is_named(run):
    assert collect(run).problem is None
    run.manifest_file.write_text(run.manifest_file.read_text()[:200])
    assert collect(run).problem == "manifest.json is damaged: environment and data ledger are unknown"
    run.events_file.rename(run.path / "elsewhere")
    assert "; events.jsonl is missing or empty: state, saves and interruptions are unknown" in collect(run).problem
    (run.path / "elsewhere").rename(run.events_file)
    run.metrics_file.unlink()
    assert "metrics.jsonl is missing or empty: loss and speed are unknown" in collect(run).problem
    assert "This folder is incomplete" in markdown_report([run])


def test_a_damaged_config_is_named(run):
    run.config_file.write_text("{")
    assert "config.json is damaged: 1 bytes" in collect(run).problem


def test_not_a_run(tmp_path):
    with pytest.raises(RunError) as caught:
        collect(tmp_path / "nothing")
    assert caught.value.code == "runs.not-a-run-folder"
    with pytest.raises(RunError) as caught:
        find_runs(tmp_path / "nothing")
    assert caught.value.code == "report.not-a-folder"


def test_runs_below_a_folder_and_no_link_out_of_it(run, tmp_path):
    outside = make_run(tmp_path / "elsewhere" / "secret")
    (run.path.parent / "link").symlink_to(outside)
    make_run(run.path.parent / "deep" / "er" / "two")
    assert [r.name for r in find_runs(run.path.parent)] == ["two", "sample"]


def test_a_copy_says_the_same(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "copy")
    a, b = collect(run).as_dict(), collect(Run(tmp_path / "copy")).as_dict()
    assert {k: v for k, v in a.items() if k != "path"} == {k: v for k, v in b.items() if k != "path"}


def test_an_imported_run_is_complete_without_metrics(tmp_path):
    run = Run(make_run(tmp_path / "imported", steps=0))
    run.events_file.unlink()
    run.metrics_file.unlink(missing_ok=True)
    run.record(Saved(step=0))
    run.record(WeightsImported(origin="hf", dtype="fp32"))
    s = collect(run)
    assert (s.status, s.problem) == ("imported", None)


def test_a_running_run_has_a_time_left(tmp_path):
    s = collect(Run(make_run(tmp_path / "going", finished=False, steps=220)))
    assert s.status == "running"
    assert s.eta_seconds == pytest.approx((40e6 - 220 * BATCH) / s.tokens_per_second)
