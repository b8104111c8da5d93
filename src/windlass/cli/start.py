"""`windlass` alone: the seven steps of the story, what this folder already has, and the next command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

STEPS = (
    ("plan", "windlass plan RECIPE", "memory, tokens/s, days, kWh and CO2 before a node-hour is spent"),
    ("tokenize", "windlass tokenize DATA.toml", "exact token counts and a provenance ledger"),
    ("sweep", "windlass sweep SWEEP.toml", "the fast layout, with out-of-memory as a result"),
    ("launch", "windlass launch RECIPE", "job chains on SLURM that resume themselves"),
    ("train", "windlass train RECIPE", "the loop itself, here or as a rank of a job"),
    ("watch", "windlass watch RUN", "loss, MFU and energy while it runs"),
    ("report", "windlass report RUN", "the page a funder can read"),
)
FILES = 200
"""No more files than this are opened: a folder of another project should cost nothing."""


@dataclass(frozen=True, kw_only=True)
class RunHere:
    path: str
    state: str
    """finished, running, stopped, failed or submitted, from the last events."""
    step: int | None
    seen_at: float
    """The last sign of life."""
    launched: bool
    reported: bool
    evaluated: bool


@dataclass(frozen=True, kw_only=True)
class Here:
    """What a folder holds."""

    recipes: list[str] = field(default_factory=list)
    data_files: list[str] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    stores: dict[str, int] = field(default_factory=dict)
    """Folder -> tokens."""
    runs: list[RunHere] = field(default_factory=list)
    """Newest first."""


def _version(value: bool) -> None:
    if value:
        from windlass import __version__

        typer.echo(f"windlass {__version__}")
        raise typer.Exit


def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What this folder has, as JSON.")] = False,
) -> None:
    """From a compute allocation to a trained language model on a public supercomputer."""
    if context.invoked_subcommand is not None:
        return
    from windlass.cli.output import console, print_json, table

    here = look(Path())
    command, reason = next_command(here)
    if as_json:
        print_json({**asdict(here), "next": {"command": command, "reason": reason}})
        return
    found = summary(here)
    rows = [(i, command, what, found[name]) for i, (name, command, what) in enumerate(STEPS, 1)]
    out = console()
    out.print(
        table("windlass: seven steps from an allocation to a model", ("", "command", "what it gives you", "here"), rows)
    )
    out.print(f"next: {command}   ({reason})", soft_wrap=True)
    out.print(
        "`windlass demo` shows the whole story on this machine in about two minutes; `windlass --help` lists everything."
    )


# -- what is here -----------------------------------------------------------------------------------------------------


def look(folder: Path) -> Here:
    """Recipes, data files, stores and runs in a folder and in the places where they usually lie."""
    kinds: dict[str, list[str]] = {"recipe": [], "data": [], "sweep": []}
    for path in _tomls(folder):
        kind = _kind(path)
        if kind:
            kinds[kind].append(str(path.relative_to(folder)))
    runs = [_run(folder, p.parent) for p in sorted(folder.glob("runs/*/config.json"))[:FILES]]
    return Here(
        recipes=kinds["recipe"],
        data_files=kinds["data"],
        sweeps=kinds["sweep"],
        stores=_stores(folder),
        runs=sorted(runs, key=lambda r: -r.seen_at),
    )


def _tomls(folder: Path) -> list[Path]:
    found = [p for pattern in ("*.toml", "recipes/*.toml", "recipes/*/*.toml") for p in sorted(folder.glob(pattern))]
    return found[:FILES]


def _kind(path: Path) -> str | None:
    """By the tables a file has; what cannot be read is none of ours."""
    import tomllib

    from windlass.config.files import kind_of

    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # A recipe or a data file of another project should not be offered as ours.
    needed = {"recipe": "name", "data": "output"}
    kind = kind_of(raw)
    return kind if kind is None or needed.get(kind, "name") in raw else None


def _stores(folder: Path) -> dict[str, int]:
    from windlass.files import read_json

    found = {}
    for pattern in ("*/manifest.json", "data/*/manifest.json", "runs/*/data/manifest.json"):
        for path in sorted(folder.glob(pattern))[:FILES]:
            value = read_json(path) or {}
            if value.get("kind") == "windlass-store":
                found[str(path.parent.relative_to(folder))] = _tokens(value)
    return found


def _tokens(manifest: dict[str, Any]) -> int:
    return sum(int(source.get("tokens") or 0) for source in manifest.get("sources", {}).values())


_STATES = {"finished": "finished", "running": "running", "stopped": "stopped"}


def _run(folder: Path, path: Path) -> RunHere:
    from windlass.runs import Run
    from windlass.runs.history import read_history

    run = Run(path)
    segments = read_history(run.events(), []).segments
    last = run.last_metrics()
    signs = [segments[-1].ended_at] if segments else []
    signs += [last.time] if last.time is not None else []
    return RunHere(
        path=str(path.relative_to(folder)),
        state=_STATES.get(segments[-1].end, "failed") if segments else "submitted",
        step=last.step,
        seen_at=max(signs, default=run.config_file.stat().st_mtime),
        launched=run.jobs_file.is_file(),
        reported=run.report_file.is_file(),
        evaluated=run.eval_file.is_file(),
    )


# -- what it means ----------------------------------------------------------------------------------------------------


def summary(here: Here) -> dict[str, str]:
    """For each step, in a few words, what is here of it."""
    from windlass.units import print_tokens

    tokens = sum(here.stores.values())
    states = [r.state for r in here.runs]
    counted = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    running = [r for r in here.runs if r.state == "running"]
    return {
        "plan": _count(len(here.recipes), "recipe"),
        "tokenize": f"{_count(len(here.stores), 'store')}, {print_tokens(tokens)} tokens" if here.stores else "",
        "sweep": _count(len(here.sweeps), "sweep file"),
        "launch": _count(sum(r.launched for r in here.runs), "run") + (" launched" if any(r.launched for r in here.runs) else ""),
        "train": counted,
        "watch": ", ".join(r.path for r in running[:2]),
        "report": _count(sum(r.reported for r in here.runs), "report"),
    }  # fmt: skip


def _count(number: int, what: str) -> str:
    return "" if number == 0 else f"{number} {what}" + ("s" if number > 1 else "")


def next_command(here: Here) -> tuple[str, str]:
    """The one command that moves this folder on, and why."""
    if here.runs:
        return _after(here.runs[0])
    own = [r for r in here.recipes if not r.startswith("recipes/")] or here.recipes
    if not own:
        return "windlass init", "no recipe here yet: a few questions make one"
    if here.data_files and not here.stores:
        return f"windlass tokenize {quote(here.data_files[0])}", "there is a data file and no token store yet"
    return f"windlass plan {quote(own[0])}", "nothing has run here yet"


def _after(run: RunHere) -> tuple[str, str]:
    path = quote(run.path)
    at = "" if run.step is None else f" at step {run.step:,}"
    if run.state == "running":
        return f"windlass watch {path}", f"{run.path} is running{at}, or was cut off without a word"
    if run.state == "stopped":
        return f"windlass resume {path}", f"{run.path} stopped{at} after a save"
    if run.state == "failed":
        return f"windlass watch {path} --once", f"{run.path} failed{at}: see why, then windlass resume {path}"
    if run.state == "submitted":
        return f"windlass jobs {path}", f"{run.path} has not started yet"
    if not run.reported:
        return f"windlass report {path}", f"{run.path} is finished and has no report yet"
    if not run.evaluated:
        return f"windlass eval {path}", f"{run.path} is finished and not evaluated"
    return f"windlass export {path} --to DIR", f"{run.path} is finished, evaluated and reported"
