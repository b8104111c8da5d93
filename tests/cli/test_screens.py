"""What a person sees at 80 and 120 columns: one golden screen per command that prints a table.

`WINDLASS_GOLDEN=write pytest tests/cli/test_screens.py` writes tests/golden/screens anew; read the difference before you
commit it.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from tests.profile.conftest import TraceBuilder
from tests.report.sample_run import BEGIN, make_run
from tests.report.sample_sweep import end_point
from tests.report.test_every_figure import lines_of_html, lines_of_page
from tests.small_recipe import recipe_tables

from windlass.checkpoint import files
from windlass.cli import main
from windlass.cli.evaluate import score_table
from windlass.cli.output import COPIED, show
from windlass.config.sources import DataFile, DataSource
from windlass.config.sweep import load_sweep
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import train_bpe
from windlass.energy.carbon import print_carbon
from windlass.files import append_line, write_json
from windlass.launch import doctor
from windlass.launch.sweep.folder import SweepRun, open_sweep_folder
from windlass.launch.sweep.points import make_points
from windlass.report.dash.api import answer
from windlass.report.dash.store import Folder
from windlass.runs.folder import Run
from windlass.runs.scores import EvalScore, append_scores
from windlass.units import (
    GIB,
    print_bytes,
    print_figure,
    print_kwh,
    print_node_hours,
    print_rate,
    print_seconds,
    print_share,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "screens"
LAUNCHED = """name = "nine-b"
cluster = "leonardo-booster"
nodes = 16
[model]
layers = 34
width = 4096
ffn = 12288
heads = 32
kv_heads = 8
vocab = 50000
[data]
store = "data/shards"
tokens = "1T"
seq_len = 4096
batch_tokens = "4Mi"
[layout]
shard = "hybrid"
micro_batch = 2
[launch]
account = "EUHPC_A01_006"
"""
SWEEP = (
    'name = "grid"\n'
    + recipe_tables(cluster="snellius-h100", batch_tokens=2048, steps=12)
    + '[matrix]\n"layout.shard" = ["none", "full"]\n"layout.micro_batch" = [2]\ndevices = [1]\n'
)
SCORES = [
    EvalScore(task="belebele", group=group, metric="accuracy", value=value, low=value - 0.03, high=value + 0.03, count=900)
    for group, value in (("all", 0.412), ("language nl", 0.431), ("language fy", 0.352), ("language en", 0.476))
]  # fmt: skip
CHECKS = [
    doctor.DoctorCheck("clock", "here", "ok", "0.4 ms from the file server"),
    doctor.DoctorCheck("disk", "/scratch/project_465000001", "warn", "212 MB/s written, 1,904 MB/s read", "use the flash file system for checkpoints"),
]  # fmt: skip
SCREENS = {
    "help": "--help",
    "start": "",
    "plan": "plan nine.toml",
    "plan-why": "plan nine.toml --why shard=full,micro_batch=4",
    "budget": "budget --cluster snellius-h100 --days 30 --mfu 0.4 --tokens 450B",
    "show": "show nine.toml --set",
    "init": "init first.toml --cluster lumi-g --size 1B --yes",
    "clusters": "clusters",
    "clusters-one": "clusters snellius-h100",
    "clusters-devices": "clusters --devices",
    "tokenize": "tokenize texts.toml",
    "data": "data data/texts",
    "data-ledger": "data data/texts --ledger",
    "tokenizer-compare": "tokenizer compare texts.toml tokenizer/tokenizer.json",
    "checkpoints": "checkpoints sample",
    "launch": "launch nine.toml --dry-run",
    "jobs": "jobs sample",
    "jobs-all": "jobs",
    "jobs-ledger": "jobs --ledger",
    "watch": "watch sample --once",
    "energy": "energy sample",
    "energy-mwh": "energy --mwh 52.3 --cluster lumi-g --nodes 64 --days 7",
    "compare": "compare sample other",
    "compare-traces": "compare slow.json fast.json",
    "profile": "profile slow.json",
    "eval-recorded": "eval sample --recorded",
    "sweep-dry-run": "sweep grid.toml --dry-run",
    "sweep-report": "sweep grid.toml --report",
    "doctor": "doctor --no-devices",
}


def write_trace(path: Path, extra: float) -> None:
    trace = TraceBuilder()
    for number in (5, 6):
        t = 1000.0 + number * (100 + extra)
        trace.step(number, t, t + 100 + extra)
        op = trace.op("aten::mm", t, t + 30)
        trace.launch(
            "sm80_xmma_gemm_bf16_tn_n_tilesize256x128x64_stage3_warpsize2x2x1", t + 2, t + 10, t + 50, external=op
        )
        trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", t + 10, t + 40, t + 80 + extra, external=999, stream=20)
    trace.write(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A project: recipes, a token store, two runs with checkpoints, jobs and scores, a sweep and two traces."""
    base = tmp_path_factory.mktemp("project")
    before = Path.cwd()
    os.chdir(base)
    Path("nine.toml").write_text(LAUNCHED)
    Path("grid.toml").write_text(SWEEP)
    train_bpe(["de lier hijst het schip uit de haven " * 40, "the winch lifts the ship " * 40], 300, Path("tokenizer"))
    sources = {}
    for name, language, text in (("news-nl", "nl", "de lier hijst het schip "), ("code", "code", "the winch lifts ")):
        path = Path(f"{name}.jsonl")
        path.write_text("".join(json.dumps({"text": text * (i + 1)}) + "\n" for i in range(40)))
        sources[name] = DataSource(
            paths=[str(path)], language=language, licence="CC-BY-4.0", origin="https://example.org"
        )
    data = DataFile(output="data/texts", tokenizer="tokenizer/tokenizer.json", sources=sources, workers=1)
    tokenize(data)
    keys = "".join(
        f'[sources.{name}]\npaths = {s.paths}\nlanguage = "{s.language}"\nlicence = "{s.licence}"\norigin = "{s.origin}"\n'
        for name, s in sources.items()
    )
    Path("texts.toml").write_text(f'output = "{data.output}"\ntokenizer = "{data.tokenizer}"\nworkers = 1\n{keys}')
    for name in ("sample", "other"):
        run = Run(make_run(Path("runs") / name, name=name))
        for step in (150, 300):
            saved = run.checkpoint(step)
            saved.mkdir(exist_ok=True)
            (saved / "__0_0.distcp").write_bytes(b"weights" * 100)
            listed = files.describe(saved, ["__0_0.distcp"])
            about = {"format": 1, "step": step, "tokens": step * 131_072, "metric": 2.7 - step / 1000, "metric_name": "val_loss", "world_size": 8, "files": listed}  # fmt: skip
            write_json(saved / files.MANIFEST, files.sealed(about))
            os.utime(saved / files.MANIFEST, (BEGIN + step, BEGIN + step))
        append_scores(run, SCORES, step=300, tokens=300 * 131_072)
        run.jobs_file.unlink()
    for link in (1, 2):
        job = {"time": BEGIN + 400 * link, "job": str(4710 + link), "restart": 0}
        append_line(run.jobs_file, {"record": "submitted", "link": link, "links": 2, "executor": "slurm", "cluster": "lumi-g", "account": "p1", "nodes": 4, "seconds": 7200.0, "units_per_node_hour": 4.0, "unit": "GPU-hour", **job})  # fmt: skip
        append_line(run.jobs_file, {"record": "began", **job})
        append_line(
            run.jobs_file, {"record": "ended", **job, "time": BEGIN + 400 * link + 300, "code": 75 if link == 1 else 0}
        )
    run.jobs_file.rename("runs/sample/jobs.jsonl")
    loaded = load_sweep(Path("grid.toml"))
    points = make_points(loaded)
    work = SweepRun(
        loaded=loaded, folder=open_sweep_folder(Path("runs/grid"), loaded, points), points=points, expected=[]
    )
    for point in points:
        end_point(work, point)
    write_trace(Path("slow.json"), 40.0)
    write_trace(Path("fast.json"), 0.0)
    os.chdir(before)
    return base


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def reconfigure(self, **settings: object) -> None:
        """As of a real stream."""


@pytest.fixture
def screen(folder, monkeypatch):
    """`screen("plan r.toml", 80)`: what the command prints on a terminal of that width."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr(time, "time", lambda: BEGIN + 3600)
    monkeypatch.setattr(doctor, "host_checks", lambda *arguments, **options: CHECKS)
    time.tzset()

    def run(command: str, width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "argv", ["windlass", *command.split()])
        if command == "eval":  # the table of tasks, without torch and a model
            show(False, None, score_table(SCORES))
        else:
            try:
                main()
            except SystemExit as error:
                terminal.write(f"(exit code {error.code})\n")
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
        text = re.sub(r"[\d.]+ (m?s) of CPU", r"N \1 of CPU", text).replace(str(folder), "/home/anna/project")
        text = text.replace(str(GOLDEN.parents[2]), "/opt/windlass")
        text = re.sub(r"(documents|nothing to do.*), [\d.]+ m?s", r"\1, N s", text)
        return "".join(line.rstrip() + "\n" for line in text.splitlines())

    yield run
    monkeypatch.undo()
    time.tzset()


# Figure -> how `--json` has it, as text, and the views that show it.
PLAN_FIGURES = {
    "time": (lambda p: print_seconds(p["days"] * 86_400), ("table", "page", "dash", "launch")),
    "node-hours": (lambda p: print_node_hours(p["node_hours"]), ("table", "page", "dash", "launch")),
    "units": (lambda p: print_figure(p["allocation"]["amount"]), ("table", "page", "dash", "launch")),
    "energy": (lambda p: print_kwh(p["mwh"] * 1e3), ("table", "page", "dash", "launch")),
    "energy at the nodes": (lambda p: print_kwh(p["mwh_at_nodes"] * 1e3), ("page",)),
    "energy per billion tokens": (lambda p: print_kwh(p["kwh_per_billion_tokens"]), ("page",)),
    "CO2e": (lambda p: print_carbon(p["tco2e"] * 1e3, unit=""), ("table", "page", "dash")),
    "memory": (lambda p: print_bytes(p["memory_gib"] * GIB), ("table", "page", "dash", "launch")),
    "usable memory": (lambda p: print_bytes(p["memory_limit_gib"] * GIB), ("table", "page", "dash", "launch")),
    "tokens/s": (lambda p: print_rate(p["tokens_per_second"], unit=""), ("page", "dash", "launch")),
    "tokens/s per device": (lambda p: print_rate(p["tokens_per_second_per_device"], unit=""), ("table", "page", "dash")),
    "MFU": (lambda p: print_share(p["mfu"]), ("table", "page", "dash")),
    "reason": (lambda p: p["reason"], ("table", "page", "dash", "launch")),
}  # fmt: skip


@pytest.mark.parametrize("size", ["8B", "0.2B"])
def test_a_figure_of_a_plan_reads_the_same_in_every_view(size, screen, tmp_path):
    """Of days and MWh, and of hours and kWh."""
    tokens = "450B" if size == "8B" else "1B"
    sent = {"cluster": "leonardo-booster", "nodes": "16", "size": size, "tokens": tokens}
    planner = answer(Folder(Path("runs")), "plan", {key: [value] for key, value in sent.items()})
    recipe, page = tmp_path / "page.toml", tmp_path / "page.html"
    recipe.write_text(planner["recipe"])
    views = {
        "dash": lines_of_page(planner),
        "launch": screen(f"launch {recipe} launch.account=EUHPC_A01_006 --dry-run", 120),
        "table": screen(f"plan {recipe} --html {page}", 120),
        "page": lines_of_html(page.read_text()),
    }
    first = json.loads(screen(f"plan {recipe} --json", 120))["plans"][0]
    assert first == planner["best"]
    assert first["node_hours"] == pytest.approx(16 * 24 * first["days"])
    for name, (show_figure, shown_in) in PLAN_FIGURES.items():
        text = show_figure(first)
        for view in shown_in:
            printed = re.sub(r"\s+", " ", views[view])
            assert re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d]|[.,]\d)", printed), (name, view, text)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", [*SCREENS, "eval"])
def test_screen(name, width, screen):
    text = screen(SCREENS.get(name, name), width)
    if name == "launch":
        text = text[text.rindex("nine-b on Leonardo") :]  # the script has its own golden file
    elif name == "init":
        Path("first.toml").unlink()
    assert [line for line in text.splitlines() if len(line) > width and not COPIED.search(line)] == []
    if width == 120:
        assert "Not shown" not in text
    path = GOLDEN / f"{name}-{width}.txt"
    if os.environ.get("WINDLASS_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: run with WINDLASS_GOLDEN=write, read it, commit it"
    assert text == path.read_text()
