"""Cluster and run names for shell completion; commands and options complete by themselves."""

from pathlib import Path
from typing import Any


def run_completions(start: str, folder: Path = Path("runs")) -> list[str]:
    """Names of the runs in runs/; a path is left to the shell."""
    if "/" in start or not folder.is_dir():
        return []
    return sorted(p.name for p in folder.glob("*") if p.name.startswith(start) and (p / "config.json").is_file())


def add_completions(group: Any) -> None:
    """Give every parameter of the click group that names a cluster or a run its list."""
    from windlass.clusters.load import cluster_names

    for command_name, command in group.commands.items():
        if getattr(command, "commands", None):
            add_completions(command)
        for parameter in command.params:
            if parameter.name == "cluster" or (command_name == "clusters" and parameter.name == "name"):
                parameter._custom_shell_complete = lambda context, parameter, start: [
                    name for name in cluster_names() if name.startswith(start)
                ]
            elif parameter.name in ("run", "runs") and parameter.param_type_name == "argument":
                parameter._custom_shell_complete = lambda context, parameter, start: run_completions(start)
