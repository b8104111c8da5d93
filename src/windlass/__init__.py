"""windlass takes a team from a compute allocation to a trained language model on a public supercomputer.

In Python: `windlass.plan(recipe)` and `windlass.open_run(path)`; see docs/guides/notebook.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.notebook import open_run, plan

__version__ = "0.9.0"
__all__ = ["__version__", "open_run", "plan"]


def __getattr__(name: str) -> Any:
    """Imported when used: recipes and planner take long to import, and the CLI imports this module first."""
    if name not in ("open_run", "plan"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from windlass import notebook

    return getattr(notebook, name)
