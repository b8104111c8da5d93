"""LEPISZCZE: its tasks are read, stand-ins have their formats, and a killed matrix ends with the same table."""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.train.tuning_files import save_encoder
from typer.testing import CliRunner

from windlass.cli import build
from windlass.data.examples import read_example_sets
from windlass.evaluate.finetune import read_task

TOP = Path(__file__).parents[3]
TASKS = sorted((TOP / "recipes" / "lepiszcze").glob("*.toml"))
DVC = TOP / "tests" / "launch" / "sweep" / "hackathon" / "flat.yaml"
OURS = (TOP / "recipes" / "lepiszcze" / "command.txt").read_text().strip()


def sweep(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(build("sweep"), ["sweep", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize("path", TASKS, ids=lambda p: p.stem)
def test_tasks(path: Path) -> None:
    tune, length = read_task(path, {})
    assert tune.train == f"data/lepiszcze/{path.stem}/train.jsonl" and length in (256, 512)
    assert "sentence_A" in path.read_text() or path.stem != "cdsc_e"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-ins and two encoders."""
    folder = tmp_path_factory.mktemp("lepiszcze")
    (folder / "recipes").symlink_to(TOP / "recipes")
    script = TOP / "recipes" / "lepiszcze" / "stand_in.py"
    subprocess.run([sys.executable, str(script), "data/lepiszcze"], cwd=folder, check=True, capture_output=True)
    save_encoder(folder / "models" / "one")
    shutil.copytree(folder / "models" / "one", folder / "models" / "two")
    return folder


def test_stand_ins_have_the_formats(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    labels = {}
    for name in ("polemo2", "cdsc_e", "kpwr_ner"):
        sets = read_example_sets(read_task(Path(f"recipes/lepiszcze/{name}.toml"), {})[0])
        labels[name] = sets.labels
        sizes = (173, 19, 96) if name == "kpwr_ner" else (192, 48, 96)  # without a validation file a tenth
        assert (len(sets.train), len(sets.validation), len(sets.test)) == sizes
        assert (here / "data" / "lepiszcze" / name / "STAND-IN.txt").is_file()
    assert labels["cdsc_e"] == ["CONTRADICTION", "ENTAILMENT", "NEUTRAL"] and "B-nam_liv_person" in labels["kpwr_ner"]


def test_the_teams_matrix_with_our_command() -> None:
    """The team's own dvc.yaml, its five points, and `windlass finetune` in place of its program."""
    answer = sweep(str(DVC), "--dry-run", "--command", OURS)
    assert len(answer["points"]) == 5 and not answer["faults"]
    launch = ["launch.account=project_1", "launch.container=/project/project_1/klajster.sif"]
    jobs = sweep(str(DVC), "--dry-run", "--slurm", "--cluster", "lumi-g", "--command", OURS, *launch)["jobs"]
    assert all("--command" in job["script"] and "project_1" in job["script"] for job in jobs)
    assert {(pack["nodes"], pack["devices"]) for job in jobs for pack in job["packs"]} == {
        (1, 1), (1, 2), (1, 4), (1, 8), (2, 8)
    }  # fmt: skip


# -- killed, and finished with the same table ----------------------------------------------------------------------------


def write_matrix(here: Path, name: str, models: list[str], data_sets: list[str], batches: list[int], devices: list[int],
                 seeds: int) -> Path:  # fmt: skip
    path = here / f"{name}.toml"
    command = (
        f"{sys.executable} -m windlass finetune {{model}} --tune recipes/lepiszcze/{{dataset}}.toml --batch {{batch}} "
        f"--devices {{devices}} --seeds {seeds} --epochs 1 --lr 3e-3 --length 48 --runs {{folder}}/runs "
        "--output {folder}/metrics.json --no-save"
    )
    lines = [f'name = "{name}"', f'command = "{command}"', 'results = "metrics.json"', 'rank_by = "score"', "[leaderboard]",
             "[matrix]", f"model = {json.dumps(models)}", f"dataset = {json.dumps(data_sets)}", f"batch = {batches}",
             f"devices = {devices}"]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def start(here: Path, file: Path, run: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "windlass", "sweep", file.name, "--run", run, "--json"]
    return subprocess.Popen(argv, cwd=here, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def table(folder: Path) -> list[tuple[str, ...]]:
    """What must not change: everything but times and the energy."""
    keys = ("model", "dataset", "metric", "score", "spread", "seeds", "point", "points")
    return [tuple(line[key] for key in keys) for line in csv.DictReader((folder / "leaderboard.csv").open())]


def test_two_points_killed_and_continued(here: Path) -> None:
    """Killed in the second point: the first is kept, the second begins again, and both have their scores."""
    file = write_matrix(here, "two", ["models/one", "models/two"], ["cdsc_e"], [64], [1], seeds=1)
    process, outcomes = start(here, file, "runs/two"), here / "runs" / "two" / "outcomes.jsonl"
    deadline = time.monotonic() + 300
    # The file exists a moment before its first line does.
    while not (outcomes.is_file() and outcomes.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(outcomes.read_text().splitlines()) == 1
    assert start(here, file, "runs/two").wait(timeout=300) == 0
    first, second = table(here / "runs" / "two")
    assert first[0] == "models/one" and float(first[3]) > 0
    assert first[2:6] == second[2:6], "the same weights, data and seed"
    assert "models/one" in (here / "runs" / "two" / "leaderboard.html").read_text()


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(3600)  # the matrix takes five minutes, and is run twice
def test_matrix_killed_at_random(here: Path) -> None:
    """2 models x 3 data sets x 2 batches x 1 and 2 processes, at once, and killed up to five times.

    2026-11-17: 224 s undisturbed on two idle cores (308 s of CPU time)."""
    sets = ["polemo2", "cdsc_e", "kpwr_ner"]
    file = write_matrix(here, "matrix", ["models/one", "models/two"], sets, [16, 32], [1, 2], seeds=1)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    assert start(here, file, "runs/whole").wait() == 0
    after, wall_seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"undisturbed: {cpu_seconds:.0f} s of CPU, {wall_seconds:.0f} s, load {os.getloadavg()[1]:.1f}")
    assert cpu_seconds < 2 * 360, "six minutes of two cores"
    seconds = sum(line["seconds"] for line in map(json.loads, (here / "runs/whole/outcomes.jsonl").open()))
    dice, kills = random.Random(0), 0
    while (process := start(here, file, "runs/killed")).poll() is None:
        try:
            assert process.wait(timeout=dice.uniform(0.1, 0.35) * seconds if kills < 5 else None) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            continue
        break
    print(f"killed {kills} times, finished after {time.monotonic() - started - wall_seconds:.0f} s")
    assert kills and table(here / "runs" / "killed") == table(here / "runs" / "whole")
    assert len(table(here / "runs" / "whole")) == 6


@pytest.mark.slow
def test_a_point_of_the_teams_matrix_runs(here: Path) -> None:
    shutil.copytree(here / "models" / "one", here / "models" / "allegro__herbert-base-cased", dirs_exist_ok=True)
    point = "dataset-polemo2.embedding-allegro__herbert-base-cased.num_nodes-1-num_gpus-1"
    command = OURS.replace("windlass", f"{sys.executable} -m windlass") + " --epochs 0.5 --length 48"
    argv = [
        sys.executable,
        "-m",
        "windlass",
        "sweep",
        str(DVC),
        "--command",
        command,
        "--point",
        point,
        "--run",
        "runs/dvc",
    ]
    subprocess.run(argv, cwd=here, check=True, capture_output=True)
    (line,) = map(json.loads, (here / "runs" / "dvc" / "outcomes.jsonl").open())
    assert (line["point"], line["outcome"]) == (point, "ok")
