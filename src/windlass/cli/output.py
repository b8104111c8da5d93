"""How do commands print? Tables for people, `--json` for programs, the same numbers in both."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def console() -> Console:
    """Where people read; wide enough for tables even when piped."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def print_json(value: Any) -> None:
    """One JSON document on standard output, nothing else. NaN and infinity become null: they are not JSON."""
    sys.stdout.write(json.dumps(finite(value), indent=2, default=_plain, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        from dataclasses import asdict

        return finite(asdict(value))
    if hasattr(value, "item"):
        return finite(value.item())
    return str(value)


def table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()
) -> Table:
    """A plain table; `right` lists the columns with numbers. Texts are shown as they are, never as markup or control codes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from windlass.units import print_text

    def shown(text: object) -> Text:
        return Text("" if text is None else print_text(str(text), lines=True))

    made = Table(
        title=None if title is None else shown(title),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
    )
    for index, name in enumerate(columns):
        made.add_column(shown(name), justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(shown, row))
    return made


@contextlib.contextmanager
def bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream, so that what is printed stays clean; call it with what is done and the whole."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
