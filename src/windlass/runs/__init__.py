"""The run folder: every path, the manifest, append-only metrics and events, and reading them back."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.runs.folder import Run, create_run, open_run

__all__ = ["Run", "create_run", "open_run"]


def __getattr__(name: str) -> Any:
    """Imported when used: `folder` needs recipes, which take long to import, and the other modules do not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from windlass.runs import folder

    return getattr(folder, name)
