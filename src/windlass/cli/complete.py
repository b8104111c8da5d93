"""Cluster and run names for shell completion; commands and options complete by themselves."""

from pathlib import Path
from typing import Any


def cluster_completions(start: str) -> list[str]:
    from windlass.clusters.load import cluster_names

    return [name for name in cluster_names() if name.startswith(start)]


def run_completions(start: str, folder: Path = Path("runs")) -> list[str]:
    """Names of the runs in runs/; a path is left to the shell."""
    if "/" in start or not folder.is_dir():
        return []
    names = (p.name for p in folder.iterdir() if (p / "config.json").is_file())
    return sorted(name for name in names if name.startswith(start))


def add_completions(group: Any) -> None:
    """Give every parameter of the click group that names a cluster or a run its list."""
    for command_name, command in group.commands.items():
        if getattr(command, "commands", None):
            add_completions(command)
        for parameter in command.params:
            if parameter.name == "cluster" or (command_name == "clusters" and parameter.name == "name"):
                parameter._custom_shell_complete = lambda context, parameter, start: cluster_completions(start)
            elif parameter.name in ("run", "runs") and parameter.param_type_name == "argument":
                parameter._custom_shell_complete = lambda context, parameter, start: run_completions(start)
