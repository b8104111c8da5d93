"""How do sources become a token store on all cores, whatever happens? Plan, lock, do what is missing, account for it, finish.

The folder `work/` inside the store holds pieces and journals until the store is complete. Killing the job at any moment loses at most
the chunks under way; the same command, or another with more workers, goes on from there and ends in the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from windlass.config.sources import DataFile
from windlass.data import megatron
from windlass.data.engines import Choice, choose
from windlass.data.finish import finish, forget_joined, joining, reject_lines, restate
from windlass.data.inputs import InputFile, Item, find_files, kind_of, plan_items
from windlass.data.ledger import refuse_unlawful
from windlass.data.read import peek
from windlass.data.schedule import Key, Schedule, make_schedule, missing
from windlass.data.store import MANIFEST, REJECTS, SourceInfo, hash_json
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.data.work import Job, Worker, cores, piece_name, stay_with_parent
from windlass.errors import EXIT_RESUMABLE, DataError, RunError, WindlassError
from windlass.files import append_line, read_json, read_json_lines, write_atomic, write_json
from windlass.runs.lock import holder, locked

_HOPELESS = 1000
"""Rejects after which a run in which most documents are rejected stops at once: the field name or format is probably wrong."""

_WARM = 4
"""Chunks per worker from which on the first is done before workers are forked: they all wait for it, but learn from it."""
Journal = dict[Key, dict[str, Any]]
"""What is done: (item, chunk) -> its line."""
_SELF = -1
"""Number of this process among its workers."""
_GROWTH = 100_000_000
"""Bytes that a worker may grow in any case, also where tokenizer and engine alone are stout."""
_REREAD = 300_000_000
"""Bytes that a new worker would rather decompress again, to find its place in a file, than load the engine anew."""


class StoppedError(WindlassError):
    """A signal ended the job; nothing is lost and the same command goes on."""

    exit_code = EXIT_RESUMABLE


@dataclass
class Progress:
    """What a progress bar needs; the numbers count this run, `done_bytes` also what earlier ones did."""

    total_bytes: int = 0
    done_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0
    documents: int = 0
    rejects: int = 0
    workers: int = 0
    engine: str = ""
    phase: str = "tokenizing"
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Result:
    store: Path
    complete: bool
    """False: an array task did its share; the store is not joined yet."""
    chunks_done: int
    chunks_kept: int
    """Found done by an earlier run."""
    engine: str
    tokens: int
    """These three are of the whole store; of an array task, what it did in this run."""
    documents: int
    rejects: int
    seconds: float
    manifest: dict[str, Any] = field(default_factory=dict)
    restated: bool = False
    """The store was complete; only what the ledger says of its sources was brought up to the data file."""


def tokenize(
    file: DataFile, *, task: tuple[int, int] | None = None, on_progress: Callable[[Progress], None] | None = None
) -> Result:
    """Make the store of a data file, or the share of array task (index, count). Safe to call again at any time."""
    target, work = Path(file.output), Path(file.output) / "work"
    if file.policy == "lawful":
        refuse_unlawful([_provenance(name, file) for name in file.sources], "the data file")
    tokenizer = load_tokenizer(file.tokenizer, eos=file.eos, glance=True)
    if file.add_eos and tokenizer.eos is None:
        raise DataError(
            "data.names-token-ends-document",
            f"{tokenizer.path} names no token that ends a document",
            hint='set eos = "<name of the token>", or add_eos = false',
        )
    files = {name: find_files(name, source) for name, source in file.sources.items()}
    _make_folders(target)
    with _lock(target, work, task), _uncollected():
        return _run(file, target, work, tokenizer, files, task, on_progress or (lambda progress: None))


def _run(
    file: DataFile,
    target: Path,
    work: Path,
    tokenizer: Tokenizer,
    files: dict[str, list[InputFile]],
    task: tuple[int, int] | None,
    show: Callable[[Progress], None],
) -> Result:
    began = time.monotonic()
    settings = settings_of(file, tokenizer)
    items = plan_items(file, files, hash_json(settings))
    kept = read_json(target / MANIFEST)
    items, fresh = _what_is_new(items, kept, settings, target, file)
    restated = restate(target, kept, file) if kept is not None and task is None else None
    kept = restated or kept
    if kept is not None and not items:
        if work.is_dir():  # something was to be added, and is no longer wanted
            forget_joined(work, target, kept)
            shutil.rmtree(work, ignore_errors=True)
        return replace(_result(target, kept, began, 0, 0, ""), restated=restated is not None)
    _make_folders(work / "pieces", work / "journal", work / "tokenizer")
    _write_plan(work, settings, items, target, kept)
    journal = read_journal(work, items)
    kept_chunks = len(journal)
    # Joining needs no engine; one is chosen if there are chunks to do.
    job = Job(file, None, tokenizer.eos if file.add_eos else None, megatron.dtype_for(tokenizer.vocab_size), work)  # type: ignore[arg-type]
    progress = _do_chunks(job, tokenizer, items, journal, task, show)
    done = len(journal) - kept_chunks
    if task is not None:
        seconds = time.monotonic() - began
        return Result(
            target, False, done, kept_chunks, progress.engine, progress.tokens, progress.documents, progress.rejects, seconds
        )  # fmt: skip
    _refuse_missing(items, journal)
    _refuse_rejects(file, job, items, journal, (work if fresh else target) / REJECTS)
    progress.phase = "joining"
    show(progress)
    with _stoppable():
        try:
            manifest = finish(job, items, journal, tokenizer, target, kept if fresh else None)
        except OSError as error:
            raise _failure(*_trouble(error, job)) from None
    _log(work, "finished", seconds=time.monotonic() - began)
    shutil.move(work / "history.jsonl", target / "history.jsonl")
    shutil.rmtree(work, ignore_errors=True)
    return _result(target, manifest, began, done, kept_chunks, progress.engine)


def _do_chunks(
    job: Job,
    tokenizer: Tokenizer,
    items: list[Item],
    journal: Journal,
    task: tuple[int, int] | None,
    show: Callable[[Progress], None],
) -> Progress:
    """What the journal does not hold yet; an engine is loaded only if there is something to do."""
    progress = Progress(total_bytes=sum(item.weight for item in items))
    progress.done_bytes = sum(_chunk_weight(item) for item in items for (name, _) in journal if name == item.id)
    schedule = make_schedule(items, _ends(journal), task)
    if schedule.waiting or any(not long.ended for long in schedule.longs):
        choice = _engine(job.file, tokenizer, items, job.folder)
        progress.engine = choice.reason
        show(progress)
        _log(job.folder, "started", task=task, engine=choice.reason, chunks_kept=len(journal))
        with _stoppable():
            _work(replace(job, engine=choice.engine), schedule, items, journal, progress, show, task)
    return progress


def _refuse_missing(items: list[Item], journal: Journal) -> None:
    if left := missing(items, _ends(journal)):
        raise DataError(
            "data.files-done-first",
            f"{len(left)} files are not done, the first is {left[0]}",
            hint="this is a fault in windlass; run the same command again",
        )


def _ends(journal: Journal) -> dict[Key, bool]:
    """(item, chunk) -> whether it was the item's last."""
    return {key: bool(line["last"]) for key, line in journal.items()}


def _result(target: Path, manifest: dict[str, Any], began: float, done: int, kept: int, engine: str) -> Result:
    rejects = sum(sum(source["rejected"].values()) for source in manifest["sources"].values())
    seconds = time.monotonic() - began
    return Result(
        target, True, done, kept, engine, manifest["tokens"], manifest["documents"], rejects, seconds, manifest
    )


def _provenance(name: str, file: DataFile) -> SourceInfo:
    source = file.sources[name]
    return SourceInfo(name=name, tokens=0, documents=None, licence=source.licence, origin=source.origin)


def settings_of(file: DataFile, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything, besides the texts, that decides which bytes are written."""
    keys = (
        "add_eos",
        "special_tokens",
        "dedup",
        "utf8",
        "min_chars",
        "max_chars",
        "max_document",
        "validation",
        "chunk",
        "shard_tokens",
    )
    return {
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        **{key: getattr(file, key) for key in keys},
    }


def _make_folders(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                "data.store-s-folder-cannot",
                f"the store's folder {folder} cannot be made: {error.strerror}",
                hint="choose another `output` in the data file",
            ) from None


# -- adding to a store ---------------------------------------------------------------------------------------------


def _what_is_new(
    items: list[Item], kept: dict[str, Any] | None, settings: dict[str, Any], target: Path, file: DataFile
) -> tuple[list[Item], bool]:
    """(items to do, whether they are added to a finished store). A finished source is never done again or changed."""
    if kept is None:
        return items, False
    differ = [key for key, value in settings.items() if kept["settings"].get(key) != value]
    if differ:
        shown = "; ".join(f"{key}: {kept['settings'].get(key)!r} there, {settings[key]!r} here" for key in differ)
        raise DataError(
            "data.finished-store-made-other",
            f"{target} is a finished store made with other settings ({shown})",
            hint="choose another `output`: tokens of two tokenizers or settings do not mix",
        )
    by_source = {name: [item.id for item in items if item.source == name] for name in file.sources}
    changed = [
        name
        for name, ids in by_source.items()
        if name in kept["sources"] and kept["sources"][name]["items"] != hash_json(sorted(ids))
    ]
    if changed:
        raise DataError(
            "data.files-those-made",
            f"the files of {', '.join(changed)} are not those that {target} was made from",
            hint="put new files into a source of another name, or choose another `output`",
        )
    fresh = [item for item in items if item.source not in kept["sources"]]
    if fresh and file.dedup == "exact":
        raise DataError(
            "data.sources-cannot-added-dedup",
            f'sources cannot be added to {target} with dedup = "exact"',
            hint="the hashes of its documents are gone: make a new store of all sources",
        )
    return fresh, bool(fresh)


def _write_plan(
    work: Path, settings: dict[str, Any], items: list[Item], target: Path, kept: dict[str, Any] | None
) -> None:
    by_source: dict[str, list[str]] = {}
    for item in items:
        by_source.setdefault(item.source, []).append(item.id)
    plan, before = {"settings": settings, "items": by_source}, read_json(work / "plan.json")
    if before is not None and (before != plan or list(before["items"]) != list(by_source)):
        forget_joined(work, target, kept)
    write_json(work / "plan.json", plan)


# -- journals ------------------------------------------------------------------------------------------------------


def read_journal(work: Path, items: list[Item]) -> Journal:
    """Every chunk that is done: its line stands in a journal. Lines of changed files or settings are passed over, and so are
    those whose pieces went into a shard that is no longer wanted."""
    known = {item.id for item in items}
    there = None if joining(work) else {entry.name for entry in os.scandir(work / "pieces")}
    found: Journal = {}
    for path in sorted((work / "journal").glob("*.jsonl")):
        for line in read_json_lines(path):
            if line.get("item") in known and "files" in line and _has_pieces(line, there):
                found.setdefault((line["item"], line["chunk"]), line)
    return found


def _has_pieces(line: dict[str, Any], there: set[str] | None) -> bool:
    return there is None or all(piece_name(line["item"], line["chunk"], split) in there for split in line["pieces"])


def _log(work: Path, event: str, **facts: Any) -> None:
    append_line(work / "history.jsonl", {"time": time.time(), "event": event, "pid": os.getpid(), **facts})


def _chunk_weight(item: Item) -> int:
    return item.weight // item.chunks if item.chunks else min(item.step, item.weight)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector off: it would look through a whole vocabulary again and again, and there are no cycles to find in it."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# -- locks and signals ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(target: Path, work: Path, task: tuple[int, int] | None) -> Iterator[None]:
    """One job per store, or many tasks of one array, but not both."""
    from windlass.clusters.scheduler import job_id

    main = target / ".tokenize.lock"
    mine = main if task is None else work / f"task-{task[0]:05d}.lock"
    others = sorted(work.glob("task-*.lock")) if task is None else [main]
    busy = next((path for path in others if holder(path) is not None), None)
    if busy is not None:
        raise _occupied(target, holder(busy) or {})
    try:
        with locked(mine, job_id()):
            yield
    except RunError as error:
        if "is being written by another process" not in error.message:
            raise
        raise _occupied(target, holder(mine) or {}) from None


def _occupied(target: Path, who: dict[str, object]) -> DataError:
    name = f"host {who.get('host', 'unknown')}, pid {who.get('pid', 'unknown')}" + (
        f", job {who['job']}" if who.get("job") else ""
    )
    return DataError(
        "data.being-written-another-tokenize",
        f"{target} is being written by another tokenize job ({name})",
        hint="wait for it, stop it, or choose another `output`",
    )


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM (the queue's time limit) ends the job with a message and the exit code of a job that can be continued."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError(
            f"stopped by {signal.Signals(number).name}", hint="run the same command again: it does only what is missing"
        )

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: the caller decides about signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- the engine ----------------------------------------------------------------------------------------------------


def _engine(file: DataFile, tokenizer: Tokenizer, items: list[Item], work: Path) -> Choice:
    sample: list[str] = []
    for name, source in file.sources.items():
        first = next((item for item in items if item.source == name), None)
        sample += peek(first, source, 4000)[:8] if first is not None else []
    specials = file.special_tokens == "parse"
    return choose(tokenizer, file.engine, specials=specials, sample=sample[:32], cache=work / "tokenizer")


# -- workers -------------------------------------------------------------------------------------------------------


def _work(
    job: Job,
    schedule: Schedule,
    items: list[Item],
    journal: Journal,
    progress: Progress,
    show: Callable[[Progress], None],
    task: tuple[int, int] | None,
) -> None:
    """Fork workers, hand out chunks, collect journal lines. Ends with an error as soon as one worker reports one."""
    by_id = {item.id: item for item in items}
    workers = progress.workers = job.file.workers or cores()

    def hear(kind: str, *rest: Any) -> None:
        if kind == "progress":
            progress.text_bytes, progress.tokens = progress.text_bytes + rest[0], progress.tokens + rest[1]
            progress.documents, progress.rejects = progress.documents + rest[2], progress.rejects + rest[3]
            _stop_hopeless(job.file, progress)
        elif kind == "done":
            line = rest[0]
            item = by_id[line["item"]]
            journal[(line["item"], line["chunk"])] = line
            schedule.finished(item, bool(line["last"]))
            progress.done_bytes += _chunk_weight(item)
        else:
            raise _failure(*rest)
        show(progress)

    if job.engine.before_fork and workers > 1 and schedule.left() >= _WARM * workers:
        _first_chunk(job, schedule, hear, task)
    gc.freeze()  # what is loaded now is shared with the workers; the collector would copy it page by page
    team = _Team(job, by_id, workers, task)
    try:
        for number, message in team.messages():
            if message[0] == "ready":
                found = schedule.next(number)
                team.send(number, None if found is None else (found[0].id, found[1]))
            else:
                hear(*message)
    finally:
        team.close()
        gc.unfreeze()


def _first_chunk(job: Job, schedule: Schedule, hear: Callable[..., None], task: tuple[int, int] | None) -> None:
    """Do one chunk here, before workers are forked: the words that the engine learns in it are then known to all of them."""
    found = schedule.next(_SELF)
    if found is None:
        return
    worker = Worker(job, _journal(job, task, "first"), lambda *numbers: hear("progress", *numbers))
    try:
        hear("done", worker.do(*found))
    except OSError as error:
        hear("error", *_trouble(error, job))
    finally:
        worker.close()
        schedule.release(_SELF)


def _journal(job: Job, task: tuple[int, int] | None, name: str) -> Path:
    return job.folder / "journal" / f"{'main' if task is None else f'task-{task[0]:05d}'}-{name}.jsonl"


def _trouble(error: Exception, job: Job) -> tuple[str, str, str | None]:
    """(kind, text, hint): an error in a form that passes through a pipe."""
    if isinstance(error, OSError):
        return "disk", f"{error.strerror} ({error.filename or job.folder})", None
    if isinstance(error, WindlassError):
        return "data", error.message, error.hint
    hint = "this is a fault in windlass; please report it with the traceback above"
    return "fault", f"{type(error).__name__}: {error}", hint


def _failure(kind: str, text: str, hint: str | None) -> WindlassError:
    if kind == "disk":
        return DataError(
            "data.disk-refused",
            f"the disk refused: {text}",
            hint="free some space (or quota) and run the same command again: what is done stays done",
        )
    return DataError("data.failed", text, hint=hint)


def _stop_hopeless(file: DataFile, progress: Progress) -> None:
    if progress.rejects > max(_HOPELESS, file.max_rejects) and progress.rejects > progress.documents:
        raise DataError(
            "data.first-documents-rejected-stopped",
            f"{progress.rejects:,} of the first {progress.rejects + progress.documents:,} documents were rejected: stopped early",
            hint="is `field` the name of the text field, and `format` right? The reasons stand in work/pieces/*.rejects",
        )


class _Team:
    """Forked workers and the pipes to them."""

    def __init__(self, job: Job, items: dict[str, Item], count: int, task: tuple[int, int] | None) -> None:
        self.job, self.items, self.task = job, items, task
        self.members: dict[int, tuple[Any, Connection]] = {}
        for number in range(count):
            self._start(number)

    def _start(self, number: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        foreign = [c for _, c in self.members.values()] + [ours]
        book = _journal(self.job, self.task, f"{number:03d}")
        process = context.Process(target=_member, args=(self.job, self.items, theirs, foreign, book), daemon=True)
        process.start()
        theirs.close()
        self.members[number] = (process, ours)

    def _relieve(self, number: int) -> Connection:
        """A new worker in the place of one that ends: it knows what this process knew when it was forked, and has little memory."""
        process, connection = self.members.pop(number)
        connection.close()
        process.join()
        self._start(number)
        return self.members[number][1]

    def send(self, number: int, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.members[number][1].send(message)

    def messages(self) -> Iterator[tuple[int, Any]]:
        """Every message of every worker until all have ended; a worker that dies without a word is an error."""
        open_ = {connection: number for number, (_, connection) in self.members.items()}
        while open_:
            for connection in wait(list(open_)):
                number = open_[connection]  # type: ignore[index]
                try:
                    message = self.members[number][1].recv()
                except (EOFError, ConnectionResetError):
                    process = self.members[number][0]
                    process.join(5)
                    raise DataError(
                        "data.failed",
                        _died(process.exitcode),
                        hint="run the same command again: at most the chunks under way are repeated",
                    ) from None
                if message[0] == "bye":
                    del open_[connection]  # type: ignore[arg-type]
                elif message[0] == "stout":
                    del open_[connection]  # type: ignore[arg-type]
                    open_[self._relieve(number)] = number
                else:
                    yield number, message

    def close(self) -> None:
        for process, connection in self.members.values():
            connection.close()
            if process.is_alive():
                process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join()


def _died(code: int | None) -> str:
    if code is not None and code < 0:
        return f"a worker was killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
    return f"a worker ended with exit code {code}"


def _member(job: Job, items: dict[str, Item], connection: Connection, foreign: list[Connection], book: Path) -> None:
    """A worker's life: ask, do, report, until told to stop or the parent is gone."""
    stay_with_parent()
    for other in foreign:  # a pipe that this process holds open would hide the parent's death from another worker
        other.close()
    worker = Worker(job, book, lambda *numbers: connection.send(("progress", *numbers)))
    limit = max(job.engine.stout, resident() + _GROWTH)
    try:
        while True:
            connection.send(("ready",))
            if (told := connection.recv()) is None:
                connection.send(("bye",))
                return
            connection.send(("done", worker.do(items[told[0]], told[1])))
            gc.collect()  # what was loaded before the fork is frozen, so little is looked at
            if resident() > limit:
                if not _slimmed(job, worker):
                    connection.send(("stout",))
                    return
                limit = max(job.engine.stout, resident() + _GROWTH)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except Exception as error:
        if not isinstance(error, (OSError, WindlassError)):
            import traceback

            traceback.print_exc(file=sys.stderr)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # another one's trouble was heard first
            connection.send(("error", *_trouble(error, job)))


def resident() -> int:
    """Bytes of memory of this process; 0 where the system does not say (then no worker is relieved)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _slimmed(job: Job, worker: Worker) -> bool:
    """Load the engine anew where a new worker would have to decompress too much again; False: let a new worker take over."""
    if worker.depth < _REREAD or job.engine.renew is None:
        return False
    job.engine.renew()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return True


# -- rejects -------------------------------------------------------------------------------------------------------


def _refuse_rejects(file: DataFile, job: Job, items: list[Item], journal: Journal, listing: Path) -> None:
    """More rejects than allowed, or a damaged file: say so, list them, keep everything, and let the user decide."""
    total = sum(line["rejects"] for line in journal.values())
    damaged = sorted(
        {(part["file"], part["damage"]) for line in journal.values() for part in line["files"] if part["damage"]}
    )
    if total <= file.max_rejects and (not damaged or file.allow_damaged):
        return
    lines = list(reject_lines(job, items, journal))
    write_atomic(listing, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    said = [f"{path}: {reason}" for path, reason in damaged[:10]]
    said += [f"{line['file']}, {_place(line['file'])} {line['line']}: {line['reason']}" for line in lines[:10]]
    more = f"\n  and more in {listing}" if len(lines) > 10 else ""
    refused, broken = total > file.max_rejects, damaged and not file.allow_damaged
    what = [f"{_many(total, 'document was', 'documents were')} rejected, {file.max_rejects:,} are allowed"] * refused
    what += [f"{_many(len(damaged), 'file is', 'files are')} damaged"] * bool(broken)
    keys = ["max_rejects"] * refused + ["allow_damaged = true"] * bool(broken)
    raise DataError(
        "data.failed",
        f"{' and '.join(what)}:\n  " + "\n  ".join(said) + more,
        hint=f"all other documents are done and kept: repair the files, or set {' and '.join(keys)}, and run again",
    )


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _place(file: str) -> str:
    """What a document is called in a file of this kind."""
    return "row" if kind_of(file)[0] in ("parquet", "arrow") else "line"
