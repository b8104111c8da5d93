"""`windlass demo`: a complete project on this machine's CPU, run with the ordinary commands."""

import shlex
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.output import console
from windlass.errors import RunError, WindlassError
from windlass.units import print_bytes, print_seconds

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
    from windlass.data.corpus import gather
    from windlass.launch import demo as project
    from windlass.runs.folder import Run

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise WindlassError(
            "cli.demo-package-missing",
            f"the demo trains a model and needs {', '.join(missing)}, which the base installation does not have",
            hint="pip install 'windlass[train,data]'; docs/install.md",
        )
    out, started_at, story = console(), time.monotonic(), project.Story(run, steps=steps)
    project.clear(story)
    values = {key: str(getattr(story, key)) for key in ("data_file", "recipe_file", "tokenizer", "vocab", "folder")}

    def announce(pid: int, step: int) -> None:
        event = f"worker 1 (process {pid}) killed on purpose after step {step}"
        out.print(f"*** {event}: the run resumes from its last checkpoint ***", style="bold yellow", markup=False)

    for number, (title, reason, template) in enumerate(SECTIONS, 1):
        out.print(f"\n[bold cyan]\\[{number}/{len(SECTIONS)}] {title}:[/bold cyan] [dim]{reason}[/dim]")
        argv = [part.format(**values) for part in template]
        if not argv:
            sources = gather(story.raw, story.corpus_bytes).values()
            for source in sources:
                size = f"{source.documents} documents, {print_bytes(source.bytes)}"
                out.print(f"  {source.name}: {size}, {source.licence}", markup=False)
            keys = ("name", "file", "language", "licence", "origin")
            project.write_data_file(story, [{key: str(getattr(source, key)) for key in keys} for source in sources])
            continue
        if argv[0] == "plan":
            project.write_recipe(story)
        # As a user would type it: names with spaces in quotes, on one line.
        out.print(f"$ windlass {shlex.join(argv)}", style="green", markup=False, soft_wrap=True)
        is_training = argv[0] == "train"  # it loses a worker on the way
        fault = project.WorkerKill(Run(story.folder), 1, story.kill_after, announce)
        if is_training:
            fault.start()
        try:
            code = project.run_command(project.command(*argv), int(is_training))
        finally:
            fault.done.set()
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
