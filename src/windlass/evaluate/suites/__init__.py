"""Evaluation suites: kinds of task that a JSON-lines file can hold. Listing their names imports nothing heavy.

A file `short_answer.py` in this folder with a class `ShortAnswer` is the suite "short answer"; no list names it.
Other packages register a class with an entry point in the group "windlass.suites".
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from windlass.registry import Registry

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.evaluate.generate import Sampling
    from windlass.evaluate.open_model import OpenModel
    from windlass.runs.scores import EvalScore

Item = Mapping[str, Any]
SUITES = Registry(
    "windlass.suites",
    {
        module.name.replace("_", " "): f"{__name__}.{module.name}:{module.name.title().replace('_', '')}"
        for module in pkgutil.iter_modules(__path__)
    },
)


class TextEngine(Protocol):
    """Continues prompts (token ids), each with its own sampling; `evaluate.answers` has the engines."""

    def complete(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[Sampling],
        *,
        ends: Sequence[int],
        stops: Sequence[str],
        strip: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[list[int]]:
        """The new tokens of each prompt; `strip`: stop strings in white space at the beginning do not count."""


class TaskHeader(BaseModel):
    """The optional first line of a task file, {"task": {...}}: how its items are asked."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    template: str | None = None  # the prompt, with {field} for each field of an item; None: the suite's
    system: str | None = None  # system message of a chat
    shots: int = Field(0, ge=0)  # solved examples before each question
    max_tokens: int | None = Field(None, ge=1)  # of a generated answer; None: the suite's
    stop: list[str] | None = None  # strings that end an answer; None: the suite's
    samples: int = Field(1, ge=1)  # code: answers to each item
    pass_at: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1)  # code: k of pass@k, at most `samples`
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0
    cpu_seconds: int = Field(5, ge=1)  # code: limit of one program and its tests
    memory: str = "1 GiB"  # code


class SuiteOptions(TaskHeader):
    """The header of a task file, and what the command says about it."""

    chat: bool = False  # ask through the tokenizer's chat template
    run_code: bool = False  # generated programs may be executed
    weak_sandbox: bool = False  # also where the kernel lacks a protection
    engine: Any = None  # a TextEngine; None: our own decoder
    batch: int | None = None  # sequences per forward pass; None: as many as fill the device
    progress: Callable[[int, int], None] = lambda done, total: None
    keep_answers: Callable[[list[dict[str, Any]]], None] = lambda rows: None  # item, prompt and answers of each item


class Suite(Protocol):
    """One kind of task. A file belongs to the suite with the most of its fields; all members are static."""

    kind: str
    fields: tuple[str, ...]
    generates: bool = False  # text, which any engine can do; scores of given texts need our own model

    @classmethod
    def problem(cls, item: Item) -> str | None:
        """What is wrong with one line that has all fields, or None. A suite that derives from this class inherits the
        rule that every field is a text."""
        wrong = [name for name in cls.fields if not isinstance(item[name], str) or not item[name]]
        return f"{', '.join(wrong)} must be a text" if wrong else None

    @staticmethod
    def check(options: SuiteOptions) -> None:
        """Refuse options that the suite cannot work with, before a model is loaded."""

    @staticmethod
    def solved_text(item: Item) -> str:
        """The item as it would stand in a text that gives the answer away, for the search in the training split."""

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        """Scores of all items and of each group; `task` is the name in the scores."""


def solved_examples(items: Sequence[Item], number: int, shots: int, show: Callable[[Item], str]) -> str:
    return "".join(show(items[i]) + "\n\n" for i in solved_numbers(len(items), number, shots))


def solved_numbers(count: int, number: int, shots: int) -> list[int]:
    """The next `shots` items after this one of `count`; never the item itself."""
    return [(number + 1 + i) % count for i in range(shots)]


def text_list(value: Any) -> list[str]:
    """A field that may hold one text or several."""
    return [value] if isinstance(value, str) else list(value)


def is_text_list(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)


def groups(items: Sequence[Item]) -> dict[str, list[int]]:
    """Item numbers of "all", and of each language and group that items name."""
    numbers: dict[str, list[int]] = {"all": list(range(len(items)))}
    for number, item in enumerate(items):
        for key in ("language", "group"):
            if item.get(key):
                numbers.setdefault(f"{key} {item[key]}", []).append(number)
    return numbers
