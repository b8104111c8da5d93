"""Printing of commands: tables and lines for people, `--json` for programs, with the same numbers in both."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.files import json_safe
from windlass.units import print_text


def console() -> Console:
    """Where people read; wide enough for tables even when piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def show(as_json: bool, document: Any, *parts: Any) -> None:
    """The end of a command: its result as one JSON document, or as tables and lines. None is left out."""
    if as_json:
        print_json(document)
        return
    out = console()
    for part in parts:
        if part is not None:
            out.print(part, markup=False, soft_wrap=not isinstance(part, Table))


def print_json(value: Any) -> None:
    """One JSON document on standard output, nothing else. NaN and infinity become null: they are not JSON."""
    sys.stdout.write(json.dumps(json_safe(value), indent=2, default=_plain, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return json_safe(asdict(value))
    return json_safe(value.item()) if hasattr(value, "item") else str(value)


def text_of(value: float | None, form: str, unknown: str = "unknown") -> str:
    """`text_of(0.4, ".1%")` is `40.0%`; None is unknown."""
    return unknown if value is None else format(value, form)


def table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()
) -> Table:
    """A plain table; `right`: columns with numbers. Texts are shown as they are, never as markup or control codes."""

    def shown(text: object) -> Text:
        return Text("" if text is None else print_text(str(text), lines=True))

    result = Table(
        title=None if title is None else shown(title),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        title_style="bold",
        header_style="bold",
    )
    for index, name in enumerate(columns):
        result.add_column(shown(name), justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*map(shown, row))
    return result


@contextlib.contextmanager
def bar(label: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on the error stream, if it is a terminal. Call it with the done and the total amount, and a new label."""
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total, text=label: progress.update(task, completed=done, total=total, description=text)
