"""The dashboard's server without a browser: who may ask, what is answered, and how fast a long run opens."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import pytest
from tests.report.sample_run import BATCH, BEGIN, make_run, metric
from tests.report.test_report import HOSTILE, SECRETS

from windlass.clusters.load import load_cluster
from windlass.config import load_recipe
from windlass.errors import LaunchError
from windlass.files import append_line
from windlass.planner.search import search
from windlass.planner.task import make_task
from windlass.report.collect import collect
from windlass.report.columns import axis, thin
from windlass.report.dash.api import answer
from windlass.report.dash.server import DashServer, make_server, serve_in_background
from windlass.report.dash.store import Folder, RunView
from windlass.runs.events import FaultEvent
from windlass.runs.folder import Run
from windlass.runs.metrics import MetricsLine
from windlass.units import print_seconds


@pytest.fixture
def server(run) -> Iterator[DashServer]:
    made = make_server(run.path.parent)
    serve_in_background(made)
    yield made
    made.shutdown()
    made.server_close()


def get(
    server: DashServer, path: str, *, token: bool = True, headers: dict[str, str] | None = None, method: str = "GET"
):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    cookie = {"Cookie": f"{server.cookie}={server.token}"} if token else {}
    connection.request(method, path, headers={**cookie, **(headers or {})})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def post(server: DashServer, path: str, body: bytes, changed: dict[str, str | None]):
    """As our own page sends it, but for the headers in `changed`."""
    port = server.server_port
    headers = {
        "Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json",
        "Cookie": f"{server.cookie}={server.token}", "Content-Length": str(len(body)), **changed,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("POST", path, skip_host=True)
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def ask(server: DashServer, path: str):
    answer, body = get(server, f"/api/{path}")
    return answer.status, json.loads(body)


def run_id(server: DashServer) -> str:
    return server.folder.views()[0].id


class TestSecurity:
    @pytest.mark.parametrize(
        "path", ["/", "/api/runs", "/app.js", "/plotly.js", "/api/run?id=x", "/?token=wrong", "/?token="]
    )
    def test_without_the_token_nothing(self, server, path):
        answer, body = get(server, path, token=False)
        assert answer.status == 403
        assert server.token.encode() not in body

    def test_the_token_moves_into_a_cookie_that_scripts_cannot_read(self, server):
        answer, _ = get(server, f"/?token={server.token}", token=False)
        assert (answer.status, answer.getheader("Location")) == (303, "/")
        cookie = answer.getheader("Set-Cookie")
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        answer, body = get(server, "/", token=False, headers={"Cookie": cookie.split(";")[0]})
        assert answer.status == 200 and b"windlass" in body

    def test_a_new_start_has_a_new_token(self, run, server):
        other = make_server(run.path)
        other.server_close()
        assert other.token != server.token and len(server.token) >= 32

    @pytest.mark.parametrize(
        "path",
        ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/static/../server.py", "/server.py", "/api/../runs", "/metrics.jsonl",
         "/api/run?id=../../../etc", "/api/run?id=/etc/passwd", "/api/series?id=..%2f..", "/api/profile?id=%00", "/app.js/../../store.py"],
    )  # fmt: skip
    def test_paths_outside_are_refused(self, server, path):
        answer, body = get(server, path)
        assert answer.status == 404
        assert b"root:" not in body and b"def " not in body

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
    def test_a_foreign_host_name_is_refused(self, server, host):
        assert get(server, "/api/runs", headers={"Host": host})[0].status == 403

    def test_a_tunnels_port_is_fine(self, server):
        assert get(server, "/api/runs", headers={"Host": "localhost:9999"})[0].status == 200

    def test_an_address_that_cannot_be_read_is_answered(self, server):
        answer, body = get(server, f"/api/runs?{'a=1&' * 200}", token=False)
        assert (answer.status, body) == (400, b"this address is not valid\n")

    @pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE"])
    def test_other_methods_do_not_exist(self, server, method):
        assert get(server, "/api/runs", method=method)[0].status == 501

    @pytest.mark.parametrize(
        ("path", "changed", "status"),
        [
            ("notes", {}, 200), ("notes", {"Origin": "http://evil.example"}, 403), ("notes", {"Origin": None}, 403),
            ("notes", {"Origin": "null"}, 403), ("notes", {"Cookie": None}, 403), ("notes", {"Host": "evil.example"}, 403),
            ("notes", {"Content-Type": "text/plain"}, 415), ("notes", {"Content-Length": "99999"}, 413),
            ("notes", {"Content-Length": "-1"}, 413), ("runs", {}, 404), ("../notes.json", {}, 404),
        ],
    )  # fmt: skip
    def test_only_our_own_page_writes_and_only_notes(self, run, server, path, changed, status):
        before = sorted(run.path.iterdir())
        answer, _ = post(server, f"/api/{path}?id={run_id(server)}", b'{"text": "a", "tags": ["b"]}', changed)
        assert answer.status == status
        written = [p.name for p in sorted(run.path.iterdir()) if p not in before]
        assert written == (["notes.json"] if status == 200 else [])

    def test_only_localhost_is_bound(self, server):
        assert server.server_address[0] == "127.0.0.1"

    def test_headers_forbid_everything_foreign(self, server):
        answer, _ = get(server, "/")
        policy = answer.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "http" not in policy and "unsafe-eval" not in policy
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Cache-Control") == "no-store"

    def test_assets_name_no_other_host(self, server):
        for path in ("/", "/app.js", "/draw.js", "/runs.js", "/run.js", "/planner.js", "/app.css"):
            body = get(server, path)[1].decode()
            links = [word for word in body.split() if "http" in word.lower() and "www.w3.org" not in word]
            assert links == []
            assert "innerHTML" not in body and "document.write" not in body and "eval(" not in body

    def test_hostile_names_travel_as_text(self, run, server):
        run.record(FaultEvent(rank=0, kind=HOSTILE, error=HOSTILE))
        found = ask(server, f"run?id={run_id(server)}")[1]
        figures = [i["figure"] for s in found["sections"] for i in s["items"] if i["kind"] == "figure"]
        assert "<img" not in json.dumps(figures)
        assert any(
            HOSTILE in cell
            for s in found["sections"]
            for i in s["items"]
            if i["kind"] == "table"
            for row in i["rows"]
            for cell in row
        )

    def test_no_secret_reaches_a_page(self, run, server):
        config = json.loads(run.config_file.read_text())
        config["notes"] = " ".join(f"{k}={v!r}" for k, v in SECRETS.items())
        run.config_file.write_text(json.dumps(config))
        run.record(FaultEvent(rank=1, kind="error", error=f"WANDB_API_KEY={SECRETS['WANDB_API_KEY']}"))
        for path in ("runs", f"run?id={run_id(server)}", "sweep", "data"):
            text = get(server, f"/api/{path}")[1].decode()
            assert not [value for value in SECRETS.values() if value in text]

    def test_a_port_in_use_is_explained(self, run, server):
        with pytest.raises(LaunchError, match=str(server.server_port)):
            make_server(run.path, port=server.server_port)


class TestAnswers:
    def test_runs_and_one_run_agree_with_the_report(self, run, server):
        from windlass.report.collect import collect

        row = ask(server, "runs")[1]["runs"][0]
        s = collect(run)
        assert (row["name"], row["loss"], row["joules"]) == (s.name, s.loss, s.energy.joules)
        assert row["mfu"] == pytest.approx(s.mfu, rel=0.01)  # of fewer lines
        page = ask(server, f"run?id={row['id']}")[1]
        cards = {c["label"]: c["value"] for c in page["sections"][0]["items"][0]["cards"]}
        assert cards["energy"] == "363.61 Wh" and cards["goodput"] == "67.7 %"
        fault = next(e for e in page["events"] if e["event"] == "fault")
        assert fault["step"] == 180  # it names no step itself: the last one before it

    def test_series_by_every_axis(self, server):
        for x, last in (("step", 300), ("tokens", 300 * 131_072), ("kwh", 3300.0 * 330 / 3.6e6)):
            found = ask(server, f"series?id={run_id(server)}&keys=loss,mfu&x={x}")[1]
            assert found["runs"][0]["series"]["loss"]["x"][-1] == pytest.approx(last)
        assert ask(server, f"series?id={run_id(server)}&x=nonsense")[1]["axis"] == "step"

    def test_unchanged_is_said_and_a_new_line_is_seen(self, run, server):
        first = ask(server, f"series?id={run_id(server)}&keys=loss")[1]
        path = f"series?id={run_id(server)}&keys=loss&have={first['version']}"
        assert ask(server, path)[1] == {"version": first["version"], "unchanged": True}
        append_line(run.metrics_file, metric(301, BEGIN + 2000, None))
        time.sleep(0.6)
        assert ask(server, path)[1]["runs"][0]["series"]["loss"]["x"][-1] == 301

    def test_a_new_run_appears(self, run, server, monkeypatch):
        make_run(run.path.parent / "second")
        server.folder._listed_at = -1e9
        assert {r["path"] for r in ask(server, "runs")[1]["runs"]} == {"sample", "second"}

    def test_numbers_out_of_bounds_are_bounded(self, server):
        for points in ("0", "-5", "999999999", "x"):
            assert ask(server, f"series?id={run_id(server)}&points={points}")[0] == 200
        assert ask(server, "series?id=unknown")[0] == 404
        assert ask(server, "nothing")[0] == 404

    def test_repeated_steps_are_drawn_once(self, run, server):
        """The sample dies at step 180 and resumes at 150; its last line repeats step 300 without going back."""
        path = f"series?id={run_id(server)}&keys=loss,val_loss&points=4000"
        series = ask(server, path)[1]["runs"][0]["series"]
        assert series["loss"]["x"] == [*range(1, 301), 300]
        assert (series["loss"]["repeated"]["x"], series["loss"]["repeated"]["y"][-1]) == ([*range(151, 181), 180], None)
        assert "repeated" not in series["val_loss"] and series["val_loss"]["x"] == [300]
        over_time = ask(server, f"{path}&x=time")[1]["runs"][0]["series"]["loss"]
        assert len(over_time["x"]) == 331 and "repeated" not in over_time

    def test_a_zoom_asks_for_its_part_and_a_mean_keeps_the_lines(self, server):
        path = f"series?id={run_id(server)}&keys=loss&low=200&high=210&mean=5"
        loss = ask(server, path)[1]["runs"][0]["series"]["loss"]
        assert loss["x"] == list(range(200, 211)) == loss["mean"]["x"]
        assert loss["mean"]["y"][5] == pytest.approx(sum(loss["y"][3:8]) / 5)
        for odd in (
            "low=x&high=y",
            "low=nan&high=inf",
            "low=9&high=1",
            "mean=-4",
            "mean=1e99",
            "low=-1e308&high=1e308",
        ):
            assert ask(server, f"series?id={run_id(server)}&keys=loss&{odd}")[0] == 200

    def test_csv_has_every_line(self, run, server):
        append_line(run.metrics_file, {"step": 301, "=cmd()": 1.5, "time": BEGIN + 31.25})
        rows = get(server, "/api/csv?id=sample&key=loss")[1].decode().splitlines()
        assert rows[0] == "run,step,tokens,hours,kwh,loss,repeated" and len(rows) == 332
        assert [rows[151].split(",")[i] for i in (0, 1, 6)] == ["sample", "151", "1"]
        answer, body = get(server, "/api/csv?id=sample&key=%3Dcmd()")
        assert answer.getheader("Content-Disposition") == "attachment"
        assert body.decode().splitlines() == ["run,step,tokens,hours,kwh,cmd(),repeated", "sample,301,,0,,1.5,0"]

    def test_runs_have_readable_names_also_when_two_look_alike(self, run, server):
        for name in ("a\x1bb", "a\x1cb"):
            make_run(run.path.parent / name, name="twin")
        (run.path.parent / "link").symlink_to(run.path)
        os.mkdir(os.fsencode(run.path.parent) + b"/\xff")  # a name that is not UTF-8
        for file in ("config.json", "events.jsonl"):
            (run.path / file).rename(Path(os.fsdecode(os.fsencode(run.path.parent) + b"/\xff")) / file)
        server.folder._listed_at = -1e9
        rows = ask(server, "runs")[1]["runs"]
        paths = sorted(row["path"] for row in rows)
        assert len(set(paths)) == len(rows) == 3 and paths[0] == "a\ufffdb" and paths[1].startswith("a\ufffdb ")
        for row in rows:
            page = ask(server, f"run?{urlencode({'id': row['path']})}")[1]
            assert page["id"] == row["id"] == ask(server, f"run?id={row['id']}")[1]["id"]

    def test_notes_are_kept_shown_and_bounded(self, run, server):
        def write(value: object) -> dict:
            return json.loads(post(server, "/api/notes?id=sample", json.dumps(value).encode(), {})[1])

        notes = {"text": f"{HOSTILE}\n\x1b[31m", "tags": ["b", "b", HOSTILE[:40]]}
        assert write(notes)["notes"]["tags"] == ["b", HOSTILE[:40]]
        time.sleep(0.6)
        row, page = ask(server, "runs")[1]["runs"][0], ask(server, "run?id=sample")[1]
        assert row["notes"] == page["notes"]["text"] == f"{HOSTILE}\n\ufffd[31m"
        assert row["tags"] == page["notes"]["tags"] and page["notes"]["writable"]
        for refused in ({"text": "x" * 4001}, {"tags": ["t"] * 13}, {"tags": ["t" * 41]}, {"other": 1}, [1], 7):
            assert write(refused)["error"]
        assert json.loads(post(server, "/api/notes?id=sample", b"{", {})[1])["error"]
        assert ask(server, "run?id=sample")[1]["notes"]["tags"] == ["b", HOSTILE[:40]]
        for damaged in ("[1", '{"text": 5}', "x" * 100_000):
            run.notes_file.write_text(damaged)
            assert ask(server, "run?id=sample")[1]["notes"]["text"] == ""

    def test_a_list_sends_what_changed_and_comes_in_parts(self, run, server, monkeypatch):
        monkeypatch.setattr("windlass.report.dash.api.LIST_PART_SECONDS", -1.0)
        first = ask(server, "runs")[1]
        assert (first["runs"], first["reading"], first["complete"]) == ([], 1, True)
        monkeypatch.undo()
        monkeypatch.setattr("windlass.report.dash.api.LOOK_SECONDS", 0.0)
        second = ask(server, f"runs?have={first['version']}")[1]
        assert (len(second["runs"]), second["reading"], second["complete"]) == (1, 0, False)
        assert ask(server, f"runs?have={second['version']}")[1]["runs"] == []
        append_line(run.metrics_file, metric(301, BEGIN + 2000, None))
        assert ask(server, f"runs?have={second['version']}")[1]["runs"][0]["step"] == 301
        make_run(run.path.parent / "second")
        server.folder._listed_at = -1e9
        third = ask(server, f"runs?have={second['version']}")[1]
        assert {row["path"] for row in third["runs"]} == {"sample", "second"} and not third["complete"]
        shutil.rmtree(run.path)
        server.folder._listed_at = -1e9
        fourth = ask(server, f"runs?have={third['version']}")[1]
        assert [row["path"] for row in fourth["runs"]] == ["second"] and fourth["complete"]

    def test_end_time_only_of_a_run_that_goes_on(self, run, server):
        assert ask(server, "run?id=sample")[1]["eta"] is None
        live = Run(make_run(run.path.parent / "live", finished=False, steps=220))
        append_line(live.metrics_file, metric(221, time.time(), None))
        server.folder._listed_at = -1e9
        page = ask(server, "run?id=live")[1]
        left = (40e6 - 221 * BATCH) / collect(live).tokens_per_second
        assert page["eta_seconds"] == pytest.approx(left) and page["eta"] == print_seconds(left)

    def test_large_folders_show_the_newest_where_all_of_each_run_is_read(self, run, server, monkeypatch):
        make_run(run.path.parent / "second", name="second")
        os.utime(run.metrics_file, (1.0, 1.0))
        server.folder._listed_at = -1e9
        monkeypatch.setattr("windlass.report.dash.api.MAX_WHOLE_RUNS", 1)
        notes, shown = ask(server, "data")[1]["sections"]
        assert shown["run"] == "second" and "2 runs" in notes["items"][0]["text"]

    def test_a_folder_that_breaks_while_it_is_shown(self, run, server):
        first = run_id(server)
        run.events_file.write_bytes(b"\xff\xfe garbage\n[]\n")
        run.manifest_file.write_text("[1")
        assert ask(server, f"run?id={first}")[0] == 200

    def test_data_and_sweep_pages(self, run, server):
        make_run(run.path.parent / "second", steps=200, name="second")
        server.folder._listed_at = -1e9
        assert "dutch-news" in json.dumps(ask(server, "data")[1])
        ids = [s["id"] for s in ask(server, "sweep")[1]["sections"]]
        assert ids == ["heat", "scaling", "pareto", "table"]

    def test_planner(self, server):
        found = ask(server, "plan?cluster=snellius-h100&nodes=4&size=1.1B&tokens=20B&seq_len=4096&days=10")[1]
        assert found["best"]["days"] > 0 and found["best"]["fits"]
        fewer = ask(server, "plan?cluster=snellius-h100&nodes=2&size=1.1B&tokens=20B&seq_len=4096")[1]
        assert fewer["best"]["days"] > found["best"]["days"]

    def test_the_planners_recipe_plans_the_same(self, server, tmp_path):
        sent = "cluster=snellius-h100&nodes=4&size=1.1B&tokens=20B&batch_tokens=1Mi&seq_len=4096"
        found = ask(server, f"plan?{sent}")[1]
        file = tmp_path / found["file"]
        file.write_text(found["recipe"])
        recipe = load_recipe(file).recipe
        best = search(make_task(recipe, load_cluster(recipe.cluster))).best
        assert best.days == pytest.approx(found["best"]["days"]) and best.candidate.describe() == found["layout"]

    def test_the_planner_takes_any_size_and_any_shape(self, server):
        def model(query: str) -> dict:
            return ask(server, f"plan?nodes=1&tokens=1B&{query}")[1]["model"]

        assert model("size=8B") | {"parameters": 0} == {
            "family": "llama", "layers": 32, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "parameters": 0,
        }  # fmt: skip
        assert (
            model("size=350M")["parameters"].endswith("M")
            and 0.9 < float(model("size=350M")["parameters"][:-1]) / 350 < 1.1
        )
        shape = model("size=8B&layers=10&width=1024&vocab=32000")
        assert [shape[key] for key in ("layers", "width", "heads", "ffn", "vocab")] == [10, 1024, 16, 3584, 32000]

    @pytest.mark.parametrize(
        "query",
        [
            "heads=7",
            "layers=0",
            "width=ten",
            "precision=fp1",
            "batch_tokens=x",
            "nodes=0",
            "nodes=abc",
            "size=9999B",
            "cluster=../../x",
            "tokens=-1",
            "days=soon",
            "nodes=99999999999",
        ],
    )
    def test_planner_refuses_with_words(self, server, query):
        status, found = ask(server, f"plan?{query}")
        assert status == 200 and found["error"]


def test_a_list_reads_few_lines_of_each_run_and_agrees_with_its_page(run, server, monkeypatch):
    """The complete metrics are read for a run's page only; a row is made again when a file has changed."""
    for number in range(4):
        make_run(run.path.parent / f"more-{number}", steps=2000)
    (run.path.parent / "more-3" / "metrics.jsonl").unlink()
    server.folder._listed_at = -1e9
    monkeypatch.setattr("windlass.report.collect.BRIEF_FILE_BYTES", 100 << 10)
    with monkeypatch.context() as patch:
        patch.setattr("windlass.report.dash.store.RunView.columns", lambda _: pytest.fail("read completely"))
        listed = ask(server, "runs")[1]["runs"]
    rows = {row["path"]: row for row in listed}
    assert max(view.glance()[0].lines for view in server.folder.views()) < 700
    assert len(rows) == 5 and rows["more-3"]["loss"] is None and "metrics.jsonl" in rows["more-3"]["problem"]
    view = server.folder.get(rows["more-1"]["id"])
    summary, row = view.summary(), rows["more-1"]
    assert summary.lines > 2000 and summary.life is not None
    exact = {key: getattr(summary, key) for key in ("step", "tokens", "loss", "memory_bytes", "updated_at")}
    assert {key: row[key] for key in exact} == exact and row["joules"] == summary.energy.joules
    assert row["tokens_per_second"] == pytest.approx(summary.tokens_per_second, rel=0.01)
    assert row["goodput"] == pytest.approx(summary.life.goodput, rel=0.005) and 20 < len(row["spark"]) <= 62
    monkeypatch.setattr("windlass.report.dash.api.LOOK_SECONDS", 0.0)
    view.run.record_metrics(MetricsLine(step=2001, tokens=7, loss=1.0, time=BEGIN + 1e6))
    assert next(r for r in ask(server, "runs")[1]["runs"] if r["path"] == "more-1")["step"] == 2001


def test_an_empty_folder_is_explained_and_fills_by_itself(tmp_path):
    folder = Folder(tmp_path)
    first = answer(folder, "runs", {})
    assert (first["runs"], first["reading"], first["complete"]) == ([], 0, True)
    for page in ("data", "sweep"):
        texts = [item["text"] for part in answer(folder, page, {})["sections"] for item in part["items"]]
        assert len(texts) == 1 and tmp_path.name in texts[0]
    make_run(tmp_path / "first")
    folder._listed_at = -1e9
    assert [row["path"] for row in answer(folder, "runs", {"have": [str(first["version"])]})["runs"]] == ["first"]


def test_of_many_viewers_one_makes_the_summary(run, monkeypatch):
    made = []

    def slowly(*words, **more):
        made.append(1)
        time.sleep(0.2)  # long enough for every other thread to find it out of date
        return collect(*words, **more)

    monkeypatch.setattr("windlass.report.dash.store.collect", slowly)
    view = RunView(run, "a")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: view.summary(), range(8)))
    assert (len(made), len({id(s) for s in found})) == (1, 1)


def test_a_run_that_grows_between_two_columns_is_drawn_as_it_was(run, monkeypatch):
    """What fifty viewers of a live run do to each other: one reads a new line while another draws."""
    view = RunView(run, "a")
    columns = view.columns()
    before = len(columns)
    xs = axis(columns, "step")
    append_line(run.metrics_file, metric(301, BEGIN + 1e4, 1.0))
    monkeypatch.setattr("windlass.report.dash.store.LOOK_SECONDS", 0.0)
    assert len(view.columns()) == before + 1
    assert len(thin(xs, columns.get("loss"))[0]) >= before


def test_a_long_run_opens_from_a_sample_and_is_exact_in_the_end(tmp_path):
    """The first look may take a sample; a spike between the samples is found when the whole file was read."""
    run = Run(make_run(tmp_path / "long"))
    line = json.dumps(metric(1, BEGIN, 1.0))
    head, tail = line.split('"step": 1,', 1)
    with run.metrics_file.open("w") as file:
        for block in range(60):
            file.write("".join(f'{head}"step": {block * 500 + i},{tail}\n' for i in range(500)))
        file.write(line.replace('"loss": ', '"loss": 77') + "\n")
    assert run.metrics_file.stat().st_size > 8 << 20
    view = RunView(run, "long")
    began = time.process_time()
    view.summary()
    xs = view.series("loss", "step", 800)["x"]
    first = time.process_time() - began
    assert len(xs) > 100
    assert first < 1.0
    deadline = time.monotonic() + 60
    while view._sample is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.6)
    assert len(view.columns()) == 30_001
    assert max(y for y in view.series("loss", "step", 800)["y"] if y is not None) > 70


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_runs(tmp_path):
    """The list comes in parts that each take seconds; then an update sends nothing, and every page still answers."""
    template = make_run(tmp_path / "template", steps=8, crash_at=6, resume_from=4)
    root = tmp_path / "runs"
    for number in range(10_000):
        shutil.copytree(template, root / f"{number // 100:02}" / f"run-{number:04}", copy_function=os.link)
    server = make_server(root)
    serve_in_background(server)
    try:
        began, parts, rows, version, reading = time.monotonic(), [], {}, 0, 1
        while reading:
            part_began = time.monotonic()
            found = ask(server, f"runs?have={version}")[1]
            rows |= {row["id"]: row for row in found["runs"]}
            version, reading = found["version"], found["reading"]
            parts.append(time.monotonic() - part_began)
        listed = time.monotonic() - began
        time.sleep(0.6)
        began = time.monotonic()
        again = ask(server, f"runs?have={version}")[1]["runs"]
        print(
            f"list {listed:.1f} s in {len(parts)} parts, longest {max(parts):.1f} s; again {time.monotonic() - began:.1f} s"
        )
        assert len(rows) == 10_000 and again == [] and max(parts) < 30
        for path in ("run?id=37/run-3712", "series?id=37/run-3712&id=00/run-0000", "data", "sweep"):
            began = time.monotonic()
            assert ask(server, path)[0] == 200
            print(f"{path} {time.monotonic() - began:.1f} s")
    finally:
        server.shutdown()
        server.server_close()
