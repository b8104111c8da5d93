"""No command computes for more than two seconds without saying what it does, in a terminal as people use it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest
from tests.small_recipe import recipe_tables
from tests.train.chat_store import TEMPLATE

pytestmark = pytest.mark.integration

LIMIT_SECONDS = 2.0
SMALL = """name = "small"
cluster = "workstation"
[model]
layers = 2
width = 64
ffn = 128
heads = 4
vocab = 600
[data]
store = "store"
seq_len = 64
batch_tokens = 2048
[train]
steps = 4
[save]
every = 2
"""
# A spinner's text and what a line says of work that follows end in dots; a bar has this character.
ANNOUNCED = re.compile(r"\.\.\.\s*$|━|█")
ERASED = b"\x1b[1A\x1b[2K"  # the end of a spinner
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
SERVING = b"press Ctrl-C to stop"  # the last words of `dash` before it waits for a browser


def cpu_seconds(process: psutil.Process) -> dict[int, float]:
    """CPU time of each process of the tree: wall time would count other programs of a busy machine."""
    times = {}
    for member in [process, *process.children(recursive=True)]:
        try:
            used = member.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        times[member.pid] = used.user + used.system
    return times


def longest_silence(argv: list[str], folder: Path) -> tuple[int, float, str]:
    """(exit code, CPU seconds of the busiest process between two outputs of which the first announces no work, the
    output before it)."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    command = subprocess.Popen(argv, cwd=folder, env=environment, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    process, before, text = psutil.Process(command.pid), dict[int, float](), b""
    silent, worst, worst_text = 0.0, 0.0, ""
    while True:
        is_ready = select.select([terminal], [], [], 0.05)[0]
        try:
            now = cpu_seconds(process)
        except psutil.Error:
            now = before
        silent = max([silent, *(used - before.get(pid, 0.0) for pid, used in now.items())])
        if not is_ready:
            continue
        shown = ESCAPES.sub(b"", text[-400:].replace(ERASED, b"\n(erased)")).decode(errors="replace").rstrip()
        try:
            output = os.read(terminal, 65536)
        except OSError:  # the last process has closed the terminal; after the last output nobody waits for a word
            break
        if silent > worst and not ANNOUNCED.search(shown.splitlines()[-1] if shown else ""):
            worst, worst_text = silent, shown[-200:]
        text, before, silent = text + output, now, 0.0
        if SERVING in text:
            command.send_signal(signal.SIGINT)
    os.close(terminal)
    return command.wait(), worst, worst_text


DATA = """output = "store"
tokenizer = "tokenizer.json"
validation = 0.1
[sources.texts]
paths = ["texts.jsonl"]
language = "en"
licence = "CC0-1.0"
origin = "tests"
"""
SWEEP = (
    'name = "grid"\n'
    + recipe_tables(cluster="workstation", batch_tokens=2048, steps=4)
    + '[matrix]\n"layout.shard" = ["none"]\n"layout.micro_batch" = [2, 4]\ndevices = [1]\n'
)
COMMANDS = (
    "tokenizer train data.toml --vocab 600 --out tokenizer.json",
    "tokenize data.toml",
    "data store --verify",
    "plan small.toml",
    "budget --cluster snellius-h100 --days 30",
    "launch small.toml cluster=snellius-h100 --dry-run",
    "train small.toml --run runs/one profile.steps=2:4",
    "train small.toml --devices 2 --run runs/two",
    "resume runs/one train.steps=6",
    "checkpoints runs/one --verify",
    "eval runs/one",
    "generate runs/one --prompt ship --tokens 4",
    "export runs/one --to exported",
    "import exported --run runs/imported",
    "report runs/one",
    "compare runs/one runs/two",
    "energy runs/one",
    "doctor --no-devices",
    "finetune runs/one --train labels.tsv --epochs 1 --length 16",
    "sweep grid.toml",
    "profile runs/one",
    "chat runs/one --tokenizer tokenizer.json --prompt ship --tokens 4",
    "launch small.toml --local --devices 1 --run runs/launched",
    "logs runs/launched -f",
    "jobs runs/launched",
    "stage runs/one --store staged",
    "image --cluster snellius-h100 --base TAG --dry-run",
    "dash runs",
    "demo --steps 24",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_command_is_silent(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "data.toml").write_text(DATA)
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "the winch lifts ship {i}"}}\n' for i in range(4000)))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "labels.tsv").write_text("text\tlabel\n" + "the ship\tplus\nthe winch\tminus\n" * 20)
    (tmp_path / "grid.toml").write_text(SWEEP)
    silent = {}
    for command in COMMANDS:
        code, seconds, after = longest_silence([sys.executable, "-m", "windlass", *command.split()], tmp_path)
        assert code == 0, command
        if seconds > LIMIT_SECONDS:
            silent[command] = (seconds, after)
    assert not silent


def test_a_silent_command_is_found(tmp_path):
    """Computing after a line that announces nothing counts; after one that announces work, and sleeping, do not."""
    busy = "import sys, time\nt = time.process_time\n"
    for line, least, most in (("ready", 0.5, 9.0), ("loading ...", 0.0, 0.4)):
        code = f"{busy}print({line!r}, flush=True)\nend = t() + 0.6\nwhile t() < end: pass\nprint('done')"
        assert least <= longest_silence([sys.executable, "-c", code], tmp_path)[1] <= most
