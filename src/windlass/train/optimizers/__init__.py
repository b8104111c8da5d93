"""Optimizers: one folder each, with `spec.py` (state sizes, no torch) and `update.py` (the arithmetic).

`windlass.registry.OPTIMIZERS` finds them by folder name, and those of other packages by the entry point group
"windlass.optimizers", which names an `OptimizerSpec`.
"""
