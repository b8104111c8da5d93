"""`windlass eval`, `generate`, `export`, `import`: from a checkpoint to a model that others can use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.evaluate.opened import Opened
    from windlass.evaluate.perplexity import Evaluation

Which = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (or a Hugging Face folder).")]
AtStep = Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint of this step; the newest when left out.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1; a GPU when there is one.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="fp32 or bf16; as the run computed on a GPU, fp32 on a CPU.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command("eval")(eval_)
    app.command("generate")(generate)
    app.command("export")(export)
    app.command("import")(import_)
    app.command("finetune")(finetune)


def eval_(
    run: Which,
    store: Annotated[
        Path | None, typer.Option("--store", help="Another token store of held-out text; the run's own when left out.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Split of the store; the recipe's, else `validation`.")
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option("--tokens", help='At most about so many tokens ("10M"), spread over the split.')
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option("--task", help="JSONL file of a task (multiple choice, cloze, translation); may be repeated."),
    ] = None,
    harness: Annotated[
        str | None, typer.Option("--harness", help="Tasks of lm-evaluation-harness, comma between them.")
    ] = None,
    harness_folder: Annotated[
        Path | None,
        typer.Option("--harness-folder", help="Folder with the tasks' YAML files: nothing is looked up elsewhere."),
    ] = None,
    shots: Annotated[int | None, typer.Option("--shots", min=0, help="Solved examples before each question.")] = None,
    template: Annotated[
        str, typer.Option("--template", help="Translation: the prompt, with {source} in it.")
    ] = "{source}\n",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Harness: at most so many questions of each task.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Also look for the evaluation texts in the training split.")
    ] = False,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences per forward pass.")] = None,
    step: AtStep = None,
    device: Device = None,
    dtype: Dtype = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with charts by group.")] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Append the results to the run's eval.jsonl.")] = True,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Compute nothing: show by language what eval.jsonl says.")
    ] = False,
    beside: Annotated[
        list[Path] | None, typer.Option("--beside", help="With --recorded: another run in the same table; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity and bits per byte on held-out documents, by source, language and length; or tasks from files and the harness."""
    if recorded or beside:
        _recorded([run, *(beside or [])], html, as_json)
        return
    from windlass.cli.output import console, print_json
    from windlass.evaluate.opened import find_store, open_model
    from windlass.evaluate.record import append

    opened = open_model(run, step=step, device=device, dtype=dtype)
    if task or harness:
        scores = _task_scores(
            opened, task or [], harness, harness_folder, shots, template, limit, batch, overlap, as_json
        )
        answer = {**_about(opened), "scores": [score.line() for score in scores]}
        more = {}
    else:
        held = find_store(opened, store)
        made, found = _held_out(opened, held, split, max_tokens, batch, overlap, as_json)
        scores = [*made.scores, *found]
        answer, more = _eval_json(opened, made, scores, held.path), {"store": str(held.path)}
    if save and opened.run is not None:
        append(opened.run, scores, step=opened.step, tokens=opened.tokens, **more)
    if html is not None:
        _write_page(html, opened, scores)
    if as_json:
        print_json(answer)
        return
    if not (task or harness):
        _eval_tables(console(), opened, made)
        scores = found
    _score_table(console(), scores)
    if task or harness:
        _language_table(opened, scores)
    if save and opened.run is not None:
        console().print(f"written to {opened.run.eval_file}", markup=False, soft_wrap=True)


def _recorded(runs: list[Path], html: Path | None, as_json: bool) -> None:
    """Models beside each other, language by language."""
    from windlass.cli.output import print_json
    from windlass.evaluate.by_language import page_of
    from windlass.evaluate.by_language import recorded as read
    from windlass.runs.files import write_whole

    rows = read(runs)
    if html is not None:
        write_whole(html, page_of(rows))
    if as_json:
        print_json({"rows": [row.plain() for row in rows]})
        return
    _by_language(rows)


def _language_table(opened: Opened, scores: list[Any]) -> None:
    """Only where there is more than one language to set beside another."""
    from windlass.evaluate.by_language import languages, of_scores

    rows = of_scores(opened.recipe.name, opened.step, scores)
    if len(languages(rows)) > 1:
        _by_language(rows)


def _by_language(rows: list[Any]) -> None:
    from windlass.cli.output import console, table
    from windlass.evaluate.by_language import table_of

    columns, cells = table_of(rows)
    title = "By language (± half of the 95 % interval)"
    console().print(table(title, columns, cells, right=tuple(range(3, len(columns)))))


def _held_out(
    opened: Opened, held: Any, split: str | None, max_tokens: str | None, batch: int | None, overlap: bool, quiet: bool
) -> Any:
    """Scores of the held-out documents, and of their overlap with the training split where that was asked for."""
    from windlass.evaluate.opened import find_tokenizer
    from windlass.evaluate.perplexity import choose, evaluate
    from windlass.units import parse_tokens

    limit = parse_tokens(max_tokens) if max_tokens is not None else None
    name = split or opened.recipe.data.validation or "validation"
    with bar("evaluating", quiet=quiet) as tell:
        made = evaluate(
            opened,
            held,
            find_tokenizer(opened, held.tokenizer_file),
            split=name,
            max_tokens=limit,
            batch=batch,
            tell=tell,
        )
    if not overlap:
        return made, []
    items = [
        (source, held.tokens(source, name)[start:stop])
        for source, spans in choose(held, name, limit)
        for start, stop in spans
    ]
    return made, _overlap(
        opened, "overlap", [ids for _, ids in items], [f"source {source}" for source, _ in items], quiet
    )


def _overlap(opened: Opened, task: str, items: list[Any], groups: list[str], quiet: bool) -> list[Any]:
    from windlass.evaluate.opened import own_store
    from windlass.evaluate.overlap import find_overlap

    with bar("looking for overlap", quiet=quiet) as tell:
        found = find_overlap(own_store(opened), items, tell=tell)
    numbers = {"all": list(range(len(items)))}
    for number, group in enumerate(groups):
        numbers.setdefault(group, []).append(number)
    return [found.score(task, group, inside) for group, inside in numbers.items()]


def _task_scores(
    opened: Opened, files: list[Path], harness: str | None, folder: Path | None, shots: int | None, template: str, limit: int | None,
    batch: int | None, overlap: bool, quiet: bool,
) -> list[Any]:  # fmt: skip
    from windlass.evaluate.opened import find_tokenizer
    from windlass.evaluate.tasks import read_task, run_task

    words, scores = find_tokenizer(opened), []
    for task in [read_task(path) for path in files]:  # all are read first: a bad file costs no minute of another's work
        with bar(task.name, quiet=quiet) as tell:
            scores += run_task(opened, words, task, shots=shots or 0, template=template, tell=tell)
        if overlap:
            import numpy as np

            texts = [
                np.array(words.encode(" ".join(v for v in item.values() if isinstance(v, str)))) for item in task.items
            ]
            scores += _overlap(opened, task.name, texts, [], quiet)
    if harness:
        from windlass.evaluate.harness import run_harness

        scores += run_harness(opened, words, harness.split(","), folder=folder, shots=shots, limit=limit, batch=batch)
    return scores


def _score_table(out: Any, scores: list[Any]) -> None:
    from windlass.cli.output import table

    if scores:
        rows = [(s.task, s.group, s.metric, _with_interval(s, 3), f"{s.count:,}") for s in scores]
        out.print(table("Tasks", ("task", "group", "metric", "value (95 %)", "items"), rows, right=(3, 4)))


def _write_page(path: Path, opened: Opened, scores: list[Any]) -> None:
    """One chart per metric: groups side by side."""
    from windlass.evaluate.picture import page_of
    from windlass.runs.files import write_whole

    write_whole(path, page_of(opened.recipe.name, opened.step, scores))


def _about(opened: Opened) -> dict[str, Any]:
    return {"source": opened.source, "step": opened.step, "trained_tokens": opened.tokens, "device": opened.where}


def _eval_json(opened: Opened, made: Evaluation, scores: list[Any], store: Path) -> dict[str, Any]:
    return {
        **_about(opened), "store": store, "tokens": made.tokens, "tokens_per_second": made.tokens_per_second,
        "scores": [score.line() for score in scores],
    }  # fmt: skip


def _eval_tables(out: Any, opened: Opened, made: Evaluation) -> None:
    from windlass.cli.output import table

    perplexity = {s.group: s for s in made.scores if s.metric == "perplexity"}
    bits = {s.group: s for s in made.scores if s.metric == "bits_per_byte"}
    rows = [
        (
            group,
            f"{score.count:,}",
            f"{score.detail['tokens']:,}",
            _with_interval(bits.get(group), 3),
            _with_interval(score, 2),
        )
        for group, score in perplexity.items()
    ]
    step = "" if opened.step is None else f", step {opened.step:,}"
    columns = ("group", "documents", "tokens", "bits per byte (95 %)", "perplexity (95 %)")
    out.print(table(f"Held-out text{step} ({opened.source})", columns, rows, right=(1, 2, 3, 4)))
    rate = made.tokens_per_second
    out.print(
        f"{made.tokens:,} tokens at {'unknown' if rate is None else f'{rate:,.0f}'} tokens/s ({opened.where})",
        markup=False,
    )


def _with_interval(score: Any, digits: int) -> str:
    if score is None or score.value is None:
        return "unknown"
    interval = "" if score.low is None else f" ({score.low:.{digits}f} to {score.high:.{digits}f})"
    return f"{score.value:.{digits}f}{interval}"


@contextlib.contextmanager
def bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream, so that what is printed stays clean; call it with what is done and the whole."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def generate(
    run: Which,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="At most so many new tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the most probable token.")
    ] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of probability to choose from.")] = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")] = 0,
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Never pick the end token: the text has the whole length.")
    ] = False,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Tokenizer; the store's when left out.")] = None,
    step: AtStep = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text: with a key/value cache (Llama) or a state of constant size (RetNet)."""
    from windlass.cli.output import console, print_json
    from windlass.evaluate.generate import Sampling
    from windlass.evaluate.generate import generate as continue_text
    from windlass.evaluate.opened import find_tokenizer, open_model
    from windlass.units import print_bytes

    how = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, go_on=go_on)
    opened = open_model(run, step=step, device=device, dtype=dtype)
    words = find_tokenizer(opened, tokenizer)
    made = continue_text(opened.model, words.encode(prompt), how, eos=words.eos)
    text, rate = words.decode(made.ids), made.tokens_per_second
    if as_json:
        print_json({
            "prompt": prompt, "text": text, "ids": made.ids, "tokens_per_second": rate, "prompt_tokens": made.prompt_tokens,
            "prompt_seconds": made.prompt_seconds, "state_bytes": made.state_bytes, "ended": made.ended, "step": opened.step, "device": opened.where,
        })  # fmt: skip
        return
    out = console()
    out.print(prompt, style="bold", markup=False, end="", soft_wrap=True)
    out.print(text, markup=False, soft_wrap=True)
    speed = "unknown" if rate is None else f"{rate:,.1f}"
    out.print(
        f"{len(made.ids)} tokens{', ended by the model,' if made.ended else ''} at {speed} tokens/s after a prompt of {made.prompt_tokens}; state {print_bytes(made.state_bytes)} ({opened.where})",
        style="dim", markup=False, soft_wrap=True,
    )  # fmt: skip


def export(
    run: Which,
    to: Annotated[Path, typer.Option("--to", help="New folder; an existing one is refused.")],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="fp32 or bf16; bf16 unless the run computed in fp32, an import as it came."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare logits with transformers before it is done.")
    ] = True,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text file to compare on; Python's library when left out.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Tokenizer; the run's when left out.")] = None,
    shard: Annotated[str, typer.Option("--shard", help="Largest file; also about the memory that is needed.")] = "4 GB",
    step: AtStep = None,
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face folder: weights, config, tokenizer and model card, checked by its logits."""
    from windlass.cli.output import console, print_json
    from windlass.evaluate.export import export as write
    from windlass.units import parse_bytes, print_bytes

    said = text.read_text(encoding="utf-8") if text is not None else None
    with bar("exporting", quiet=as_json) as tell:
        made = write(
            run, to, step=step, dtype=dtype, tokenizer=tokenizer, card=_card(run), verify=verify, text=said, shard_bytes=parse_bytes(shard), tell=tell,
        )  # fmt: skip
    if as_json:
        print_json(made)
        return
    out = console()
    out.print(
        f"{made.folder}: {made.tensors} tensors, {print_bytes(made.bytes)} of {made.dtype} in {made.files} file(s); tokenizer: {made.tokenizer}",
        markup=False,
    )
    out.print("not verified (--no-verify)" if made.check is None else _checked(made.check), markup=False)


def _checked(check: Any) -> str:
    return (
        f"logits verified ({check.how}) on {check.positions:,} positions of {check.text}: largest difference {check.difference:.2g}, "
        f"same first choice at {check.agreement:.2%}"
    )


def _card(run: Path) -> str | None:
    """README.md from the ledger, the energy and the report; None where there is no run folder."""
    from windlass.errors import WindlassError
    from windlass.report.card import content_summary, data_section, model_card
    from windlass.report.collect import collect
    from windlass.report.evaluations import evaluation
    from windlass.report.text import markdown
    from windlass.runs import open_run

    try:
        summary = collect(open_run(run))
    except WindlassError:
        return None
    library = "windlass" if summary.recipe.get("model", {}).get("family") == "retnet" else "transformers"
    front = f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [windlass]\n---\n\n"
    return front + markdown(
        summary.name, [model_card(summary), data_section(summary), evaluation(summary), content_summary(summary)]
    )


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Hugging Face folder, or a run whose vocabulary is to grow.")
    ],
    run: Annotated[Path | None, typer.Option("--run", help="New run folder; runs/<name of DIR> when left out.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="New tokenizer: embeddings are made for it from the old tokenizer's pieces."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="Sequence length to note; at most what the model allows.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare logits with transformers.")] = True,
    as_json: AsJson = False,
) -> None:
    """Read a Hugging Face model into a run folder: `save.load = "RUN"` starts from it at any layout."""
    from windlass.cli.output import console, print_json
    from windlass.evaluate.imports import import_model

    target = run or Path("runs") / folder.resolve().name
    with bar("importing", quiet=as_json):
        made = import_model(folder, target, tokenizer=tokenizer, seq_len=seq_len, verify=verify)
    if as_json:
        print_json(made)
        return
    out = console()
    out.print(
        f"{made.run}: {made.family}, {made.parameters:,} parameters, {made.dtype}, vocabulary {made.vocab:,}",
        markup=False,
    )
    for line in made.notes:
        out.print(line, markup=False, soft_wrap=True)
    if made.check is not None:
        out.print(_checked(made.check), markup=False)
    out.print(f'to go on training from it: [save] load = "{made.run}"', markup=False)


def finetune(
    run: Which,
    train: Annotated[Path, typer.Option("--train", help="TSV with the columns text and label (or target).")],
    test: Annotated[
        Path | None, typer.Option("--test", help="TSV to test on; a fifth of the training file when left out.")
    ] = None,
    frozen: Annotated[bool, typer.Option("--frozen/--full", help="Only a head learns, or every weight.")] = False,
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts of one step over all processes.")] = 16,
    lr: Annotated[float | None, typer.Option("--lr", help="1e-3 frozen, 5e-5 full, when left out.")] = None,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a text that are read.")] = 256,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="So many seeds: 0, 1, 2, ...")] = 1,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Processes on this machine, one per device.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the result as JSON here.")] = None,
    step: AtStep = None,
    device: Device = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Append the results to the run's eval.jsonl.")] = True,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a classifier on texts and labels; accuracy and macro-F1 over several seeds."""
    from windlass.clusters.scheduler import place
    from windlass.evaluate.classify import HowToTune
    from windlass.evaluate.tune import start_workers, work

    where = place()
    if devices is not None and devices > 1 and where.source == "single":
        raise typer.Exit(start_workers(devices))
    how = HowToTune(frozen=frozen, epochs=epochs, batch=batch, lr=lr, length=length, seeds=tuple(range(seeds)))
    made = work(run, train, test, how, where=where, step=step, device=device, save=save)
    if where.rank:
        return
    _tell_tuned(made, output, as_json)


def _tell_tuned(made: Any, output: Path | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json
    from windlass.runs.files import write_json

    rate = made.scores[0].detail["texts_per_second"]
    numbers = {score.metric: score.value for score in made.scores}  # flat, so that a sweep finds them
    answer = {
        **numbers,
        "texts_per_second": rate,
        "train": made.train,
        "labels": made.labels,
        "processes": made.processes,
    }
    answer["scores"] = [score.line() for score in made.scores]
    if output is not None:
        write_json(output, answer)
    if as_json:
        print_json(answer)
        return
    _score_table(console(), made.scores)
    console().print(
        f"{len(made.labels)} labels, {made.processes} process(es), {rate:,.1f} texts/s in training", markup=False
    )
