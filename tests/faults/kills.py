"""Random kills of real process trees: a phase is chosen, its mark awaited, and after a random part of it one process of
the tree gets a SIGKILL. Every run must end as the undisturbed one, to the last bit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.data.conftest import make_text
from tests.faults import lab as faults
from tests.faults.lab import Lab
from tests.faults.marked import MARKS, PHASES
from tests.model_runs import save_run
from tests.slurm.conftest import BIN, SCRIPT, login

from windlass.config import Loaded, load_recipe
from windlass.config.sources import DataFile, DataSource
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import train_bpe
from windlass.files import read_json, read_json_lines
from windlass.launch.staging import MARKER
from windlass.launch.start import bind_start
from windlass.launch.sweep.folder import SweepFolder
from windlass.runs.events import FaultEvent, ProcessStart, Resumed
from windlass.runs.folder import Run, create_run

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 600.0
# A kill that nobody has noticed by then counts as not noticed.
NOTICE_SECONDS = 60.0


@dataclass
class Kill:
    work: str
    phase: str
    victim: str
    # From the kill to the record of the fault, or to the end of every process where nobody is left to write one.
    # None: not noticed.
    detection_seconds: float | None
    # The record names the rank, the signal and the node; None where the victim is no rank or nobody is left.
    named: bool | None = None
    tokens_redone: int | None = None
    identical: bool | None = None
    killed_at: float = 0.0

    @property
    def good(self) -> bool:
        """The death of a process of windlass is noticed within 5 s (of srun and the batch shell in SLURM's own time), the
        rank is named, and no bit of the result is another."""
        is_ours = self.victim.startswith(("rank", "parent", "child"))
        in_time = self.detection_seconds is not None and (self.detection_seconds <= 5.0 or not is_ours)
        return self.identical is True and self.named is not False and in_time


@dataclass
class Work:
    """A process tree that can be started again and again until its work is done."""

    name: str
    marks: MarkReader
    start: Callable[[], subprocess.Popen[bytes]]
    # What is not as in the work that nobody disturbed.
    differences: Callable[[], list[str]]
    # Asked when no process is left. None: the command has ended with exit code 0.
    finished: Callable[[], bool] | None = None
    # What must hold after every kill, before the command is given again.
    intact: Callable[[], bool] = lambda: True
    # Every living process with a label.
    processes: Callable[[subprocess.Popen[bytes]], list[tuple[str, psutil.Process]]] = lambda process: tree(process)
    faults: Callable[[], Iterable[FaultEvent]] = tuple
    phases: tuple[str, ...] = PHASES
    # Its phases come again and again; else a kill in a late one would leave no early one to come.
    repeats: bool = True
    # How many marks of a step there are at least.
    steps: int = 6
    # How long each phase takes, as measured; the moment of a kill is a random part of it.
    seconds: dict[str, float] = field(default_factory=dict)
    run: Run | None = None
    tokens_per_step: int = 0
    process: subprocess.Popen[bytes] | None = None

    def go_on(self) -> bool:
        """Give the command (again) where it does not run; False: the work is done."""
        if self.process is None or self.process.poll() is not None:
            has_ended = self.process is not None and self.process.returncode == 0
            if has_ended if self.finished is None else self.finished():
                return False
            self.marks.drain()
            self.marks.phase, self.marks.since = "none", time.monotonic()
            self.process = self.start()
        return True

    def alive(self) -> list[tuple[str, psutil.Process]]:
        return [] if self.process is None else self.processes(self.process)


class MarkReader:
    """The phase that the tree has reached, by its newest mark; steps beside a save in the background count as save."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.path, self.phase, self.since = path, "none", time.monotonic()
        # Phase -> how long it took the last time.
        self.spans: dict[str, float] = {}
        self.received: queue.Queue[tuple[str, float]] = queue.Queue()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        while True:
            self.received.put((self.socket.recv(64).decode(), time.monotonic()))

    def read(self, timeout_seconds: float) -> str | None:
        try:
            phase, at = self.received.get(timeout_seconds > 0, timeout_seconds)
        except queue.Empty:
            return None
        phase = "step" if phase == "saved" else self.phase if (self.phase, phase) == ("save", "step") else phase
        if phase != self.phase:
            self.spans[self.phase] = at - self.since
            self.phase, self.since = phase, at
        return phase

    def drain(self) -> None:
        while self.read(0) is not None:
            pass

    def wait_for(self, phase: str, times: int, alive: Callable[[], bool]) -> bool:
        """Until the phase was reached for the n-th time from now on; False when nothing is left alive to reach it."""
        end = time.monotonic() + LIMIT_SECONDS
        while times > 0 and time.monotonic() < end:
            before, current = self.phase, self.read(0.2)
            if current is None and not alive():
                return False
            times -= current == phase and (before != phase or phase == "step")  # ranks mark a phase one by one
        return times == 0


def tree(process: subprocess.Popen[bytes]) -> list[tuple[str, psutil.Process]]:
    """The process and all below it; a rank by its number, others by their place."""
    labelled = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for member in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if member.status() != psutil.STATUS_ZOMBIE:
                    rank = member.environ().get("RANK")
                    label = "parent" if member.pid == process.pid else "child" if rank is None else f"rank {rank}"
                    labelled.append((label, member))
    return labelled


def measure(work: Work) -> None:
    """Run the work once without kills: how long its phases take."""
    spans: dict[str, list[float]] = {}
    while work.go_on():
        before, since = work.marks.phase, work.marks.since
        work.marks.read(0.05)
        assert work.process is not None and not work.process.poll(), f"{work.name} fails without a kill"
        if work.marks.phase != before:
            spans.setdefault(before, []).append(work.marks.since - since)
    spans.setdefault(work.marks.phase, []).append(time.monotonic() - work.marks.since)
    work.seconds = {phase: sorted(values)[len(values) // 2] for phase, values in spans.items()}


def random_kills(make: Callable[[str, MarkReader], Work], runs: int, seed: int) -> Iterator[Kill]:
    """`make` gives the work of a name; the first one, "reference", is not disturbed."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="marks-") as short:  # a Unix socket's path has at most 107 characters
        marks = MarkReader(Path(short) / "marks")
        measure(reference := make("reference", marks))
        for number in range(runs):
            work = make(f"kills-{number}", marks)
            work.seconds = reference.seconds
            kills = disturb(work, dice)
            if work.run is not None:
                tokens_redone(work.run, kills, work.tokens_per_step)
            if problems := work.differences():
                print(f"{work.name}: {'; '.join(problems)}", file=sys.stderr)
            for kill in kills:
                kill.identical = kill.identical and not problems
            yield from kills


def disturb(work: Work, dice: random.Random) -> list[Kill]:
    """One kill in every phase, in random order where they repeat, and shutdown last; then the work is brought to its end."""
    kills: list[Kill] = []
    misses, waiting = 0, list(work.phases)
    if work.repeats:
        waiting[:-1] = dice.sample(work.phases[:-1], len(work.phases) - 1)
    while waiting and work.go_on():
        phase = waiting.pop(0)
        if kill := kill_in(work, phase, dice):
            kill.identical = work.intact()
            kills.append(kill)
        elif waiting and work.repeats and misses < 5:  # the next start may reach it
            misses += 1
            waiting.insert(len(waiting) - 1, phase)
    deadline = time.monotonic() + LIMIT_SECONDS
    while work.go_on() and time.monotonic() < deadline:
        time.sleep(0.05)
    return kills


def kill_in(work: Work, phase: str, dice: random.Random) -> Kill | None:
    """A kill after a random part of the phase; None when it was over before, however often it came."""
    marks = work.marks
    for _ in range(1 if phase in ("start-up", "shutdown") else 20):
        times = dice.randint(1, work.steps) if phase == "step" else 1
        if not marks.wait_for(phase, times, lambda: bool(work.alive())):
            return None
        time.sleep(dice.random() * work.seconds.get(phase, 0.0))
        marks.drain()
        if marks.phase == phase:
            return kill_one(work, phase, dice)
        if phase in marks.spans:  # it took less time than when it was measured
            work.seconds[phase] = min(work.seconds.get(phase, 0.0), marks.spans[phase])
    return None


def kill_one(work: Work, phase: str, dice: random.Random) -> Kill | None:
    """SIGKILL to one process of the tree. None: it had ended by itself just before."""
    members = work.alive()
    if not members:
        return None
    label, victim = dice.choice(members)
    moment = time.time()
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.kill()
    assert work.process is not None
    while time.time() - moment < NOTICE_SECONDS:
        for fault in work.faults():
            if (fault.time or 0) >= moment:
                is_rank = label.startswith("rank")
                right = label == f"rank {fault.rank}" and "SIGKILL" in (fault.error or "") and bool(fault.host)
                seconds = (fault.time or 0) - moment
                return Kill(work.name, phase, label, seconds, right if is_rank else None, killed_at=moment)
        if not any(_lives(member) for _, member in members):
            if work.process.poll() == 0 and (work.finished is None or work.finished()):
                return None
            return Kill(work.name, phase, label, time.time() - moment, killed_at=moment)
        time.sleep(0.01)
        work.process.poll()
    return Kill(work.name, phase, label, None, killed_at=moment)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def tokens_redone(run: Run, kills: list[Kill], tokens_per_step: int) -> None:
    """Steps that the start after each kill did again, in tokens; None where no start followed it."""
    starts = list(run.events(ProcessStart))
    lines = [line for line in run.metrics_lines() if line.time is not None]
    for kill, after in zip(kills, [*(k.killed_at for k in kills[1:]), float("inf")], strict=True):
        following = next((s for s in starts if kill.killed_at < (s.time or 0) < after), None)
        if following is not None:
            first = following.step or 0 if isinstance(following, Resumed) else 0
            began = max((s.time or 0 for s in starts if (s.time or 0) < kill.killed_at), default=0.0)
            reached = max(
                (line.step or 0 for line in lines if began <= (line.time or 0) < (following.time or 0)), default=0
            )
            kill.tokens_redone = max(0, reached - first) * tokens_per_step


# -- what is killed ---------------------------------------------------------------------------------------------------


def environment(marks: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARKS: str(marks)}


def command(*arguments: Any, marks: MarkReader, log: Path, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "tests.faults.marked", *map(str, arguments)]
    with log.open("ab") as output:
        return subprocess.Popen(argv, env=environment(marks.path), stdout=output, stderr=output, cwd=cwd)


def training_kills(folder: Path, world: int, runs: int, seed: int = 0) -> Iterator[Kill]:
    tables: dict[str, Any] = {"data": {"batch_tokens": 64 * world}, "train": {"eval_tokens": 2000}}
    recipe = faults.recipe(Lab(folder).store, steps=100, every=5, **tables)

    def make(name: str, marks: MarkReader) -> Work:
        run = create_run(folder / name, Loaded(recipe, "", None, {}))

        def start() -> subprocess.Popen[bytes]:
            name = bind_start(run, devices=world, devices_per_node=world).name
            return command("supervisor", run.path, "--start", name, marks=marks, log=run.logs / "supervisor.log")

        return Work(
            f"training on {world} processes",
            marks,
            start,
            differences=lambda: faults.differences(Run(folder / "reference"), run, recipe),
            finished=lambda: any(event.event == "finished" for event in run.events()),
            faults=lambda: run.events(FaultEvent),
            run=run,
            tokens_per_step=64 * world,
        )

    return random_kills(make, runs, seed)


def write_texts(folder: Path, count: int) -> tuple[Path, Path]:
    """A file of texts, and a tokenizer."""
    texts = [make_text(i, 200) for i in range(count)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "text.jsonl", train_bpe(texts[:300], 600, folder / "tokenizer").path


def tokenizing_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    source, tokenizer = write_texts(folder, 4000)

    def make(name: str, marks: MarkReader) -> Work:
        data_file = folder / f"{name}.toml"
        data_file.write_text(
            f'output = "{folder / name}"\nengine = "tokenizers"\ntokenizer = "{tokenizer}"\nworkers = 2\nchunk = "64KiB"\n'
            f'validation = 0.1\ndedup = "exact"\nshard_tokens = 50_000\n[sources.s]\npaths = ["{source}"]\n'
        )
        return Work(
            "tokenising",
            marks,
            lambda: command("tokenize", data_file, marks=marks, log=folder / f"{name}.log"),
            differences=lambda: unlike(folder / "reference", folder / name, "history.jsonl"),
            phases=("start-up", "step", "save", "shutdown"),
            repeats=False,
        )

    return random_kills(make, runs, seed)


SWEEP = """
name = "kills"
devices = 1
[recipe]
name = "tiny"
[recipe.model]
layers = 2
width = 32
ffn = 64
heads = 4
vocab = 128
[recipe.data]
seq_len = 16
batch_tokens = 128
[recipe.train]
steps = 60
precision = "fp32"
[recipe.energy]
enabled = false
[matrix]
"optim.lr" = [1e-3, 3e-3, 1e-2]
[[include]]
name = "two"
devices = 2
"optim.lr" = 3e-2
"""


def sweep_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    """A point that was killed is a result; `--only fail` repeats it."""
    (folder / "sweep.toml").write_text(SWEEP)

    def table(sweep: SweepFolder) -> list[list[Any]]:
        rows = (read_json(sweep.table("json")) or {}).get("rows", [])
        return [[row.get(key) for key in ("point", "outcome", "loss", "devices", "steps")] for row in rows]

    def make(name: str, marks: MarkReader) -> Work:
        sweep, reference = SweepFolder(folder / name), SweepFolder(folder / "reference")
        done: list[subprocess.Popen[bytes]] = []

        def failed() -> list[str]:
            return [point for point, line in sweep.outcomes().items() if line["outcome"] != "ok"]

        def start() -> subprocess.Popen[bytes]:
            only = ("--only", "fail") if done and done[-1].poll() == 0 else ()
            argv = ("sweep", folder / "sweep.toml", "--run", sweep.path, *only)
            done.append(command(*argv, marks=marks, log=folder / f"{name}.log"))
            return done[-1]

        def noticed() -> Iterator[FaultEvent]:
            for line in read_json_lines(sweep.outcomes_file):
                yield FaultEvent(time=line["time"], rank=line["rank"], error=line["detail"], host=line["host"])

        def differences() -> list[str]:
            lines = list(read_json_lines(sweep.outcomes_file))
            done = [line["point"] for line in lines if line["outcome"] == "ok"]
            return [
                *(["the tables differ"] if not table(sweep) or table(sweep) != table(reference) else []),
                *(f"point {point} was done again" for point in set(done) if done.count(point) > 1),
            ]

        return Work(
            "sweep",
            marks,
            start,
            differences,
            finished=lambda: bool(done) and done[-1].poll() == 0 and not failed(),
            faults=noticed,
            phases=("start-up", "step", "save", "shutdown"),
            repeats=False,
            steps=2,
        )

    return random_kills(make, runs, seed)


def write_run(folder: Path, **model: Any) -> Run:
    """A run with a checkpoint of random weights, a tokenizer and a token store."""
    source, tokenizer = write_texts(folder, 400)
    sources = {"text": DataSource(paths=[str(source)], language="en")}
    tables: dict[str, Any] = {"validation": 0.5, "workers": 1, "engine": "tokenizers"}
    tokenize(DataFile(output=str(folder / "store"), tokenizer=str(tokenizer), sources=sources, **tables))
    return save_run(folder / "run", folder / "store", vocab=600, **model)


def eval_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    """Held-out text, then tasks."""
    base = write_run(folder, seq_len=64, width=128, ffn=512)
    tasks = [folder / f"task-{number}.jsonl" for number in range(3)]
    for number, task in enumerate(tasks):
        items = [{"context": make_text(1000 * number + i, 30), "answer": make_text(i, 3)} for i in range(200)]
        task.write_text("".join(json.dumps(item) + "\n" for item in items))

    def make(name: str, marks: MarkReader) -> Work:
        run = Run(folder / name)
        shutil.copytree(base.path, run.path)
        pages = [run.path / "text.html", run.path / "tasks.html"]

        def start() -> subprocess.Popen[bytes]:
            argv = ["eval", run.path, "--overlap", "--batch", 2, "--html", pages[pages[0].exists()]]
            argv += [word for task in tasks for word in ("--task", task)] if pages[0].exists() else []
            return command(*argv, marks=marks, log=folder / f"{name}.log")

        def scores(run: Run) -> list[dict[str, Any]]:
            lines = [json.loads(line) for line in run.eval_file.read_text().splitlines()]
            return [{key: value for key, value in line.items() if key != "time"} for line in lines]

        def differences() -> list[str]:
            reference = scores(Run(folder / "reference"))
            return [] if scores(run) == reference else [f"{len(scores(run))} scores, not the {len(reference)}"]

        return Work(
            "eval",
            marks,
            start,
            differences,
            finished=lambda: all(page.exists() for page in pages),
            phases=("start-up", "step", "save", "step", "save", "shutdown"),
            repeats=False,
        )

    return random_kills(make, runs, seed)


def stage_kills(folder: Path, runs: int, seed: int = 0, files: int = 1000) -> Iterator[Kill]:
    store, dice = folder / "store", random.Random(seed)
    store.mkdir(parents=True)
    for number in range(files):
        (store / f"{number}.bin").write_bytes(dice.randbytes(50_000 if number % 50 else 10_000_000))
    recipe = faults.recipe(store)

    def make(name: str, marks: MarkReader) -> Work:
        run, fast = create_run(folder / name, Loaded(recipe, "", None, {})), folder / f"fast-{name}"
        for step in (1, 2):
            shutil.copytree(store, run.checkpoint(step), copy_function=os.link)

        def intact() -> bool:
            """A copy that is marked is complete, and the checkpoints are at one place at least."""
            places = [run.checkpoints, run.path / "checkpoints.moved"]
            is_moved = [
                place for place in places if place.is_dir() and not unlike(store, place / run.checkpoint(2).name)
            ]
            return bool(is_moved) and (
                not (fast / "store" / MARKER).exists() or not unlike(store, fast / "store", MARKER)
            )

        def differences() -> list[str]:
            places = [fast / "store", *(fast / "checkpoints" / run.checkpoint(step).name for step in (1, 2))]
            problems = [problem for place in places for problem in unlike(store, place, MARKER)]
            problems += [] if run.checkpoints.is_symlink() else ["the checkpoints have not moved"]
            return problems + [f"{path} is left" for path in run.path.glob("*.moved")]

        argv = ("stage", run.path, "--store", fast / "store", "--checkpoints", fast / "checkpoints")
        return Work(
            "staging",
            marks,
            lambda: command(*argv, marks=marks, log=folder / f"{name}.log"),
            differences,
            intact=intact,
            phases=("start-up", "step", "save", "shutdown"),
            repeats=False,
        )

    return random_kills(make, runs, seed)


def export_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    """An export, and an import of what it wrote."""
    base, reference = write_run(folder, width=512, ffn=2048), folder / "reference"

    def make(name: str, marks: MarkReader) -> Work:
        own = folder / name
        own.mkdir()
        (own / "run").symlink_to(base.path)

        def start() -> subprocess.Popen[bytes]:
            argv = ["export", "run", "--to", "hf", "--shard", "4 MB"]
            argv = ["import", "hf", "--run", "imported"] if (own / "hf").exists() else argv
            return command(*argv, marks=marks, log=folder / f"{name}.log", cwd=own)

        def problems(target: str) -> list[str]:
            # These hold times and random states.
            own_files = ("events.jsonl", "manifest.json", ".metadata", "extra.json")
            found = unlike(reference / target, own / target, *own_files)
            return found + (other_weights(reference / target, own / target) if target == "imported" else [])

        return Work(
            "export and import",
            marks,
            start,
            differences=lambda: problems("hf") + problems("imported"),
            finished=lambda: (own / "imported").exists(),
            # Nothing is under the target's name, or everything.
            intact=lambda: not any((own / target).exists() and problems(target) for target in ("hf", "imported")),
            phases=2 * ("start-up", "save", "validation", "shutdown"),
            repeats=False,
        )

    return random_kills(make, runs, seed)


def finetuning_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    """Two seeds on two processes each."""
    base, seeds = write_run(folder, seq_len=64), (0, 1)
    for name, count in (("train", 320), ("test", 80)):
        labels = [["red", "blue"][number % 2] for number in range(count)]
        texts = [" ".join([*make_text(number, 20).split(), f"{label}\t{label}"]) for number, label in enumerate(labels)]
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel", *texts, ""]))

    def make(name: str, marks: MarkReader) -> Work:
        own, reference = folder / name, folder / "reference"
        shutil.copytree(base.path, own / "run")
        runs = [own / f"run-train-seed{number}" for number in seeds]

        def scores(place: Path) -> list[Any]:
            """Of the command, in the ledgers of the model and of its seeds."""
            answer = read_json(place / "scores.json") or {}
            found = [[answer.get(key) for key in ("accuracy", "loss", "score", "spread", "validation_score")]]
            for run in (place / "run", *(place / run.name for run in runs)):
                lines = [json.loads(line) for line in Run(run).eval_file.read_text().splitlines()]
                found.append([[line[key] for key in ("metric", "value", "count", "step")] for line in lines])
            return found

        def differences() -> list[str]:
            found = [] if scores(own) == scores(reference) else [f"scores differ: {scores(own)}, {scores(reference)}"]
            return [*found, *(problem for run in runs for problem in other_weights(reference / run.name, run))]

        argv = (
            "finetune", own / "run", "--train", folder / "train.tsv", "--test", folder / "test.tsv", "--epochs", 2,
            "--length", 32, "--lr", 3e-3, "--seeds", len(seeds), "--devices", 2, "--runs", own,
            "--output", own / "scores.json",
        )  # fmt: skip
        return Work(
            "fine-tuning two seeds",
            marks,
            lambda: command(*argv, marks=marks, log=folder / f"{name}.log"),
            differences,
            finished=lambda: (own / "scores.json").exists(),
            faults=lambda: (event for run in runs for event in Run(run).events(FaultEvent)),
        )

    return random_kills(make, runs, seed)


def slurm_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    """Chains of six jobs on two nodes of the development cluster, which must be up."""
    store, shims = Lab(folder / "lab").store, folder / "shims"
    with login(SCRIPT, folder / "site") as site:

        def make(name: str, marks: MarkReader) -> Work:
            (shims / "bin").mkdir(parents=True, exist_ok=True)
            (shims / "bin" / "activate").write_text(f'export PATH="{shims}/bin:{BIN}:$PATH"\n')
            shim = shims / "bin" / "python"
            shim.write_text(
                f'#!/bin/bash\nexport PYTHONPATH="{environment(marks.path)["PYTHONPATH"]}"\n'
                f'if [ "$2" = windlass.train.worker ]; then exec {sys.executable} -m tests.faults.marked worker "${{@:3}}"; fi\n'
                f'exec {sys.executable} "$@"\n'
            )
            shim.chmod(0o755)
            tables = {
                "model__vocab": 128, "data__store": str(store), "data__seq_len": 16, "data__batch_tokens": 128,
                "data__max_epochs": 1.0, "train__steps": 100, "train__eval_every": 10, "train__eval_tokens": 1024, "save__every": 5,
            }  # fmt: skip
            file = site.recipe(name, launch={"venv": str(shims), "env": {MARKS: str(marks.path)}}, **tables)
            run, recipe = Run(site.folder / "runs" / name), load_recipe(file).recipe

            def start() -> subprocess.Popen[bytes]:
                site.launch(file, "--chain", 6)
                return subprocess.Popen(["bash", "-c", f"while squeue -h -n {name} | grep -q .; do sleep 0.3; done"])

            return Work(
                "SLURM chain",
                marks,
                start,
                differences=lambda: faults.differences(Run(run.path.parent / "reference"), run, recipe),
                finished=lambda: any(event.event == "finished" for event in run.events()),
                processes=lambda process: job_processes(),
                faults=lambda: run.events(FaultEvent),
                run=run,
                tokens_per_step=128,
            )

        yield from random_kills(make, runs, seed)


def job_processes() -> list[tuple[str, psutil.Process]]:
    """Every process of the jobs on this machine but SLURM's own: the batch shell, srun, windlass link, ranks and their
    parents."""
    labelled = []
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            env, parent = member.environ(), member.parent()
            if "SLURM_JOB_ID" in env and not member.name().startswith("slurm"):
                is_rank = "tests.faults.marked" in member.cmdline() and "SLURM_PROCID" in env
                is_child = parent is not None and member.cmdline() == parent.cmdline()
                rank = f"{'rank' if is_child else 'parent of rank'} {env.get('SLURM_PROCID')}"
                labelled.append((rank if is_rank else member.name(), member))
    return labelled


def unlike(reference: Path, folder: Path, *ignored: str) -> list[str]:
    """Files of two folders that differ or are in one only; those of these names are not compared."""

    def digests(place: Path) -> dict[str, str]:
        files = (path for path in place.rglob("*") if path.is_file() and path.name not in ignored)
        return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    ours, theirs = digests(folder), digests(reference)
    return [f"{name} of {folder}" for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


def other_weights(reference: Path, folder: Path) -> list[str]:
    """Whether the newest checkpoints of two runs differ in a bit."""
    ours, theirs = (faults.tensors(max(Run(path).checkpoints.glob("step-*"))) for path in (folder, reference))
    is_same = ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    return [] if is_same else [f"the weights of {folder}"]


# -- the table --------------------------------------------------------------------------------------------------------


def table(kills: list[Kill]) -> str:
    """Kills by work and phase: how many ended bit-identical, seconds to detection, tokens redone."""
    head = "| work | phase | kills | victims | bit-identical | named | seconds to detection (median, worst) | tokens redone (sum, most) |"
    lines = [head, "| " + " | ".join(["---"] * 8) + " |"]
    for work in dict.fromkeys(kill.work for kill in kills):
        for phase in PHASES:
            own = [kill for kill in kills if (kill.work, kill.phase) == (work, phase)]
            if own:
                lines.append(_row(work, phase, own))
    return "\n".join([*lines, _row("all", "", kills)]) if kills else head


def _row(work: str, phase: str, kills: list[Kill]) -> str:
    times = sorted(float("inf") if k.detection_seconds is None else k.detection_seconds for k in kills)
    redone = [kill.tokens_redone for kill in kills if kill.tokens_redone is not None]
    named = [kill.named for kill in kills if kill.named is not None]
    victims = ", ".join(f"{sum(k.victim == v for k in kills)} {v}" for v in sorted({kill.victim for kill in kills}))
    tokens = f"{sum(redone):,}, {max(redone):,}" if redone else "not measured"
    worst = f"{times[-1]:.1f}" if times[-1] < NOTICE_SECONDS else f"not within {NOTICE_SECONDS:.0f}"
    return (
        f"| {work} | {phase} | {len(kills)} | {victims} | {sum(kill.identical is True for kill in kills)} | "
        f"{sum(named)} of {len(named)} | {times[len(times) // 2]:.1f}, {worst} | {tokens} |"
    )
