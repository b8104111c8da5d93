"""`windlass dash [FOLDER]`: all runs of a folder live in the browser, through an ssh tunnel if need be."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.output import show, working


def dash(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder that holds runs.")] = Path("runs"),
    port: Annotated[int, typer.Option("--port", help="Port on localhost; 0 chooses a free one.", min=0, max=65535)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print address and port as one JSON line, then serve.")
    ] = False,
) -> None:
    """Serve live pages on localhost: runs, comparison, one run, sweep, planner, data, profile. Works offline."""
    import socket

    from windlass.report.dash.server import make_server

    with working(f"reading the runs in {folder}", quiet=as_json):
        server = make_server(folder, port=port)
        port, runs = server.server_port, len(server.folder.views())
    if as_json:
        typer.echo(json.dumps({"url": server.url, "port": port, "folder": str(folder), "runs": runs}))
    else:
        tunnel = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        show(
            False,
            None,
            f"{runs} runs in {folder}",
            f"open {server.url}",
            f"from another machine: {tunnel}, then the same address",
            "only this machine can connect, with that token; press Ctrl-C to stop",
        )
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(server.socket):
        server.serve_forever(poll_interval=0.2)
