"""Trackers: one module each with `open_tracker(run, recipe, first_step) -> Tracker` (see `windlass.train.tracking`).

`windlass.registry.TRACKERS` finds them by module name, and those of other packages by the entry point group
"windlass.trackers", which names such a function or class. A tracker is turned on by `[trackers] NAME = true`.
"""
