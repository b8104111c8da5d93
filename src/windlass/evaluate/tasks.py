"""How well does the model do a task? Multiple choice, cloze and translation from a JSONL file of one's own; no network, no package but sacrebleu.

One object per line; the fields say the kind, `language` (or `group`) makes a row of the table:
  multiple choice  {"context": "...", "choices": ["...", "..."], "answer": 0}
  cloze            {"context": "...", "answer": "..."}
  translation      {"source": "...", "reference": "..."}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.generate import Sampling, generate
from windlass.evaluate.likelihood import likelihoods, pair
from windlass.evaluate.opened import Opened
from windlass.evaluate.record import RESAMPLES, Score, ratio_interval, read_utf8, wilson_interval

KINDS: dict[str, tuple[str, ...]] = {
    "multiple choice": ("context", "choices", "answer"),
    "translation": ("source", "reference"),
    "cloze": ("context", "answer"),
}
TEMPLATE = "{source}\n"
Item = dict[str, Any]
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Task:
    name: str
    kind: str
    items: list[Item]


def read_task(path: Path | str) -> Task:
    """The task of a file; every line that lacks something is named."""
    path = Path(path)
    items, problems = [], []
    for number, line in enumerate(read_utf8(path, "task file").split("\n"), start=1):
        if line.strip():
            item, problem = _read(line)
            items.append(item)
            problems += [f"line {number}: {problem}"] if problem else []
    if not items:
        raise DataError("evaluate.task-file-empty", f"the task file {path} is empty", hint="one JSON object per line")
    kind = "unknown" if problems else kind_of(items[0])
    problems += (
        [] if problems else [f"line {n}: {p}" for n, item in enumerate(items, start=1) if (p := problem_of(item, kind))]
    )
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(
            "evaluate.failed",
            f"{path}: {'; '.join(problems[:5])}{more}",
            hint=f"a task has the fields {' or '.join(', '.join(f) for f in KINDS.values())}",
        )
    return Task(path.stem, kind, items)


def _read(line: str) -> tuple[Item, str | None]:
    try:
        value = json.loads(line)
    except ValueError as error:
        return {}, f"not JSON ({error})"
    return (value, None) if isinstance(value, dict) else ({}, "not a JSON object")


def kind_of(item: Item) -> str:
    return next((kind for kind, fields in KINDS.items() if all(name in item for name in fields)), "unknown")


def problem_of(item: Item, kind: str) -> str | None:
    """What is wrong with one line, or None."""
    missing = [name for name in KINDS.get(kind, ()) if name not in item]
    if kind == "unknown":
        return f"has {', '.join(item) or 'no fields'}"
    if missing:
        return f"lacks {', '.join(missing)}"
    if kind == "multiple choice":
        choices, answer = item["choices"], item["answer"]
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            return "choices must be two or more texts"
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            return f"answer {answer!r} is not the number of one of {len(choices)} choices"
        return None
    wrong = [name for name in KINDS[kind] if not isinstance(item[name], str) or not item[name]]
    return f"{', '.join(wrong)} must be a text" if wrong else None


def run_task(
    opened: Opened,
    words: Tokenizer,
    task: Task,
    *,
    shots: int = 0,
    template: str = TEMPLATE,
    tokens: int = 64,
    batch: int | None = None,
    tell: Tell = lambda done, total: None,
) -> list[Score]:
    """The task's scores, over all lines and by language or group. `shots` solved examples come before each question."""
    if shots >= len(task.items):
        raise ConfigError(
            "evaluate.examples-before-each-question",
            f"{shots} examples before each question need more than the task's {len(task.items)} lines",
            hint="lower --shots",
        )
    if task.kind == "translation":
        return _translation(opened, words, task, shots, template, tokens, tell)
    return (_choice if task.kind == "multiple choice" else _cloze)(opened, words, task, shots, batch, tell)


def solved_text(task: Task, item: Item) -> str:
    """The words of an item as they would stand in a text that gives it away."""
    if task.kind == "translation":
        return str(item["source"]) + "\n" + str(item["reference"])
    answer = item["choices"][item["answer"]] if task.kind == "multiple choice" else item["answer"]
    return str(item["context"]) + str(answer)


def examples(items: Sequence[Item], number: int, shots: int, show: Callable[[Item], str]) -> str:
    """The next `shots` lines after this one, solved; never the line itself."""
    return "".join(show(items[(number + 1 + i) % len(items)]) + "\n\n" for i in range(shots))


def _ask(
    opened: Opened, words: Tokenizer, asked: list[tuple[str, str]], batch: int | None, tell: Tell
) -> tuple[list[tuple[float, bool]], int]:
    """Answers, and how many of the questions were longer than the model's sequences."""
    pairs = [pair(words, context, following) for context, following in asked]
    cut = sum(len(context) + len(following) > opened.recipe.data.seq_len + 1 for context, following in pairs)
    return likelihoods(opened, pairs, first=words.eos, batch=batch, tell=tell), cut


def _choice(opened: Opened, words: Tokenizer, task: Task, shots: int, batch: int | None, tell: Tell) -> list[Score]:
    def solved(item: Item) -> str:
        return item["context"] + item["choices"][item["answer"]]

    asked = [
        (examples(task.items, number, shots, solved) + item["context"], choice)
        for number, item in enumerate(task.items) for choice in item["choices"]
    ]  # fmt: skip
    (found, cut), place = _ask(opened, words, asked, batch, tell), 0
    plain, normed = [], []
    for item in task.items:
        nats = np.array([answer[0] for answer in found[place : place + len(item["choices"])]])
        sizes = np.array([len(choice.encode()) for choice in item["choices"]])
        plain.append(int(nats.argmax()) == item["answer"])
        normed.append(int((nats / sizes).argmax()) == item["answer"])
        place += len(item["choices"])
    return _shares(task, {"accuracy": plain, "accuracy_per_byte": normed}, {"shots": shots, "cut": cut})


def _cloze(opened: Opened, words: Tokenizer, task: Task, shots: int, batch: int | None, tell: Tell) -> list[Score]:
    asked = [
        (examples(task.items, n, shots, lambda i: i["context"] + i["answer"]) + item["context"], item["answer"])
        for n, item in enumerate(task.items)
    ]
    found, cut = _ask(opened, words, asked, batch, tell)
    how = {"shots": shots, "cut": cut}
    bits = np.array([-nats / np.log(2) for nats, _ in found])
    size = np.array([len(item["answer"].encode()) for item in task.items], dtype=np.float64)
    made = _shares(task, {"accuracy": [said for _, said in found]}, how)
    for group, inside in groups(task.items):
        low, high = ratio_interval(bits[inside], size[inside])
        value = float(bits[inside].sum() / size[inside].sum())
        made.append(_score(task, group, "bits_per_byte", value, low, high, len(inside), how))
    return made


def groups(items: Sequence[Item]) -> list[tuple[str, list[int]]]:
    """("all", every line), then one for each language or group that lines name."""
    found: dict[str, list[int]] = {"all": list(range(len(items)))}
    for number, item in enumerate(items):
        for key in ("language", "group"):
            if item.get(key):
                found.setdefault(f"{key} {item[key]}", []).append(number)
    return list(found.items())


def _score(
    task: Task,
    group: str,
    metric: str,
    value: float,
    low: float | None,
    high: float | None,
    count: int,
    how: Mapping[str, int],
) -> Score:
    return Score(
        task=task.name,
        group=group,
        metric=metric,
        value=value,
        low=low,
        high=high,
        count=count,
        detail={"kind": task.kind, **how},
    )


def _shares(task: Task, metrics: dict[str, list[bool]], how: Mapping[str, int]) -> list[Score]:
    made = []
    for group, inside in groups(task.items):
        for metric, right in metrics.items():
            count = sum(right[i] for i in inside)
            made.append(
                _score(task, group, metric, count / len(inside), *wilson_interval(count, len(inside)), len(inside), how)
            )
    return made


# -- translation ----------------------------------------------------------------------------------------------------------


def _translation(
    opened: Opened, words: Tokenizer, task: Task, shots: int, template: str, tokens: int, tell: Tell
) -> list[Score]:
    if "{source}" not in template:
        raise ConfigError(
            "evaluate.template-source",
            f"the template {template!r} has no {{source}}",
            hint='for example "Dutch: {source}\\nEnglish:"',
        )

    def shown(item: Item) -> str:
        return template.replace("{source}", item["source"])

    said, cut = [], 0
    for number, item in enumerate(task.items):
        prompt = words.encode(examples(task.items, number, shots, lambda i: shown(i) + i["reference"]) + shown(item))
        said.append(translate(opened, words, prompt, tokens))
        cut += len(prompt) > prompt_room(opened, tokens)
        tell(number + 1, len(task.items))
    return translation_scores(task, said, {"shots": shots, "cut": cut})


def prompt_room(opened: Opened, tokens: int) -> int:
    """Tokens of a prompt that fit before an answer; at least half of the model's sequence, however long the answer may be."""
    longest = opened.recipe.data.seq_len
    return max(longest - tokens, longest // 2, 1)


def translate(opened: Opened, words: Tokenizer, prompt: list[int], tokens: int) -> str:
    """The most probable continuation up to the end of the line."""
    made = generate(
        opened.model, prompt[-prompt_room(opened, tokens) :], Sampling(tokens=tokens, temperature=0), eos=words.eos,
        stop=lambda ids: "\n" in words.decode(ids).lstrip(),
    )  # fmt: skip
    lines = words.decode(made.ids).lstrip().splitlines()
    return lines[0].strip() if lines else ""


def translation_scores(task: Task, said: list[str], how: Mapping[str, int] | None = None) -> list[Score]:
    """BLEU and chrF of sacrebleu, with intervals over resampled sentences."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise ConfigError(
            "evaluate.translation-scores-need-package",
            "translation scores need the package sacrebleu",
            hint="pip install 'windlass[eval]'",
        ) from None
    made = []
    for group, inside in groups(task.items):
        for name, metric in (("bleu", BLEU(effective_order=False)), ("chrf", CHRF())):
            answers, right = [said[i] for i in inside], [task.items[i]["reference"] for i in inside]
            value = metric.corpus_score(answers, [right]).score
            made.append(_score(task, group, name, value, *_resampled(metric, answers, right), len(inside), how or {}))
    return made


def _resampled(metric: Any, said: list[str], right: list[str]) -> tuple[float | None, float | None]:
    if len(said) < 2:
        return None, None
    # One sentence's counts are computed once; a resample only adds them up.
    statistics = np.array(metric._extract_corpus_statistics(said, [right]))
    random = np.random.default_rng(0)
    values = [
        metric._aggregate_and_compute(statistics[random.integers(0, len(said), len(said))].tolist()).score
        for _ in range(RESAMPLES // 4)
    ]
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
