"""`windlass watch RUN`: the run live in the terminal, from files only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from windlass.report.watch import Watch


def register(app: typer.Typer) -> None:
    app.command("watch")(watch)


def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, or its name in runs/.")],
    every: Annotated[float, typer.Option("--every", help="Seconds between looks.", min=0.1)] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and leave; also what happens without a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON and leave.")] = False,
) -> None:
    """Show loss, speed, power, saves and time left while the run goes on. Leave with Ctrl-C; the run is not touched."""
    import sys

    from rich.console import Console

    from windlass.cli.output import print_json
    from windlass.report.redact import redact
    from windlass.report.watch import Watch
    from windlass.runs.folder import open_run

    live = not (once or as_json) and sys.stdout.isatty()
    view = Watch(open_run(run), sample_first=live)
    if as_json:
        print_json(redact(view.look().as_dict()))
        return
    console = Console(highlight=False)
    if not live:
        console.print(view.picture(console.width))
        return
    _live(view, console, every)


def _live(view: Watch, console: Console, every: float) -> None:
    import time

    from rich.live import Live

    try:
        with Live(console=console, screen=False, auto_refresh=False) as live:
            while True:
                live.update(view.picture(console.width, height=console.height), refresh=True)
                if view.look().status == "finished":
                    return
                time.sleep(every)
    except KeyboardInterrupt:
        return
