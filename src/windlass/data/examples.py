"""Files of labelled examples for fine-tuning: TSV, CSV, JSON lines, and CoNLL for tags. No torch."""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windlass.config.tune import TuneConfig
from windlass.errors import DataError
from windlass.files import parse_json, read_text_file

VALIDATION_SHARE = 0.1  # of the training examples where no validation file is named
MAX_NAMED = 5  # lines or labels that a message names


@dataclass(frozen=True)
class Example:
    """`label`: a name (classify), names (multi_label), a number (regress), or a tag of each word (tag)."""

    text: str | tuple[str, ...]  # for tag the words
    label: Any
    pair: str | None = None


@dataclass(frozen=True)
class ExampleSets:
    labels: list[str]  # empty for regress
    train: list[Example]
    validation: list[Example]
    test: list[Example]


def read_example_sets(tune: TuneConfig) -> ExampleSets:
    """All files of a `[tune]` table, checked against each other."""
    if tune.train is None:
        raise DataError("tune.no-examples", "tune.train names no file of examples", hint="set tune.train")
    train = read_examples(Path(tune.train), tune)
    labels = list(tune.labels) or sorted({name for example in train for name in label_names(example)})
    if tune.task != "regress" and len(labels) < 2:
        raise DataError(
            "tune.one-label-only",
            f"{tune.train}: all {len(train):,} training examples have the label {labels[0] if labels else 'none'!r}",
            hint="add examples with a second label",
        )
    if tune.validation is None and len(train) < 2:
        raise DataError(
            "tune.no-examples", f"{tune.train} has 1 example: none is left for training", hint="add more examples"
        )
    if tune.validation is not None:
        validation = read_examples(Path(tune.validation), tune)
    else:  # the same examples for every seed and every number of processes
        order = np.random.default_rng(0).permutation(len(train)).tolist()
        cut = max(1, round(len(train) * VALIDATION_SHARE))
        validation, train = [train[i] for i in sorted(order[:cut])], [train[i] for i in sorted(order[cut:])]
    test = read_examples(Path(tune.test), tune) if tune.test is not None else []
    parts = (("training", tune.train, train), ("validation", tune.validation, validation), ("test", tune.test, test))
    for part, file, examples in parts if tune.task != "regress" else ():
        counts = Counter(name for example in examples for name in label_names(example) if name not in set(labels))
        if counts:
            listed = ", ".join(f"{name!r} ({count:,})" for name, count in counts.most_common(MAX_NAMED))
            raise DataError(
                "tune.labels-unknown",
                f"{file or tune.train}: {sum(counts.values()):,} labels of the {part} examples are not among the "
                f"{len(labels)} of the training examples: {listed}",
                hint="check that the files belong to one task, or list all labels in tune.labels",
            )
    return ExampleSets([] if tune.task == "regress" else labels, train, validation, test)


def label_names(example: Example) -> Sequence[str]:
    if isinstance(example.label, float):
        return ()
    return (example.label,) if isinstance(example.label, str) else example.label


def read_examples(path: Path, tune: TuneConfig) -> list[Example]:
    """Every example of a file; one DataError that counts and names the lines which are not examples."""
    text = read_text_file(path, "file of examples")
    examples, bad = list[Example](), list[tuple[int, str]]()
    for number, row in read_rows(path, text, tune):
        try:
            example = read_example(row, tune)
            "".join(as_list(example.text) + as_list(example.label) + as_list(example.pair)).encode()
            examples.append(example)
        except UnicodeEncodeError:
            bad.append((number, "a lone surrogate, which is not Unicode text"))
        except ValueError as error:
            bad.append((number, str(error)))
    if bad:
        listed = "; ".join(f"line {number}: {reason}" for number, reason in bad[:MAX_NAMED])
        raise DataError(
            "tune.bad-examples",
            f"{path}: {len(bad):,} of {len(bad) + len(examples):,} lines are not examples of task {tune.task!r} ({listed})",
            hint="set tune.text, tune.pair and tune.label to the names of the columns",
        )
    if not examples:
        raise DataError("tune.no-examples", f"{path} contains no examples", hint="write one example per line")
    return examples


def read_rows(path: Path, text: str, tune: TuneConfig) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and columns of each example."""
    suffixes = path.suffixes
    lines_of_text = text.split("\n")  # not splitlines: it also ends a line at U+2028 and others inside a text
    if ".json" in suffixes and text.lstrip()[:1] == "[":  # one list of all examples
        try:
            rows = parse_json(text.encode())
        except ValueError:
            rows = [None]
        yield from ((number, row if isinstance(row, dict) else {}) for number, row in enumerate(rows, 1))
        return
    if ".jsonl" in suffixes or ".json" in suffixes or text.lstrip()[:1] == "{":
        for number, line in enumerate(lines_of_text, 1):
            if line.strip():
                try:
                    row = parse_json(line.encode())
                except ValueError:
                    row = None
                yield number, row if isinstance(row, dict) else {}
        return
    if tune.task == "tag":
        yield from read_conll(text)
        return
    if ".csv" in suffixes:
        csv.field_size_limit(len(text) + 1)  # by default a text of 131,072 characters is an error
        reader = csv.reader(io.StringIO(text))
        lines = [(reader.line_num, row) for row in reader if row]
    else:  # a quote in TSV is a character like any other
        lines = [(number, line.split("\t")) for number, line in enumerate(lines_of_text, 1) if line.strip()]
    header = [name.strip().lower() for name in lines[0][1]] if lines else []
    if tune.text.lower() in header and {tune.label.lower(), "target"} & set(header):
        lines = lines[1:]
        own = {name.lower(): name for name in (tune.text, tune.pair, tune.label) if name}
        header = [own.get(name, name) for name in header]
    else:  # without names: the texts first, the label last
        header = [tune.text, *([tune.pair] if tune.pair else []), tune.label]
    for number, row in lines:
        yield number, dict(zip(header, row, strict=False))


def read_conll(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """A word and its tag per line (first and last column), an empty line between sentences."""
    words, tags, first = list[str](), list[str](), 1
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fields = line.split("\t") if "\t" in line.strip() else line.split()
        if fields and not line.startswith("-DOCSTART-"):
            first = first if words else number
            words.append(fields[0])
            tags.append(fields[-1] if len(fields) > 1 else "")
        elif words:
            yield first, {"words": words, "tags": tags}
            words, tags = [], []


def read_example(row: Mapping[str, Any], tune: TuneConfig) -> Example:
    """ValueError says what is missing."""
    text = first_of(row, tune.text, "words", "tokens") if tune.task == "tag" else first_of(row, tune.text)
    label = first_of(row, tune.label, "tags", "ner_tags") if tune.task == "tag" else first_of(row, tune.label, "target")
    if tune.task == "tag":
        words, tags = as_list(text), as_list(label)
        if isinstance(label, list) and any(isinstance(tag, int) for tag in label):
            raise ValueError(f"the tags are numbers ({tags[0]}): write their names (O, B-PER, I-PER)")
        if not words or len(words) != len(tags) or not all(tags):
            raise ValueError(f"{len(words)} words and {sum(map(bool, tags))} tags")
        return Example(tuple(words), tuple(tags))
    pair = first_of(row, tune.pair) if tune.pair is not None else None
    if not isinstance(text, str) or not text.strip() or (tune.pair is not None and not isinstance(pair, str)):
        raise ValueError("no text")
    if label is None or (isinstance(label, str) and not label.strip() and tune.task != "multi_label"):
        raise ValueError("no label")
    if tune.task == "multi_label":
        names = as_list(label, separator=",")
        return Example(text, tuple(dict.fromkeys(name.strip() for name in names if name.strip())), pair)
    if tune.task == "regress":
        value = float(label) if isinstance(label, (str, int, float)) and not isinstance(label, bool) else math.nan
        if not math.isfinite(value):
            raise ValueError(f"the label {label!r} is not a number")
        return Example(text, value, pair)
    return Example(text, str(label).strip(), pair)


def first_of(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if name in row), None)


def as_list(value: Any, separator: str | None = None) -> list[str]:
    """A JSON list, or a text whose parts are separated."""
    if isinstance(value, (list, tuple)):
        return [str(part) for part in value]
    return [] if value is None else str(value).split(separator)
