from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest
from tests.report.sample_run import make_run
from typer.testing import CliRunner

from windlass.cli import build
from windlass.figures import Chart
from windlass.files import append_line
from windlass.report.collect import collect
from windlass.report.model_card import KINDS
from windlass.report.redact import HIDDEN, redact, redact_text, without_paths
from windlass.report.sections import energy
from windlass.report.write import html_report, json_report, markdown_report, write_report
from windlass.runs.events import FaultEvent
from windlass.runs.folder import Run

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567", "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY", "MY_PASSWORD": "correct horse battery",
}  # fmt: skip
HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>'


class Links(HTMLParser):
    """Everything a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        for name in ("src", "href"):
            if values.get(name) and tag != "a":
                self.found.append(values[name])


def test_html_is_whole_and_needs_no_network(run):
    text = write_report(run).read_text()
    links = Links()
    links.feed(text)
    assert [x for x in links.found if not x.startswith("data:")] == []
    for title in (
        "Overview",
        "Energy and carbon",
        "Run timeline",
        "Data",
        "Model card",
        "Summary of training content",
        "Conventions",
    ):
        assert title in text
    assert "rank 5 failed" in text and "resumed at step 150" in text


def test_markdown_has_the_same_numbers(run):
    text = markdown_report([run])
    assert "| with PUE | 363.61 Wh |" in text
    assert "**goodput**: 67.7 % (1 resume)" in text
    assert "not measured on 1 of 2 nodes" in text


def test_training_content_summary_sorts_sources_by_kind(run):
    text = markdown_report([run])
    assert "| 2.1 Publicly available datasets | dutch-news | 24M | CC-BY-4.0 |" in text
    assert "| 2.3 Data crawled and scraped from online sources | code |" in text
    assert "| 2.5 Synthetic data | none in the ledger |" in text
    assert "less than 1 billion tokens" in text


def with_sources(run: Run, sources) -> str:
    manifest = json.loads(run.manifest_file.read_text())
    manifest["data"]["sources"] = sources
    run.manifest_file.write_text(json.dumps(manifest))
    return markdown_report([run])


def test_the_templates_further_questions_are_asked_of_the_kinds_that_are_there(run):
    web = {"name": "crawl", "kind": "web", "collected": "2024-01 to 2024-06", "notes": "boilerplate removed"}
    text = with_sources(run, [web, {"name": "made", "kind": "synthetic"}])
    assert "| 2.3 Period of collection | crawl: 2024-01 to 2024-06 |" in text
    assert re.search(r"\| 2\.3 Crawlers: .* \| not stated in the ledger; to be written by the provider \|", text)
    assert "| 2.5 Models that generated the data | not stated in the ledger; to be written by the provider |" in text
    assert "| 3.3 Other processing | crawl: boilerplate removed |" in text
    assert "2.4 Services" not in text


def test_every_field_of_the_templates_first_and_third_part_is_there(run):
    fields = re.findall(r"^\| ([13]\.\d) ", with_sources(run, []), flags=re.MULTILINE)
    assert fields == ["1.1"] * 2 + ["1.2"] * 3 + ["1.3"] * 7 + ["3.1"] * 2 + ["3.2", "3.3"]


def test_what_one_source_says_of_opt_outs_is_not_said_of_the_others(run):
    text = with_sources(run, [{"name": "a", "kind": "web", "opt_out": "robots.txt"}, {"name": "b", "kind": "web"}])
    assert "| 3.1 Reservation of rights (text and data mining opt-outs) | a: robots.txt; not stated for b |" in text


@pytest.mark.parametrize(
    ("said", "latest"),
    [
        (["2019-03 to 2024-06", "2023-11-30"], "2024-06"),
        (["03/2019 to 06/2024", "2023"], "2024-06"),
        (["dump of 20240601", "last summer"], "dump of 20240601; last summer"),
        (["2022", None], "2022 (not stated for 1 of 2 sources)"),
        ([None], "not stated in the ledger"),
    ],
)
def test_the_latest_date_is_the_end_of_the_latest_period(run, said, latest):
    text = with_sources(run, [{"name": f"s{i}", "collected": value} for i, value in enumerate(said)])
    assert f"| 1.3 Latest date of acquisition | {latest} |" in text


def test_measured_inner_and_modelled_energy_have_their_own_colour_and_the_tables_unit(run):
    append_line(run.energy_file, {
        "time": 1.0, "node": "gcn1", "session": "1-1", "job": "4711", "source": "cray", "scope": "node", "method": "counter", "joules": 9e5, "seconds": 255.0,
    })  # fmt: skip
    chart = next(i for i in energy(collect(run)).items if isinstance(i, Chart))
    assert [(s.name, s.x) for s in chart.series] == [
        ("in the total", ("cray node", "nvml device")), ("inside another", ("nvml device",)), ("modelled, not in the total", ("model node",)),
    ]  # fmt: skip
    assert len({s.colour for s in chart.series}) == 3
    assert (chart.y_title, chart.series[0].y[0]) == ("Wh", 250.0)  # the table says 250 Wh


def test_a_source_without_kind_is_not_guessed(run):
    text = with_sources(run, {"mystery": {"tokens": 5}, "stated": {"tokens": 6, "kind": "licensed"}})
    assert "| 2.6 Other sources of data (kind not stated) | mystery |" in text
    assert "| mystery | not stated | not stated | not stated |" in text
    assert "The kind of 1 of 2 sources is not stated" in text
    assert "| 2.2.1 Private datasets licensed by rightsholders | stated |" in text
    assert "| 2.1 Publicly available datasets | none in the ledger |" in text
    assert "| 2.6 Other sources of data | none in the ledger |" not in text


def test_every_kind_has_its_place_in_the_template(run):
    text = with_sources(run, [{"name": f"from-{kind}", "kind": kind} for kind in KINDS])
    places = re.findall(r"^\| (2\.\S+) .*? \| from-(\S+) \|", text, flags=re.MULTILINE)
    assert places == [("2.1", "public-dataset"), ("2.2.1", "licensed"), ("2.2.2", "private"), ("2.3", "web"), ("2.4", "user"),
                      ("2.5", "synthetic"), ("2.6", "other")]  # fmt: skip
    assert "is not stated: listed" not in text


def test_a_kind_of_another_tool_is_shown_as_it_is(run):
    text = with_sources(run, [{"name": "a", "kind": "scanned books"}])
    assert "| 2.6 Other sources of data (kind: scanned books) | a |" in text


def test_a_published_report_names_no_path_of_the_machine(run):
    config = json.loads(run.config_file.read_text())
    config["data"]["store"] = "/projects/p123/ann/tokens/sample"
    run.config_file.write_text(json.dumps(config))
    run.record(FaultEvent(rank=0, kind="error", error="OSError: /home/ann/secret-project/x.bin is gone"))
    text, page = markdown_report([run]), html_report([run])
    for form in (text, page):
        assert "p123" not in form and "secret-project" not in form and str(run.path) not in form
    assert "| data | token store sample, sequences of" in text
    assert "OSError: .../x.bin is gone" in text


def test_addresses_and_common_places_are_no_paths_of_the_machine():
    kept = "https://example.org/a/b.txt, no RAPL zone under /sys/class/powercap, 5 tokens/s, nl/en/de, .../a/b, s3://bucket/a/b"
    assert without_paths(kept) == kept
    assert without_paths("in '/data/x/y/' now") == "in '.../y' now"


def test_several_runs_join(run, tmp_path):
    other = Run(make_run(tmp_path / "runs" / "other", name="other"))
    text = markdown_report([run, other])
    assert "## 2 runs" in text
    assert (
        "Measured IT energy of 2 of 2 runs together: 611.11 Wh, 727.22 Wh with PUE, 195 g CO2e location-based." in text
    )
    found = json_report([run, other])
    sums = found["together"]
    assert sums["node_hours"] == 2 * found["runs"][0]["node_hours"]
    assert f"| compute | {sums['node_hours']:.3g} node-hours | allocation unknown; 2 runs |" in text
    assert (len(found["runs"]), sums["tokens"]) == (2, 2 * 300 * 131_072)
    assert sums["location_kg"] == pytest.approx(2 * 1.1 / 3.6 * 1.19 * 0.2676)
    assert "together" not in json_report([run])


@pytest.mark.parametrize("name", [b"esc\x1b[2J", b"latin\xe9\xff", "turned\u202e".encode(), b"a\\|b *c*"])
def test_a_folder_of_any_name_is_text_in_a_joint_report(run, tmp_path, name):
    other = tmp_path / "runs" / os.fsdecode(name)
    shutil.copytree(run.path, other)
    page, text = html_report([run, Run(other)]), markdown_report([run, Run(other)])
    for form in (page, text):
        form.encode()
        assert not set(form.split("<main>")[-1]) & {"\x1b", "\u202e"}
    rows = [x for x in text.splitlines() if "| finished |" in x][:2]
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", x)) for x in rows] == [11, 11]
    assert all("*c*" not in x.replace("\\*", "") for x in rows)


def test_a_copy_of_a_run_is_shown_and_not_added_again(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "copy")
    text = markdown_report([run, Run(tmp_path / "copy")])
    assert "Measured IT energy of 1 of 1 runs together: 305.56 Wh, 363.61 Wh with PUE" in text
    assert "Copies of a run are not added again: 1 folder." in text


def test_two_runs_with_one_name_are_told_apart_by_folder(run, tmp_path):
    twin = Run(make_run(tmp_path / "more" / "sample"))
    text = markdown_report([run, twin])
    assert "| runs/sample | finished |" in text and "| more/sample | finished |" in text
    assert "## more/sample: Overview" in text


def test_hostile_names_are_text(run):
    run.record(FaultEvent(rank=0, kind=HOSTILE, error=HOSTILE))
    append_line(run.metrics_file, {"step": 301, HOSTILE: 1.0, "loss": 1.0})
    manifest = json.loads(run.manifest_file.read_text())
    manifest["data"]["sources"][0]["name"] = HOSTILE
    manifest["host"] = HOSTILE
    run.manifest_file.write_text(json.dumps(manifest))
    text = html_report([run])
    assert "<img src=x" not in text and "<script>alert" not in text
    assert "&lt;img src=x" in text
    assert "<img" not in markdown_report([run])


@pytest.fixture
def leaky(run) -> Run:
    """A run whose owner put keys wherever one can."""
    config = json.loads(run.config_file.read_text())
    config["launch"]["sbatch"] = {"comment": " ".join(f"{k}={v!r}" for k, v in SECRETS.items())}
    config["notes"] = f"export HF_TOKEN={SECRETS['HF_TOKEN']}"
    run.config_file.write_text(json.dumps(config))
    run.record(FaultEvent(rank=1, kind="error", error=f"401 for WANDB_API_KEY={SECRETS['WANDB_API_KEY']}"))
    manifest = json.loads(run.manifest_file.read_text())
    manifest.update(
        {"api_key": SECRETS["WANDB_API_KEY"], "env": SECRETS, "host": f"x MY_PASSWORD='{SECRETS['MY_PASSWORD']}'"}
    )
    run.manifest_file.write_text(json.dumps(manifest))
    return run


def test_no_secret_reaches_a_report(leaky):
    assert collect(leaky).recipe["launch"]["sbatch"]  # the recipe itself could be read
    texts = [html_report([leaky]), markdown_report([leaky]), json.dumps(json_report([leaky]))]
    for text in texts:
        for value in SECRETS.values():
            assert value not in text


def test_redaction_leaves_our_own_words_alone():
    kept = {"tokens": 5, "target_tokens": 6, "tokenizer": "bpe", "recipe_hash": "ab", "seq_len": 8}
    assert redact(kept) == kept
    assert redact({"api_key": "x"}) == {"api_key": HIDDEN}
    assert redact_text("tokens = 5, HF_TOKEN = abc") == f"tokens = 5, HF_TOKEN = {HIDDEN}"


class TestCommands:
    def invoke(self, *words: str):
        return CliRunner().invoke(build(), list(words), catch_exceptions=False)

    def test_energy_json_is_one_document_with_the_reports_numbers(self, run):
        found = json.loads(self.invoke("energy", str(run.path), "--json").stdout)
        assert found["measured_joules"] == 1_100_000.0
        assert found["carbon"]["kwh"] == collect(run).energy.carbon.kwh
        assert found["missing"]["rapl"].endswith("CPU energy is not measured")

    def test_energy_takes_ear_and_sacct_into_the_record(self, run, tmp_path):
        ear = tmp_path / "e.csv"
        ear.write_text("NODENAME;JOBID;STEPID;TIME_SEC;DC_NODE_POWER_W\ngcn1;4711;0;255;4000\ngcn1;4712;0;200;4000\n")
        before = json.loads(self.invoke("energy", str(run.path), "--json").stdout)
        after = json.loads(self.invoke("energy", str(run.path), "--ear", str(ear), "--json").stdout)
        assert before["measured_joules"] == 1_100_000.0
        assert after["measured_joules"] == 455 * 4000
        assert json.loads(self.invoke("watch", str(run.path), "--json").stdout)["energy"]["joules"] == 455 * 4000

    def test_table(self, run):
        text = self.invoke("energy", str(run.path)).stdout
        assert "305.56 Wh" in text and "no (estimate)" in text and "not measured on 1 of 2" in text

    def test_report_writes_and_prints(self, run, tmp_path):
        assert "report.html" in self.invoke("report", str(run.path)).stdout
        assert run.report_file.stat().st_size > 1_000_000
        out = tmp_path / "r.md"
        self.invoke("report", str(run.path), "--out", str(out))
        assert out.read_text().startswith("# sample")
        assert json.loads(self.invoke("report", str(run.path.parent), "--json").stdout)["runs"][0]["name"] == "sample"

    def test_figures_for_slides(self, run, tmp_path):
        pytest.importorskip("matplotlib")
        self.invoke("report", str(run.path), "--figures", str(tmp_path / "figures"), "--json")
        names = sorted(p.name for p in (tmp_path / "figures").iterdir())
        assert {"training-loss.svg", "life-steps-over-time.svg", "energy-energy-by-source.svg"} <= set(names)
        assert "<svg" in (tmp_path / "figures" / "training-loss.svg").read_text()

    def test_watch_fits_80_columns(self, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        text = self.invoke("watch", str(run.path), "--once").stdout
        assert max(map(len, text.splitlines())) <= 80
        for word in ("loss", "104.85k", "41.2 %", "67.7 %", "rank 5", "363.61 Wh"):
            assert word in text

    def test_no_torch_on_a_login_node(self, run):
        import subprocess
        import sys

        code = f"import sys; from windlass.report.write import json_report; from windlass.runs import Run; from pathlib import Path; json_report([Run(Path({str(run.path)!r}))]); import windlass.report.dash.server, windlass.report.watch; assert 'torch' not in sys.modules and 'plotly' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_report_of_an_empty_run_says_so(tmp_path):
    path = make_run(tmp_path / "new")
    for name in ("metrics.jsonl", "events.jsonl", "energy.jsonl", "manifest.json"):
        (path / name).unlink()
    text = markdown_report([Run(path)])
    assert "metrics.jsonl is empty" in text
    assert re.search(r"\| energy \| not measured \|", text)


def test_the_stores_own_ledger_stands_in_while_it_can_be_reached(run):
    manifest = json.loads(run.manifest_file.read_text())
    del manifest["data"]
    run.manifest_file.write_text(json.dumps(manifest))
    config = json.loads(run.config_file.read_text())
    config["data"]["store"] = "store"
    run.config_file.write_text(json.dumps(config))
    assert "cannot be reached from here" in markdown_report([run])
    store = run.path / "store"
    store.mkdir()
    source = {
        "language": "nl",
        "licence": "CC0",
        "origin": "here",
        "consent": "public domain",
        "notes": "letters",
        "documents": 3,
        "tokens": 99,
    }
    (store / "ledger.json").write_text(json.dumps({"version": 1, "sources": {"letters": source}}))
    (store / "manifest.json").write_text(
        json.dumps({"ledger_hash": "f00", "settings": {"dedup": "exact", "validation": 0.01}})
    )
    text = markdown_report([run])
    assert "| letters | not stated | CC0 | here | public domain | nl | 99 | 3 |" in text
    assert "exact duplicates removed; 1 % of documents held out for validation; letters: letters" in text


def test_the_published_card_names_the_store_but_not_where_it_lies(run):
    from windlass.report.model_card import data_section

    manifest = json.loads(run.manifest_file.read_text())
    manifest["data"]["store"] = "/scratch/project_123/someone/letters-v2"
    run.manifest_file.write_text(json.dumps(manifest))
    assert "Token store letters-v2; ledger abc123." in str(data_section(collect(run)))
    manifest["data"] = {"store": manifest["data"]["store"]}
    run.manifest_file.write_text(json.dumps(manifest))
    assert "token store letters-v2 cannot be reached" in str(data_section(collect(run)))
