"""From sources to a token store on all cores: plan, lock, process the missing chunks, check the counts, join.

The folder `work/` inside the store holds pieces and journals until the store is complete. Killing the job at any moment
loses at most the chunks under way; the same command, also with more workers, continues and ends in the same bytes.
"""

import contextlib
import ctypes
import gc
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from windlass.clusters.scheduler import job_id
from windlass.config.sources import DataFile
from windlass.data.chunks import ChunkWorker, TokenizeTask, piece_name
from windlass.data.conversations import conversation_encoder
from windlass.data.engines import choose
from windlass.data.inputs import (
    ROW_FORMATS,
    WorkItem,
    find_files,
    format_of,
    make_schedule,
    plan_items,
    unfinished_files,
)
from windlass.data.joining import SHARD_LIST, Journal, reject_lines, undo_joining, update_terms, write_store
from windlass.data.readers import first_texts
from windlass.data.shards import dtype_for
from windlass.data.store import MANIFEST, REJECTS, hash_json, read_manifest, refuse_unlawful
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import EXIT_RESUMABLE, DataError, WindlassError
from windlass.files import append_line, read_json, read_json_lines, write_atomic, write_json
from windlass.processes import ForkedWorkers, WorkerDiedError, WorkerFailedError, usable_cores
from windlass.runs.lock import holder, locked

_EARLY_STOP_REJECTS = 1000  # a run in which most documents are rejected stops at once: probably a wrong field name
# Per worker. With more chunks, the first is processed before the fork: all workers inherit the engine's cache.
_WARM_UP_CHUNKS = 4
_PARENT = -1  # worker number of this process itself
_MIN_GROWTH_BYTES = 100_000_000  # by which a worker may grow even if tokenizer and engine alone are large
_REREAD_BYTES = 300_000_000  # above which loading the engine again is cheaper than decompressing up to the same place
_SETTINGS = (
    "add_eos", "special_tokens", "dedup", "utf8", "min_chars", "max_chars", "max_document", "validation", "chunk",
    "shard_tokens",
)  # fmt: skip


class StoppedError(WindlassError):
    """A signal ended the job; nothing is lost and the same command continues."""

    exit_code = EXIT_RESUMABLE


@dataclass
class TokenizeProgress:
    """Numbers of this run for a progress bar; `done_bytes` includes what earlier runs did."""

    total_bytes: int = 0
    done_bytes: int = 0
    tokens: int = 0
    documents: int = 0
    rejects: int = 0
    engine: str = ""
    phase: str = "tokenizing"
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class TokenizeResult:
    """What a run did. Tokens, documents and rejects count the store; for an array task, what it did in this run."""

    store: Path
    complete: bool  # False: an array task did its share; the store is not joined yet
    chunks_done: int
    chunks_kept: int  # done by an earlier run
    engine: str
    tokens: int
    documents: int
    rejects: int
    seconds: float
    manifest: dict[str, Any] = field(default_factory=dict)
    restated: bool = False  # the store was complete; only the terms of its sources were updated from the data file


ShowProgress = Callable[[TokenizeProgress], None]


def tokenize(
    file: DataFile, *, task: tuple[int, int] | None = None, on_progress: ShowProgress | None = None
) -> TokenizeResult:
    """Make the store of a data file, or the share of array task (index, count). Safe to call again at any time."""
    target = Path(file.output)
    if file.policy == "lawful":
        refuse_unlawful(file.sources, "the data file")
    tokenizer = load_tokenizer(file.tokenizer, eos=file.eos, glance=True)
    if file.add_eos and tokenizer.eos is None:
        raise DataError(
            "data.eos-missing",
            f"{tokenizer.path} has no token that ends a document",
            hint='set eos = "<name of the token>", or add_eos = false',
        )
    is_chat = any(source.form != "text" for source in file.sources.values())
    chat = conversation_encoder(tokenizer, file.template) if is_chat else None
    files = {name: find_files(name, source, target) for name, source in file.sources.items()}
    _make_folder(target)
    with _lock(target, task):
        # Python's garbage collector would scan the vocabulary again and again, and there are no cycles in it.
        collecting = gc.isenabled()
        gc.disable()
        try:
            settings: dict[str, Any] = {"tokenizer": tokenizer.hash, "vocab_size": tokenizer.vocab_size}
            settings |= {"eos": tokenizer.eos, **{key: getattr(file, key) for key in _SETTINGS}}
            items = plan_items(file, files, hash_json(settings), None if chat is None else chat.template.source)
            eos, dtype = tokenizer.eos if file.add_eos else None, dtype_for(tokenizer.vocab_size)
            shared = TokenizeTask(file, settings, None, eos, dtype, target / "work", chat)
            return _tokenize(shared, tokenizer, items, task, on_progress or (lambda progress: None))
        finally:
            if collecting:
                gc.enable()


def _tokenize(
    shared: TokenizeTask,
    tokenizer: Tokenizer,
    items: list[WorkItem],
    task: tuple[int, int] | None,
    show: ShowProgress,
) -> TokenizeResult:
    started = time.monotonic()
    work, target = shared.folder, shared.folder.parent
    if (manifest := read_json(target / MANIFEST)) is not None:
        manifest = read_manifest(target)
        items = _new_items(items, manifest, shared.settings, target, shared.file)
        updated = update_terms(target, manifest, shared.file) if task is None else None
        manifest = updated or manifest
        if not items:
            if work.is_dir():  # an earlier run began to add sources that the data file no longer has
                undo_joining(work, target, manifest)
                shutil.rmtree(work, ignore_errors=True)
            return replace(_result(target, manifest, started, 0, 0, ""), restated=updated is not None)
    for name in ("pieces", "journal", "tokenizer"):
        _make_folder(work / name)
    plan: dict[str, Any] = {"settings": shared.settings, "items": {}}
    for item in items:
        plan["items"].setdefault(item.source, []).append(item.id)
    old_plan = read_json(work / "plan.json")
    if old_plan is not None and (old_plan != plan or list(old_plan["items"]) != list(plan["items"])):
        undo_joining(work, target, manifest)
    write_json(work / "plan.json", plan)
    # Lines of changed files or settings are ignored, and so are those whose pieces are gone.
    # A run was stopped while joining: then a piece that is missing may be in a shard already.
    ids, was_joining = {item.id for item in items}, (work / SHARD_LIST).is_file()
    pieces = {entry.name for entry in os.scandir(work / "pieces")}
    journal: Journal = {}
    for line in (line for path in sorted((work / "journal").glob("*.jsonl")) for line in read_json_lines(path)):
        if line.get("item") in ids and "files" in line:
            names = {piece_name(line["item"], line["chunk"], split) for split in line["pieces"]}
            if was_joining or names <= pieces:
                journal.setdefault((line["item"], line["chunk"]), line)
    kept = len(journal)
    progress = _process_chunks(shared, tokenizer, items, journal, task, show)
    done = len(journal) - kept
    if task is not None:
        counts = (progress.tokens, progress.documents, progress.rejects)
        return TokenizeResult(target, False, done, kept, progress.engine, *counts, time.monotonic() - started)
    if unfinished := unfinished_files(items, {key: bool(line["last"]) for key, line in journal.items()}):
        raise DataError(
            "data.chunks-missing",
            f"{len(unfinished)} files are not finished, the first is {unfinished[0]}",
            hint="this is a bug in windlass; run the same command again",
        )
    _check_rejects(shared, items, journal, (target if manifest is None else work) / REJECTS)
    progress.phase = "joining"
    show(progress)
    with _explain_failures(work):
        manifest = write_store(shared, items, journal, tokenizer, target, manifest)
    _log(work, "finished", seconds=time.monotonic() - started)
    shutil.move(work / "history.jsonl", target / "history.jsonl")
    shutil.rmtree(work, ignore_errors=True)
    return _result(target, manifest, started, done, kept, progress.engine)


def _result(
    target: Path, manifest: dict[str, Any], started: float, done: int, kept: int, engine: str
) -> TokenizeResult:
    rejects = sum(sum(source["rejected"].values()) for source in manifest["sources"].values())
    counts = (manifest["tokens"], manifest["documents"], rejects)
    return TokenizeResult(target, True, done, kept, engine, *counts, time.monotonic() - started, manifest)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            "data.output-not-writable",
            f"the store's folder {folder} cannot be created: {error.strerror}",
            hint="choose another `output` in the data file",
        ) from None


def _log(work: Path, event: str, **values: Any) -> None:
    append_line(work / "history.jsonl", {"time": time.time(), "event": event, "pid": os.getpid(), **values})


def _new_items(
    items: list[WorkItem], manifest: dict[str, Any], settings: dict[str, Any], target: Path, file: DataFile
) -> list[WorkItem]:
    """The items of sources that a finished store does not have. A finished source is never done again or changed."""
    old = manifest["settings"]
    if differences := [key for key, value in settings.items() if old.get(key) != value]:
        listed = "; ".join(f"{key}: {old.get(key)!r} there, {settings[key]!r} here" for key in differences)
        raise DataError(
            "data.store-settings-differ",
            f"{target} is a finished store with other settings ({listed})",
            hint="choose another `output`: tokens of two tokenizers or settings do not mix",
        )
    changed = [
        name
        for name, entry in manifest["sources"].items()
        if name in file.sources and entry["items"] != hash_json(sorted(i.id for i in items if i.source == name))
    ]
    if changed:
        raise DataError(
            "data.source-files-changed",
            f"the files of {', '.join(changed)} have changed since {target} was written",
            hint="add new files as a source with another name, or choose another `output`",
        )
    new = [item for item in items if item.source not in manifest["sources"]]
    if new and file.dedup == "exact":
        raise DataError(
            "data.dedup-cannot-add",
            f'sources cannot be added to {target} with dedup = "exact"',
            hint="make a new store of all sources: the hashes of the old documents are no longer available",
        )
    return new


# -- locks and failures --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(target: Path, task: tuple[int, int] | None) -> Iterator[None]:
    """One job per store, or many tasks of one array, but not both."""
    main = target / ".tokenize.lock"
    own = main if task is None else target / "work" / f"task-{task[0]:05d}.lock"
    others = sorted((target / "work").glob("task-*.lock")) if task is None else [main]
    for path in (own, *others):
        if (owner := holder(path)) is not None:
            job = f", job {owner['job']}" if owner.get("job") else ""
            raise DataError(
                "data.store-locked",
                f"another tokenize job is writing to {target} "
                f"(host {owner.get('host', 'unknown')}, pid {owner.get('pid', 'unknown')}{job})",
                hint="wait for it, stop it, or choose another `output`",
            )
    with locked(own, job_id()):
        yield


@contextlib.contextmanager
def _explain_failures(work: Path) -> Iterator[None]:
    """Turn SIGTERM (the queue's time limit), failures of the disk and of workers into errors that say how to
    continue."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError(
            "data.stopped",
            f"stopped by {signal.Signals(number).name}",
            hint="run the same command again, which processes only the missing parts",
        )

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # not the main thread: the caller decides about signals
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, stop))
        try:
            yield
        except OSError as error:
            raise DataError(
                "data.disk-failed",
                f"cannot write to disk: {error.strerror} ({error.filename or work})",
                hint="free some space (or quota) and run the same command again: finished chunks are kept",
            ) from None
        except WorkerDiedError as error:
            raise DataError(
                "data.worker-died",
                str(error),
                hint="run the same command again: only the chunks in progress are repeated",
            ) from None
        except WorkerFailedError as error:
            raise DataError(
                "data.worker-failed",
                str(error),
                hint="this is a bug in windlass; please report it with the traceback above",
            ) from None


# -- chunks --------------------------------------------------------------------------------------------------------


def _process_chunks(
    shared: TokenizeTask,
    tokenizer: Tokenizer,
    items: list[WorkItem],
    journal: Journal,
    task: tuple[int, int] | None,
    show: ShowProgress,
) -> TokenizeProgress:
    """Process what is not in the journal yet; an engine is loaded only if there is something to do."""
    by_id = {item.id: item for item in items}
    progress = TokenizeProgress(total_bytes=sum(item.weight for item in items))
    progress.done_bytes = sum(by_id[name].chunk_weight for name, _ in journal)
    schedule = make_schedule(items, {key: bool(line["last"]) for key, line in journal.items()}, task)
    if not schedule.waiting and not schedule.compressed:
        return progress
    file = shared.file
    first_items = {item.source: item for item in reversed(items)}
    sample = [
        text
        for name, source in file.sources.items()
        if name in first_items and source.form == "text"
        for text in first_texts(first_items[name], source, 8, 4000)
    ]
    specials, cache = file.special_tokens == "parse", shared.folder / "tokenizer"
    engine, progress.engine = choose(tokenizer, file.engine, specials=specials, sample=sample[:32], cache=cache)
    shared, workers = replace(shared, engine=engine), file.workers or usable_cores()
    show(progress)
    _log(shared.folder, "started", task=task, engine=progress.engine, chunks_kept=len(journal))

    def receive(message: dict[str, Any] | tuple[int, int, int]) -> None:
        """A finished chunk's journal line, or numbers of progress."""
        if isinstance(message, dict):
            journal[(message["item"], message["chunk"])] = message
            schedule.finished(by_id[message["item"]], bool(message["last"]))
            progress.done_bytes += by_id[message["item"]].chunk_weight
        else:
            progress.tokens += message[0]
            progress.documents += message[1]
            progress.rejects += message[2]
            if progress.rejects > max(_EARLY_STOP_REJECTS, file.max_rejects) and progress.rejects > progress.documents:
                raise DataError(
                    "data.most-documents-rejected",
                    f"{progress.rejects:,} of the first {progress.rejects + progress.documents:,} documents were rejected: "
                    "stopped early",
                    hint="check `field` (the name of the text field) and `format`; work/pieces/*.rejects lists the "
                    "reasons",
                )
        show(progress)

    def journal_path(name: str) -> Path:
        return shared.folder / "journal" / f"{'main' if task is None else f'task-{task[0]:05d}'}-{name}.jsonl"

    def serve(connection: Connection, number: int) -> bool:
        """In a worker: ask for chunks and process them. True: its memory is full and another should continue."""
        worker = ChunkWorker(shared, journal_path(f"{number:03d}"), lambda *numbers: connection.send(numbers))
        max_bytes = max(engine.max_worker_bytes, resident_bytes() + _MIN_GROWTH_BYTES)
        while True:
            connection.send(None)
            if (chunk := connection.recv()) is None:
                return False
            connection.send(worker.process(by_id[chunk[0]], chunk[1]))
            gc.collect()  # cheap: what was loaded before the fork is frozen
            if resident_bytes() > max_bytes:
                if worker.decompressed_bytes < _REREAD_BYTES:
                    return True
                engine.reload()
                with contextlib.suppress(OSError, AttributeError):
                    ctypes.CDLL(None).malloc_trim(0)
                max_bytes = max(engine.max_worker_bytes, resident_bytes() + _MIN_GROWTH_BYTES)

    with _explain_failures(shared.folder):
        # All workers inherit what the engine has cached before the fork.
        if engine.usable_before_fork and workers > 1 and schedule.chunks_left() >= _WARM_UP_CHUNKS * workers:
            worker = ChunkWorker(shared, journal_path("first"), lambda *numbers: receive(numbers))
            try:
                if (chunk := schedule.next(_PARENT)) is not None:
                    receive(worker.process(*chunk))
            finally:
                worker.close()
                schedule.release(_PARENT)
        gc.freeze()  # what is loaded now is shared with the workers; the collector would copy it page by page
        with contextlib.ExitStack() as stack:
            stack.callback(gc.unfreeze)
            pool = stack.enter_context(contextlib.closing(ForkedWorkers(serve, workers)))
            for number, message in pool.messages():
                if message is None:  # the worker is ready for a chunk
                    chunk = schedule.next(number)
                    pool.send(number, None if chunk is None else (chunk[0].id, chunk[1]))
                else:
                    receive(message)
    return progress


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say (then no worker is replaced)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


# -- rejects -------------------------------------------------------------------------------------------------------


def _check_rejects(shared: TokenizeTask, items: list[WorkItem], journal: Journal, listing: Path) -> None:
    """More rejects than allowed, or a damaged file: list them, keep everything, and let the user decide."""
    file = shared.file
    total = sum(line["rejects"] for line in journal.values())
    damaged = sorted({(p["file"], p["damage"]) for line in journal.values() for p in line["files"] if p["damage"]})
    problems = []
    if total > file.max_rejects:
        text = f"{total:,} rejected document{'s' * (total != 1)}, {file.max_rejects:,} allowed"
        problems.append(("data.documents-rejected", text, "max_rejects"))
    if damaged and not file.allow_damaged:
        text = f"{len(damaged):,} damaged file{'s' * (len(damaged) != 1)}"
        problems.append(("data.files-damaged", text, "allow_damaged = true"))
    if not problems:
        return
    lines = list(reject_lines(shared, items, journal))
    write_atomic(listing, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    details = [f"{path}: {reason}" for path, reason in damaged[:10]]
    for line in lines[:10]:
        place = "row" if format_of(line["file"])[0] in ROW_FORMATS else "line"
        details.append(f"{line['file']}, {place} {line['line']}: {line['reason']}")
    details += [f"and more in {listing}"] if len(lines) > 10 else []
    codes, texts, keys = zip(*problems, strict=True)
    raise DataError(
        codes[0],
        f"{' and '.join(texts)}:\n  " + "\n  ".join(details),
        hint=f"repair the files, or set {' and '.join(keys)}, and run again: all other documents are kept",
    )
