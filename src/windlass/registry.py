"""Registries: names that extensions register under, resolved to code on first use.

Built-in entries are import paths ("windlass.train.trackers.wandb:open_tracker"), so that listing names imports nothing.
Other packages add entries with Python entry points in the group of the same name ("windlass.trackers").
"""

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from windlass.errors import ConfigError


class Registry:
    """Names of one kind of extension (optimizers, trackers, ...) and where their code lives."""

    def __init__(self, group: str, builtin: Mapping[str, str]) -> None:
        self.group = group
        self.kind = group.removeprefix("windlass.").rstrip("s").replace("_", " ")
        self.builtin = builtin

    def names(self) -> list[str]:
        """Every registered name: built-in ones first, then those of installed packages."""
        return [*self.builtin, *(name for name in sorted(self._external()) if name not in self.builtin)]

    def target(self, name: str) -> str:
        """The import path registered as `name`; a ConfigError with the nearest names when there is none."""
        target = self.builtin.get(name) or self._external().get(name)
        if target is None:
            close = get_close_matches(name, self.names(), n=3, cutoff=0.5)
            raise ConfigError(
                f"registry.unknown-{self.kind.replace(' ', '-')}",
                f"unknown {self.kind} {name!r}",
                hint=f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(self.names())}",
            )
        return target

    def load(self, name: str) -> Any:
        """The object registered as `name`, imported on first use."""
        return import_target(self.target(name))

    def _external(self) -> dict[str, str]:
        import importlib.metadata  # slow to import, and most commands only use built-in names

        return {point.name: point.value for point in importlib.metadata.entry_points(group=self.group)}


def import_target(target: str) -> Any:
    """The object that an import path ("package.module:attribute", or a module alone) names."""
    name, _, attribute = target.partition(":")
    module = importlib.import_module(name)
    return getattr(module, attribute) if attribute else module


def package_entries(package: str, target: str) -> dict[str, str]:
    """Built-in entries of a package under windlass, found by file name: nothing is imported.

    `target` completes the import path of an entry: ":lr_factor" where each module is an entry, ".spec:SPEC" where each
    folder is one.
    """
    folder = Path(__file__).parent.joinpath(*package.split(".")[1:])
    module = target.partition(":")[0].removeprefix(".")
    paths = [path.parent for path in folder.glob(f"*/{module}.py")] if module else list(folder.glob("[!_]*.py"))
    return {path.stem: f"{package}.{path.stem}{target}" for path in sorted(paths)}


# The extension points of training. Adding a built-in entry means adding its file or folder; nothing here changes.
OPTIMIZERS = Registry("windlass.optimizers", package_entries("windlass.train.optimizers", ".spec:SPEC"))
SCHEDULES = Registry("windlass.schedules", package_entries("windlass.train.schedules", ":lr_factor"))
OBJECTIVES = Registry("windlass.objectives", package_entries("windlass.train.objectives", ":OBJECTIVE"))
TRACKERS = Registry("windlass.trackers", package_entries("windlass.train.trackers", ":open_tracker"))
ENGINES = Registry("windlass.engines", package_entries("windlass.train.engines", ":assemble"))
# A block's entry names its package, which has the modules spec, module and parallel.
BLOCKS = Registry(
    "windlass.blocks",
    {name: path.removesuffix(".spec") for name, path in package_entries("windlass.blocks", ".spec").items()},
)
PRESETS = Registry("windlass.presets", package_entries("windlass.models.presets", ":PRESET"))
