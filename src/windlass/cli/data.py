"""`windlass tokenize`, `windlass data` and `windlass tokenizer train`: from sources to a token store, and what is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.data.store import Store
    from windlass.data.tokenize import Progress as TokenizeProgress
    from windlass.data.tokenize import Result

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command("tokenize")(tokenize)
    app.command("data")(data)
    family = typer.Typer(
        name="tokenizer", help="Train a tokenizer, and compare how well it fits each language.", no_args_is_help=True
    )
    family.command("train")(train)
    family.command("compare")(compare)
    app.add_typer(family)


# -- tokenize ------------------------------------------------------------------------------------------------------


def tokenize(
    file: Annotated[Path, typer.Argument(help="Data file: sources, tokenizer, output.", metavar="DATA.toml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Keys of the data file to change: workers=8.", metavar="KEY=VALUE")
    ] = None,
    array: Annotated[
        int | None, typer.Option("--array", min=1, help="Submit N tasks under SLURM and a job that joins their work.")
    ] = None,
    array_task: Annotated[
        str | None,
        typer.Option(
            "--array-task", help="Do the share of task I of N (written I/N, from 0), as a job of the array does."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="With --array: the machine, when it is not recognised.")
    ] = None,
    account: Annotated[str | None, typer.Option("--account", help="With --array: the project that is charged.")] = None,
    as_json: Json = False,
) -> None:
    """Turn sources into a token store with exact counts and a ledger. Run it again after any interruption: it does what is missing."""
    from windlass.cli.output import print_json
    from windlass.config.sources import load_data_file

    # There is no linear algebra here: numpy's threads would only spin, and stand in the way of forking workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from windlass.data.inputs import passed_over
    from windlass.data.tokenize import tokenize as run

    config = load_data_file(file, overrides or ())
    if array is not None:
        _submit_array(file, overrides or [], array, cluster, account, as_json)
        return
    with _bar(as_json) as show:
        result = run(config, task=_task(array_task), on_progress=show)
    left = {name: found for name, source in config.sources.items() if (found := passed_over(source))}
    if as_json:
        print_json({**_result_json(result), "passed_over": left})
    else:
        _print_result(result)
        _print_passed_over(left)


def _task(text: str | None) -> tuple[int, int] | None:
    """`3/8` -> (3, 8); `auto`: what the scheduler says."""
    from windlass.clusters.scheduler import array_task
    from windlass.errors import ConfigError

    if text is None:
        return None
    if text == "auto":
        found = array_task()
        if found is None:
            raise ConfigError(
                "cli.array-task-auto-but",
                "--array-task auto, but this is no task of a job array",
                hint="the scheduler's variables are missing; write --array-task 0/4",
            )
        return found
    index, slash, count = text.partition("/")
    if not slash or not index.isdigit() or not count.isdigit() or int(index) >= int(count):
        raise ConfigError(
            "cli.array-task-task",
            f"--array-task {text!r} is not a task",
            hint="write I/N with I from 0 to N-1, for example 0/4",
        )
    return int(index), int(count)


def _submit_array(
    file: Path, overrides: list[str], count: int, cluster: str | None, account: str | None, as_json: bool
) -> None:
    """The launch room runs this very command as an array, then once more to join."""
    from windlass.cli.output import console, print_json
    from windlass.launch.array import submit_array

    words = ["windlass", "tokenize", str(file.absolute()), *overrides]
    made = submit_array([*words, "--array-task", "auto"], count=count, then=words, cluster=cluster, account=account)
    if as_json:
        print_json(
            {"array_job": made.array_job, "merge_job": made.merge_job, "folder": str(made.folder), "tasks": count}
        )
        return
    console().print(
        f"submitted {count} tasks as job {made.array_job}, joined by job {made.merge_job}; scripts and logs: {made.folder}"
    )
    console().print(f"train after it: windlass launch RECIPE --after {made.merge_job}")


def _bar(quiet: bool) -> Any:
    """A context that gives the function to show progress with; silent for --json and when nobody watches."""
    import contextlib
    import sys

    if quiet or not sys.stderr.isatty():
        return contextlib.nullcontext()
    return _live_bar()


def _live_bar() -> Any:
    import contextlib
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from windlass.units import print_tokens

    @contextlib.contextmanager
    def live() -> Any:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            line = bar.add_task("tokenizing", total=None, said="")

            def show(now: TokenizeProgress) -> None:
                seconds = max(1e-3, time.monotonic() - now.started)
                rejects = f", {now.rejects:,} rejected" if now.rejects else ""
                said = f"{print_tokens(now.tokens)} tokens, {print_tokens(now.tokens / seconds)}/s{rejects}"
                bar.update(
                    line,
                    total=now.total_bytes,
                    completed=min(now.done_bytes, now.total_bytes),
                    said=said,
                    description=now.phase,
                )

            yield show

    return live()


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "store": str(result.store), "complete": result.complete, "tokens": result.tokens, "documents": result.documents, "rejects": result.rejects,
        "chunks_done": result.chunks_done, "chunks_kept": result.chunks_kept, "engine": result.engine or None, "seconds": result.seconds,
        "restated": result.restated, "ledger_hash": result.manifest.get("ledger_hash"),
    }  # fmt: skip


def _print_passed_over(left: dict[str, dict[str, int]]) -> None:
    """A folder gives the files of known kinds: whoever meant others should hear of it."""
    from windlass.cli.output import console

    for name, endings in left.items():
        shown = ", ".join(f"{count:,} {ending}" for ending, count in list(endings.items())[:5])
        many = sum(endings.values())
        console().print(
            f"note: {name}: {many:,} file{'' if many == 1 else 's'} of other kinds below its folders not taken ({shown}); a pattern such as FOLDER/**/*.py takes them",
            markup=False,
        )


def _print_result(result: Result) -> None:
    from windlass.cli.output import console
    from windlass.units import print_seconds

    out = console()
    if result.engine:
        out.print(f"engine: {result.engine}")
    if result.chunks_kept:
        chunks = "1 chunk was" if result.chunks_kept == 1 else f"{result.chunks_kept:,} chunks were"
        out.print(f"resumed: {chunks} already done")
    if not result.complete:
        out.print(
            f"this task's share is done: {result.tokens:,} tokens in {print_seconds(result.seconds)}; `windlass tokenize` without --array-task joins the shares"
        )
        return
    idle = "complete, its ledger brought up to the data file" if result.restated else "complete, nothing to do"
    what = "written" if result.chunks_done or result.chunks_kept or result.engine else idle
    out.print(
        f"{result.store}: {what}, {result.tokens:,} tokens in {result.documents:,} documents, {print_seconds(result.seconds)}"
    )
    from windlass.data.store import REJECTS, open_store

    if result.rejects:
        out.print(f"rejected: {result.rejects:,}, each with its reason in {result.store / REJECTS}", soft_wrap=True)
    _print_sources(open_store(result.store))


# -- data ----------------------------------------------------------------------------------------------------------


def data(
    path: Annotated[
        Path, typer.Argument(help="Token store: ours, Megatron's, OLMo's or datatrove's.", metavar="STORE")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every checksum; the exit code is 5 when something is wrong.")
    ] = False,
    ledger: Annotated[
        bool,
        typer.Option("--ledger", help="Print where the text comes from, and write the summary of training content."),
    ] = False,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Show so many documents of each source, decoded.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --ledger: where to write the summary (default: STORE/training-content.md)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What is in a token store: counts, fertility, samples, provenance."""
    from windlass.cli.output import print_json
    from windlass.data.store import open_store

    store = open_store(path)
    if verify:
        _verify(store, as_json)
        return
    if ledger:
        _ledger(store, out, as_json)
        return
    shown = _samples(store, samples)
    if as_json:
        print_json({**_store_json(store), "samples": shown})
        return
    _print_store(store)
    for sample in shown:
        _print_sample(sample)


def _store_json(store: Store) -> dict[str, Any]:
    from dataclasses import asdict

    from windlass.data.inspect import fertility

    fertile = fertility(store)
    return {
        "store": str(store.path), "kind": store.kind, "tokens": sum(s.tokens for s in store.sources.values()), "vocab_size": store.vocab_size, "eos": store.eos,
        "max_token": store.max_token, "splits": list(store.splits), "tokenizer_file": str(store.tokenizer_file) if store.tokenizer_file else None,
        "tokenizer_hash": store.tokenizer_hash, "ledger_hash": store.ledger_hash,
        "sources": {name: {**asdict(info), **fertile[name]} for name, info in store.sources.items()},
    }  # fmt: skip


def _print_store(store: Store) -> None:
    from windlass.cli.output import console

    out = console()
    out.print(
        f"{store.path} ({store.kind} store), tokenizer {store.tokenizer_hash[:16] if store.tokenizer_hash else 'unknown'}, vocabulary {_number(store.vocab_size)}, largest id {_number(store.max_token)}"
    )
    _print_sources(store)
    if store.ledger_hash:
        out.print(
            f"ledger {store.ledger_hash[:16]}; `windlass data {store.path} --ledger` prints it, --verify checks every byte"
        )


def _print_sources(store: Store) -> None:
    from windlass.cli.output import console, table
    from windlass.data.inspect import by_language, fertility

    fertile = fertility(store)
    rows = [
        _row(
            info.name,
            info.language,
            info.documents,
            info.tokens,
            info.splits.get("validation"),
            info.bytes,
            fertile[info.name],
        )
        for info in store.sources.values()
    ]
    columns = ("source", "language", "documents", "tokens", "validation", "text bytes", "tokens/word", "tokens/byte")
    console().print(table(None, columns, rows, right=range(2, 8)))
    languages = by_language(store)
    if len(languages) > 1:
        rows = [
            _row("", name, row["documents"], row["tokens"], None, row["bytes"], row) for name, row in languages.items()
        ]
        console().print(
            table("by language", columns[1:4] + columns[5:], [row[1:4] + row[5:] for row in rows], right=range(1, 6))
        )


def _row(
    name: str,
    language: str | None,
    documents: int | None,
    tokens: int,
    held: int | None,
    size: int | None,
    fertile: dict[str, float | None],
) -> tuple[str, ...]:
    return (
        name,
        language or "unknown",
        _number(documents),
        f"{tokens:,}",
        _number(held) if held is not None else "none",
        _number(size),
        _ratio(fertile["tokens_per_word"]),
        _ratio(fertile["tokens_per_byte"]),
    )


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _ratio(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _verify(store: Store, as_json: bool) -> None:
    from windlass.cli.output import console, print_json
    from windlass.errors import DataError

    problems = store.verify()
    if as_json:
        print_json(
            {
                "store": str(store.path),
                "whole": not problems,
                "problems": [{"file": p.file, "what": p.what} for p in problems],
            }
        )
    elif not problems:
        checked = "every checksum" if store.kind == "windlass" else "every size (a foreign store has no checksums)"
        console().print(f"{store.path}: whole; {checked} is right")
    if problems:
        lines = "\n  ".join(f"{p.file} {p.what}" for p in problems[:20])
        raise DataError(
            "cli.damaged",
            f"{store.path} is damaged in {len(problems)} {'place' if len(problems) == 1 else 'places'}:\n  {lines}",
            hint="copy the store again from where it was made, or tokenize again",
        )


def _ledger(store: Store, out: Path | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.data.ledger import summary
    from windlass.files import write_atomic

    text = summary(store)
    target = out or store.path / "training-content.md"
    if store.kind == "windlass" or out is not None:
        write_atomic(target, text)
    if as_json:
        print_json({"ledger": store.ledger(), "ledger_hash": store.ledger_hash, "summary_file": str(target)})
        return
    rows = [
        (
            i.name,
            i.language or "unknown",
            i.licence or "missing",
            i.origin or "missing",
            i.consent or "not stated",
            i.kind or "not stated",
            f"{i.tokens:,}",
        )
        for i in store.sources.values()
    ]
    console().print(
        table(
            f"ledger {store.ledger_hash or '(none)'}",
            ("source", "language", "licence", "origin", "consent", "kind", "tokens"),
            rows,
            right=(6,),
        )
    )
    console().print(f"summary of training content: {target}")


def _samples(store: Store, count: int) -> list[dict[str, Any]]:
    from windlass.data.inspect import samples

    return samples(store, count) if count else []


def _print_sample(sample: dict[str, Any]) -> None:
    from rich.text import Text

    from windlass.cli.output import console

    console().print(
        Text(f"--- {sample['source']}, document {sample['document']:,}, {sample['tokens']:,} tokens", style="bold")
    )
    console().print(Text(sample["text"]))


# -- tokenizer -----------------------------------------------------------------------------------------------------


def train(
    file: Annotated[Path, typer.Argument(help="Data file whose sources are learned from.", metavar="DATA.toml")],
    vocab: Annotated[int, typer.Option("--vocab", help="Number of ids, the end token included.")] = 32_768,
    out: Annotated[Path, typer.Option("--out", help="Folder or .json file for the tokenizer.")] = Path("tokenizer"),
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help="Text to learn from, shared by the sources in proportion to their size.")
    ] = "500 MB",
    reference: Annotated[Path | None, typer.Option("--reference", help="Tokenizer to compare with.")] = None,
    as_json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer on the sources of a data file, and show how it fits each language."""
    from windlass.config.sources import load_data_file
    from windlass.data.inspect import compare_tokenizers, source_texts
    from windlass.data.tokenizer import load_tokenizer, train_bpe
    from windlass.units import parse_bytes

    config = load_data_file(file)
    made = train_bpe(
        (text for _, text in source_texts(config, parse_bytes(max_bytes))), vocab, out, progress=not as_json
    )
    others = {"reference": load_tokenizer(reference)} if reference else {}
    _show_fit(compare_tokenizers(config, {"trained": made, **others}), str(made.path), as_json)


def compare(
    file: Annotated[Path, typer.Argument(help="Data file whose sources are measured.", metavar="DATA.toml")],
    tokenizers: Annotated[list[Path], typer.Argument(help="Tokenizers to compare.")],
    as_json: Json = False,
) -> None:
    """Tokens per word and per byte of several tokenizers, by language."""
    from windlass.config.sources import load_data_file
    from windlass.data.inspect import compare_tokenizers
    from windlass.data.tokenizer import load_tokenizer

    named = {str(path): load_tokenizer(path) for path in tokenizers}
    _show_fit(compare_tokenizers(load_data_file(file), named), None, as_json)


def _show_fit(rows: list[dict[str, Any]], path: str | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table

    if as_json:
        print_json({"tokenizer": path, "fertility": rows})
        return
    if path:
        console().print(f"tokenizer: {path}")
    cells = [
        (
            r["language"],
            r["tokenizer"],
            f"{r['vocab_size']:,}",
            _ratio(r["tokens_per_word"]),
            _ratio(r["tokens_per_byte"]),
            f"{r['bytes']:,}",
        )
        for r in rows
    ]
    console().print(
        table(
            "fertility (fewer tokens per word is better)",
            ("language", "tokenizer", "vocabulary", "tokens/word", "tokens/byte", "bytes measured"),
            cells,
            right=(2, 3, 4, 5),
        )
    )
