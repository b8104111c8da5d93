"""`windlass` without a command: the seven steps, what the current folder has of each, and the next command."""

import contextlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from windlass import __version__
from windlass.cli.output import show, table
from windlass.errors import ConfigError
from windlass.files import read_json
from windlass.units import print_tokens

STEPS = (
    ("plan", "windlass plan RECIPE", "memory, tokens/s, days, kWh and CO2e of every layout"),
    ("tokenize", "windlass tokenize DATA.toml", "exact token counts and a provenance ledger"),
    ("sweep", "windlass sweep SWEEP.toml", "the fastest layout; out-of-memory points count too"),
    ("launch", "windlass launch RECIPE", "job chains on SLURM that resume themselves"),
    ("train", "windlass train RECIPE", "a run that stops, resumes and records everything"),
    ("watch", "windlass watch RUN", "loss, MFU and energy while it runs"),
    ("report", "windlass report RUN", "a page for the funder, details after it"),
)
MAX_FILES = 200  # opened at most, so that a large folder of another project costs nothing
# State of the newest run -> the command that continues, and the reason.
NEXT_COMMANDS = {
    "running": ("windlass watch {path}", "{run} is running{at_step}, or was killed without a final event"),
    "stopped": ("windlass resume {path}", "{run} stopped{at_step} after a save"),
    "failed": ("windlass watch {path} --once", "{run} failed{at_step}: see why, then windlass resume {path}"),
    "submitted": ("windlass jobs {path}", "{run} has not started yet"),
    "finished": ("windlass report {path}", "{run} is finished and has no report yet"),
    "reported": ("windlass eval {path}", "{run} is finished and not evaluated"),
    "evaluated": ("windlass export {path} --to DIR", "{run} is finished, evaluated and reported"),
}


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    path: str
    state: str  # finished, running, stopped, failed, imported or submitted, from the last events
    step: int | None
    seen_at: float  # time of the last event or metric
    launched: bool
    reported: bool
    evaluated: bool


@dataclass(frozen=True, kw_only=True)
class FolderContents:
    recipes: list[str] = field(default_factory=list)
    data_files: list[str] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    stores: dict[str, int] = field(default_factory=dict)  # folder -> tokens
    runs: list[RunStatus] = field(default_factory=list)  # newest first


def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what this folder contains as JSON.")] = False,
    verbose: Annotated[  # read by `main`, which accepts it anywhere
        bool, typer.Option("--verbose", "-v", help="Print files read, durations, error codes and tracebacks.")
    ] = False,
) -> None:
    """From a compute allocation to a trained language model on a public supercomputer."""
    if version:
        typer.echo(f"windlass {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        return
    contents = scan_folder(Path())
    next_command, reason = find_next_command(contents)
    present = summarize(contents)
    rows = [(i, command, result, present[name]) for i, (name, command, result) in enumerate(STEPS, 1)]
    show(
        as_json,
        {**asdict(contents), "next": {"command": next_command, "reason": reason}},
        table(
            "windlass: seven steps from an allocation to a model",
            ("", "command", "what you get", "in this folder"),
            rows,
        ),
        f"next: {next_command}   ({reason})",
        "`windlass demo` runs all steps on this machine in under three minutes; `windlass --help` lists all commands.",
    )


def scan_folder(folder: Path) -> FolderContents:
    """Recipes, data files, stores and runs of a folder, in the places where they usually are."""
    # Slow to import, and this module is part of every command.
    from windlass.config.load import kind_of, read_toml
    from windlass.runs import Run, history
    from windlass.runs.events import WeightsImported, known_int
    from windlass.runs.measured import columns_of

    def matches(*patterns: str) -> list[Path]:
        return [path for pattern in patterns for path in sorted(folder.glob(pattern))][:MAX_FILES]

    files: dict[str, list[str]] = {"recipe": [], "data": [], "sweep": []}
    # A recipe or data file of another project may look like ours, but does not have this key.
    required_keys = {"recipe": "name", "data": "output", "sweep": "name"}
    for path in matches("*.toml", "recipes/*.toml", "recipes/*/*.toml"):
        with contextlib.suppress(ConfigError):  # unreadable files are not ours
            raw, _ = read_toml(path)
            kind = kind_of(raw)
            if kind is not None and required_keys[kind] in raw:
                files[kind].append(str(path.relative_to(folder)))
    stores = {}
    for path in matches("*/manifest.json", "data/*/manifest.json", "runs/*/data/manifest.json"):
        manifest = read_json(path) or {}
        if manifest.get("kind") == "windlass-store":
            sources = manifest.get("sources")
            tables = (
                [table for table in sources.values() if isinstance(table, dict)] if isinstance(sources, dict) else []
            )
            stores[str(path.parent.relative_to(folder))] = sum(known_int(table.get("tokens")) or 0 for table in tables)
    runs = []
    for path in matches("runs/*/config.json"):
        run = Run(path.parent)
        events, last = list(run.events()), run.last_metrics()
        segments = history.read_history(events, columns_of([])).segments
        times = [segments[-1].ended_at] if segments else []
        times += [last.time] if last.time is not None else []
        is_imported = any(isinstance(event, WeightsImported) for event in events)
        state = segments[-1].end if segments else "imported" if is_imported else "submitted"
        status = RunStatus(
            path=str(run.path.relative_to(folder)),
            state=state if state in ("finished", "running", "stopped", "imported", "submitted") else "failed",
            step=last.step,
            seen_at=max(times, default=run.config_file.stat().st_mtime),
            launched=run.jobs_file.is_file(),
            reported=run.report_file.is_file(),
            evaluated=run.eval_file.is_file(),
        )
        runs.append(status)
    return FolderContents(
        recipes=files["recipe"],
        data_files=files["data"],
        sweeps=files["sweep"],
        stores=stores,
        runs=sorted(runs, key=lambda r: -r.seen_at),
    )


def summarize(contents: FolderContents) -> dict[str, str]:
    """What the folder has of each step; empty where it has nothing."""

    def count(number: int, noun: str, suffix: str = "") -> str:
        return f"{number} {noun}{'s' if number > 1 else ''}{suffix}" if number else ""

    runs, states = contents.runs, [run.state for run in contents.runs]
    tokens = f", {print_tokens(sum(contents.stores.values()))} tokens"
    return {
        "plan": count(len(contents.recipes), "recipe"),
        "tokenize": count(len(contents.stores), "store", tokens),
        "sweep": count(len(contents.sweeps), "sweep file"),
        "launch": count(sum(run.launched for run in runs), "run", " launched"),
        "train": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "watch": ", ".join([run.path for run in runs if run.state == "running"][:2]),
        "report": count(sum(run.reported for run in runs), "report"),
    }


def find_next_command(contents: FolderContents) -> tuple[str, str]:
    """The command that continues the work in this folder, and why."""
    if trained := [run for run in contents.runs if run.state != "imported"]:  # imported weights wait for nothing
        run = trained[0]
        path, at_step = quote(run.path), "" if run.step is None else f" at step {run.step:,}"
        is_reported = run.state == "finished" and run.reported
        state = ("evaluated" if run.evaluated else "reported") if is_reported else run.state
        command, reason = NEXT_COMMANDS[state]
        return command.format(path=path), reason.format(run=run.path, path=path, at_step=at_step)
    own = [r for r in contents.recipes if not r.startswith("recipes/")] or contents.recipes
    own_data = [d for d in contents.data_files if not d.startswith("recipes/")]  # those of a checkout are examples
    if not own:
        return "windlass init", "there is no recipe yet: init writes one from a few answers"
    if own_data and not contents.stores:
        return f"windlass tokenize {quote(own_data[0])}", "there is a data file and no token store yet"
    return f"windlass plan {quote(own[0])}", "nothing has run in this folder yet"
