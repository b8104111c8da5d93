"""Printing of commands: tables and lines for people, `--json` for programs, with the same numbers in both."""

import contextlib
import copy
import json
import logging
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.table import Table
from rich.text import Text

from windlass.files import json_safe
from windlass.units import print_seconds, print_share, print_text

logger = logging.getLogger(__name__)
# Whether this command has printed its JSON document: an error after it prints none.
json_printed = False

# What people copy: commands, paths, addresses and scripts.
COPIED = re.compile(r"\n|`|://|\bwindlass |\S/\S+/|\.(toml|html|md|json|jsonl|out|png|svg)\b")


def console() -> Console:
    """The console for human output; wide enough for tables even if piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def show(as_json: bool, document: Any, *parts: Any) -> None:
    """The end of a command: its result as one JSON document, or as tables and lines. None is left out."""
    if as_json:
        print_json(document)
        return
    out = console()
    for part in parts:
        if part is not None:
            if out.is_terminal and isinstance(part, (str, Text)):
                part = Text(wrap(str(part), out.width), style=part.style if isinstance(part, Text) else "")
            out.print(part, markup=False, soft_wrap=not isinstance(part, Table))


def wrap(text: str, width: int) -> str:
    """Lines broken at words; text to be copied as it is, because the breaks of a terminal do not get into the
    clipboard."""
    if len(text) <= width or COPIED.search(text):
        return text
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output, nothing else. NaN and infinity become null: they are not JSON."""
    global json_printed
    json_printed = True
    sys.stdout.write(json.dumps(json_safe(value), indent=2, default=_plain, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return json_safe(asdict(value))
    return json_safe(value.item()) if hasattr(value, "item") else str(value)


def text_of(value: float | None, form: str, unknown: str = "unknown") -> str:
    """`text_of(1979.0, "g")` is `1979`; None is unknown."""
    return unknown if value is None else format(value, form)


# A column of texts is wrapped at words to no less than this; a longer word is broken only where nothing else helps.
TEXT_WIDTH, WORD_WIDTH = 20, 40
# Between two lines about progress in a log.
PROGRESS_SECONDS = 60.0
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
            note = f"Not shown: {', '.join(missing)} (use a wider terminal or --json)."
            yield Text(wrap(note, options.max_width), style="dim")


def fit_columns(
    columns: Sequence[tuple[str, Sequence[str], bool]], drop: Sequence[str] | None, width: int
) -> dict[int, int]:
    """Index -> width of the columns (name, cells, is number) that fit into `width` without breaking a number or a word.

    `drop` names the columns to leave out, in this order; None: from the right, down to two columns.
    """

    def longest(texts: Iterable[str]) -> int:
        return max(map(cell_len, texts), default=0)

    full, least = [], []
    for name, cells, is_number in columns:
        lines = longest(line for cell in cells for line in cell.splitlines())
        longest_word = longest(word for cell in cells for word in cell.split())
        title = longest(name.split())
        full.append(max(lines, cell_len(name)))
        least.append(max(title, lines if is_number else min(lines, max(min(longest_word, WORD_WIDTH), TEXT_WIDTH))))
    kept = list(range(len(columns)))

    def room(widths: Sequence[int]) -> int:
        return width - 2 - sum(widths[index] for index in kept) - GAP * (len(kept) - 1)

    names = [name for name, *_ in columns]
    order = [index for name in drop or () for index in kept if names[index] == name]
    order += [] if drop is not None else reversed(kept[2:])
    while room(least) < 0 and order:
        kept.remove(order.pop(0))
    widths = {index: least[index] for index in kept}
    spare = room(least)
    # Columns that lack least are completed first, and then the titles of numbers if they fit. A negative rest is taken
    # from the widest column of texts.
    order = sorted(kept, key=lambda index: (columns[index][2], full[index] - least[index]))
    texts = len([index for index in kept if not columns[index][2]])
    for count, index in enumerate(order):
        lack, room_for_it = full[index] - least[index], max(0, spare) // max(1, texts - count)
        # One more column does not save a line of a short title.
        extra = 0 if columns[index][2] and room_for_it < min(lack, TEXT_WIDTH) else min(lack, room_for_it)
        widths[index], spare = widths[index] + extra, spare - extra
    while spare < 0 and (wrapped := [index for index in kept if not columns[index][2] and widths[index] > 8]):
        widest = max(wrapped, key=lambda index: (index > 0, widths[index]))  # the first column has the names
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

    result = FittedTable(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, GAP - 1, 0, 0),
        header_style="bold",
        show_header=any(columns),
    )
    result.heading, result.drop = None if title is None else Text(print_text(title, lines=True), style="bold"), drop
    for index, name in enumerate(columns):
        # A name that is too long is abbreviated, a text or an address wrapped.
        overflow: OverflowMethod = "fold" if index else "ellipsis"
        result.add_column(shown(name), justify="right" if index in right else "left", overflow=overflow)
    for row in rows:
        result.add_row(*map(shown, row))
    return result


@contextlib.contextmanager
def bar(label: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Progress on the error stream: a bar in a terminal, elsewhere (the log of a job) a line each PROGRESS_SECONDS.
    Call it with the done and the total amount, and a new label."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    if not quiet and not sys.stderr.isatty():
        began_at = logged_at = time.monotonic()
        first: float | None = None  # what an earlier, interrupted command had done

        def log(done: float, total: float, text: str = label) -> None:
            nonlocal first, logged_at
            first, now = done if first is None else first, time.monotonic()
            if now - logged_at >= PROGRESS_SECONDS and total:
                logged_at, left = now, ""
                if done > first:
                    left = f", {print_seconds((total - done) * (now - began_at) / (done - first))} left"
                print(f"{print_text(text)}: {print_share(done / total, digits=0)}{left}", file=sys.stderr, flush=True)

        yield log
        return
    label_column, eta = TextColumn("{task.description}", markup=False), TimeRemainingColumn(compact=True)
    columns = (label_column, BarColumn(bar_width=None), TaskProgressColumn(), TextColumn("ETA"), eta)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total, text=label: progress.update(task, completed=done, total=total, description=text)


@contextlib.contextmanager
def working(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Print on the error stream, if it is a terminal, what is taking time: `working("loading step-1000")`. No progress
    bar may start inside. With --verbose also how long it took."""
    started_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        if not quiet and sys.stderr.isatty():
            stack.enter_context(Console(stderr=True).status(Text(f"{print_text(text)} ...")))
        yield
    logger.info("%s: %.1f s", text, time.monotonic() - started_at)
