"""Blocks of a model, one folder each: `spec.py` (sizes and costs, no torch), `module.py`, `parallel.py`.

Another package adds a block with an entry point of the group `windlass.blocks` that names its package (a module, no attribute).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType


def block_part(kind: str, part: str) -> ModuleType:
    """The module `part` ("module", "parallel") of a block's folder."""
    for point in importlib.metadata.entry_points(group="windlass.blocks", name=kind):
        return importlib.import_module(f"{point.value}.{part}")
    return importlib.import_module(f"windlass.blocks.{kind}.{part}")
