"""The two commands as a person and as a program see them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.errors import ConfigError, ProfileError
from windlass.files import append_line, write_json
from windlass.runs import Run


def call(*args):
    result = CliRunner().invoke(build(), [str(a) for a in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def trace(tmp_path, overlapped):
    return overlapped.write(tmp_path / "one.pt.trace.json.gz")


@pytest.fixture
def faster(tmp_path, builder):
    trace = builder()
    trace.step(5, 1000, 1080)
    op = trace.op("aten::mm", 1000, 1030)
    trace.launch("sm80_xmma_gemm_bf16", 1002, 1010, 1070, external=op)
    return trace.write(tmp_path / "two.json")


def test_json_is_the_contract_and_nothing_else(trace):
    for mode, kernel, comm in (("fixed", 40, 30), ("tb", 70, 0)):
        value = json.loads(call("profile", trace, "--mode", mode, "--json").stdout)
        assert value["steps"] == 2
        assert value["step_us"] == 100
        assert value["categories_us"]["Kernel"] == kernel
        assert value["categories_us"]["Communication"] == comm
        assert value["gpu_utilization"] == pytest.approx(0.7)
        assert value["occupancy_pct"] == pytest.approx(40)
        assert value["ranks"][0]["rank"] == 2


def test_unknown_is_null_in_json_and_words_in_the_table(faster):
    assert json.loads(call("profile", faster, "--json").stdout)["sm_efficiency"] is None
    assert "not available" in call("profile", faster).stdout


def test_the_tables_a_person_reads(trace):
    out = call("profile", trace).stdout
    for text in (
        "Execution summary of one",
        "Communication, exposed",
        "aten::mm",
        "ncclDevKernel_AllReduce",
        "none in the trace",
        "advice: 30.0 %",
        "100.00 %",
    ):
        assert text in out


def test_several_files_are_ranks_of_one_job(tmp_path, trace, faster):
    value = json.loads(call("profile", trace, faster, "--json").stdout)
    assert len(value["ranks"]) == 2
    assert value["step_us"] == pytest.approx(90)
    assert value["spread"]["straggler"] in (1, 2)


def test_a_page_with_stacked_bars(tmp_path, trace):
    page = tmp_path / "page.html"
    call("profile", trace, "--html", page)
    text = page.read_text()
    assert "Where an average step" in text
    assert "Communication" in text
    assert '"barmode": "stack"' in text or '"barmode":"stack"' in text


def test_compare_two_traces(tmp_path, trace, faster):
    page = tmp_path / "page.html"
    value = json.loads(call("compare", trace, faster, "--json", "--html", page).stdout)
    step = value["summary"][0]
    assert (step["category"], step["values_us"], step["delta_us"], step["delta_pct"]) == ("step", [100, 80], -20, -20)
    mm = next(o for o in value["operators"] if o["name"] == "aten::mm")
    assert mm["calls"] == {"baseline": 2, "experiment": 1, "delta": -1, "percent": -50}
    assert value["scaling"][1]["efficiency"] == pytest.approx(1.25)
    assert "Scaling efficiency" in page.read_text()
    out = call("compare", trace, faster).stdout
    for text in ("Operator diff: one.pt.trace -> two", "-20.00 %", "Kernel diff"):
        assert text.replace(".pt.trace", "") in out


def test_compare_keeps_the_notes_of_both_sides(tmp_path, trace, faster, builder):
    odd = builder()
    odd.step(5, 1000, 1080)
    odd.launch("gemm", 1002, 1010, 1005)
    odd.launch("gemm", 1030, 1020, 1070)
    path = odd.write(tmp_path / "odd.json")
    page = tmp_path / "page.html"
    value = json.loads(call("compare", path, path, "--json").stdout)
    assert all(len(profile["ranks"][0]["notes"]) == 2 for profile in value["profiles"])
    for targets, label in (((path, trace), "odd"), ((trace, path), "odd")):
        out = " ".join(call("compare", *targets, "--html", page).stdout.split())
        assert f"note: {label}: 1 events with a negative duration" in out
        assert f"note: {label}: 1 kernels and copies start before their launch" in out
        assert "negative duration" in page.read_text()


def test_compare_more_than_two_is_a_scaling_table(trace, faster, tmp_path, overlapped):
    third = overlapped.write(tmp_path / "three.json")
    value = json.loads(call("compare", trace, faster, third, "--json").stdout)
    assert [round(r["efficiency"], 2) for r in value["scaling"]] == [1.0, 1.25, 1.0]
    assert value["operators"] == []
    assert sum(value["scaling"][1]["lost_to"].values()) == pytest.approx(value["scaling"][1]["lost_us"])


@pytest.fixture
def runs(tmp_path, overlapped, builder):
    def write_run(name, shift, devices):
        run = Run(tmp_path / name)
        write_json(run.config_file, {"name": name, "train": {"precision": "bf16"}})
        write_json(
            run.manifest_file, {"world_size": devices, "tokens_per_step": 1000 * devices, "packages": {"torch": "2.13"}}
        )
        for i in range(1, 41):
            append_line(
                run.metrics_file,
                {
                    "step": i,
                    "tokens": i * 1000,
                    "loss": 5 - i / 20 + shift,
                    "tokens_per_second": 100.0 * devices,
                    "energy_joules": 2.0 * i,
                },
            )
        return run

    return [write_run("a", 0.0, 1), write_run("b", 0.0, 4), write_run("c", 0.5, 4)]


def test_runs_without_traces_are_still_compared(runs):
    value = json.loads(call("compare", runs[0].path, runs[1].path, "--json").stdout)
    assert value["profiles"] == []
    assert value["runs"]["loss"][0]["same"] is True
    assert [p["tokens_per_second_per_device"] for p in value["runs"]["performance"]] == [100, 100]
    out = call("compare", runs[0].path, runs[1].path).stdout
    assert "as expected, the loss is the same" in out
    assert "energy per token" in out


def test_check_turns_the_loss_test_into_an_exit_code(runs):
    assert call("compare", runs[0].path, runs[1].path, "--check").exit_code == 0
    assert call("compare", runs[0].path, runs[2].path, "--check").exit_code == 1
    assert call("compare", runs[0].path, runs[2].path, "--check", "--tolerance", "0.6").exit_code == 0


def test_runs_with_traces_know_their_work_per_device(runs, overlapped):
    for run in runs[:2]:
        overlapped.write(run.profile / "step-000000005" / "rank-00000.json.gz")
    value = json.loads(call("compare", runs[0].path, runs[1].path, "--json").stdout)
    assert [r["devices"] for r in value["scaling"]] == [1, 4]
    assert value["scaling"][1]["efficiency"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("args", "kind", "code"),
    [
        (["profile", "nowhere.json"], ProfileError, "path-missing"),
        (["profile", "{trace}", "--mode", "exact"], ConfigError, "mode-unknown"),
        (["profile", "{trace}", "{trace}", "--now"], ProfileError, "now-needs-one-run"),
        (["profile", "{run}", "--now"], ProfileError, "run-not-training"),
        (["profile", "{run}", "--now", "--ranks", "x"], ConfigError, "ranks-invalid"),
        (["profile", "{run}"], ProfileError, "run-without-traces"),
        (["profile", "{run}", "{trace}"], ProfileError, "several-runs"),
        (["compare", "{trace}"], ProfileError, "compare-needs-two"),
        (["compare", "{trace}", "{trace}", "--sort", "size"], ConfigError, "sort-unknown"),
        (["compare", "{run}", "{trace}"], ProfileError, "compare-mixed"),
    ],
)
def test_mistakes_have_a_code_and_a_hint(trace, runs, args, kind, code):
    with pytest.raises(kind) as error:
        call(*(a.format(trace=trace, run=runs[0].path) for a in args))
    assert error.value.code == f"profile.{code}"
    assert error.value.hint
