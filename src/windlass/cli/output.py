"""Printing of commands: tables and lines for people, `--json` for programs, with the same numbers in both."""

import contextlib
import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from windlass.files import json_safe
from windlass.units import print_text


# What people copy: commands, paths, addresses and scripts. The terminal breaks such lines, because its breaks do not
# get into the clipboard; other lines are broken at words.
COPIED = re.compile(r"\n|`|://|\bwindlass |^ |\S/\S+/|\.(toml|html|md|json|jsonl|out|png|svg)\b")


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
            out.print(part, markup=False, soft_wrap=not isinstance(part, Table) and bool(COPIED.search(str(part))))


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


# A column of texts is wrapped at words to no less than this; a longer word is broken only where nothing else helps.
TEXT_WIDTH, WORD_WIDTH = 22, 40
GAP = 2  # between columns; one more stands at each edge


class FittedTable(Table):
    """A table that leaves out columns on a narrow terminal, and names them below."""

    drop: Sequence[str] | None = None
    heading: Text | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [(str(c.header), [str(cell) for cell in c.cells], c.justify == "right") for c in self.columns]
        widths = fit_columns(columns, self.drop, options.max_width)
        shown = copy.copy(self)
        kept = [replace(self.columns[index], width=width) for index, width in widths.items()]
        shown.columns = [replace(column, _index=index) for index, column in enumerate(kept)]
        if self.heading:
            yield self.heading
        yield from Table.__rich_console__(shown, console, options)
        if missing := [name for index, (name, *_) in enumerate(columns) if index not in widths]:
            yield Text(f"Not shown: {', '.join(missing)} (use a wider terminal or --json).", style="dim")


def fit_columns(
    columns: Sequence[tuple[str, Sequence[str], bool]], drop: Sequence[str] | None, width: int
) -> dict[int, int]:
    """Index -> width of the columns (name, cells, is number) that fit into `width` without breaking a number or a word.

    `drop` names the columns to leave out, the first first; None: from the right, down to two columns.
    """

    def longest(texts: Iterable[str]) -> int:
        return max(map(cell_len, texts), default=0)

    full, least = [], []
    for name, cells, is_number in columns:
        lines = longest(line for cell in cells for line in cell.splitlines())
        words = longest(word for cell in cells for word in cell.split())
        title = longest(name.split())
        full.append(max(lines, title if is_number else cell_len(name)))
        least.append(max(title, lines if is_number else min(lines, max(min(words, WORD_WIDTH), TEXT_WIDTH))))
    kept = list(range(len(columns)))

    def room(widths: Sequence[int]) -> int:
        return width - 2 - sum(widths[index] for index in kept) - GAP * (len(kept) - 1)

    names = [name for name, *_ in columns]
    order = [names.index(name) for name in drop] if drop is not None else [*reversed(kept[2:])]
    while room(least) < 0 and order:
        kept.remove(order.pop(0))
    widths = {index: least[index] for index in kept}
    spare = room(least)
    # The columns that lack least are completed first; a negative rest is taken from the widest column of texts.
    for count, index in enumerate(sorted(kept, key=lambda index: full[index] - least[index])):
        extra = min(full[index] - least[index], max(0, spare) // (len(kept) - count))
        widths[index], spare = widths[index] + extra, spare - extra
    while spare < 0 and (wrapped := [index for index in kept if not columns[index][2] and widths[index] > 8]):
        widest = max(wrapped, key=lambda index: widths[index])
        widths[widest], spare = widths[widest] - 1, spare + 1
    return widths


def table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[int] = (),
    drop: Sequence[str] | None = None,
) -> Table:
    """A plain table. `right`: columns with numbers; `drop`: the columns that a narrow terminal can do without, the
    least important first (None: from the right). Texts are shown as they are, never as markup or control codes."""

    def shown(text: object) -> Text:
        return Text("" if text is None else print_text(str(text), lines=True))

    result = FittedTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold")
    result.heading, result.drop = None if title is None else Text(print_text(title, lines=True), style="bold"), drop
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
