"""`windlass watch RUN`: the run live in the terminal, from files only."""

import contextlib
import sys
import time
from typing import Annotated

import typer

from windlass.cli.options import RunArgument
from windlass.cli.output import print_json


def watch(
    run: RunArgument,
    every: Annotated[float, typer.Option("--every", help="Refresh interval in seconds.", min=0.1)] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print a single snapshot and exit (default if stdout is not a terminal).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and exit.")] = False,
) -> None:
    """Show loss, speed, power, saves and remaining time of a run. Press Ctrl-C to quit; the run continues."""

    from rich.console import Console
    from rich.live import Live

    from windlass.report.redact import redact
    from windlass.report.watch import Watch
    from windlass.runs.folder import open_run

    is_live = not (once or as_json) and sys.stdout.isatty()
    # JSON is for programs, which count lines and sum segments: it is exact, and of a long run it takes its time.
    view = Watch(open_run(run), sample_first=not as_json)
    console = Console(highlight=False)
    if as_json:
        print_json(redact(view.look().as_dict()))
    elif not is_live:
        console.print(view.picture(console.width))
    else:
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=False, auto_refresh=False) as live:
            while True:
                live.update(view.picture(console.width, height=console.height), refresh=True)
                if view.look().status in ("finished", "imported"):
                    return
                time.sleep(every)
