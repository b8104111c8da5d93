"""`windlass demo`: a complete project on this machine's CPU, run with the ordinary commands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.launch.demo import Story


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    run: Annotated[Path, typer.Option("--run", help="Folder of the demo; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option("--steps", min=60, help="Optimizer steps to train.")] = 140,
) -> None:
    """Run a small project on this machine's CPU in about two minutes: data, plan, training, a fault, resume, report."""
    from windlass.launch.demo import Story, clear

    refuse_without(NEEDED)
    started_at = time.monotonic()
    story = Story(run, steps=steps)
    clear(story)
    output = DemoOutput(total=9)
    for section in (corpus, tokenizer, tokens, plan, training, evaluation, sample, energy, report):
        section(story, output)
    output.finish(story, time.monotonic() - started_at)


NEEDED = ("torch", "safetensors", "psutil", "tokenizers")
"""Packages that the demo uses and the base installation does not have."""


def refuse_without(packages: tuple[str, ...]) -> None:
    """Fail before the first section, not in the middle of the second."""
    from importlib.util import find_spec

    from windlass.errors import WindlassError

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise WindlassError(
            "cli.demo-package-missing",
            f"the demo trains a model and needs {', '.join(missing)}, which the base installation does not have",
            hint="pip install 'windlass[train,data]'; docs/install.md",
        )


class DemoOutput:
    """Prints one line per section (what happens and why), runs its commands, and stops when one fails."""

    def __init__(self, total: int) -> None:
        from windlass.cli.output import console

        self.out, self.number, self.total = console(), 0, total

    def section(self, title: str, reason: str) -> None:
        self.number += 1
        self.out.print(f"\n[bold cyan]\\[{self.number}/{self.total}] {title}:[/bold cyan] [dim]{reason}[/dim]")

    def run(self, *arguments: Any, threads: int | None = None) -> None:
        import shlex

        from windlass.errors import RunError
        from windlass.launch.demo import command, run_command

        # As a user would type it: names with spaces in quotes, on one line.
        line = f"$ windlass {shlex.join(map(str, arguments))}"
        self.out.print(line, style="green", markup=False, soft_wrap=True)
        code = run_command(command(*arguments), threads)
        if code:
            raise RunError(
                "cli.demo-command-failed",
                f"windlass {arguments[0]} ended with exit code {code}",
                hint="see the lines above for the reason; the demo stops here",
            )

    def say(self, text: str, style: str = "") -> None:
        self.out.print(text, style=style, markup=False)

    def finish(self, story: Story, seconds: float) -> None:
        from windlass.units import print_seconds

        self.out.print(f"\n[bold green]Done in {print_seconds(seconds)}.[/bold green] Open the report in a browser:")
        self.out.print(f"  {(story.folder / 'report.html').resolve()}", markup=False, soft_wrap=True)
        self.out.print("Next:")
        for line in next_lines(story.folder):
            self.out.print(f"  {line}", markup=False, soft_wrap=True)


def next_lines(folder: Path) -> list[str]:
    """Commands that work as they are printed: with the paths of recipes on this disk, and first a PATH if it is needed."""
    import shlex
    import shutil
    import sys

    from windlass.config.files import shipped

    program = Path(sys.argv[0]).resolve().parent
    lines = [] if shutil.which("windlass") else [f"export PATH={shlex.quote(str(program))}:$PATH"]
    lines += [f"windlass watch {shlex.quote(str(folder))}", "windlass dash"]
    for command, name in (("train", "tiny_cpu"), ("plan", "gptnl_8b_snellius")):
        here = Path("recipes") / f"{name}.toml"
        path = here if here.is_file() else shipped(here)
        lines += [] if path is None else [f"windlass {command} {shlex.quote(str(path))}"]
    return lines


def corpus(story: Story, output: DemoOutput) -> None:
    from windlass.data.corpus import gather
    from windlass.launch.demo import write_data_file
    from windlass.units import print_bytes

    output.section("Gather a corpus", "from Python's own library: real text, known licence, no network")
    sources = gather(story.raw, story.corpus_bytes).values()
    for source in sources:
        output.say(f"  {source.name}: {source.documents} documents, {print_bytes(source.bytes)}, {source.licence}")
    write_data_file(
        story,
        [
            {"name": s.name, "file": str(s.file), "language": s.language, "licence": s.licence, "origin": s.origin}
            for s in sources
        ],
    )


def tokenizer(story: Story, output: DemoOutput) -> None:
    output.section("Train a tokenizer", "byte-level BPE, so that no byte of any language is unknown")
    output.run("tokenizer", "train", story.data_file, "--vocab", story.vocab, "--out", story.tokenizer)


def tokens(story: Story, output: DemoOutput) -> None:
    output.section("Tokenise", "once, before any GPU time is used; the token count is exact from here on")
    output.run("tokenize", story.data_file)


def plan(story: Story, output: DemoOutput) -> None:
    from windlass.launch.demo import write_recipe

    output.section("Plan the run", "memory, speed and days before a node-hour is spent")
    write_recipe(story)
    output.run("plan", story.recipe_file, "--top", "3")


def training(story: Story, output: DemoOutput) -> None:
    from windlass.launch.demo import WorkerKill
    from windlass.runs.folder import Run

    output.section(
        "Train on two processes, and lose one", "nodes fail in long runs, so one worker is killed on purpose"
    )

    def report_kill(pid: int, step: int) -> None:
        output.say(
            f"*** worker 1 (process {pid}) killed on purpose after step {step}: the run resumes from its last checkpoint ***",
            "bold yellow",
        )

    fault = WorkerKill(Run(story.folder), 1, story.kill_after, report_kill).start()
    try:
        output.run("train", story.recipe_file, "--devices", "2", "--run", story.folder, threads=1)
    finally:
        fault.done.set()


def evaluation(story: Story, output: DemoOutput) -> None:
    output.section("Evaluate", "bits per byte on held-out documents, so that tokenizers can be compared")
    output.run("eval", story.folder)


def sample(story: Story, output: DemoOutput) -> None:
    output.section("Generate a few lines", "a model this small writes nonsense, but it looks like Python")
    output.run("generate", story.folder, "--prompt", "def read(self, ", "--tokens", "60", "--ignore-eos")


def energy(story: Story, output: DemoOutput) -> None:
    output.section(
        "Account for energy", "energy that no sensor measured is shown as modelled or not measured, never as 0"
    )
    output.run("energy", story.folder)


def report(story: Story, output: DemoOutput) -> None:
    output.section("Write the report", "one file that opens from disk, for a colleague or a funder")
    output.run("report", story.folder)
