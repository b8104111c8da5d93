"""Task files: JSON lines whose fields name the evaluation suite. Every bad line is reported with its number."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.scores import EvalScore
from windlass.evaluate.suites import SUITES, Suite, SuiteOptions


@dataclass(frozen=True)
class TaskFile:
    name: str
    suite: Suite
    items: list[dict[str, Any]]


def read_text_file(path: Path, description: str) -> str:
    """The text of a file that a user wrote; a file that is not UTF-8 text is refused with the place."""
    if not path.is_file():
        raise DataError("evaluate.file-missing", f"there is no {description} {path}", hint="check the path")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            "evaluate.not-utf8",
            f"the {description} {path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start:,}",
            hint="convert it, for example with iconv -f LATIN1 -t UTF-8",
        ) from None


def read_task_file(path: Path | str) -> TaskFile:
    """The task of a file. `language` and `group` of an item make rows of the table."""
    path = Path(path)
    items: list[dict[str, Any]] = []
    problems = []
    for number, line in enumerate(read_text_file(path, "task file").split("\n"), start=1):
        if line.strip():
            try:
                item = json.loads(line)
            except ValueError as error:
                item = f"not JSON ({error})"
            if not isinstance(item, dict):
                problems.append(f"line {number}: {item if isinstance(item, str) else 'not a JSON object'}")
            else:
                items.append(item)
    if not items and not problems:
        raise DataError("evaluate.task-file-empty", f"the task file {path} is empty", hint="one JSON object per line")
    suites: list[Suite] = [SUITES.load(name) for name in SUITES.names()]
    suite = None
    if not problems:
        matching = [suite for suite in suites if all(name in items[0] for name in suite.fields)]
        suite = max(matching, key=lambda suite: len(suite.fields), default=None)
        for number, item in enumerate(items, start=1):
            if suite is None:
                problem: str | None = f"has {', '.join(item) or 'no fields'}"
            elif missing := [name for name in suite.fields if name not in item]:
                problem = f"lacks {', '.join(missing)}"
            else:
                problem = suite.problem(item)
            if problem:
                problems.append(f"line {number}: {problem}")
    if problems or suite is None:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(
            "evaluate.task-file-invalid",
            f"{path}: {'; '.join(problems[:5])}{more}",
            hint=f"a task has the fields {' or '.join(', '.join(suite.fields) for suite in suites)}",
        )
    return TaskFile(path.stem, suite, items)


def run_task(opened: OpenModel, tokenizer: Tokenizer, task: TaskFile, options: SuiteOptions) -> list[EvalScore]:
    """The task's scores over all items and by language or group."""
    if options.shots >= len(task.items):
        raise ConfigError(
            "evaluate.too-many-shots",
            f"{options.shots} examples before each question need more than the task's {len(task.items)} items",
            hint="lower --shots",
        )
    return task.suite.run(opened, tokenizer, task.name, task.items, options)
