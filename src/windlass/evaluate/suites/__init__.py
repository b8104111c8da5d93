"""Evaluation suites: kinds of task that a JSON-lines file can hold. Listing their names imports nothing heavy.

A file `short_answer.py` in this folder with a class `ShortAnswer` is the suite "short answer"; no list names it.
Other packages register a class with an entry point in the group "windlass.suites".
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from windlass.registry import Registry

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.evaluate.open_model import OpenModel
    from windlass.evaluate.scores import EvalScore

Item = Mapping[str, Any]
SUITES = Registry(
    "windlass.suites",
    {
        module.name.replace("_", " "): f"{__name__}.{module.name}:{module.name.title().replace('_', '')}"
        for module in pkgutil.iter_modules(__path__)
    },
)


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    shots: int = 0  # solved examples before each question
    template: str = "{source}\n"  # translation: the prompt
    max_tokens: int = 64  # of a generated answer
    batch: int | None = None  # sequences per forward pass; None: as many as fill the device
    progress: Callable[[int, int], None] = lambda done, total: None


class Suite(Protocol):
    """One kind of task. A file belongs to the suite with the most of its fields; all members are static."""

    kind: str
    fields: tuple[str, ...]

    @classmethod
    def problem(cls, item: Item) -> str | None:
        """What is wrong with one line that has all fields, or None. A suite that derives from this class inherits the
        rule that every field is a text."""
        wrong = [name for name in cls.fields if not isinstance(item[name], str) or not item[name]]
        return f"{', '.join(wrong)} must be a text" if wrong else None

    @staticmethod
    def solved_text(item: Item) -> str:
        """The item as it would stand in a text that gives the answer away, for the search in the training split."""

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        """Scores of all items and of each group; `task` is the name in the scores."""


def solved_examples(items: Sequence[Item], number: int, shots: int, show: Callable[[Item], str]) -> str:
    """The next `shots` items after this one, solved; never the item itself."""
    return "".join(show(items[(number + 1 + i) % len(items)]) + "\n\n" for i in range(shots))


def groups(items: Sequence[Item]) -> dict[str, list[int]]:
    """Item numbers of "all", and of each language and group that items name."""
    numbers: dict[str, list[int]] = {"all": list(range(len(items)))}
    for number, item in enumerate(items):
        for key in ("language", "group"):
            if item.get(key):
                numbers.setdefault(f"{key} {item[key]}", []).append(number)
    return numbers
