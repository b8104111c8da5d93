"""From finished pieces to a token store: duplicates dropped, pieces joined into shards, counts summed, manifest last.

Each step leaves a complete file or none, and a second run does only what is missing. The result does not depend on
which worker did what.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from windlass.config.sources import DataFile
from windlass.data.chat import SETTINGS_FILE, TEMPLATE_FILE
from windlass.data.chunks import SPLITS, TokenizeTask, piece_name, write_fully
from windlass.data.conversations import COUNTED
from windlass.data.inputs import ChunkKey, WorkItem, last_chunks
from windlass.data.shards import Ints, index_parts
from windlass.data.store import CHECKSUMS, FILES, KIND, LEDGER, MANIFEST, REJECTS, TERMS, hash_file, hash_json
from windlass.data.tokenizer import Tokenizer
from windlass.errors import DataError
from windlass.files import append_line, read_json, read_json_lines, write_atomic, write_json
from windlass.processes import ForkedWorkers, usable_cores

Journal = dict[ChunkKey, dict[str, Any]]  # the line of each finished chunk
_MAX_HASHES = 8_000_000  # compared at a time: 200 MB
SHARD_LIST = "shards.jsonl"  # in work/: a line for each complete shard, whose pieces may be gone


@dataclass(frozen=True)
class Piece:
    """A finished piece of one split, its entry in the journal, and which of its documents are dropped as duplicates."""

    path: Path
    source: str
    split: str
    entry: Mapping[str, Any]
    itemsize: int
    dropped: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def tail(self, dtype: str, skip_bytes: int, count: int) -> npt.NDArray[Any]:
        """Numbers stored after the tokens."""
        offset = self.entry["tokens"] * self.itemsize + skip_bytes
        return np.fromfile(self.path, dtype=dtype, count=count, offset=offset)

    def lengths(self) -> npt.NDArray[np.int32]:
        return self.tail("<i4", 0, self.entry["documents"])

    def marks(self, *, hashed: bool) -> npt.NDArray[np.uint8]:
        """The marks of conversations, stored after the lengths and, if duplicates are removed, after sizes and
        hashes."""
        marks = self.tail("u1", (24 if hashed else 4) * self.entry["documents"], self.entry["tokens"])
        keep = np.ones(self.entry["documents"], dtype=bool)
        keep[self.dropped] = False
        return marks if keep.all() else marks[np.repeat(keep, self.lengths())]


def ordered_chunks(items: Iterable[WorkItem], journal: Journal) -> Iterator[tuple[WorkItem, int, dict[str, Any]]]:
    """Every chunk in the order of the store, without those that a second reader found beyond the end of a file."""
    ends = last_chunks({key: bool(line["last"]) for key, line in journal.items()})
    for item in items:
        for chunk in range(item.chunks if item.chunks is not None else ends.get(item.id, 0) + 1):
            yield item, chunk, journal[(item.id, chunk)]


def write_store(
    task: TokenizeTask,
    items: list[WorkItem],
    journal: Journal,
    tokenizer: Tokenizer,
    target: Path,
    old_manifest: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Join all pieces into a complete store, or add them to the store of `old_manifest`. Returns the new manifest."""
    pieces = [
        Piece(task.piece(item.id, chunk, split), item.source, split, entry, task.dtype.itemsize)
        for item, chunk, line in ordered_chunks(items, journal)
        for split, entry in line["pieces"].items()
    ]
    if task.file.dedup == "exact":
        # Documents whose text came before, in the order of the store, are dropped.
        saved = task.folder / "duplicates.npz"
        if not saved.is_file():
            buffer = io.BytesIO()
            repeated = zip(pieces, find_duplicates(pieces), strict=True)
            np.savez(buffer, **{piece.path.name: rows for piece, rows in repeated if len(rows)})  # type: ignore[arg-type]
            write_atomic(saved, buffer.getvalue())
        with np.load(saved) as dropped:
            pieces = [replace(p, dropped=dropped[p.path.name]) if p.path.name in dropped else p for p in pieces]
    counts = _count_files(items, journal, {piece.path.name: piece.dropped for piece in pieces})
    # Read before the pieces are removed, and kept for a restart after that.
    dropped_bytes = read_json(task.folder / "removed.json")
    if dropped_bytes is None:
        dropped_bytes = Counter[str]()
        for piece in (piece for piece in pieces if len(piece.dropped)):
            count = piece.entry["documents"]
            sizes = piece.tail("<i4", 4 * count, count)[piece.dropped]
            dropped_bytes[piece.source] += int(sizes.sum(dtype=np.int64))
        write_json(task.folder / "removed.json", dropped_bytes)
    sources = dict(old_manifest["sources"]) if old_manifest else {}
    old_sources = tuple(sources)
    checksums = (read_json(target / CHECKSUMS) or {}).get("files", {}) if old_manifest else {}
    # Grouped once: a data file may have a thousand sources and a million files.
    ids_of, pieces_of, counts_of = (defaultdict[str, list[Any]](list) for _ in range(3))
    for item in items:
        ids_of[item.source].append(item.id)
    for piece in pieces:
        pieces_of[piece.source].append(piece)
    for file_counts in counts:
        counts_of[file_counts["source"]].append(file_counts)
    for name, table in task.file.sources.items():
        if not (ids := ids_of[name]):
            continue
        source_pieces, source_counts = pieces_of[name], counts_of[name]
        shards = _write_shards(task, name, source_pieces, target)
        lines = [line for split_lines in shards.values() for line in split_lines]
        reasons: dict[str, Counter[str]] = {
            kind: sum((Counter(count[kind]) for count in source_counts), Counter()) for kind in ("rejected", "filtered")
        }
        sources[name] = {
            **{key: sum(line[key] for line in lines) for key in ("tokens", "documents")},
            "bytes": sum(piece.entry["bytes"] for piece in source_pieces) - dropped_bytes.get(name, 0),
            **{key: sum(piece.entry[key] for piece in source_pieces) for key in ("sample_words", "sample_tokens")},
            "max_token": max((piece.entry["max_token"] for piece in source_pieces), default=-1),
            "files": len(source_counts),
            "documents_in": sum(count["documents"] for count in source_counts),
            **{kind: dict(sorted(counter.items())) for kind, counter in reasons.items()},
            "damaged_files": sum(count["damage"] is not None for count in source_counts),
            **{key: getattr(table, key) for key in (*TERMS, "paths")},
            "items": hash_json(sorted(ids)),
            **({"form": table.form, "counted": sum(line["counted"] for line in lines)} if table.form != "text" else {}),
            "shards": {
                split: [{key: line[key] for key in ("file", "tokens", "documents")} for line in split_lines]
                for split, split_lines in shards.items()
            },
        }
        for line in lines:
            checksums |= {line["file"]: line["stretches"], f"{Path(line['file']).stem}.idx": line["index"]}
            checksums |= {f"{Path(line['file']).stem}.marks": line["marks"]} if "marks" in line else {}
    # Late, so that a store that is added to keeps its old lines almost as long as its old manifest.
    _write_lines(target / REJECTS, reject_lines(task, items, journal), old_sources)
    _write_lines(target / FILES, counts, old_sources)
    return _write_manifest(task, tokenizer, target, sources, checksums)


# -- duplicates ----------------------------------------------------------------------------------------------------


def find_duplicates(pieces: list[Piece]) -> list[Ints]:
    """For each piece, its documents that are not the first with their hash.

    Hashes are compared in partitions, so that memory is bounded.
    """
    starts = np.cumsum([0, *(piece.entry["documents"] for piece in pieces)])
    partitions = max(1, -(-int(starts[-1]) // _MAX_HASHES))
    marked: list[list[Ints]] = [[piece.dropped] for piece in pieces]
    for partition in range(partitions if pieces else 0):
        hashes, numbers = [], []
        for start, piece in zip(starts, pieces, strict=False):
            count = piece.entry["documents"]
            pairs = piece.tail("<u8", 8 * count, 2 * count).reshape(-1, 2)
            rows = np.flatnonzero(pairs[:, 1] % np.uint64(partitions) == partition)
            hashes.append(pairs[rows])
            numbers.append(rows + start)
        pairs, number = np.concatenate(hashes), np.concatenate(numbers)
        order = np.lexsort((number, pairs[:, 0], pairs[:, 1]))
        same_as_previous = np.all(pairs[order][1:] == pairs[order][:-1], axis=1)
        repeated = np.sort(number[order[1:][same_as_previous]])
        for place, rows in enumerate(np.split(repeated, np.searchsorted(repeated, starts[1:-1]))):
            marked[place].append(rows - starts[place])
    return [np.sort(np.concatenate(rows)) for rows in marked]


# -- shards --------------------------------------------------------------------------------------------------------


def _write_shards(
    task: TokenizeTask, source: str, pieces: list[Piece], target: Path
) -> dict[str, list[dict[str, Any]]]:
    """Join a source's pieces into shards, several at a time; returns their lines by split."""
    complete = {line["file"]: line for line in read_json_lines(task.folder / SHARD_LIST)}
    groups: dict[str, tuple[str, list[Piece]]] = {}
    for split in SPLITS:
        number = tokens = 0
        for piece in (p for p in pieces if p.split == split and p.entry["documents"] > len(p.dropped)):
            is_open = f"{source}-{split}-{number:05d}.bin" in groups
            if is_open and tokens + piece.entry["tokens"] > task.file.shard_tokens:
                number, tokens = number + 1, 0
            groups.setdefault(f"{source}-{split}-{number:05d}.bin", (split, []))[1].append(piece)
            tokens += piece.entry["tokens"]
    for path in target.glob(f".{source}-*.tmp"):
        if f"{path.name[1:].rsplit('.', 3)[0]}.bin" in groups:
            path.unlink()  # left by a killed run
    missing = [(name, group) for name, (_, group) in groups.items() if name not in complete]
    count = min(len(missing), task.file.workers or usable_cores())

    def write(connection: Connection, number: int) -> None:
        for name, group in missing[number::count]:
            connection.send(_write_shard(task, group, target / name))

    # One process copies a gigabyte in a second or two: a store of terabytes needs all cores.
    with contextlib.closing(ForkedWorkers(write, count if count > 1 else 0)) as workers:
        alone = (_write_shard(task, group, target / name) for name, group in missing)
        for line in alone if count <= 1 else (line for _, line in workers.messages()):
            append_line(task.folder / SHARD_LIST, line)
            complete[line["file"]] = line
            for piece in groups[line["file"]][1]:
                piece.path.unlink(missing_ok=True)
    shards: dict[str, list[dict[str, Any]]] = {}
    for name, (split, group) in groups.items():
        shards.setdefault(split, []).append(complete[name])
        for piece in group:  # repeated, because an earlier run may have been killed just before this
            piece.path.unlink(missing_ok=True)
    return shards


def _write_shard(task: TokenizeTask, pieces: list[Piece], path: Path) -> dict[str, Any]:
    lengths = np.concatenate([np.delete(piece.lengths(), piece.dropped) for piece in pieces])
    with _temporary(path) as file:
        stretches = [_append_piece(file, piece, task.dtype) for piece in pieces]
    index = hashlib.sha256()
    with _temporary(path.with_suffix(".idx")) as file:
        for part in index_parts(lengths, task.dtype, marks=task.file.document_marks):
            index.update(part)
            write_fully(file, part)
    line = {
        "file": path.name,
        "tokens": int(lengths.sum(dtype=np.int64)),
        "documents": len(lengths),
        "stretches": [stretch for stretch in stretches if stretch[0]],
        "index": [[path.with_suffix(".idx").stat().st_size, index.hexdigest()]],
    }
    if pieces[0].entry.get("marked"):
        digest, counted = hashlib.sha256(), 0
        with _temporary(path.with_suffix(".marks")) as file:
            for piece in pieces:
                marks = piece.marks(hashed=task.file.dedup == "exact")
                counted += int((marks & COUNTED).sum(dtype=np.int64))
                digest.update(marks.tobytes())
                write_fully(file, marks)
        line |= {"marks": [[line["tokens"], digest.hexdigest()]], "counted": counted}
    return line


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name that gets its own when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _append_piece(file: BinaryIO, piece: Piece, dtype: np.dtype[Any]) -> list[Any]:
    """Append a piece's tokens; returns [bytes, checksum] of what was appended."""
    left = size = piece.entry["tokens"] * dtype.itemsize
    if len(piece.dropped):
        lengths = piece.lengths()
        keep = np.ones(len(lengths), dtype=bool)
        keep[piece.dropped] = False
        tokens = np.fromfile(piece.path, dtype=dtype, count=piece.entry["tokens"])[np.repeat(keep, lengths)]
        write_fully(file, tokens)
        return [tokens.nbytes, f"{zlib.crc32(tokens):08x}"]
    with piece.path.open("rb") as opened:
        source, target = opened.fileno(), file.fileno()
        try:  # inside the kernel where the file system can do it
            while left and (copied := os.copy_file_range(source, target, left)):
                left -= copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        while left and (block := os.read(source, min(left, 1 << 20))):
            left -= os.write(target, block)
    if left:
        raise DataError(
            "data.piece-cut",
            f"{piece.path} is truncated: {left:,} of {size:,} bytes of tokens are missing",
            hint=f"remove {piece.path.parent.parent} and run again",
        )
    return [size, piece.entry.get("crc32") or piece.entry["sha256"]]  # sha256: a piece of an earlier release


def undo_joining(work: Path, target: Path, manifest: Mapping[str, Any] | None) -> None:
    """Undo what a stopped run joined from pieces that are no longer wanted; what `manifest` lists stays."""
    sources = manifest["sources"] if manifest else {}
    listed = {shard["file"] for source in sources.values() for shards in source["shards"].values() for shard in shards}
    unlisted = [line["file"] for line in read_json_lines(work / SHARD_LIST) if line["file"] not in listed]
    for path in [work / name for name in (SHARD_LIST, "duplicates.npz", "removed.json")] + [
        (target / name).with_suffix(suffix) for name in unlisted for suffix in (".bin", ".idx", ".marks")
    ]:
        path.unlink(missing_ok=True)
    for path in (target / FILES, target / REJECTS) if manifest else ():
        if path.is_file() and (before := _lines_of(path, sources)) != path.read_bytes():
            write_atomic(path, before)


# -- counts --------------------------------------------------------------------------------------------------------


def _count_files(items: list[WorkItem], journal: Journal, dropped: Mapping[str, Ints]) -> list[dict[str, Any]]:
    """The counts of every input file; documents = out + rejected + filtered, or the run stops."""
    files: dict[tuple[str, str], dict[str, Any]] = {}
    kinds = ("out", "rejected", "filtered")
    for item, chunk, line in ordered_chunks(items, journal):
        for split in line["pieces"]:  # move dropped documents from `out` to `filtered` of the file they came from
            gone = dropped[piece_name(item.id, chunk, split)]
            ends = np.cumsum([part["out"].get(split, 0) for part in line["files"]])
            for number, count in Counter(np.searchsorted(ends, gone, side="right").tolist()).items():
                part = line["files"][number]
                part["out"][split] -= count
                part["filtered"]["duplicate"] = part["filtered"].get("duplicate", 0) + count
        for file, part in zip(item.files, line["files"], strict=True):
            total = files.setdefault(
                (item.source, part["file"]),
                {"source": item.source, "file": part["file"], "size": file.size, "lines": 0, "documents": 0}
                | {kind: Counter() for kind in kinds}
                | {"damage": None},
            )
            total["lines"] += part["lines"]
            total["documents"] += part["documents"]
            total["damage"] = total["damage"] or part["damage"]
            for kind in kinds:
                total[kind].update(part[kind])
    for total in files.values():
        counted = sum(sum(total[kind].values()) for kind in kinds)
        if counted != total["documents"]:
            raise DataError(
                "data.documents-lost",
                f"{total['file']}: {total['documents']:,} documents were read, but {counted:,} are accounted for",
                hint="this is a bug in windlass; please report it",
            )
        total.update({kind: dict(sorted((k, v) for k, v in total[kind].items() if v)) for kind in kinds})
    return list(files.values())


def reject_lines(task: TokenizeTask, items: list[WorkItem], journal: Journal) -> Iterator[dict[str, Any]]:
    """Every rejected document with its file and its line (or row) in that file, counted from 1."""
    lines_before: Counter[tuple[str, str]] = Counter()
    for item, chunk, line in ordered_chunks(items, journal):
        for reject in read_json_lines(task.piece(item.id, chunk, "rejects")) if line["rejects"] else ():
            file = line["files"][reject["file"]]["file"]
            number = lines_before[(item.source, file)] + reject["line"] + 1
            yield {"source": item.source, "file": file, "line": number} | {k: reject[k] for k in ("reason", "text")}
        for part in line["files"]:
            lines_before[(item.source, part["file"])] += part["lines"]


# -- the store's own files -----------------------------------------------------------------------------------------


def _write_lines(path: Path, lines: Iterable[dict[str, Any]], old_sources: Collection[str]) -> None:
    """Write the lines after those of the sources that the store had before."""
    new = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomic(path, _lines_of(path, old_sources) + new.encode())


def _lines_of(path: Path, sources: Collection[str]) -> bytes:
    if not sources or not path.is_file():
        return b""
    with path.open("rb") as file:
        return b"".join(line for line in file if json.loads(line)["source"] in sources)


def _write_ledger(target: Path, sources: Mapping[str, Any], tokenizer_hash: str) -> str:
    """Write what was used, from where, on what terms, and how much of it became tokens. Returns the ledger's hash."""
    keys = (*TERMS, "paths", "files", "documents", "tokens", "bytes")
    terms = {name: {key: entry.get(key) for key in keys} for name, entry in sources.items()}
    ledger = {"version": 1, "tokenizer": tokenizer_hash, "sources": terms}
    write_json(target / LEDGER, ledger)
    return hash_json(ledger)


def _write_manifest(
    task: TokenizeTask, tokenizer: Tokenizer, target: Path, sources: dict[str, Any], checksums: dict[str, Any]
) -> dict[str, Any]:
    name = {"json": "tokenizer.json", "tekken": "tekken.json"}.get(tokenizer.kind, "tokenizer.model")
    write_atomic(target / name, tokenizer.path.read_bytes())
    manifest = {
        "kind": KIND,
        "version": 1,
        "dtype": task.dtype.newbyteorder("<").str,
        "max_token": max((source["max_token"] for source in sources.values()), default=-1),
        "tokenizer": {
            "file": name,
            "kind": tokenizer.kind,
            "hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            "eos": tokenizer.eos,
            "eos_per_document": task.eos is not None,
        },
        "settings": task.settings,
        "ledger_hash": _write_ledger(target, sources, tokenizer.hash),
        "tokens": sum(source["tokens"] for source in sources.values()),
        "documents": sum(source["documents"] for source in sources.values()),
        "sources": sources,
    }
    names = [name, LEDGER, FILES, REJECTS]
    if task.chat is not None:  # so that the store's tokenizer still renders conversations
        write_atomic(target / TEMPLATE_FILE, task.chat.template.source)
        names.append(TEMPLATE_FILE)
        if (settings := read_json(tokenizer.path.with_name(SETTINGS_FILE))) is not None:
            write_json(target / SETTINGS_FILE, {**settings, **task.chat.template.specials})
            names.append(SETTINGS_FILE)
    _write_checksums(target, checksums, names)
    write_json(target / MANIFEST, manifest)
    return manifest


def _write_checksums(target: Path, checksums: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        checksums[name] = [[(target / name).stat().st_size, hash_file(target / name)]]
    write_json(target / CHECKSUMS, {"files": checksums})


def update_terms(target: Path, manifest: Mapping[str, Any], file: DataFile) -> dict[str, Any] | None:
    """Change the terms of a finished store's sources to those of the data file; None when they are the same.

    The manifest is written last: until then the old one is valid, and a second run does this again.
    """
    sources = {
        name: entry | {key: getattr(file.sources[name], key) for key in TERMS if name in file.sources}
        for name, entry in manifest["sources"].items()
    }
    if all(manifest["sources"][name].get(key) == entry.get(key) for name, entry in sources.items() for key in TERMS):
        return None
    ledger_hash = _write_ledger(target, sources, manifest["tokenizer"]["hash"])
    _write_checksums(target, (read_json(target / CHECKSUMS) or {"files": {}})["files"], [LEDGER])
    updated = {**manifest, "ledger_hash": ledger_hash, "sources": sources}
    write_json(target / MANIFEST, updated)
    return updated
