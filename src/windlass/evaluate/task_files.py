"""Task files: one JSON object per line, the scores of a task, and the overlap of its texts with the training split.

For the overlap, hashes of all n-grams of the evaluation items are kept (8 bytes each); the training tokens are read
once, in parts. A hit is an equal hash: with 64 bits a false one is expected once in 2^64 / (n-grams x training tokens)
cases.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from windlass.convert.source import ModelSource, ProgressCallback, own_store
from windlass.data.mix import mix64
from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.perplexity import choose_documents
from windlass.evaluate.suites import SUITES, Suite, SuiteOptions, TaskHeader, groups
from windlass.files import read_text_file
from windlass.runs.scores import EvalScore, share_score


@dataclass(frozen=True)
class TaskFile:
    name: str
    suite: Suite
    items: list[dict[str, Any]]
    header: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **command_line: Any) -> SuiteOptions:
        """The options of the header, overridden by those of the command line that are not None."""
        stated = {name: value for name, value in command_line.items() if value is not None}
        return SuiteOptions(**{**self.header, **stated})


def read_task_file(path: Path | str) -> TaskFile:
    """The task of a file. `language` and `group` of an item make rows of the table.

    A first line {"task": {...}} says how the items are asked (`TaskHeader`).
    """
    path = Path(path)
    header: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}  # by line number
    problems: dict[int, str | None] = {}
    lines = enumerate(read_text_file(path, "task file").split("\n"), start=1)
    for number, line in ((number, line) for number, line in lines if line.strip()):
        try:
            items[number] = json.loads(line)
            problems[number] = None if isinstance(items[number], dict) else "not a JSON object"
        except ValueError as error:
            problems[number] = f"not JSON ({error})"
    first_number = next(iter(items), 0)
    if isinstance(line_one := items.get(first_number), dict) and line_one.keys() == {"task"}:
        del items[first_number]
        del problems[first_number]
        try:
            header = TaskHeader.model_validate(line_one["task"]).model_dump(exclude_unset=True)
        except ValidationError as error:
            places = [f"{'.'.join(map(str, one['loc'])) or 'task'}: {one['msg']}" for one in error.errors()]
            raise DataError(
                "evaluate.task-header-invalid",
                f"{path}, line {first_number}: {'; '.join(places)}",
                hint=f"use only these keys: {', '.join(TaskHeader.model_fields)}",
            ) from None
    if not problems:
        raise DataError(
            "evaluate.task-file-empty", f"the task file {path} is empty", hint="write one JSON object per line"
        )
    suites: list[Suite] = [SUITES.load(name) for name in SUITES.names()]
    suite = None
    if not any(problems.values()):
        first = next(iter(items.values()))
        matching = [suite for suite in suites if all(name in first for name in suite.fields)]
        suite = max(matching, key=lambda suite: len(suite.fields), default=None)
        for number, item in items.items():
            missing = [name for name in suite.fields if name not in item] if suite is not None else []
            if suite is None:
                problems[number] = f"has {', '.join(item) or 'no fields'}"
            else:
                problems[number] = f"lacks {', '.join(missing)}" if missing else suite.problem(item)
    invalid = [f"line {number}: {problem}" for number, problem in problems.items() if problem]
    if invalid or suite is None:
        more = f" and {len(invalid) - 5} more" if len(invalid) > 5 else ""
        raise DataError(
            "evaluate.task-file-invalid",
            f"{path}: {'; '.join(invalid[:5])}{more}",
            hint=f"a task has the fields {' or '.join(', '.join(suite.fields) for suite in suites)}",
        )
    return TaskFile(path.stem, suite, list(items.values()), header)


def check_task(task: TaskFile, options: SuiteOptions) -> None:
    """Raise an error for a task that cannot work, before a model is loaded."""
    if options.shots >= len(task.items):
        raise ConfigError(
            "evaluate.too-many-shots",
            f"{options.shots} examples before each question need more items than the task has ({len(task.items)})",
            hint="lower --shots",
        )
    if check := getattr(task.suite, "check", None):  # suites of other packages may lack it
        check(options)


def run_task(opened: OpenModel, tokenizer: Tokenizer, task: TaskFile, options: SuiteOptions) -> list[EvalScore]:
    check_task(task, options)
    return task.suite.run(opened, tokenizer, task.name, task.items, options)


NGRAM = 13
OVERLAPPING_SHARE = 0.5  # of an item's n-grams in the training split
READ_TOKENS = 1 << 22
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class TrainingOverlap:
    shares: list[float | None]  # of each item's n-grams; None for an item shorter than n
    n: int
    trained_tokens: int  # training tokens that were read

    def scores(self, task: str, groups: Mapping[str, Sequence[int]]) -> list[EvalScore]:
        """Share of overlapping items in each group (item numbers); items that are too short are left out."""
        scores = []
        for group, numbers in groups.items():
            shares = [share for i in numbers if (share := self.shares[i]) is not None]
            hits = sum(share >= OVERLAPPING_SHARE for share in shares)
            detail = {
                "n": self.n,
                "at_least": OVERLAPPING_SHARE,
                "trained_tokens": self.trained_tokens,
                "too_short": len(numbers) - len(shares),
            }
            scores.append(share_score(task, group, "overlap_with_training", hits, len(shares), detail))
        return scores


def find_overlap(
    store: Store,
    items: Sequence[npt.NDArray[Any]],
    *,
    split: str = "train",
    n: int = NGRAM,
    progress: ProgressCallback = lambda done, total: None,
) -> TrainingOverlap:
    """Compare items (arrays of token ids) with a split of the store."""
    item_hashes = [ngram_hashes(item, n) for item in items]
    wanted = np.unique(np.concatenate([np.empty(0, np.uint64), *item_hashes]))
    trained, done = np.zeros(len(wanted), dtype=bool), 0
    arrays = [store.tokens(name, split) for name in store.sources if store.shards[name].get(split)]
    total = sum(map(len, arrays))
    for array in arrays:
        for start in range(0, len(array), READ_TOKENS):
            stop = min(len(array), start + READ_TOKENS)
            hashes = ngram_hashes(array[start : min(len(array), stop + n - 1)], n)  # none is lost at a border
            if len(wanted):
                place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
                trained[place[wanted[place] == hashes]] = True
            done += stop - start
            progress(done, total)
    shares = [float(trained[np.searchsorted(wanted, part)].mean()) if len(part) else None for part in item_hashes]
    return TrainingOverlap(shares, n, done)


def ngram_hashes(tokens: npt.NDArray[Any], n: int) -> Hashes:
    """One 64-bit hash for each run of n tokens."""
    count = max(0, len(tokens) - n + 1)
    mixed = mix64(tokens.astype(np.uint64))
    hashes = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(n if count else 0):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + mixed[offset : offset + count]
    return hashes


def task_overlap(
    source: ModelSource, tokenizer: Tokenizer, task: TaskFile, progress: ProgressCallback
) -> list[EvalScore]:
    """Overlap of a task's items, with their answers, with the text that the model was trained on."""
    items = [np.array(tokenizer.encode(task.suite.solved_text(item))) for item in task.items]
    return find_overlap(own_store(source), items, progress=progress).scores(task.name, groups(task.items))


def document_overlap(
    source: ModelSource, held_out: Store, split: str, max_tokens: int | None, progress: ProgressCallback
) -> list[EvalScore]:
    """Overlap of held-out documents with the text that the model was trained on, by source."""
    items: list[npt.NDArray[Any]] = []
    numbers: dict[str, list[int]] = {"all": []}
    for name, spans in choose_documents(held_out, split, max_tokens):
        numbers[f"source {name}"] = list(range(len(items), len(items) + len(spans)))
        items += [held_out.tokens(name, split)[start:stop] for start, stop in spans]
    numbers["all"] = list(range(len(items)))
    return find_overlap(own_store(source), items, progress=progress).scores("overlap", numbers)
