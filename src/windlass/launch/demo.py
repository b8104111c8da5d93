"""The files of `windlass demo` and its deliberate fault; the demo runs the ordinary commands."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from windlass.config.schema import schema_line
from windlass.errors import RunError
from windlass.files import read_json, write_atomic
from windlass.runs.folder import Run
from windlass.runs.lock import holder

# The best of sixty products: of processor time, so that other programs on the machine do not count.
TIMED_PRODUCTS = """\
import time, numpy
a = numpy.ones((512, 512), numpy.float32)
times = []
for _ in range(60):
    start = time.process_time()
    a @ a
    times.append(time.process_time() - start)
print(2 * 512**3 / min(times) / 1e12)
"""
# The planner's own constants stay; only the peak that MFU and prediction divide by is this machine's.
DEVICES = """\
# Written by `windlass demo`: one core of this machine.
[cpu]
fp32_tflops = {tflops:.4g}
bf16_tflops = {tflops:.4g}
[cpu.sources]
fp32_tflops = {{ source = "best fp32 matrix product of one core, measured by windlass demo", on = "{on}", status = "measured" }}
bf16_tflops = {{ source = "as fp32, in which the demo trains", on = "{on}", status = "derived" }}
"""

RECIPE = """\
{schema}# Written by `windlass demo`: a four-million-parameter Llama on two CPU processes.
name    = "demo"
cluster = "workstation"
[model]
layers   = 4
width    = 256
ffn      = 704
heads    = 4
kv_heads = 2
vocab    = {vocab}
tied     = true
[data]
store   = "{store}"
mix     = {{ code = 0.6, docs = 0.4 }}
seq_len = 256
batch_tokens = 2048             # 8 sequences: 2 processes x 4
policy  = "lawful"
[optim]
lr      = 1e-3
warmup  = 20480                 # 10 steps
[train]
steps   = {steps}
precision = "fp32"
eval_every = {eval_every}
eval_tokens = 16384
[layout]
shard   = "none"
micro_batch = 4
[save]
every   = {save_every}
keep_last = 2
keep_best = 1
"""

DATA = """\
# Written by `windlass demo`: Python's own library as a corpus.
output    = "{store}"
tokenizer = "{tokenizer}"
validation = 0.03
policy    = "lawful"
{sources}"""

SOURCE = """
[sources.{name}]
paths    = ["{file}"]
language = "{language}"
licence  = "{licence}"
origin   = "{origin}"
consent  = "licence"
"""


@dataclass(frozen=True)
class Story:
    folder: Path
    vocab: int = 4096
    corpus_bytes: int = 3_000_000
    steps: int = 100

    @property
    def save_every(self) -> int:
        return self.steps // 4

    @property
    def kill_after(self) -> int:
        """The step after which a worker is killed: there is a checkpoint, and there are steps to repeat."""
        return self.save_every + max(2, self.steps // 20)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def raw(self) -> Path:
        return self.data / "raw"

    @property
    def tokenizer(self) -> Path:
        return self.data / "tokenizer.json"

    @property
    def data_file(self) -> Path:
        return self.data / "data.toml"

    @property
    def recipe_file(self) -> Path:
        return self.data / "demo.toml"

    @property
    def config(self) -> Path:
        """Stands for ~/.config in the demo's commands: what it measures changes nothing outside its folder."""
        return (self.data / "config").absolute()

    @property
    def second(self) -> Path:
        """The run whose speed is predicted from the first one."""
        return self.data / "second"


def clear(story: Story) -> None:
    """Remove an earlier demo; it is an error if the folder contains anything else."""
    if not story.folder.exists():
        return
    run, hint = Run(story.folder), "choose another folder with --run"
    config = read_json(run.config_file)
    if holder(run.lock_file) is not None:
        raise RunError("demo.running", f"a demo is running in {story.folder}", hint=f"wait for it, or {hint}")
    if config is not None and config.get("name") != "demo":
        raise RunError(
            "demo.folder-of-other-run", f"{story.folder} holds the run {config.get('name')!r}, not a demo", hint=hint
        )
    if config is None and any(p.name != "data" for p in story.folder.iterdir()):
        raise RunError("demo.folder-not-empty", f"{story.folder} contains other files", hint=hint)
    shutil.rmtree(story.folder)


def write_data_file(story: Story, sources: list[dict[str, str]]) -> None:
    tables = "".join(SOURCE.format(**source) for source in sources)
    write_atomic(story.data_file, DATA.format(store=story.data, tokenizer=story.tokenizer, sources=tables))


def write_recipe(story: Story) -> None:
    sizes = {"vocab": story.vocab, "steps": story.steps, "save_every": story.save_every, "eval_every": story.save_every}
    schema = schema_line("recipe", story.recipe_file)
    write_atomic(story.recipe_file, RECIPE.format(schema=schema, store=story.data, **sizes))


def measure_core(story: Story) -> float:
    """TFLOP/s of one core in fp32, written to the device file that the demo's commands read."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    argv = [sys.executable, "-c", TIMED_PRODUCTS]
    done = subprocess.run(argv, env={**os.environ, **threads}, capture_output=True, text=True, check=True)
    text = DEVICES.format(tflops=float(done.stdout), on=time.strftime("%Y-%m-%d", time.gmtime()))
    write_atomic(story.config / "windlass" / "clusters" / "devices.toml", text)
    return float(done.stdout)


def command(*arguments: str | Path) -> list[str]:
    """A windlass command line for a subprocess, with the same interpreter."""
    return [sys.executable, "-m", "windlass", *map(str, arguments)]


def run_command(argv: list[str], **environment: str) -> int:
    """Run it in the foreground with its own output; Ctrl-C reaches it too."""
    return subprocess.run(argv, env={**os.environ, **environment}, check=False).returncode


@dataclass
class WorkerKill:
    """Kills one worker of a live run, once, as a node failure would."""

    run: Run
    rank: int
    after_step: int
    on_kill: Callable[[int, int], None]  # called with pid and step
    done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> WorkerKill:
        threading.Thread(target=self._wait_and_kill, daemon=True).start()
        return self

    def _wait_and_kill(self) -> None:
        while not self.done.wait(0.2):
            step = self.run.last_metrics().step or 0
            pid = int((read_json(self.run.heartbeat_file(self.rank)) or {}).get("pid") or 0)
            if step < self.after_step or not any(self.run.checkpoints.glob("step-*")):
                continue
            with contextlib.suppress(OSError):
                # A heartbeat may be old and its pid reused: only a process that runs windlass is ours to kill.
                if b"windlass" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    self.on_kill(pid, step)
                    return
