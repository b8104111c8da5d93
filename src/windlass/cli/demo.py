"""`windlass demo`: a complete project on this machine's CPU, run with the ordinary commands."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.output import console
from windlass.errors import RunError, WindlassError

if TYPE_CHECKING:
    from windlass.launch.demo import Story

# Packages that the demo uses and the base installation does not have.
NEEDED = ("torch", "safetensors", "psutil", "tokenizers")
# (title, reason, the command with the names of the story's files)
SECTIONS = (
    ("Gather a corpus", "from Python's own library: real text, known licence, no network", ()),
    ("Train a tokenizer", "byte-level BPE, so that no byte of any language is unknown",
     ("tokenizer", "train", "{data_file}", "--vocab", "{vocab}", "--out", "{tokenizer}")),
    ("Tokenise", "once, before any GPU time is used; the token count is exact from here on",
     ("tokenize", "{data_file}")),
    ("Plan the run", "memory, speed and days before a node-hour is spent", ("plan", "{recipe_file}", "--top", "3")),
    ("Train on two processes, and lose one", "nodes fail in long runs, so one worker is killed on purpose",
     ("train", "{recipe_file}", "--devices", "2", "--run", "{folder}")),
    ("Evaluate", "bits per byte on held-out documents, so that tokenizers can be compared", ("eval", "{folder}")),
    ("Generate a few lines", "a model this small writes nonsense, but it looks like Python",
     ("generate", "{folder}", "--prompt", "def read(self, ", "--tokens", "60", "--ignore-eos")),
    ("Account for energy", "energy that no sensor measured is shown as modelled or not measured, never as 0",
     ("energy", "{folder}")),
    ("Write the report", "one file that opens from disk, for a colleague or a funder", ("report", "{folder}")),
)  # fmt: skip


def demo(
    run: Annotated[Path, typer.Option("--run", help="Folder of the demo; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option("--steps", min=60, help="Optimizer steps to train.")] = 140,
) -> None:
    """Run a small project on this machine's CPU in about two minutes: data, plan, training, a fault, resume, report."""
    from windlass.launch.demo import Story, clear, write_recipe
    from windlass.units import print_seconds

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise WindlassError(
            "cli.demo-package-missing",
            f"the demo trains a model and needs {', '.join(missing)}, which the base installation does not have",
            hint="pip install 'windlass[train,data]'; docs/install.md",
        )
    out, started_at, story = console(), time.monotonic(), Story(run, steps=steps)
    clear(story)
    values = {key: str(getattr(story, key)) for key in ("data_file", "recipe_file", "tokenizer", "vocab", "folder")}
    for number, (title, reason, template) in enumerate(SECTIONS, 1):
        out.print(f"\n[bold cyan]\\[{number}/{len(SECTIONS)}] {title}:[/bold cyan] [dim]{reason}[/dim]")
        argv = [part.format(**values) for part in template]
        if not argv:
            _gather_corpus(story, lambda text: out.print(text, markup=False))
            continue
        if argv[0] == "plan":
            write_recipe(story)
        # As a user would type it: names with spaces in quotes, on one line.
        out.print(f"$ windlass {shlex.join(argv)}", style="green", markup=False, soft_wrap=True)
        code = _run(argv, story, lambda text: out.print(text, style="bold yellow", markup=False))
        if code:
            raise RunError(
                "cli.demo-command-failed",
                f"windlass {argv[0]} ended with exit code {code}",
                hint="see the lines above for the reason; the demo stops here",
            )
    seconds = print_seconds(time.monotonic() - started_at)
    out.print(f"\n[bold green]Done in {seconds}.[/bold green] Open the report in a browser:")
    for line in (f"  {(run / 'report.html').resolve()}", "Next:", *(f"  {line}" for line in next_lines(run))):
        out.print(line, markup=False, soft_wrap=True)


def _gather_corpus(story: Story, say: Callable[[str], None]) -> None:
    from windlass.data.corpus import gather
    from windlass.launch.demo import write_data_file
    from windlass.units import print_bytes

    sources = gather(story.raw, story.corpus_bytes).values()
    for source in sources:
        say(f"  {source.name}: {source.documents} documents, {print_bytes(source.bytes)}, {source.licence}")
    keys = ("name", "file", "language", "licence", "origin")
    write_data_file(story, [{key: str(getattr(source, key)) for key in keys} for source in sources])


def _run(argv: list[str], story: Story, say: Callable[[str], None]) -> int:
    """Run a command; training loses a worker on the way."""
    from windlass.launch.demo import WorkerKill, command, run_command
    from windlass.runs.folder import Run

    if argv[0] != "train":
        return run_command(command(*argv))

    def announce(pid: int, step: int) -> None:
        say(
            f"*** worker 1 (process {pid}) killed on purpose after step {step}: "
            "the run resumes from its last checkpoint ***"
        )

    fault = WorkerKill(Run(story.folder), 1, story.kill_after, announce).start()
    try:
        return run_command(command(*argv), 1)
    finally:
        fault.done.set()


def next_lines(folder: Path) -> list[str]:
    """Commands that work as they are printed: with the paths of recipes on this disk, and first a PATH if needed."""
    from windlass.config.load import shipped

    program = Path(sys.argv[0]).resolve().parent
    lines = [] if shutil.which("windlass") else [f"export PATH={shlex.quote(str(program))}:$PATH"]
    lines += [f"windlass watch {shlex.quote(str(folder))}", "windlass dash"]
    for command, name in (("train", "tiny_cpu"), ("plan", "gptnl_8b_snellius")):
        local = Path("recipes") / f"{name}.toml"
        path = local if local.is_file() else shipped(local)
        lines += [] if path is None else [f"windlass {command} {shlex.quote(str(path))}"]
    return lines
