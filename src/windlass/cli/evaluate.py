"""`windlass eval`: perplexity on held-out text, tasks, and models compared by language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from windlass.cli.options import JsonOption, ModelChoice, SaveOption, option_groups
from windlass.cli.output import bar, show, table, text_of, working
from windlass.errors import ConfigError, interrupt_exit_code
from windlass.files import append_line, write_atomic
from windlass.units import parse_tokens

if TYPE_CHECKING:
    from windlass.evaluate.open_model import OpenModel
    from windlass.evaluate.scores import LanguageRow
    from windlass.evaluate.suites import SuiteOptions
    from windlass.evaluate.task_files import TaskFile
    from windlass.runs.scores import EvalScore

    Keep = Callable[..., None]


@dataclass(frozen=True)
class HeldOutOptions:
    store: Annotated[
        Path | None, typer.Option("--store", help="Token store of held-out text (default: the run's own).")
    ] = None
    split: Annotated[
        str | None, typer.Option("--split", help="Split of the store (default: the recipe's, else `validation`).")
    ] = None
    max_tokens: Annotated[
        str | None, typer.Option("--tokens", help='Approximate maximum number of tokens ("10M"), over the whole split.')
    ] = None


@dataclass(frozen=True)
class TaskOptions:
    task: Annotated[
        list[Path] | None,
        typer.Option("--task", help="JSONL file of a task (repeatable); its fields determine the suite."),
    ] = None
    harness: Annotated[str | None, typer.Option("--harness", help="Comma-separated lm-evaluation-harness tasks.")] = (
        None
    )
    harness_folder: Annotated[
        Path | None,
        typer.Option("--harness-folder", help="Folder of task YAML files; tasks are read only from this folder."),
    ] = None
    shots: Annotated[int | None, typer.Option("--shots", min=0, help="Solved examples before each question.")] = None
    template: Annotated[
        str | None,
        typer.Option(
            "--template", help="Prompt template of a generation task, with {source} or other fields of the task."
        ),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Use the tokenizer's chat template for generation and harness tasks.")
    ] = False
    engine: Annotated[str, typer.Option("--engine", help="Generate with windlass's own decoder or with vllm.")] = (
        "windlass"
    )
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Code tasks: run the code that the model writes, in a sandbox.")
    ] = False
    weak_sandbox: Annotated[
        bool,
        typer.Option(
            "--weak-sandbox", help="With --run-code: run the code even if the kernel cannot isolate it fully."
        ),
    ] = False
    answers: Annotated[
        Path | None, typer.Option("--answers", help="Append prompts and generated answers to this JSONL file.")
    ] = None
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Harness: maximum number of questions per task.")
    ] = None


@dataclass(frozen=True)
class RecordedOptions:
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Compute nothing: show the scores in eval.jsonl by language.")
    ] = False
    beside: Annotated[
        list[Path] | None,
        typer.Option("--compare-with", "--beside", help="With --recorded: add another run to the table (repeatable)."),
    ] = None
    all_steps: Annotated[
        bool, typer.Option("--all-steps", help="With --recorded: show every evaluated checkpoint, not only the newest.")
    ] = False


@option_groups
def eval_(
    model: ModelChoice,
    text: HeldOutOptions,
    tasks: TaskOptions,
    recorded: RecordedOptions,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Also search the training split for the evaluation texts.")
    ] = False,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences per forward pass.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with charts by group.")] = None,
    save: SaveOption = True,
    as_json: JsonOption = False,
) -> None:
    """Compute perplexity and bits per byte on held-out documents, by source, language and length; or run tasks."""
    from windlass.evaluate import scores as scoring
    from windlass.runs.scores import append_scores

    if recorded.recorded or recorded.beside or recorded.all_steps:
        rows = scoring.recorded_rows([model.run, *(recorded.beside or [])], every_step=recorded.all_steps)
        if html is not None:
            write_atomic(html, scoring.language_page(rows))
        show(as_json, {"rows": [row.to_json() for row in rows]}, _language_table(rows))
        return
    with working("importing torch", quiet=as_json):  # which recorded scores do not need
        from windlass.evaluate import open_model

    # What can be wrong with the arguments is checked first: a bad file must not cost a model load.
    limit_tokens = parse_tokens(text.max_tokens) if text.max_tokens is not None else None
    chosen = _read_tasks(tasks, batch)
    own_engine = tasks.engine == "windlass"
    with working(f"loading the weights of {model.run}", quiet=as_json):
        opened = open_model.open_model(
            model.run, step=model.step, device=model.device, dtype=model.dtype, weights=own_engine
        )
    source, scores = opened.source, list["EvalScore"]()

    def keep(new_scores: list[EvalScore], **more: Any) -> None:
        """Write scores down as soon as they exist: stopping in the next task loses nothing."""
        scores.extend(new_scores)
        if save and source.run is not None:
            append_scores(source.run, new_scores, step=opened.step, tokens=opened.tokens, **more)

    answer: dict[str, Any] = {}
    stopped: KeyboardInterrupt | None = None
    if chosen or tasks.harness:
        unfinished, stopped = _run_tasks(opened, chosen, tasks, batch, overlap, keep, quiet=as_json)
        answer = {"unfinished": unfinished} if unfinished else {}
        cut = {score.task: score.detail["cut"] for score in scores if score.group == "all" and score.detail.get("cut")}
        language_rows = scoring.language_rows(opened.recipe.name, [score.line(step=opened.step) for score in scores])
        printed = [
            score_table(scores),
            *(
                f"{name}: {count:,} prompt(s) are longer than {opened.max_length:,} tokens and were truncated at the start"
                for name, count in cut.items()
            ),
            _language_table(language_rows) if len(scoring.languages(language_rows)) > 1 else None,
            f"stopped: no scores of {', '.join(unfinished)}" if unfinished else None,
        ]
    else:
        split = text.split or opened.recipe.data.validation or "validation"
        answer, printed = _held_out(opened, text.store, split, limit_tokens, batch, overlap, keep, quiet=as_json)
    if html is not None:
        write_atomic(html, scoring.scores_page(opened.recipe.name, opened.step, scores))
    about = {"source": source.folder, "step": opened.step, "trained_tokens": opened.tokens, "note": source.note}
    document = {**about, "device": opened.device_text, **answer, "scores": [score.line() for score in scores]}
    written = f"written to {source.run.eval_file}" if save and source.run is not None and scores else None
    show(as_json, document, source.note or None, *printed, written)
    if stopped is not None:
        raise typer.Exit(interrupt_exit_code(stopped))


def _read_tasks(tasks: TaskOptions, batch: int | None) -> list[tuple[TaskFile, SuiteOptions]]:
    """Task files and how they are asked; refused here if the options cannot work."""
    from windlass.evaluate import task_files

    engines = ("windlass", "vllm")
    if tasks.engine not in engines:
        raise ConfigError(
            "evaluate.engine-unknown", f"there is no engine {tasks.engine!r}", hint=f"use {' or '.join(engines)}"
        )
    chosen = []
    for path in tasks.task or []:
        task = task_files.read_task_file(path)
        options = task.options(
            shots=tasks.shots,
            template=tasks.template,
            chat=tasks.chat,
            run_code=tasks.run_code,
            weak_sandbox=tasks.weak_sandbox,
            batch=batch,
        )
        task_files.check_task(task, options)
        chosen.append((task, options))
    needs_weights = [task.name for task, _ in chosen if not getattr(task.suite, "generates", False)]
    needs_weights += tasks.harness.split(",") if tasks.harness else []
    if tasks.engine != "windlass" and (needs_weights or not chosen):
        raise ConfigError(
            "evaluate.engine-cannot-score",
            f"{tasks.engine} only generates, and {', '.join(needs_weights) or 'held-out text'} needs the probabilities "
            "of given texts or the harness",
            hint="omit --engine",
        )
    return chosen


def _run_tasks(
    opened: OpenModel,
    chosen: Sequence[tuple[TaskFile, SuiteOptions]],
    tasks: TaskOptions,
    batch: int | None,
    overlap: bool,
    keep: Keep,
    *,
    quiet: bool,
) -> tuple[list[str], KeyboardInterrupt | None]:
    """Run tasks one after another; the names of those that Ctrl-C or SIGTERM left without scores."""
    from windlass.convert.source import find_tokenizer
    from windlass.data.chat import load_chat_template
    from windlass.evaluate import task_files
    from windlass.evaluate.answers import VllmEngine
    from windlass.evaluate.harness import run_harness

    engine = VllmEngine(opened) if tasks.engine == "vllm" else None
    tokenizer = find_tokenizer(opened.source)
    if tasks.chat:
        load_chat_template(tokenizer)  # refused now, and not in the middle of the tasks
    names = tasks.harness.split(",") if tasks.harness else []
    unfinished = [task.name for task, _ in chosen] + names

    def keep_answers(name: str, rows: list[dict[str, Any]]) -> None:
        if tasks.answers is not None:
            for row in rows:
                append_line(tasks.answers, {"task": name, **row})

    try:
        for task, options in chosen:
            with bar(task.name, quiet=quiet) as progress:
                more = {"engine": engine, "progress": progress, "keep_answers": partial(keep_answers, task.name)}
                scores = task_files.run_task(opened, tokenizer, task, options.model_copy(update=more))
            if overlap:
                with bar("looking for overlap", quiet=quiet) as progress:
                    scores += task_files.task_overlap(opened.source, tokenizer, task, progress)
            keep(scores)
            unfinished.remove(task.name)
        if not names:
            return [], None
        with bar("harness", quiet=quiet) as progress:
            harness: dict[str, Any] = {
                "folder": tasks.harness_folder,
                "shots": tasks.shots,
                "limit": tasks.limit,
                "chat": tasks.chat,
            }
            parts = run_harness(opened, tokenizer, names, batch=batch, progress=progress, **harness)
            for name, scores in zip(names, parts, strict=True):
                keep(scores)
                unfinished.remove(name)
    except KeyboardInterrupt as error:
        return unfinished, error
    return [], None


def _held_out(
    opened: OpenModel,
    store: Path | None,
    split: str,
    max_tokens: int | None,
    batch: int | None,
    overlap: bool,
    keep: Keep,
    *,
    quiet: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """Score held-out documents: what `--json` adds, and what is printed."""
    from windlass.convert.source import find_tokenizer
    from windlass.evaluate import open_model, perplexity, task_files

    held_out = open_model.find_store(opened, store)
    tokenizer = find_tokenizer(opened.source, held_out.tokenizer_file)
    with bar("evaluating", quiet=quiet) as progress:
        result = perplexity.evaluate_text(
            opened, held_out, tokenizer, split=split, max_tokens=max_tokens, batch=batch, progress=progress
        )
    keep(result.scores, store=str(held_out.path))
    bits = {score.group: score for score in result.scores if score.metric == "bits_per_byte"}
    rows = [
        (s.group, f"{s.count:,}", f"{s.detail['tokens']:,}", _interval_text(bits.get(s.group), 3), _interval_text(s, 2))
        for s in result.scores
        if s.metric == "perplexity"
    ]
    at_step = "" if opened.step is None else f", step {opened.step:,}"
    columns = ("group", "documents", "tokens", "bits per byte (95 %)", "perplexity (95 %)")
    rate = text_of(result.tokens_per_second, ",.0f", "not measured")
    printed: list[Any] = [
        table(f"Held-out text{at_step} ({opened.source.folder})", columns, rows, right=(1, 2, 3, 4)),
        f"{result.tokens:,} tokens at {rate} tokens/s ({opened.device_text})",
    ]
    if overlap:
        with bar("looking for overlap", quiet=quiet) as progress:
            scores = task_files.document_overlap(opened.source, held_out, split, max_tokens, progress)
        keep(scores, store=str(held_out.path))
        printed.append(score_table(scores))
    numbers = {"tokens": result.tokens, "tokens_per_second": result.tokens_per_second}
    return {"store": held_out.path, **numbers}, printed


def score_table(scores: Sequence[EvalScore]) -> Table:
    rows = [(s.task, s.group, s.metric, _interval_text(s, 3), f"{s.count:,}") for s in scores]
    return table("Tasks", ("task", "group", "metric", "value (95 %)", "items"), rows, right=(3, 4))


def _interval_text(score: EvalScore | None, digits: int) -> str:
    if score is None or score.value is None:
        return "unknown"
    interval = "" if score.low is None else f" ({score.low:.{digits}f} to {score.high:.{digits}f})"
    return f"{score.value:.{digits}f}{interval}"


def _language_table(rows: list[LanguageRow]) -> Table:
    from windlass.evaluate.scores import language_table

    columns, cells = language_table(rows)
    return table("By language (± half of the 95 % interval)", columns, cells, right=tuple(range(3, len(columns))))
