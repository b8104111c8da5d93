"""What could come next? Names of machines and runs for the shell's completion; commands and options complete by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def machines(start: str) -> list[str]:
    from windlass.clusters.load import cluster_names

    return [name for name in cluster_names() if name.startswith(start)]


def runs(start: str, folder: Path = Path("runs")) -> list[str]:
    """Runs by their name in runs/, as every command takes them; a path is left to the shell."""
    if "/" in start or not folder.is_dir():
        return []
    found = (p.name for p in folder.iterdir() if (p / "config.json").is_file())
    return sorted(name for name in found if name.startswith(start))


def clusters_command(command: str | None, name: str) -> bool:
    return name == "cluster" or (command == "clusters" and name == "name")


def offer(root: Any) -> None:
    """Give every parameter of the built command that names a machine or a run its list."""
    for word, command in root.commands.items():
        offer(command) if getattr(command, "commands", None) else None
        for parameter in command.params:
            if clusters_command(word, parameter.name):
                parameter._custom_shell_complete = _by(machines)
            elif parameter.name in ("run", "runs") and parameter.param_type_name == "argument":
                parameter._custom_shell_complete = _by(runs)


def _by(names: Callable[[str], list[str]]) -> Callable[[Any, Any, str], list[str]]:
    return lambda context, parameter, start: names(start)
