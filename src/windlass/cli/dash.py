"""`windlass dash [FOLDER]`: all runs of a folder live in the browser, through an ssh tunnel if need be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("dash")(dash)


def dash(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder that holds runs.")] = Path("runs"),
    port: Annotated[int, typer.Option("--port", help="Port on localhost; 0 takes a free one.", min=0, max=65535)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print address and port as one JSON line, then serve.")
    ] = False,
) -> None:
    """Serve live pages on localhost: runs, comparison, one run, sweep, planner, data, profile. No internet is used. Leave with Ctrl-C."""
    import json
    import socket

    from windlass.cli.output import console
    from windlass.report.dash.server import make_server

    server = make_server(folder, port=port)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "url": server.url,
                    "port": server.server_port,
                    "folder": str(folder),
                    "runs": len(server.folder.views()),
                }
            )
        )
    else:
        out = console()
        out.print(f"{len(server.folder.views())} runs in {folder}", markup=False)
        out.print(f"open {server.url}", markup=False, soft_wrap=True)
        out.print(
            f"from another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} {socket.gethostname()}, then the same address",
            markup=False,
            soft_wrap=True,
        )
        out.print("only this machine can connect, and only with that token; Ctrl-C ends it", markup=False)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
