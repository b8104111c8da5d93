"""Instruction following: {"prompt": "...", "checks": {"words": {"at_most": 50}, "contains": "harbour"}}.

What an answer must be is data that a program can verify; no other model judges it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from windlass.data.tokenizer import Tokenizer
from windlass.evaluate.answers import PromptForm, generate_answers
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.scores import ratio_score
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups, text_list
from windlass.evaluate.text_metrics import is_language, languages, words_of
from windlass.runs.scores import EvalScore, share_score

FORM = PromptForm(template="{prompt}\n", field="prompt", solution=lambda item: item.get("answer", ""), max_tokens=256)


class Range(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    at_least: int = Field(0, ge=0)
    at_most: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if self.at_most is None and self.at_least == 0:
            raise ValueError("needs at_least or at_most")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(f"at_most {self.at_most} is below at_least {self.at_least}")
        return self


def _known_language(name: str) -> str:
    if name not in languages():
        raise ValueError(f"language {name!r} cannot be recognised; these can: {', '.join(languages())}")
    return name


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _exactly(value: Any) -> Any:
    return {"at_least": value, "at_most": value} if isinstance(value, int) else value


Amount = Annotated[Range, BeforeValidator(_exactly)]  # a number means exactly so many
Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1)]


class Checks(BaseModel):
    """One or more of these. Texts are compared without regard to case, except by `matches`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    words: Amount | None = None
    sentences: Amount | None = None
    lines: Amount | None = None  # that are not empty
    paragraphs: Amount | None = None  # separated by an empty line
    bullets: Amount | None = None  # lines that begin with -, *, • or a number
    characters: Amount | None = None
    contains: Texts | None = None  # all of them
    excludes: Texts | None = None  # none of them
    begins_with: Text | None = None
    ends_with: Text | None = None
    matches: Annotated[Text, AfterValidator(_pattern)] | None = None  # a regular expression, found anywhere
    case: Literal["lower", "upper"] | None = None
    language: Annotated[str, AfterValidator(_known_language)] | None = None
    # A JSON document, alone or in a fenced block; true, or the keys that its object must have.
    is_json: Literal[True] | Annotated[list[Text], Field(min_length=1)] | None = Field(None, alias="json")

    @model_validator(mode="after")
    def _check(self) -> "Checks":
        if not self.model_fields_set:
            raise ValueError("needs at least one check")
        return self


COUNTS: dict[str, Callable[[str], int]] = {
    "words": lambda text: len(words_of(text)),
    "sentences": lambda text: len(re.findall(r"[^.!?…。！？\s][^.!?…。！？]*(?:[.!?…。！？]+|$)", text)),
    "lines": lambda text: sum(bool(line.strip()) for line in text.splitlines()),
    "paragraphs": lambda text: sum(bool(part.strip()) for part in re.split(r"\n\s*\n", text)),
    "bullets": lambda text: len(re.findall(r"^\s*(?:[-*•]|\d+[.)])\s+\S", text, re.M)),
    "characters": len,
}


def follows(text: str, checks: Checks) -> dict[str, bool]:
    """Whether a text holds each check that is set, by name. An empty answer holds none."""
    results: dict[str, bool] = {}
    folded = text.casefold()
    for name in checks.model_fields_set:
        value = getattr(checks, name)
        if value is None:
            continue
        if name in COUNTS:
            count = COUNTS[name](text)
            results[name] = value.at_least <= count and (value.at_most is None or count <= value.at_most)
        elif name in ("contains", "excludes"):
            hits = [part.casefold() in folded for part in text_list(value)]
            results[name] = all(hits) if name == "contains" else not any(hits)
        elif name in ("begins_with", "ends_with"):
            results[name] = getattr(folded, name.replace("begins", "starts").replace("_", ""))(value.casefold())
        elif name == "matches":
            results[name] = re.search(value, text) is not None
        elif name == "case":
            results[name] = text == (text.lower() if value == "lower" else text.upper())
        elif name == "language":
            results[name] = is_language(text, value)
        else:
            results["json"] = _is_json(text, [] if value is True else value)
    return results if text.strip() else dict.fromkeys(results, False)


def _is_json(text: str, keys: list[str]) -> bool:
    fenced = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.S)
    try:
        value: Any = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return not keys or (isinstance(value, dict) and value.keys() >= set(keys))


class Instructions(Suite):
    kind = "instructions"
    fields = ("prompt", "checks")
    generates = True

    @classmethod
    def problem(cls, item: Item) -> str | None:
        if not isinstance(item["prompt"], str) or not item["prompt"]:
            return "prompt must be a text"
        try:
            Checks.model_validate(item["checks"])
        except ValidationError as error:
            first = error.errors()[0]
            return f"checks: {'.'.join(map(str, first['loc']))} {first['msg']}"
        return None

    @staticmethod
    def solved_text(item: Item) -> str:
        return str(item["prompt"])

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        """Share of prompts whose checks all hold, and share of checks that hold."""
        answers = generate_answers(opened, tokenizer, items, options, FORM)
        results = [
            follows(text, Checks.model_validate(item["checks"]))
            for (text,), item in zip(answers.texts, items, strict=True)
        ]
        held = np.array([sum(result.values()) for result in results], dtype=np.float64)
        total = np.array([len(result) for result in results], dtype=np.float64)
        scores = []
        for group, inside in groups(items).items():
            set_here = Counter(name for i in inside for name in results[i])
            held_here = Counter(name for i in inside for name, holds in results[i].items() if holds)
            by_check = {name: f"{held_here[name]} of {count}" for name, count in sorted(set_here.items())}
            detail = {"kind": Instructions.kind, **answers.detail, "by_check": by_check}
            hits = sum(all(results[i].values()) for i in inside)
            scores.append(share_score(task, group, "prompts_followed", hits, len(inside), detail))
            scores.append(ratio_score(task, group, "checks_followed", held[inside], total[inside], detail))
        return scores
