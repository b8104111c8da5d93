"""How do finished pieces become a store? Duplicates marked, pieces joined into shards, accounts summed, the manifest written last.

Each step leaves a whole file or nothing, and a second run does only what is missing; the result does not depend on who did what when.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.config.sources import DataFile
from windlass.data import megatron
from windlass.data.inputs import Item
from windlass.data.schedule import Key, last_chunk
from windlass.data.store import CHECKSUMS, FILES, KIND, LEDGER, MANIFEST, REJECTS, hash_json, hash_path
from windlass.data.tokenizer import Tokenizer
from windlass.data.work import SPLITS, Job, cores, stay_with_parent, write_all
from windlass.errors import DataError
from windlass.files import append_line, read_json, read_json_lines, write_atomic, write_json

TERMS = ("language", "licence", "origin", "consent", "kind", "collected", "crawler", "opt_out", "notes")
"""What a data file says of a source that changes no token: it may be said better later."""
_PARTITION = 8_000_000
"""Hashes compared at a time: 200 MB."""
_BOOK = "shards.jsonl"
"""In work/: a line for each shard that is whole, whose pieces may be gone."""


@dataclass(frozen=True)
class Part:
    """One piece of one split, and which of its documents are dropped as duplicates."""

    path: Path
    facts: Mapping[str, Any]
    dropped: npt.NDArray[np.int64]

    def tail(self, dtype: str, skip: int, count: int, itemsize: int) -> npt.NDArray[Any]:
        offset = self.facts["tokens"] * itemsize + skip
        return np.fromfile(self.path, dtype=dtype, count=count, offset=offset)

    def lengths(self, itemsize: int) -> npt.NDArray[np.int32]:
        return self.tail("<i4", 0, self.facts["documents"], itemsize)

    @property
    def documents(self) -> int:
        return int(self.facts["documents"]) - len(self.dropped)


def ordered(items: Iterable[Item], journal: Mapping[Key, dict[str, Any]]) -> Iterator[tuple[Item, int, dict[str, Any]]]:
    """Every chunk in the order of the store. Chunks that a second reader found beyond the end of a file are left out."""
    done = {key: bool(line["last"]) for key, line in journal.items()}
    for item in items:
        count = item.chunks if item.chunks is not None else (last_chunk(item, done) or 0) + 1
        for chunk in range(count):
            yield item, chunk, journal[(item.id, chunk)]


def find_duplicates(
    job: Job, items: list[Item], journal: Mapping[Key, dict[str, Any]]
) -> dict[str, npt.NDArray[np.int64]]:
    """Piece name -> documents whose text came before, in the order of the store. Memory is bounded: hashes are compared in partitions."""
    saved = job.folder / "duplicates.npz"
    if not saved.is_file():
        pieces = [
            (job.piece(item.id, chunk, split), facts)
            for item, chunk, line in ordered(items, journal)
            for split in SPLITS
            if (facts := line["pieces"].get(split)) is not None
        ]
        marked = _mark_duplicates(pieces, job.dtype.itemsize)
        beside = saved.with_name(".duplicates.tmp.npz")
        np.savez(beside, **{path.name: found for (path, _), found in zip(pieces, marked, strict=True) if len(found)})  # type: ignore[arg-type]
        beside.replace(saved)
    with np.load(saved) as found:
        return {name: found[name] for name in found.files}


def _mark_duplicates(pieces: list[tuple[Path, Any]], itemsize: int) -> list[npt.NDArray[np.int64]]:
    total = sum(facts["documents"] for _, facts in pieces)
    partitions = max(1, -(-total // _PARTITION))
    starts = np.cumsum([0, *(facts["documents"] for _, facts in pieces)])
    marks: list[list[npt.NDArray[np.int64]]] = [[] for _ in pieces]
    for partition in range(partitions):
        repeated = _repeated(pieces, starts, itemsize, partition, partitions)
        owner = np.searchsorted(starts, repeated, side="right") - 1
        for number in np.unique(owner):
            marks[number].append(repeated[owner == number] - starts[number])
    return [np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64) for found in marks]


def _repeated(
    pieces: list[tuple[Path, Any]], starts: npt.NDArray[np.int64], itemsize: int, partition: int, partitions: int
) -> npt.NDArray[np.int64]:
    """Numbers, over all pieces, of the documents of one partition that are not the first with their hash."""
    hashes, numbers = [], []
    for number, (path, facts) in enumerate(pieces):
        count = facts["documents"]
        pairs = Part(path, facts, _NONE).tail("<u8", 8 * count, 2 * count, itemsize).reshape(-1, 2)
        here = np.flatnonzero(pairs[:, 1] % np.uint64(partitions) == partition)
        hashes.append(pairs[here])
        numbers.append(here + starts[number])
    if not hashes:
        return _NONE
    pairs, order = np.concatenate(hashes), np.concatenate(numbers)
    rank = np.lexsort((order, pairs[:, 0], pairs[:, 1]))
    same = np.all(pairs[rank][1:] == pairs[rank][:-1], axis=1)
    return order[rank[1:][same]]


_NONE: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


# -- shards --------------------------------------------------------------------------------------------------------


def write_shards(
    job: Job, source: str, parts: Mapping[str, list[Part]], target: Path
) -> dict[str, list[dict[str, Any]]]:
    """Join a source's pieces into shards, several at a time; returns the manifest's entries, with the checksums of their stretches."""
    book = job.folder / _BOOK
    ready = {line["file"]: line for line in read_json_lines(book)}
    groups = {
        f"{source}-{split}-{number:05d}.bin": (split, group)
        for split in SPLITS
        for number, group in enumerate(_groups([p for p in parts.get(split, []) if p.documents], job.file.shard_tokens))
    }
    for name in groups:
        for torn in target.glob(f".{name.removesuffix('.bin')}.*.tmp"):  # of a run that was killed here
            torn.unlink()
    for line in _joined(job, [(name, group) for name, (_, group) in groups.items() if name not in ready], target):
        append_line(book, line)
        ready[line["file"]] = line
        _drop(groups[line["file"]][1])
    made: dict[str, list[dict[str, Any]]] = {}
    for name, (split, group) in groups.items():
        _drop(group)  # again: a run may have been killed between its line and this
        made.setdefault(split, []).append(ready[name])
    return made


def _drop(group: list[Part]) -> None:
    for part in group:
        part.path.unlink(missing_ok=True)


def joining(work: Path) -> bool:
    """Whether a run was stopped while it joined: then a piece that is missing may be in a shard already."""
    return (work / _BOOK).is_file()


def forget_joined(work: Path, target: Path, kept: Mapping[str, Any] | None) -> None:
    """Undo what a stopped run had joined out of other pieces than are wanted now; what the manifest `kept` lists stays."""
    sources = kept["sources"] if kept else {}
    listed = {shard["file"] for source in sources.values() for shards in source["shards"].values() for shard in shards}
    made = [line["file"] for line in read_json_lines(work / _BOOK) if line["file"] not in listed]
    for name in (_BOOK, "duplicates.npz", "removed.json"):
        (work / name).unlink(missing_ok=True)
    for name in made:
        (target / name).unlink(missing_ok=True)
        (target / name).with_suffix(".idx").unlink(missing_ok=True)
    for name in (FILES, REJECTS) if kept else ():
        if (target / name).is_file() and (before := _lines_of(target / name, sources)) != (target / name).read_bytes():
            write_atomic(target / name, before)


Todo = list[tuple[str, list[Part]]]
"""Names of shards and what goes into them."""


def _joined(job: Job, todo: Todo, target: Path) -> Iterator[dict[str, Any]]:
    """The line of each shard when it is whole. One process copies a gigabyte in a second or two: a store of terabytes wants all cores."""
    count = min(len(todo), job.file.workers or cores())
    if count <= 1:
        yield from (_write_shard(job, group, target / name) for name, group in todo)
        return
    context = multiprocessing.get_context("fork")
    team: dict[Connection, Any] = {}
    try:
        for number in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_stripe, args=(theirs, job, todo[number::count], target), daemon=True)
            process.start()
            theirs.close()
            team[ours] = process
        while team:
            for connection in wait(list(team)):
                yield from _heard(connection, team)  # type: ignore[arg-type]
    finally:
        for connection, process in team.items():
            connection.close()
            process.kill()
            process.join()


def _heard(connection: Connection, team: dict[Connection, Any]) -> Iterator[dict[str, Any]]:
    try:
        message = connection.recv()
    except EOFError:
        raise DataError(
            "data.process-joined-pieces-died",
            "a process that joined pieces died",
            hint="run the same command again: nothing is lost",
        ) from None
    if isinstance(message, Exception):
        raise message
    if message is None:
        team.pop(connection).join()
        connection.close()
    else:
        yield message


def _stripe(sender: Connection, job: Job, todo: Todo, target: Path) -> None:
    """In a process of its own: its share of the shards, one after the other."""
    stay_with_parent()
    try:
        for name, group in todo:
            sender.send(_write_shard(job, group, target / name))
        sender.send(None)
    except (OSError, DataError) as error:
        sender.send(error)


def _groups(parts: list[Part], limit: int) -> Iterator[list[Part]]:
    group: list[Part] = []
    for part in parts:
        if group and sum(p.facts["tokens"] for p in group) + part.facts["tokens"] > limit:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _write_shard(job: Job, group: list[Part], path: Path) -> dict[str, Any]:
    itemsize = job.dtype.itemsize
    lengths = np.concatenate([np.delete(part.lengths(itemsize), part.dropped) for part in group])
    stretches: list[list[Any]] = []
    with _beside(path) as file:
        stretches.extend(_join_part(file, part, job.dtype) for part in group)
    index = hashlib.sha256()
    with _beside(path.with_suffix(".idx")) as file:
        for chunk in megatron.index_parts(lengths, job.dtype, marks=job.file.document_marks):
            index.update(chunk)
            write_all(file, chunk)
    size = path.with_suffix(".idx").stat().st_size
    return {
        "file": path.name, "tokens": int(lengths.sum(dtype=np.int64)), "documents": len(lengths),
        "stretches": [s for s in stretches if s[0]], "index": [[size, index.hexdigest()]],
    }  # fmt: skip


class _beside:  # noqa: N801 - used as a function
    """Write a file under another name and give it its own when it is whole and on disk."""

    def __init__(self, path: Path) -> None:
        self.path, self.other = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Any:
        self.file = self.other.open("wb", buffering=0)
        return self.file

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self.file.fileno())
        finally:
            self.file.close()
        if kind is None:
            self.other.replace(self.path)
        else:
            self.other.unlink(missing_ok=True)


def _join_part(file: Any, part: Part, dtype: np.dtype[Any]) -> list[Any]:
    """Append a piece's tokens; [bytes, checksum] of what was appended."""
    size = part.facts["tokens"] * dtype.itemsize
    if part.path.stat().st_size < size:
        raise DataError("data.cut", f"{part.path} was cut", hint=f"remove {part.path.parent.parent} and run again")
    if len(part.dropped) == 0:
        with part.path.open("rb") as piece:
            _copy(piece.fileno(), file.fileno(), size)
        return [size, part.facts.get("crc32") or part.facts["sha256"]]  # the latter: a piece of an earlier release
    lengths = part.lengths(dtype.itemsize)
    keep = np.ones(len(lengths), dtype=bool)
    keep[part.dropped] = False
    tokens = np.fromfile(part.path, dtype=dtype, count=part.facts["tokens"])[np.repeat(keep, lengths)]
    write_all(file, tokens)
    return [tokens.nbytes, f"{zlib.crc32(tokens):08x}"]


def _copy(source: int, target: int, size: int) -> None:
    """Inside the kernel where it can, else by reading and writing."""
    left = size
    try:
        while left and (done := os.copy_file_range(source, target, left)):
            left -= done
    except OSError as error:
        if error.errno not in (18, 22, 38, 95):  # EXDEV, EINVAL, ENOSYS, EOPNOTSUPP: not on this file system
            raise
    while left and (block := os.read(source, min(left, 1 << 20))):
        left -= os.write(target, block)
    if left:
        raise DataError(
            "data.bytes-piece-could-read",
            f"{left:,} bytes of a piece could not be read",
            hint="run the same command again",
        )


# -- accounts ------------------------------------------------------------------------------------------------------


def source_parts(
    job: Job, items: list[Item], journal: Mapping[Key, dict[str, Any]], dropped: Mapping[str, npt.NDArray[np.int64]]
) -> dict[str, dict[str, list[Part]]]:
    """Source -> split -> pieces in the order of the store."""
    found: dict[str, dict[str, list[Part]]] = {item.source: {} for item in items}
    for item, chunk, line in ordered(items, journal):
        for split, facts in line["pieces"].items():
            path = job.piece(item.id, chunk, split)
            found[item.source].setdefault(split, []).append(Part(path, facts, dropped.get(path.name, _NONE)))
    return found


def file_accounts(
    job: Job, items: list[Item], journal: Mapping[Key, dict[str, Any]], dropped: Mapping[str, npt.NDArray[np.int64]]
) -> list[dict[str, Any]]:
    """For every input file: documents = out + rejected + filtered. Anything else is a fault of ours and stops the run."""
    accounts: dict[tuple[str, str], dict[str, Any]] = {}
    for item, chunk, line in ordered(items, journal):
        _count_duplicates(job, item, chunk, line, dropped)
        for number, part in enumerate(line["files"]):
            key = (item.source, part["file"])
            total = accounts.setdefault(
                key,
                {
                    "source": item.source,
                    "file": part["file"],
                    "size": item.files[number].size,
                    "lines": 0,
                    "documents": 0,
                    "out": Counter(),
                    "rejected": Counter(),
                    "filtered": Counter(),
                    "damage": None,
                },
            )
            total["lines"] += part["lines"]
            total["documents"] += part["documents"]
            total["damage"] = total["damage"] or part["damage"]
            for name in ("out", "rejected", "filtered"):
                total[name].update(part[name])
    for total in accounts.values():
        _balance(total)
    return [
        {
            **a,
            **{name: dict(sorted((k, v) for k, v in a[name].items() if v)) for name in ("out", "rejected", "filtered")},
        }
        for a in accounts.values()
    ]


def _balance(total: dict[str, Any]) -> None:
    spent = sum(total["out"].values()) + sum(total["rejected"].values()) + sum(total["filtered"].values())
    if spent != total["documents"]:
        raise DataError(
            "data.documents-but-accounted",
            f"{total['file']}: {total['documents']:,} documents in, but {spent:,} accounted for",
            hint="this is a fault in windlass; please report it",
        )


def _count_duplicates(
    job: Job, item: Item, chunk: int, line: dict[str, Any], dropped: Mapping[str, npt.NDArray[np.int64]]
) -> None:
    """Move dropped documents from `out` to `filtered` of the file they came from."""
    if line.get("counted"):
        return
    line["counted"] = True
    for split in line["pieces"]:
        gone = dropped.get(job.piece(item.id, chunk, split).name, _NONE)
        ends = np.cumsum([part["out"].get(split, 0) for part in line["files"]])
        for number, count in Counter(np.searchsorted(ends, gone, side="right").tolist()).items():
            part = line["files"][number]
            part["out"][split] -= count
            part["filtered"]["duplicate"] = part["filtered"].get("duplicate", 0) + count


def reject_lines(job: Job, items: list[Item], journal: Mapping[Key, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every rejected document with its file and its line (or row) in that file, counted from 1."""
    before: Counter[tuple[str, str]] = Counter()
    for item, chunk, line in ordered(items, journal):
        if line["rejects"]:
            for reject in read_json_lines(job.piece(item.id, chunk, "rejects")):
                path = line["files"][reject["file"]]["file"]
                yield {
                    "source": item.source,
                    "file": path,
                    "line": before[(item.source, path)] + reject["line"] + 1,
                    "reason": reject["reason"],
                    "text": reject["text"],
                }
        for part in line["files"]:
            before[(item.source, part["file"])] += part["lines"]


# -- the store's own files -----------------------------------------------------------------------------------------


def finish(
    job: Job,
    items: list[Item],
    journal: dict[Key, dict[str, Any]],
    tokenizer: Tokenizer,
    target: Path,
    kept: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """From pieces to a complete store; `kept` is the manifest that is added to. Returns the new manifest."""
    dropped = find_duplicates(job, items, journal) if job.file.dedup == "exact" else {}
    parts = source_parts(job, items, journal, dropped)
    accounts = file_accounts(job, items, journal, dropped)
    removed = _removed_bytes(job, parts)
    sources = dict(kept["sources"]) if kept else {}
    before = tuple(sources)
    checksums = (read_json(target / CHECKSUMS) or {}).get("files", {}) if kept else {}
    for name in job.file.sources:
        if name in parts:
            shards = write_shards(job, name, parts[name], target)
            sources[name] = _source_entry(
                job, name, parts[name], shards, [a for a in accounts if a["source"] == name], removed.get(name, 0)
            )
            for entry in (e for entries in shards.values() for e in entries):
                checksums[entry["file"]] = entry["stretches"]
                checksums[str(Path(entry["file"]).with_suffix(".idx"))] = entry["index"]
    # Late, so that a store that is added to has its old lines for as long as it has its old manifest, but for a moment.
    _write_lines(target / REJECTS, reject_lines(job, items, journal), before)
    _write_lines(target / FILES, iter(accounts), before)
    return _write_manifest(job, tokenizer, target, sources, checksums, parts, kept)


def _removed_bytes(job: Job, parts: Mapping[str, Mapping[str, list[Part]]]) -> dict[str, int]:
    """Bytes of text of the dropped documents, by source; read before the pieces go, kept for a restart after that."""
    saved = job.folder / "removed.json"
    if (found := read_json(saved)) is None:
        found = {
            name: sum(_dropped_bytes(part, job.dtype.itemsize) for ps in by_split.values() for part in ps)
            for name, by_split in parts.items()
        }
        write_json(saved, found)
    return found


def _dropped_bytes(part: Part, itemsize: int) -> int:
    if not len(part.dropped):
        return 0
    count = part.facts["documents"]
    return int(part.tail("<i4", 4 * count, count, itemsize)[part.dropped].sum(dtype=np.int64))


def _source_entry(
    job: Job,
    name: str,
    parts: Mapping[str, list[Part]],
    shards: Mapping[str, list[dict[str, Any]]],
    accounts: list[dict[str, Any]],
    removed: int,
) -> dict[str, Any]:
    source = job.file.sources[name]
    facts = [part.facts for split in parts.values() for part in split]
    listed = {
        split: [{key: entry[key] for key in ("file", "tokens", "documents")} for entry in entries]
        for split, entries in shards.items()
    }
    entries = [entry for split in listed.values() for entry in split]
    rejected: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    for account in accounts:
        rejected.update(account["rejected"])
        filtered.update(account["filtered"])
    return {
        "tokens": sum(e["tokens"] for e in entries), "documents": sum(e["documents"] for e in entries), "bytes": sum(f["bytes"] for f in facts) - removed,
        "sample_words": sum(f["sample_words"] for f in facts), "sample_tokens": sum(f["sample_tokens"] for f in facts),
        "max_token": max((f["max_token"] for f in facts), default=-1), "files": len(accounts), "documents_in": sum(a["documents"] for a in accounts),
        "rejected": dict(sorted(rejected.items())), "filtered": dict(sorted(filtered.items())), "damaged_files": sum(a["damage"] is not None for a in accounts),
        **{key: getattr(source, key) for key in (*TERMS, "paths")},
        "items": hash_json(sorted(item_ids(job, name))), "shards": listed,
    }  # fmt: skip


def item_ids(job: Job, name: str) -> list[str]:
    return read_json(job.folder / "plan.json")["items"][name]  # type: ignore[index,no-any-return]


def _write_lines(path: Path, lines: Iterator[dict[str, Any]], before: Collection[str]) -> None:
    """Write the lines behind those of the sources that the store had before; a second try gives the same."""
    new = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
    write_atomic(path, _lines_of(path, before) + new)


def _lines_of(path: Path, sources: Collection[str]) -> bytes:
    """Those lines of a file that belong to one of the sources, as they stand there."""
    if not sources or not path.is_file():
        return b""
    with path.open("rb") as file:
        return b"".join(line for line in file if json.loads(line)["source"] in sources)


def ledger_of(sources: Mapping[str, Any], tokenizer_hash: str) -> dict[str, Any]:
    """What was used, from where, on what terms, and how much of it became tokens."""
    keys = (*TERMS, "paths", "files", "documents", "tokens", "bytes")
    return {
        "version": 1,
        "tokenizer": tokenizer_hash,
        "sources": {name: {key: entry.get(key) for key in keys} for name, entry in sources.items()},
    }


def _write_manifest(
    job: Job,
    tokenizer: Tokenizer,
    target: Path,
    sources: dict[str, Any],
    checksums: dict[str, Any],
    parts: Mapping[str, Any],
    kept: Mapping[str, Any] | None,
) -> dict[str, Any]:
    name = _tokenizer_name(tokenizer)
    shutil.copyfile(tokenizer.path, target / f".{name}.tmp")
    (target / f".{name}.tmp").replace(target / name)
    ledger = ledger_of(sources, tokenizer.hash)
    write_json(target / LEDGER, ledger)
    manifest = {
        "kind": KIND, "version": 1, "dtype": job.dtype.newbyteorder("<").str, "max_token": max((s["max_token"] for s in sources.values()), default=-1),
        "tokenizer": {"file": name, "kind": tokenizer.kind, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "eos_per_document": job.eos is not None},
        "settings": read_json(job.folder / "plan.json")["settings"],  # type: ignore[index]
        "ledger_hash": hash_json(ledger), "tokens": sum(s["tokens"] for s in sources.values()), "documents": sum(s["documents"] for s in sources.values()), "sources": sources,
    }  # fmt: skip
    for extra in (name, LEDGER, FILES, REJECTS):
        checksums[extra] = [[(target / extra).stat().st_size, hash_path(target / extra)]]
    write_json(target / CHECKSUMS, {"files": checksums})
    write_json(target / MANIFEST, manifest)
    return manifest


def restate(target: Path, kept: Mapping[str, Any], file: DataFile) -> dict[str, Any] | None:
    """Bring the terms of a finished store's sources up to what the data file says now; None when they are the same.

    The manifest is written last: until then the old one stands, and a second run does this again.
    """
    said = {n: {key: getattr(s, key) for key in TERMS} for n, s in file.sources.items() if n in kept["sources"]}
    if all(kept["sources"][name].get(key) == value for name, terms in said.items() for key, value in terms.items()):
        return None
    sources = {name: {**entry, **said.get(name, {})} for name, entry in kept["sources"].items()}
    ledger = ledger_of(sources, kept["tokenizer"]["hash"])
    write_json(target / LEDGER, ledger)
    checksums = read_json(target / CHECKSUMS) or {"files": {}}
    checksums["files"][LEDGER] = [[(target / LEDGER).stat().st_size, hash_path(target / LEDGER)]]
    write_json(target / CHECKSUMS, checksums)
    manifest = {**kept, "ledger_hash": hash_json(ledger), "sources": sources}
    write_json(target / MANIFEST, manifest)
    return manifest


def _tokenizer_name(tokenizer: Tokenizer) -> str:
    return {"json": "tokenizer.json", "tekken": "tekken.json"}.get(tokenizer.kind, "tokenizer.model")
