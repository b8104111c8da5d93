"""`windlass demo`: a complete project on this machine's CPU, run with the ordinary commands."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.output import console, table, working
from windlass.errors import RunError, WindlassError
from windlass.units import print_bytes, print_seconds

if TYPE_CHECKING:
    from windlass.launch.demo import Story

# Packages that the demo uses and the base installation does not have.
NEEDED = ("torch", "safetensors", "psutil", "tokenizers")
# What the second run changes.
SECOND = ("model.layers=8", "train.steps=12", "train.eval_every=0")
# (title, reason, the command with the names of the story's files)
SECTIONS = (
    ("Gather a corpus", "from Python's own library: real text, known licence, no network", ()),
    ("Train a tokenizer", "byte-level BPE, so that no byte of any language is unknown",
     ("tokenizer", "train", "{data_file}", "--vocab", "{vocab}", "--out", "{tokenizer}")),
    ("Tokenise", "once, before any GPU time is used; the token count is exact from here on",
     ("tokenize", "{data_file}")),
    ("Measure this machine", "MFU is a share of what one core can do, so that is measured first", ()),
    ("Plan the run", "memory, speed and duration before a node-hour is spent", ("plan", "{recipe_file}", "--top", "3")),
    ("Train on two processes, and lose one", "nodes fail in long runs, so one worker is killed on purpose",
     ("train", "{recipe_file}", "--devices", "2", "--run", "{folder}")),
    ("Evaluate", "bits per byte on held-out documents, so that tokenizers can be compared", ("eval", "{folder}")),
    ("Generate a few lines", "a model this small writes nonsense, but it looks like Python",
     ("generate", "{folder}", "--prompt", "def read(self, ", "--tokens", "60", "--ignore-eos")),
    ("Learn from the run", "the planner's constants are fitted to what this machine really did",
     ("plan", "--calibrate", "{folder}")),
    ("Predict a new run", "twice the layers: the fit has not seen it, and the plan is written first",
     ("plan", "{recipe_file}", *SECOND, "--top", "1")),
    ("Train it", "predicted and measured are compared at the end",
     ("train", "{recipe_file}", *SECOND, "--devices", "2", "--run", "{second}")),
    ("Account for energy", "energy that no sensor measured is shown as modelled or not measured, never as 0",
     ("energy", "{folder}")),
    ("Write the report", "one file that opens from disk, for a colleague or a funder", ("report", "{folder}")),
)  # fmt: skip


def demo(
    run: Annotated[Path, typer.Option("--run", help="Folder of the demo; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option("--steps", min=24, help="Optimizer steps to train.")] = 100,
) -> None:
    """Run a small project on this machine's CPU in under three minutes: data, plan, training, a fault, resume,
    report."""
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
    values = {
        key: str(getattr(story, key)) for key in ("data_file", "recipe_file", "tokenizer", "vocab", "folder", "second")
    }

    def announce(pid: int, step: int) -> None:
        event = f"worker 1 (process {pid}) killed on purpose after step {step}"
        out.print(f"*** {event}: the run resumes from its last checkpoint ***", style="bold yellow", markup=False)

    for number, (title, reason, template) in enumerate(SECTIONS, 1):
        out.print(f"\n[bold cyan]\\[{number}/{len(SECTIONS)}] {title}:[/bold cyan] [dim]{reason}[/dim]")
        argv = [part.format(**values) for part in template]
        if not argv:
            with working("gathering texts" if number == 1 else "timing matrix products"):
                lines = _gather(story) if number == 1 else [_measure(story)]
            for line in lines:
                out.print(f"  {line}", markup=False)
            continue
        # As a user would type it: names with spaces in quotes, on one line.
        out.print(f"$ windlass {shlex.join(argv)}", style="green", markup=False, soft_wrap=True)
        environment = {"XDG_CONFIG_HOME": str(story.config)}
        if argv[0] == "train":  # one thread per process, for arithmetic
            environment["OMP_NUM_THREADS"] = "1"
        fault = project.WorkerKill(Run(story.folder), 1, story.kill_after, announce)
        if argv[0] == "train" and argv[-1] == str(story.folder):  # it loses a worker on the way
            fault.start()
        try:
            code = project.run_command(project.command(*argv), **environment)
        finally:
            fault.done.set()
        if code:
            raise RunError(
                "cli.demo-command-failed",
                f"windlass {argv[0]} ended with exit code {code}",
                hint="see the lines above for the reason; the demo stops here",
            )
    seconds = print_seconds(time.monotonic() - started_at)
    out.print(table("Results on this machine", ("", "result", "basis"), result_rows(story)))
    out.print(f"\n[bold green]Done in {seconds}.[/bold green] Open the report in a browser:")
    for line in (f"  {(run / 'report.html').resolve()}", "Next:", *(f"  {line}" for line in next_lines(run))):
        out.print(line, markup=False, soft_wrap=True)


def _gather(story: Story) -> list[str]:
    from windlass.data.corpus import gather
    from windlass.launch import demo as project

    sources = gather(story.raw, story.corpus_bytes).values()
    keys = ("name", "file", "language", "licence", "origin")
    project.write_data_file(story, [{key: str(getattr(source, key)) for key in keys} for source in sources])
    project.write_recipe(story)
    return [f"{s.name}: {s.documents} documents, {print_bytes(s.bytes)}, {s.licence}" for s in sources]


def _measure(story: Story) -> str:
    from windlass.launch.demo import measure_core

    return f"one core: {1e3 * measure_core(story):.1f} GFLOP/s, the best of sixty fp32 matrix products"


def result_rows(story: Story) -> list[tuple[str, str, str]]:
    """The closing screen: (name, result, basis). Every number is the one that the report prints."""
    from windlass.energy.totals import print_energy
    from windlass.report.collect import collect
    from windlass.report.tables import figure, number
    from windlass.runs.folder import Run
    from windlass.units import print_rate

    first, second = collect(story.folder), collect(story.second)
    began = next((line.loss for line in Run(story.folder).metrics_lines() if line.loss is not None), None)
    scores = [e for e in first.evaluations if e.get("group") == "all" and e.get("metric") == "bits_per_byte"]
    used, basis = print_energy(first.energy)
    carbon = first.energy.carbon
    predicted, measured = next(((p, m) for title, p, m in second.plan_rows if title == "tokens/s"), (None, None))
    error = f"{100 * (measured / predicted - 1):+.0f} %" if predicted and measured else "not measured"
    return [
        ("speed", figure(first, "throughput"), "two processes, median of the logged steps"),
        ("MFU", figure(first, "MFU"), f"of {first.manifest.get('mfu_denominator')}"),
        ("loss", f"{number(began)} to {figure(first, 'training loss')}", "training, first step and median of the last ten"),
        ("held-out text", f"{number(scores[-1]['value'] if scores else None)} bits per byte", "windlass eval"),
        ("lost worker", f"{figure(first, 'lost steps')} steps repeated", "resumed from the last checkpoint"),
        ("second run", f"{print_rate(measured)}, {error}", f"predicted {print_rate(predicted)} before it started"),
        ("energy", used, basis),
        ("CO2e", figure(first, "CO2e, location-based"),
         f"{number(carbon.grid.value)} g/kWh; {carbon.grid.source}" if carbon else "energy was not measured"),
    ]  # fmt: skip


def next_lines(folder: Path) -> list[str]:
    """Commands that work as they are printed: with the paths of recipes on this disk, and first a PATH if needed."""
    from windlass.config.load import shipped

    program = Path(sys.argv[0]).resolve().parent
    lines = [] if shutil.which("windlass") else [f"export PATH={shlex.quote(str(program))}:$PATH"]
    lines += [f"windlass watch {shlex.quote(str(folder))}", "windlass dash"]
    learned = shlex.quote(str(folder / "data" / "config" / "windlass"))
    lines.append(f"mkdir -p ~/.config && cp -rn {learned} ~/.config/  # plan with what was learned about this machine")
    for command, name in (("train", "tiny_cpu"), ("plan", "gptnl_8b_snellius")):
        local = Path("recipes") / f"{name}.toml"
        path = local if local.is_file() else shipped(local)
        lines += [] if path is None else [f"windlass {command} {shlex.quote(str(path))}"]
    return lines
