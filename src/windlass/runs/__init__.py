"""The run folder: every path, the manifest, append-only metrics and events, and reading them back."""

from windlass.runs.folder import Run, create_run, open_run

__all__ = ["Run", "create_run", "open_run"]
