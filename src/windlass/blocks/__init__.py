"""Blocks of a model, one folder each: `spec.py` (sizes and costs, no torch), `module.py`, `parallel.py`.

`windlass.registry.BLOCKS` finds them by folder name. Another package adds one with an entry point of the group
"windlass.blocks", whose name is the block's `kind` and whose value is a package with these three modules. Its recipe
keys are the table `[model.<kind>]`, described by a class `TABLE` (a `windlass.config.base.Table`) in its `spec.py`.
"""

import importlib
from types import ModuleType

from windlass.registry import BLOCKS


def block_part(kind: str, part: str) -> ModuleType:
    """The module `part` ("module", "parallel") of a block's folder."""
    return importlib.import_module(f"{BLOCKS.target(kind)}.{part}")
