"""Registries: names of extensions, found without importing them and loaded on first use.

Built-in extensions are the modules (or folders) of one package: a new file registers itself by being there. Other Python
packages add theirs with entry points in the group of the same name ("windlass.trackers").
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from windlass.errors import ConfigError


class Registry:
    """Names of one kind of extension (optimizers, trackers, ...).

    `package` is the built-in package, whose modules each define `attribute`; `aliases` are further names -> module names.
    Modules whose name begins with an underscore, and those in `exclude`, are not extensions.
    """

    def __init__(
        self,
        group: str,
        package: str,
        attribute: str,
        *,
        aliases: Mapping[str, str] | None = None,
        exclude: tuple[str, ...] = (),
    ) -> None:
        self.group, self.package, self.attribute = group, package, attribute
        self.kind = group.removeprefix("windlass.").rstrip("s").replace("_", " ")
        self.aliases, self.exclude = dict(aliases or {}), exclude

    def names(self) -> list[str]:
        """Every registered name: built-in ones first, then those of installed packages. Imports nothing."""
        builtin = self._builtin()
        return [*builtin, *self.aliases, *(name for name in sorted(self._external()) if name not in builtin)]

    def load(self, name: str) -> Any:
        """The object registered as `name`, imported on first use."""
        module = self.aliases.get(name, name)
        if module in self._builtin():
            return getattr(importlib.import_module(f"{self.package}.{module}"), self.attribute)
        point = self._external().get(name)
        if point is not None:
            return point.load()
        close = get_close_matches(name, self.names(), n=3, cutoff=0.5)
        raise ConfigError(
            f"registry.unknown-{self.kind.replace(' ', '-')}",
            f"unknown {self.kind} {name!r}",
            hint=f"did you mean {' or '.join(close)}?" if close else f"one of: {', '.join(self.names())}",
        )

    def _builtin(self) -> list[str]:
        folder = Path(__file__).parent.joinpath(*self.package.split(".")[1:])
        names = [p.stem for p in folder.glob("*.py")] + [p.parent.name for p in folder.glob("*/__init__.py")]
        return sorted(name for name in names if not name.startswith("_") and name not in self.exclude)

    def _external(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {point.name: point for point in importlib.metadata.entry_points(group=self.group)}
