"""Commands of this family are registered here."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Adds nothing yet."""
