"""`windlass eval`: how good is a checkpoint, on which text and which tasks, and beside which others?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.words import AsJson, AtStep, Device, Dtype, Save, Which

if TYPE_CHECKING:
    from windlass.data.store import Store
    from windlass.evaluate.opened import Opened
    from windlass.evaluate.perplexity import Evaluation
    from windlass.evaluate.record import Score
    from windlass.evaluate.tasks import Task

Keep = Callable[..., None]
"""Writes scores down as soon as they are known."""

HeldOut = Annotated[
    Path | None, typer.Option("--store", help="Another token store of held-out text; the run's own when left out.")
]
Split = Annotated[str | None, typer.Option("--split", help="Split of the store; the recipe's, else `validation`.")]
MaxTokens = Annotated[
    str | None, typer.Option("--tokens", help='At most about so many tokens ("10M"), spread over the split.')
]
TaskFiles = Annotated[
    list[Path] | None,
    typer.Option("--task", help="JSONL file of a task (multiple choice, cloze, translation); may be repeated."),
]
Harness = Annotated[str | None, typer.Option("--harness", help="Tasks of lm-evaluation-harness, comma between them.")]
HarnessFolder = Annotated[
    Path | None,
    typer.Option("--harness-folder", help="Folder with the tasks' YAML files: nothing is looked up elsewhere."),
]
Shots = Annotated[int | None, typer.Option("--shots", min=0, help="Solved examples before each question.")]
Template = Annotated[str, typer.Option("--template", help="Translation: the prompt, with {source} in it.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Harness: at most so many questions of each task.")]
Overlap = Annotated[bool, typer.Option("--overlap", help="Also look for the evaluation texts in the training split.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Sequences per forward pass.")]
Html = Annotated[Path | None, typer.Option("--html", help="Also write a page with charts by group.")]
Recorded = Annotated[bool, typer.Option("--recorded", help="Compute nothing: show by language what eval.jsonl says.")]
Beside = Annotated[
    list[Path] | None, typer.Option("--beside", help="With --recorded: another run in the same table; repeatable.")
]
AllSteps = Annotated[
    bool,
    typer.Option("--all-steps", help="With --recorded: every checkpoint that was evaluated, not the newest alone."),
]


def register(app: typer.Typer) -> None:
    app.command("eval")(eval_)


@dataclass(frozen=True)
class Asked:
    """What to evaluate on, as it stands on the command line."""

    store: Path | None
    split: str | None
    max_tokens: int | None
    tasks: Sequence[Task]
    harness: Sequence[str]
    harness_folder: Path | None
    shots: int | None
    template: str
    limit: int | None
    batch: int | None
    overlap: bool
    quiet: bool


@dataclass(frozen=True)
class Found:
    """What came out: every number, what `--json` says around them, and what people see of it."""

    scores: list[Score]
    plain: dict[str, Any]
    shown: list[Any] = field(default_factory=list)


def eval_(
    run: Which, store: HeldOut = None, split: Split = None, max_tokens: MaxTokens = None, task: TaskFiles = None, harness: Harness = None,
    harness_folder: HarnessFolder = None, shots: Shots = None, template: Template = "{source}\n", limit: Limit = None, overlap: Overlap = False,
    batch: Batch = None, step: AtStep = None, device: Device = None, dtype: Dtype = None, html: Html = None, save: Save = True,
    recorded: Recorded = False, beside: Beside = None, all_steps: AllSteps = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Perplexity and bits per byte on held-out documents, by source, language and length; or tasks from files and the harness."""
    if recorded or beside or all_steps:
        _recorded([run, *(beside or [])], all_steps, html, as_json)
        return
    from windlass.evaluate.opened import open_model
    from windlass.evaluate.tasks import read_task
    from windlass.units import parse_tokens

    # What can be wrong with the words is found out first: a bad file costs no minute of loading a model.
    asked = Asked(
        store, split, parse_tokens(max_tokens) if max_tokens is not None else None, [read_task(path) for path in task or []],
        harness.split(",") if harness else [], harness_folder, shots, template, limit, batch, overlap, as_json,
    )  # fmt: skip
    opened = open_model(run, step=step, device=device, dtype=dtype)
    work = _tasks if asked.tasks or asked.harness else _held_out
    _tell(opened, work(opened, asked, _keeper(opened, save)), html, save, as_json)


def _keeper(opened: Opened, save: bool) -> Keep:
    from windlass.evaluate.record import append

    def keep(scores: list[Score], **more: Any) -> None:
        if save and opened.run is not None:
            append(opened.run, scores, step=opened.step, tokens=opened.tokens, **more)

    return keep


def _tell(opened: Opened, found: Found, html: Path | None, save: bool, as_json: bool) -> None:
    from windlass.cli.output import console, print_json
    from windlass.evaluate.picture import page_of
    from windlass.files import write_atomic

    if html is not None:
        write_atomic(html, page_of(opened.recipe.name, opened.step, found.scores))
    if as_json:
        about = {
            "source": opened.source,
            "step": opened.step,
            "trained_tokens": opened.tokens,
            "device": opened.where,
            "note": opened.note,
        }
        print_json({**about, **found.plain, "scores": [score.line() for score in found.scores]})
        return
    out = console()
    for part in [*([opened.note] if opened.note else []), *found.shown]:
        out.print(part, markup=False)
    if save and opened.run is not None:
        out.print(f"written to {opened.run.eval_file}", markup=False, soft_wrap=True)


# -- held-out text --------------------------------------------------------------------------------------------------------


def _held_out(opened: Opened, asked: Asked, keep: Keep) -> Found:
    """Scores of the held-out documents, and of their overlap with the training split where that was asked for."""
    from windlass.cli.output import bar
    from windlass.evaluate.opened import find_store, find_tokenizer
    from windlass.evaluate.perplexity import evaluate

    held = find_store(opened, asked.store)
    words = find_tokenizer(opened, held.tokenizer_file)
    split = asked.split or opened.recipe.data.validation or "validation"
    with bar("evaluating", quiet=asked.quiet) as tell:
        made = evaluate(
            opened, held, words, split=split, max_tokens=asked.max_tokens, batch=asked.batch, tell=tell
        )  # fmt: skip
    keep(made.scores, store=str(held.path))
    shown, found = _text_tables(opened, made), []
    if asked.overlap:
        found = _text_overlap(opened, held, split, asked)
        keep(found, store=str(held.path))
        shown.append(score_table(found))
    plain = {"store": held.path, "tokens": made.tokens, "tokens_per_second": made.tokens_per_second}
    return Found([*made.scores, *found], plain, shown)


def _text_overlap(opened: Opened, held: Store, split: str, asked: Asked) -> list[Score]:
    from windlass.evaluate.perplexity import choose

    items: list[Any] = []
    groups: dict[str, list[int]] = {}
    for source, spans in choose(held, split, asked.max_tokens):
        groups[f"source {source}"] = list(range(len(items), len(items) + len(spans)))
        items += [held.tokens(source, split)[start:stop] for start, stop in spans]
    return _overlap(opened, "overlap", items, groups, asked.quiet)


def _overlap(
    opened: Opened, task: str, items: list[Any], groups: dict[str, list[int]], quiet: bool
) -> list[Score]:  # fmt: skip
    from windlass.cli.output import bar
    from windlass.evaluate.opened import own_store
    from windlass.evaluate.overlap import find_overlap

    with bar("looking for overlap", quiet=quiet) as tell:
        found = find_overlap(own_store(opened), items, tell=tell)
    whole = {"all": list(range(len(items)))} | groups
    return [found.score(task, group, inside) for group, inside in whole.items()]


def _text_tables(opened: Opened, made: Evaluation) -> list[Any]:
    from windlass.cli.output import table

    bits = {s.group: s for s in made.scores if s.metric == "bits_per_byte"}
    rows = [
        (s.group, f"{s.count:,}", f"{s.detail['tokens']:,}", _with_interval(bits.get(s.group), 3), _with_interval(s, 2))
        for s in made.scores if s.metric == "perplexity"
    ]  # fmt: skip
    step = "" if opened.step is None else f", step {opened.step:,}"
    columns = ("group", "documents", "tokens", "bits per byte (95 %)", "perplexity (95 %)")
    rate = "unknown" if made.tokens_per_second is None else f"{made.tokens_per_second:,.0f}"
    return [
        table(f"Held-out text{step} ({opened.source})", columns, rows, right=(1, 2, 3, 4)),
        f"{made.tokens:,} tokens at {rate} tokens/s ({opened.where})",
    ]


# -- tasks ----------------------------------------------------------------------------------------------------------------


def _tasks(opened: Opened, asked: Asked, keep: Keep) -> Found:
    """Each task's scores are kept as soon as it is done: stopping in the next one loses nothing."""
    from windlass.evaluate.opened import find_tokenizer

    words, scores = find_tokenizer(opened), []
    for task in asked.tasks:
        scores += _kept(keep, _one_task(opened, words, task, asked))
    if asked.harness:
        from windlass.evaluate.harness import run_harness

        scores += _kept(
            keep,
            run_harness(
                opened, words, asked.harness, folder=asked.harness_folder, shots=asked.shots, limit=asked.limit, batch=asked.batch
            ),
        )  # fmt: skip
    return Found(scores, {}, [score_table(scores), *_cut_notes(opened, scores), *_language_table(opened, scores)])


def _kept(keep: Keep, scores: list[Score]) -> list[Score]:
    keep(scores)
    return scores


def _one_task(opened: Opened, words: Any, task: Task, asked: Asked) -> list[Score]:
    from windlass.cli.output import bar
    from windlass.evaluate.tasks import groups, run_task, solved_text

    with bar(task.name, quiet=asked.quiet) as tell:
        scores: list[Score] = run_task(
            opened, words, task, shots=asked.shots or 0, template=asked.template, batch=asked.batch, tell=tell
        )
    if asked.overlap:
        import numpy as np

        texts = [np.array(words.encode(solved_text(task, item))) for item in task.items]
        scores += _overlap(opened, task.name, texts, dict(groups(task.items)), asked.quiet)
    return scores


def score_table(scores: Sequence[Score]) -> Any:
    from windlass.cli.output import table

    rows = [(s.task, s.group, s.metric, _with_interval(s, 3), f"{s.count:,}") for s in scores]
    return table("Tasks", ("task", "group", "metric", "value (95 %)", "items"), rows, right=(3, 4))


def _cut_notes(opened: Opened, scores: Sequence[Score]) -> list[str]:
    """A context that was too long lost its beginning: the number behind it is of another question."""
    cut = {s.task: s.detail["cut"] for s in scores if s.group == "all" and s.detail.get("cut")}
    longest = opened.recipe.data.seq_len
    return [
        f"{task}: {count:,} prompt(s) are longer than {longest:,} tokens and lost their beginning"
        for task, count in cut.items()
    ]


def _with_interval(score: Score | None, digits: int) -> str:
    if score is None or score.value is None:
        return "unknown"
    interval = "" if score.low is None else f" ({score.low:.{digits}f} to {score.high:.{digits}f})"
    return f"{score.value:.{digits}f}{interval}"


# -- by language ----------------------------------------------------------------------------------------------------------


def _recorded(runs: list[Path], every: bool, html: Path | None, as_json: bool) -> None:
    """Models beside each other, language by language."""
    from windlass.cli.output import console, print_json
    from windlass.evaluate.by_language import page_of
    from windlass.evaluate.by_language import recorded as read
    from windlass.files import write_atomic

    rows = read(runs, every=every)
    if html is not None:
        write_atomic(html, page_of(rows))
    if as_json:
        print_json({"rows": [row.plain() for row in rows]})
        return
    console().print(_by_language(rows))


def _language_table(opened: Opened, scores: list[Score]) -> list[Any]:
    """Only where there is more than one language to set beside another."""
    from windlass.evaluate.by_language import languages, of_scores

    rows = of_scores(opened.recipe.name, opened.step, scores)
    return [_by_language(rows)] if len(languages(rows)) > 1 else []


def _by_language(rows: list[Any]) -> Any:
    from windlass.cli.output import table
    from windlass.evaluate.by_language import table_of

    columns, cells = table_of(rows)
    return table("By language (± half of the 95 % interval)", columns, cells, right=tuple(range(3, len(columns))))
