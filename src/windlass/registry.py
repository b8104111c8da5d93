"""Registries: names that extensions register under, resolved to code on first use.

Built-in entries are import paths ("windlass.train.trackers.wandb:WandbTracker"), so that listing names imports nothing.
Other packages add entries with Python entry points in the group of the same name ("windlass.trackers").
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from windlass.errors import ConfigError


class Registry:
    """Names of one kind of extension (optimizers, trackers, ...) and where their code lives."""

    def __init__(self, group: str, builtin: Mapping[str, str]) -> None:
        self.group = group
        self.kind = group.removeprefix("windlass.").rstrip("s").replace("_", " ")
        self._builtin = builtin

    def names(self) -> list[str]:
        """Every registered name: built-in ones first, then those of installed packages."""
        return [*self._builtin, *(name for name in sorted(self._external()) if name not in self._builtin)]

    def load(self, name: str) -> Any:
        """The object registered as `name`, imported on first use."""
        target = self._builtin.get(name) or self._external().get(name)
        if target is None:
            close = get_close_matches(name, self.names(), n=3, cutoff=0.5)
            raise ConfigError(
                f"registry.unknown-{self.kind.replace(' ', '-')}",
                f"unknown {self.kind} {name!r}",
                hint=f"did you mean {' or '.join(close)}?" if close else f"one of: {', '.join(self.names())}",
            )
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def _external(self) -> dict[str, str]:
        return {point.name: point.value for point in importlib.metadata.entry_points(group=self.group)}
