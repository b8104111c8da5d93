"""Random kills of real process trees: a phase is chosen, its mark awaited, and after a random part of it one process of
the tree gets a SIGKILL. Every run must end as the undisturbed one, to the last bit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.data.conftest import make_text
from tests.faults import lab as faults
from tests.faults.lab import Lab
from tests.faults.marked import MARKS, PHASES
from tests.slurm.conftest import BIN, SCRIPT, login

from windlass.config import Recipe, load_recipe
from windlass.data.tokenizer import train_bpe
from windlass.launch.start import bind_start
from windlass.runs.events import FaultEvent, ProcessStart, Resumed
from windlass.runs.folder import Run

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
    start: Callable[[], subprocess.Popen[bytes]]
    finished: Callable[[], bool]
    # Every living process with a label.
    processes: Callable[[subprocess.Popen[bytes]], list[tuple[str, psutil.Process]]]
    run: Run | None = None
    phases: tuple[str, ...] = PHASES
    # Its phases come again and again; else a kill in a late one would leave no early one to come.
    repeats: bool = True
    # How long each phase takes, as measured; the moment of a kill is a random part of it.
    seconds: dict[str, float] = field(default_factory=dict)


class MarkReader:
    """The phase that the tree has reached, by its newest mark; steps beside a save in the background count as save."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.phase, self.since = "start-up", time.monotonic()
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


def measure(work: Work, marks: MarkReader) -> None:
    """Run the work once without kills: how long its phases take."""
    spans: dict[str, list[float]] = {}
    process = work.start()
    marks.phase, marks.since = "start-up", time.monotonic()
    while process.poll() is None or not work.finished():
        before, since = marks.phase, marks.since
        marks.read(0.05)
        if marks.phase != before:
            spans.setdefault(before, []).append(marks.since - since)
    spans.setdefault(marks.phase, []).append(time.monotonic() - marks.since)
    work.seconds = {phase: sorted(values)[len(values) // 2] for phase, values in spans.items()}


def disturb(work: Work, marks: MarkReader, dice: random.Random) -> list[Kill]:
    """One kill in every phase, in random order where they repeat, and shutdown last; then the work is brought to its end."""
    kills: list[Kill] = []
    misses, waiting = 0, list(work.phases)
    if work.repeats:
        waiting[:-1] = dice.sample(work.phases[:-1], len(work.phases) - 1)
    process: subprocess.Popen[bytes] | None = None
    while waiting:
        if process is None or process.poll() is not None:
            if work.finished():
                break
            marks.drain()
            marks.phase, process = "none", work.start()
        phase = waiting.pop(0)
        if kill := kill_in(work, process, phase, marks, dice):
            kills.append(kill)
        elif waiting and work.repeats and misses < 5:  # the next start may reach it
            misses += 1
            waiting.insert(len(waiting) - 1, phase)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not work.finished() and time.monotonic() < deadline:
        if process is None or process.poll() is not None:
            process = work.start()
        time.sleep(0.05)
    if process is not None:
        process.wait(LIMIT_SECONDS)
    return kills


def kill_in(
    work: Work, process: subprocess.Popen[bytes], phase: str, marks: MarkReader, dice: random.Random
) -> Kill | None:
    """A kill after a random part of the phase; None when it was over before, however often it came."""
    for _ in range(1 if phase in ("start-up", "shutdown") else 20):
        times = dice.randint(1, 6) if phase == "step" else 1
        if not marks.wait_for(phase, times, lambda: bool(work.processes(process))):
            return None
        time.sleep(dice.random() * work.seconds.get(phase, 0.0))
        marks.drain()
        if marks.phase == phase:
            return kill_one(work, process, phase, dice)
        if phase in marks.spans:  # it took less time than when it was measured
            work.seconds[phase] = min(work.seconds.get(phase, 0.0), marks.spans[phase])
    return None


def kill_one(work: Work, process: subprocess.Popen[bytes], phase: str, dice: random.Random) -> Kill | None:
    """SIGKILL to one process of the tree. None: it had ended by itself just before."""
    members = work.processes(process)
    if not members:
        return None
    label, victim = dice.choice(members)
    moment = time.time()
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.kill()
    while time.time() - moment < NOTICE_SECONDS:
        for fault in work.run.events(FaultEvent) if work.run is not None else ():
            if (fault.time or 0) >= moment:
                is_rank = label.startswith("rank")
                right = label == f"rank {fault.rank}" and "SIGKILL" in (fault.error or "") and bool(fault.host)
                seconds = (fault.time or 0) - moment
                return Kill(work.name, phase, label, seconds, right if is_rank else None, killed_at=moment)
        if not any(_lives(member) for _, member in members):
            if label.startswith("rank") and work.finished() and process.poll() == 0:
                return None
            return Kill(work.name, phase, label, time.time() - moment, killed_at=moment)
        time.sleep(0.01)
        process.poll()
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


def command(*arguments: Any, marks: Path, log: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "tests.faults.marked", *map(str, arguments)]
    with log.open("ab") as output:
        return subprocess.Popen(argv, env=environment(marks), stdout=output, stderr=output)


def training(lab: Lab, recipe: Recipe, world: int, marks: Path) -> Work:
    run = lab.new_run(recipe, f"kills-{world}")

    def start() -> subprocess.Popen[bytes]:
        name = bind_start(run, devices=world, devices_per_node=world).name
        return command("supervisor", run.path, "--start", name, marks=marks, log=run.logs / "supervisor.log")

    def finished() -> bool:
        return any(event.event == "finished" for event in run.events())

    return Work(f"training on {world} processes", start, finished, tree, run)


def training_kills(folder: Path, world: int, runs: int, seed: int = 0) -> Iterator[Kill]:
    lab, dice = Lab(folder, seed), random.Random(seed)
    tables: dict[str, Any] = {"data": {"batch_tokens": 64 * world}, "train": {"eval_tokens": 2000}}
    recipe = faults.recipe(lab.store, steps=100, every=5, **tables)
    reference, seconds = lab.reference(recipe, world), {}
    with tempfile.TemporaryDirectory(prefix="marks-") as short:  # a Unix socket's path has at most 107 characters
        path = Path(short) / "marks"
        marks = MarkReader(path)
        for _ in range(runs):
            work = training(lab, recipe, world, path)
            if not seconds:
                measure(work, marks)
                seconds, work = work.seconds, training(lab, recipe, world, path)
            work.seconds = seconds
            assert work.run is not None
            own = disturb(work, marks, dice)
            tokens_redone(work.run, own, 64 * world)
            problems = faults.differences(reference, work.run, recipe)
            for kill in own:
                kill.identical = not problems
            yield from own


def tokenizing_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    dice, seconds = random.Random(seed), {}
    texts = [make_text(i, 200) for i in range(4000)]
    tokenizer = train_bpe(texts[:300], 600, folder / "tokenizer")
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def work_on(output: Path) -> Work:
        data_file = output.with_suffix(".toml")
        data_file.write_text(
            f'output = "{output}"\nengine = "tokenizers"\ntokenizer = "{tokenizer.path}"\nworkers = 2\nchunk = "64KiB"\n'
            f'validation = 0.1\ndedup = "exact"\nshard_tokens = 50_000\n[sources.s]\npaths = ["{source}"]\n'
        )
        return Work(
            "tokenising",
            lambda: command("tokenize", data_file, marks=path, log=folder / f"{output.name}.log"),
            lambda: (output / "manifest.json").is_file() and not (output / "work").exists(),
            tree,
            phases=("start-up", "step", "save", "shutdown"),
            repeats=False,
        )

    with tempfile.TemporaryDirectory(prefix="marks-") as short:
        path = Path(short) / "marks"
        marks = MarkReader(path)
        measure(reference := work_on(folder / "reference"), marks)
        seconds = reference.seconds
        for number in range(runs):
            work = work_on(folder / f"store-{number}")
            work.seconds = seconds
            own = disturb(work, marks, dice)
            identical = digest(folder / f"store-{number}") == digest(folder / "reference")
            for kill in own:
                kill.identical = identical
            yield from own


def slurm_kills(folder: Path, runs: int, seed: int = 0) -> Iterator[Kill]:
    """Chains of six jobs on two nodes of the development cluster, which must be up."""
    lab, dice, seconds = Lab(folder / "lab", seed), random.Random(seed), {}
    with tempfile.TemporaryDirectory(prefix="marks-") as short, login(SCRIPT, folder / "site") as site:
        path, shims = Path(short) / "marks", folder / "shims"
        marks = MarkReader(path)
        (shims / "bin").mkdir(parents=True)
        (shims / "bin" / "activate").write_text(f'export PATH="{shims}/bin:{BIN}:$PATH"\n')
        shim = shims / "bin" / "python"
        shim.write_text(
            f'#!/bin/bash\nexport PYTHONPATH="{environment(path)["PYTHONPATH"]}"\n'
            f'if [ "$2" = windlass.train.worker ]; then exec {sys.executable} -m tests.faults.marked worker "${{@:3}}"; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        shim.chmod(0o755)
        tables = {
            "model__vocab": 128, "data__store": str(lab.store), "data__seq_len": 16, "data__batch_tokens": 128,
            "data__max_epochs": 1.0, "train__steps": 100, "train__eval_every": 10, "train__eval_tokens": 1024, "save__every": 5,
        }  # fmt: skip
        names = ["measured", *(f"kills-{number}" for number in range(runs))]
        files = {n: site.recipe(n, launch={"venv": str(shims), "env": {MARKS: str(path)}}, **tables) for n in names}
        recipe = load_recipe(files[names[0]]).recipe
        reference = lab.reference(recipe, 2)
        for name in names:
            run = Run(site.folder / "runs" / name)

            def start(name: str = name) -> subprocess.Popen[bytes]:
                site.launch(files[name], "--chain", 6)
                return subprocess.Popen(["bash", "-c", f"while squeue -h -n {name} | grep -q .; do sleep 0.3; done"])

            def finished(run: Run = run) -> bool:
                return any(event.event == "finished" for event in run.events())

            work = Work("SLURM chain", start, finished, lambda process: job_processes(), run)
            if not seconds:
                measure(work, marks)
                seconds = work.seconds
                continue
            work.seconds = seconds
            own = disturb(work, marks, dice)
            tokens_redone(run, own, 128)
            problems = faults.differences(reference, run, recipe)
            for kill in own:
                kill.identical = not problems
            yield from own


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


def digest(folder: Path) -> dict[str, str]:
    """Every visible file of a store but its history."""
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.iterdir())
        if p.is_file() and not p.name.startswith(".") and p.name != "history.jsonl"
    }


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
