"""`windlass` alone: the seven steps of the story and where this folder stands."""

from __future__ import annotations

from typing import Annotated

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
) -> None:
    """From a compute allocation to a trained language model on a public supercomputer."""
    if context.invoked_subcommand is not None:
        return
    from windlass.cli.output import console, table

    out = console()
    out.print(table("windlass: seven steps from an allocation to a model", ("", "command", "what it gives you"),
                    [(i, command, what) for i, (_, command, what) in enumerate(STEPS, 1)]))  # fmt: skip
    out.print(
        "New here? `windlass demo` shows the whole story on this machine in about two minutes. `windlass --help` lists everything."
    )
