"""`windlass demo`: the whole story on this machine's CPU, with the commands that everybody uses."""

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
    """The whole story on this machine's CPU in about two minutes: data, plan, training, a fault, resume, report."""
    from windlass.launch.demo import Story, clear

    refuse_without(NEEDED)
    began = time.monotonic()
    story = Story(run, steps=steps)
    clear(story)
    tale = Tale(total=9)
    for chapter in (corpus, tokenizer, tokens, plan, training, evaluation, sample, energy, report):
        chapter(story, tale)
    tale.end(story, time.monotonic() - began)


NEEDED = ("torch", "safetensors", "psutil", "tokenizers")
"""What the base installation leaves out and the story uses."""


def refuse_without(packages: tuple[str, ...]) -> None:
    """Before the first chapter, and not in the middle of the second."""
    from importlib.util import find_spec

    from windlass.errors import WindlassError

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise WindlassError(
            "cli.demo-trains-model-needs",
            f"the demo trains a model and needs {', '.join(missing)}, which the base installation leaves out",
            hint="pip install 'windlass[train,data]'; docs/install.md",
        )


class Tale:
    """Says in one line each what happens and why, and stops the story when a command fails."""

    def __init__(self, total: int) -> None:
        from windlass.cli.output import console

        self.out, self.number, self.total = console(), 0, total

    def chapter(self, what: str, why: str) -> None:
        self.number += 1
        self.out.print(f"\n[bold cyan]\\[{self.number}/{self.total}] {what}:[/bold cyan] [dim]{why}[/dim]")

    def run(self, *words: Any, threads: int | None = None) -> None:
        import shlex

        from windlass.errors import RunError
        from windlass.launch.demo import command, run_command

        # As it could be typed: names with spaces in quotes, and on one line.
        line = f"$ windlass {shlex.join(map(str, words))}"
        self.out.print(line, style="green", markup=False, soft_wrap=True)
        code = run_command(command(*words), threads)
        if code:
            raise RunError(
                "cli.windlass-ended-exit-code",
                f"windlass {words[0]} ended with exit code {code}",
                hint="the lines above say why; the demo stops here",
            )

    def say(self, text: str, style: str = "") -> None:
        self.out.print(text, style=style, markup=False)

    def end(self, story: Story, seconds: float) -> None:
        from windlass.units import print_seconds

        self.out.print(f"\n[bold green]Done in {print_seconds(seconds)}.[/bold green] Open the report in a browser:")
        self.out.print(f"  {(story.folder / 'report.html').resolve()}", markup=False, soft_wrap=True)
        self.out.print("Next:")
        for line in next_lines(story.folder):
            self.out.print(f"  {line}", markup=False, soft_wrap=True)


def next_lines(folder: Path) -> list[str]:
    """Commands that work as they are printed: recipes where they lie on this disk, and first a way to the program."""
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


def corpus(story: Story, tale: Tale) -> None:
    from windlass.data.corpus import gather
    from windlass.launch.demo import write_data_file
    from windlass.units import print_bytes

    tale.chapter("Gather a corpus", "from Python's own library: real text, known licence, no network")
    found = gather(story.raw, story.corpus_bytes).values()
    for source in found:
        tale.say(f"  {source.name}: {source.documents} documents, {print_bytes(source.bytes)}, {source.licence}")
    write_data_file(
        story,
        [
            {"name": s.name, "file": str(s.file), "language": s.language, "licence": s.licence, "origin": s.origin}
            for s in found
        ],
    )


def tokenizer(story: Story, tale: Tale) -> None:
    tale.chapter("Train a tokenizer", "byte-level BPE, so that no byte of any language is unknown")
    tale.run("tokenizer", "train", story.data_file, "--vocab", story.vocab, "--out", story.tokenizer)


def tokens(story: Story, tale: Tale) -> None:
    tale.chapter("Tokenise", "once, before any device is paid for; only now is the token count exact")
    tale.run("tokenize", story.data_file)


def plan(story: Story, tale: Tale) -> None:
    from windlass.launch.demo import write_recipe

    tale.chapter("Plan the run", "memory, speed and days before a node-hour is spent")
    write_recipe(story)
    tale.run("plan", story.recipe_file, "--top", "3")


def training(story: Story, tale: Tale) -> None:
    from windlass.launch.demo import WorkerKill
    from windlass.runs.folder import Run

    tale.chapter(
        "Train on two processes, and lose one", "a node fails in every long run, so we kill a worker on purpose"
    )

    def told(pid: int, step: int) -> None:
        tale.say(
            f"*** worker 1 (process {pid}) killed on purpose after step {step}: watch the run resume from its last checkpoint ***",
            "bold yellow",
        )

    fault = WorkerKill(Run(story.folder), 1, story.kill_after, told).start()
    try:
        tale.run("train", story.recipe_file, "--devices", "2", "--run", story.folder, threads=1)
    finally:
        fault.done.set()


def evaluation(story: Story, tale: Tale) -> None:
    tale.chapter("Evaluate", "bits per byte on held-out documents, so that tokenizers can be compared")
    tale.run("eval", story.folder)


def sample(story: Story, tale: Tale) -> None:
    tale.chapter("Generate a few lines", "a model this small babbles, but it babbles Python")
    tale.run("generate", story.folder, "--prompt", "def read(self, ", "--tokens", "60", "--go-on")


def energy(story: Story, tale: Tale) -> None:
    tale.chapter("Account for energy", "what no sensor measured is called modelled or not measured, never 0")
    tale.run("energy", story.folder)


def report(story: Story, tale: Tale) -> None:
    tale.chapter("Write the report", "one file that opens from disk, for a colleague or a funder")
    tale.run("report", story.folder)
