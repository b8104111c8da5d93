"""`windlass tokenize`, `windlass data` and `windlass tokenizer`: make and inspect token stores and tokenizers."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from windlass.cli.options import JsonOption
from windlass.cli.output import bar, show, table, text_of, working
from windlass.errors import ConfigError, DataError
from windlass.files import write_atomic
from windlass.units import parse_bytes, print_rate, print_seconds, print_text, print_tokens

if TYPE_CHECKING:
    from windlass.data.store import Store
    from windlass.data.tokenize import TokenizeProgress, TokenizeResult

SOURCE_DROP = ("text bytes", "tokens/byte", "validation", "documents")
LEDGER_DROP = ("kind", "consent", "language")


# -- tokenize ------------------------------------------------------------------------------------------------------


def tokenize(
    file: Annotated[Path, typer.Argument(help="Data file: sources, tokenizer, output.", metavar="DATA.toml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Keys of the data file to change: workers=8.", metavar="KEY=VALUE")
    ] = None,
    array: Annotated[
        int | None, typer.Option("--array", min=1, help="Submit N SLURM array tasks and a job that joins their output.")
    ] = None,
    array_task: Annotated[
        str | None,
        typer.Option(
            "--array-task",
            help="Process the share of task I of N, written I/N with I from 0; auto inside an array job.",
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="With --array: cluster name, if it is not detected.")
    ] = None,
    account: Annotated[str | None, typer.Option("--account", help="With --array: SLURM account to charge.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn sources into a token store with exact counts and a ledger. Run it again to resume after an interruption."""
    # There is no linear algebra here: numpy's threads would only spin, and get in the way of forking workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from windlass.config.sources import load_data_file
    from windlass.data import inputs
    from windlass.data import tokenize as tokenization
    from windlass.launch.array import input_bytes, submit_array

    config = load_data_file(file, overrides or ())
    if array is not None:
        argv = ["windlass", "tokenize", str(file.absolute()), *(overrides or [])]
        tasks, size = [*argv, "--array-task", "auto"], input_bytes(config)
        jobs = submit_array(tasks, count=array, then=argv, cluster=cluster, account=account, size=size)
        show(
            as_json,
            {"array_job": jobs.array_job, "merge_job": jobs.merge_job, "folder": str(jobs.folder), "tasks": array},
            f"submitted {array} tasks as job {jobs.array_job}, joined by job {jobs.merge_job}; "
            f"scripts and logs: {jobs.folder}",
            jobs.partition,
            f"to train after it: windlass launch RECIPE --after {jobs.merge_job}",
        )
        return

    def progress(now: TokenizeProgress) -> None:
        rate = print_rate(now.tokens / max(1e-3, time.monotonic() - now.started))
        rejects = f", {now.rejects:,} rejected" if now.rejects else ""
        text = f"{now.phase}: {print_tokens(now.tokens)} tokens, {rate}{rejects}"
        update(min(now.done_bytes, now.total_bytes), now.total_bytes, text)

    with bar("tokenizing", quiet=as_json) as update:
        result = tokenization.tokenize(config, task=_parse_task(array_task), on_progress=progress)
    skipped = {name: counts for name, source in config.sources.items() if (counts := inputs.count_skipped(source))}
    keys = ("complete", "tokens", "documents", "rejects", "chunks_done", "chunks_kept", "seconds", "restated")
    document = {
        "store": str(result.store),
        **{key: getattr(result, key) for key in keys},
        "engine": result.engine or None,
        "ledger_hash": result.manifest.get("ledger_hash"),
        "passed_over": skipped,
    }
    notes = []
    for name, counts in skipped.items():
        listed, total = [f"{count:,} {suffix}" for suffix, count in list(counts.items())[:5]], sum(counts.values())
        files = f"{total:,} file{'s' * (total != 1)} of other formats below its folders skipped ({', '.join(listed)})"
        notes.append(f"note: {name}: {files}; a pattern such as FOLDER/**/*.py includes them")
    show(as_json, document, *_result_parts(result), *notes)


def _parse_task(text: str | None) -> tuple[int, int] | None:
    """`3/8` -> (3, 8); `auto`: from the scheduler's environment."""
    from windlass.clusters.scheduler import array_task

    if text is None:
        return None
    if text == "auto":
        task = array_task()
        if task is None:
            raise ConfigError(
                "data.array-task-missing",
                "--array-task auto, but this process is not a task of a job array",
                hint="the scheduler's variables are missing; write --array-task 0/4",
            )
        return task
    index, count = map(int, text.split("/")) if re.fullmatch(r"\d+/\d+", text) else (0, 0)
    if index >= count:
        raise ConfigError(
            "data.array-task-invalid",
            f"--array-task {text!r} is not a task",
            hint="write I/N with I from 0 to N-1, for example 0/4",
        )
    return index, count


def _result_parts(result: TokenizeResult) -> list[Table | str]:
    """What was done, and the sources of a complete store."""
    from windlass.data.store import REJECTS, open_store

    parts: list[Table | str] = [f"engine: {result.engine}"] if result.engine else []
    seconds = print_seconds(result.seconds)
    if result.chunks_kept:
        chunks = "1 chunk was" if result.chunks_kept == 1 else f"{result.chunks_kept:,} chunks were"
        parts.append(f"resumed: {chunks} already done")
    if not result.complete:
        return [
            *parts,
            f"this task's share is done: {result.tokens:,} tokens in {seconds}",
            "`windlass tokenize` without --array-task joins the shares",
        ]
    state = "written" if result.chunks_done or result.chunks_kept or result.engine else "complete, nothing to do"
    if result.restated:
        state = "complete, ledger updated from the data file"
    parts.append(f"{result.store}: {state}, {result.tokens:,} tokens in {result.documents:,} documents, {seconds}")
    if result.rejects:
        parts.append(f"rejected: {result.rejects:,}, each with its reason in {result.store / REJECTS}")
    for name, source in result.manifest["sources"].items():
        if "counted" in source:
            counted, filtered = source["counted"], source["filtered"].items()
            reasons = "".join(f"; {count:,} conversations filtered out ({reason})" for reason, count in filtered)
            parts.append(
                f"{name}: {counted:,} of {source['tokens']:,} tokens are answers, which count in the loss{reasons}"
            )
    return [*parts, *_source_tables(open_store(result.store))]


# -- data ----------------------------------------------------------------------------------------------------------


def data(
    path: Annotated[
        Path, typer.Argument(help="Token store of windlass, Megatron, OLMo or datatrove.", metavar="STORE")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every checksum; the exit code is 5 if something is wrong.")
    ] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Print the ledger, and write the summary of training content.")
    ] = False,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Show this many documents of each source as text.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --ledger: file for the summary (default: STORE/training-content.md)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the content of a token store: counts, fertility, samples, provenance."""
    from windlass.data import inspect
    from windlass.data.store import open_store

    store = open_store(path)
    if verify:
        with working(f"checking every file of {store.path}", quiet=as_json):
            problems = store.verify()
        checked = "checksums" if store.kind == "windlass" else "file sizes (a foreign store has no checksums)"
        listed = [{"file": problem.file, "what": problem.problem} for problem in problems]
        document = {"store": str(store.path), "whole": not problems, "problems": listed}
        show(as_json, document, None if problems else f"{store.path}: complete; all {checked} match")
        if problems:
            lines = "\n  ".join(f"{problem.file} {problem.problem}" for problem in problems[:20])
            raise DataError(
                "data.store-damaged",
                f"{store.path} is damaged in {len(problems)} place{'s' * (len(problems) != 1)}:\n  {lines}",
                hint="copy the store again from the original, or tokenize again",
            )
        return
    if ledger:
        _ledger(store, out, as_json)
        return
    with working(f"reading {store.path}", quiet=as_json):
        rows, decoded = inspect.by_source(store), inspect.samples(store, samples) if samples else []
    ratios = {name: {key: rows[name][key] for key in ("tokens_per_word", "tokens_per_byte")} for name in store.sources}
    document = {
        "store": str(store.path),
        "kind": store.kind,
        "tokens": sum(source.tokens for source in store.sources.values()),
        **{key: getattr(store, key) for key in ("vocab_size", "eos", "max_token", "tokenizer_hash", "ledger_hash")},
        "splits": list(store.splits),
        "tokenizer_file": str(store.tokenizer_file) if store.tokenizer_file else None,
        "sources": {name: {**asdict(info), **ratios[name]} for name, info in store.sources.items()},
        "samples": decoded,
    }
    tokenizer = store.tokenizer_hash[:16] if store.tokenizer_hash else "unknown"
    numbers = f"vocabulary {text_of(store.vocab_size, ',')}, largest id {text_of(store.max_token, ',')}"
    commands = f"`windlass data {shlex.quote(str(store.path))} --ledger` prints it, --verify checks every byte"
    texts = [
        f"--- {s['source']}, document {s['document']:,}, {s['tokens']:,} tokens\n{print_text(s['text'], lines=True)}"
        for s in decoded
    ]
    show(
        as_json,
        document,
        f"{store.path} ({store.kind} store), tokenizer {tokenizer}, {numbers}",
        *_source_tables(store),
        f"ledger {store.ledger_hash[:16]}; {commands}" if store.ledger_hash else None,
        *texts,
    )


def _source_tables(store: Store) -> list[Table]:
    from windlass.data.inspect import by_language, by_source

    columns = ("documents", "tokens", "text bytes", "tokens/word", "tokens/byte")

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        ratios = [text_of(row[key], ".3f", "not measured") for key in ("tokens_per_word", "tokens_per_byte")]
        return text_of(row["documents"], ","), f"{row['tokens']:,}", text_of(row["bytes"], ","), *ratios

    rows = []
    for name, row in by_source(store).items():
        info = store.sources[name]
        held_out = f"{info.splits['validation']:,}" if "validation" in info.splits else "none"
        rows.append((name, info.language or "unknown", *cells(row)[:2], held_out, *cells(row)[2:]))
    titles = ("source", "language", *columns[:2], "validation", *columns[2:])
    languages = [(name, *cells(row)) for name, row in by_language(store).items()]
    by_languages = table("by language", ("language", *columns), languages, right=range(1, 6), drop=SOURCE_DROP[:2])
    return [
        table(None, titles, rows, right=range(2, 8), drop=SOURCE_DROP),
        *([by_languages] if len(languages) > 1 else []),
    ]


def _ledger(store: Store, out: Path | None, as_json: bool) -> None:
    from windlass.data.store import summary

    target = out or store.path / "training-content.md"
    if store.kind == "windlass" or out is not None:
        write_atomic(target, summary(store))
    unknown = {"language": "unknown", "licence": "missing", "origin": "missing"}
    unknown |= dict.fromkeys(("consent", "kind"), "not stated")
    rows = [
        (info.name, *(getattr(info, key) or text for key, text in unknown.items()), f"{info.tokens:,}")
        for info in store.sources.values()
    ]
    show(
        as_json,
        {"ledger": store.ledger(), "ledger_hash": store.ledger_hash, "summary_file": str(target)},
        table(
            f"ledger {store.ledger_hash or '(none)'}",
            ("source", *unknown, "tokens"),
            rows,
            right=(6,),
            drop=LEDGER_DROP,
        ),
        f"summary of training content: {target}",
    )


# -- tokenizer -----------------------------------------------------------------------------------------------------


def train(
    file: Annotated[Path, typer.Argument(help="Data file with the sources to learn from.", metavar="DATA.toml")],
    vocab: Annotated[int, typer.Option("--vocab", help="Vocabulary size, including the end token.")] = 32_768,
    out: Annotated[Path, typer.Option("--out", help="Folder or .json file for the tokenizer.")] = Path("tokenizer"),
    max_bytes: Annotated[
        str,
        typer.Option(
            "--max-bytes", help="Amount of text to learn from, taken from the sources in proportion to their size."
        ),
    ] = "500 MB",
    reference: Annotated[Path | None, typer.Option("--reference", help="Tokenizer to compare with.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a byte-level BPE tokenizer on the sources of a data file, and show how it fits each language."""
    from windlass.config.sources import load_data_file
    from windlass.data.inspect import compare_tokenizers, source_texts
    from windlass.data.tokenizer import load_tokenizer, tokenizer_file, train_bpe

    config = load_data_file(file)
    if (target := tokenizer_file(out)).exists():  # token stores and models depend on it
        raise ConfigError(
            "data.tokenizer-exists", f"{target} already exists", hint="choose another --out, or remove the file first"
        )
    texts = (text for _, text in source_texts(config, parse_bytes(max_bytes)))
    tokenizer = train_bpe(texts, vocab, out, progress=not as_json and sys.stderr.isatty())
    others = {"reference": load_tokenizer(reference)} if reference else {}
    with working("tokenizing samples of every source", quiet=as_json):
        rows = compare_tokenizers(config, {"trained": tokenizer, **others})
    _show_fertility(rows, str(tokenizer.path), as_json)


def compare(
    file: Annotated[Path, typer.Argument(help="Data file with the sources to measure on.", metavar="DATA.toml")],
    tokenizers: Annotated[list[Path], typer.Argument(help="Tokenizers to compare.")],
    as_json: JsonOption = False,
) -> None:
    """Compare tokenizers: tokens per word and per byte, by language."""
    from windlass.config.sources import load_data_file
    from windlass.data import inspect, tokenizer

    with working("tokenizing samples of every source", quiet=as_json):
        named = {str(path): tokenizer.load_tokenizer(path) for path in tokenizers}
        rows = inspect.compare_tokenizers(load_data_file(file), named)
    _show_fertility(rows, None, as_json)


def _show_fertility(rows: list[dict[str, Any]], path: str | None, as_json: bool) -> None:
    cells = [
        (row["language"], row["tokenizer"], f"{row['vocab_size']:,}",
         text_of(row["tokens_per_word"], ".3f", "not measured"),
         text_of(row["tokens_per_byte"], ".3f", "not measured"), f"{row['bytes']:,}")
        for row in rows
    ]  # fmt: skip
    titles = ("language", "tokenizer", "vocabulary", "tokens/word", "tokens/byte", "bytes measured")
    fertility = table(
        "fertility (fewer tokens per word is better)",
        titles,
        cells,
        right=(2, 3, 4, 5),
        drop=("bytes measured", "vocabulary"),
    )
    show(as_json, {"tokenizer": path, "fertility": rows}, f"tokenizer: {path}" if path else None, fertility)
