"""The input files of a source, their division into chunks, and the order in which workers take them.

Input is divided by bytes, not by files: a big file becomes several chunks, small files share one. A chunk of lines owns
the lines that *begin* in its byte range, so that neighbours never share or miss a line. How many chunks a big
compressed file has is known only at its end. The same files give the same chunks.
"""

import hashlib
import heapq
import json
import os
import stat
from array import array
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from glob import glob, has_magic
from itertools import compress
from pathlib import Path
from typing import Self, overload

import numpy as np

from windlass.config.sources import DataFile, DataSource
from windlass.errors import DataError
from windlass.files import read_json

ROW_FORMATS = ("parquet", "arrow")
_FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow",
    ".txt": "text", ".md": "text", ".rst": "text",
}  # fmt: skip
_HIDDEN = (".", "cache-")  # beginnings of names of files that are not read
_EXPANSION = 4  # factor by which text grows when decompressed; only used to recognise small files and to balance work
# A big file is cut into at least 32 chunks, unless they would become smaller than 8 MiB: at the end of a run the other
# workers wait for the one that has the last chunk.
_MIN_CHUNKS, _MIN_CHUNK_BYTES = 32, 8 * 2**20
_SKIP_SPEED = 20  # decompressing to a later chunk is about this much faster than tokenizing it
ChunkKey = tuple[str, int]  # (item id, chunk)


@dataclass(frozen=True, slots=True)
class InputFile:
    path: str
    format: str
    packing: str  # "", "gz" or "zst"
    size: int
    modified: int  # nanoseconds; a file that changed between two runs is tokenized again

    @property
    def weight(self) -> int:
        """Estimated bytes of text."""
        return self.size * _EXPANSION if self.packing or self.format == "parquet" else self.size


class FileList(Sequence[InputFile]):
    """Input files in columns: a million of them take about 50 MB, and as objects 350. A slice shares the columns."""

    def __init__(self) -> None:
        # Beginnings of the paths (one for many files) and their last parts, as UTF-8, and where each of them stops.
        self._folders, self._names = bytearray(), bytearray()
        self._folder_stops, self._name_stops = array("q", [0]), array("q", [0])
        self._folder = array("I")  # which of the folders
        self._kinds: list[tuple[str, str]] = []  # (format, packing)
        self._kind, self._size = array("B"), array("q")
        # A time after 2262 has more nanoseconds than 64 bits hold.
        self._modified_seconds, self._modified_nanoseconds = array("q"), array("I")
        self._rows = range(0)
        self._last_folder: str | None = None

    def append(self, file: InputFile) -> None:
        """Add a file to a list that is not a slice."""
        folder, slash, name = file.path.rpartition("/")
        if folder + slash != self._last_folder:
            self._last_folder = folder + slash
            self._folders += self._last_folder.encode()
            self._folder_stops.append(len(self._folders))
        self._names += name.encode()
        kind = (file.format, file.packing)
        if kind not in self._kinds:
            self._kinds.append(kind)
        self._folder.append(len(self._folder_stops) - 1)
        self._name_stops.append(len(self._names))
        self._kind.append(self._kinds.index(kind))
        self._size.append(file.size)
        seconds, nanoseconds = divmod(file.modified, 10**9)
        self._modified_seconds.append(seconds)
        self._modified_nanoseconds.append(nanoseconds)
        self._rows = range(len(self._size))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> InputFile: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> InputFile | Self:
        if isinstance(index, slice):
            part = copy(self)
            part._rows = self._rows[index]
            return part
        row = self._rows[index]
        stop = self._folder[row]
        folder = self._folders[self._folder_stops[stop - 1] : self._folder_stops[stop]]
        name = self._names[self._name_stops[row] : self._name_stops[row + 1]]
        modified = self._modified_seconds[row] * 10**9 + self._modified_nanoseconds[row]
        return InputFile((folder + name).decode(), *self._kinds[self._kind[row]], self._size[row], modified)


@dataclass(frozen=True)
class WorkItem:
    """Several small files, or one big file; its chunks are numbered from 0."""

    id: str  # hash of everything its output depends on: pieces of a changed file or setting are no longer used
    source: str
    files: Sequence[InputFile]
    chunks: int | None  # None: a big compressed file, whose end is not known yet
    rows: int = 0  # rows per chunk, for Parquet and Arrow
    step: int = 0  # bytes per chunk, for lines; 0 for small files, which are one chunk

    @cached_property
    def weight(self) -> int:
        return sum(file.weight for file in self.files)

    @property
    def chunk_weight(self) -> int:
        return self.weight // self.chunks if self.chunks else min(self.step, self.weight)


def find_files(name: str, source: DataSource, output: Path | None = None) -> FileList:
    """All files of a source in a fixed order; one error lists everything that cannot be read.

    It is an error if a source leads into the folder `output` or to the store's own files, which would then be read as
    text. A folder inside `output`, such as raw/, may hold sources."""
    files, hashes = FileList(), array("q")  # hashes of real paths
    problems: list[str] = []
    outside = "" if output is None else os.path.realpath(output)
    last_folder, real_folder = None, ""  # resolving every file would take most of the time for a million of them
    for pattern in source.paths:
        if output is not None and _leads_into(pattern, outside):
            raise _overlap(name, pattern, output)
        problems += [f"{folder}: Permission denied" for folder in _closed_folders(pattern)]
        is_empty = True
        for file in (file for path in _paths(pattern, problems) if (file := _describe(path, source, problems))):
            is_empty = False
            folder, base = os.path.split(file.path)
            if folder != last_folder:
                last_folder, real_folder = folder, os.path.realpath(folder)
                if output is not None and (real_folder == outside or f"{real_folder}/".startswith(f"{outside}/work/")):
                    raise _overlap(name, file.path, output)
            is_link = os.path.islink(file.path)  # noqa: PTH114
            hashes.append(hash(os.path.realpath(file.path) if is_link else os.path.join(real_folder, base)))  # noqa: PTH118
            files.append(file)
        if is_empty and not problems:
            reason = "no file of a known format in this folder" if Path(pattern).is_dir() else "no such file"
            problems.append(f"{pattern}: {reason}")
    if problems:
        listed = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise DataError(
            "data.source-unreadable",
            f"source {name!r} cannot be read:\n  {listed}",
            hint="check the paths (relative paths start in the current folder); known formats: "
            ".jsonl, .jsonl.gz, .jsonl.zst, .parquet, .txt, save_to_disk folders",
        )
    in_order = np.sort(hashes)
    repeated = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(repeated):
        return files
    may_repeat = np.isin(hashes, repeated)
    first_of: dict[str, int] = {}  # by real path: links lead to one file by many ways
    for row in np.nonzero(may_repeat)[0].tolist():
        first_of.setdefault(os.path.realpath(files[row].path), row)
    may_repeat[list(first_of.values())] = False
    different = FileList()
    for file in compress(files, ~may_repeat):
        different.append(file)
    return different


def _paths(pattern: str, problems: list[str]) -> Iterator[str]:
    """The files that a pattern names, in a fixed order; of a folder those of a known format."""
    folder, base = os.path.split(pattern)
    if not has_magic(pattern):
        paths: Iterable[str] = [pattern]
    elif has_magic(folder) or base == "**":
        paths = sorted(glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
    else:  # the names alone take half of the memory
        names = sorted(glob(base, root_dir=folder or None))  # noqa: PTH207
        paths = (os.path.join(folder, name) for name in names)  # noqa: PTH118
    for path in paths:
        try:
            is_folder, exists = Path(path).is_dir(), Path(path).exists()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if is_folder:
            yield from _walk(path, problems)
        elif exists:
            yield path


def _leads_into(pattern: str, folder: str) -> bool:
    """Whether a pattern names `folder` (a real path) or one above it."""
    parts = Path(pattern).absolute().parts
    fixed = next((at for at, part in enumerate(parts) if has_magic(part)), len(parts))
    parts = (*Path(os.path.realpath(Path(*parts[:fixed]))).parts, *parts[fixed:])
    names = Path(folder).parts
    for part, name in zip(parts, names, strict=False):
        if part == "**":
            return True
        if not fnmatchcase(name, part):
            return False
    return len(parts) <= len(names)


def _overlap(name: str, path: str, output: Path) -> DataError:
    return DataError(
        "data.output-in-source",
        f"source {name!r} reads {path}, and the store is written to {output}: one is inside the other, so the next "
        "run would read the store's own files",
        hint="choose an `output` outside of all source folders, or a pattern that does not match it",
    )


def _closed_folders(pattern: str) -> list[str]:
    """Folders that a pattern leads through but that may not be listed: glob skips them, and all they hold, silently."""
    parts = Path(pattern).parts if has_magic(pattern) else ()
    closed: dict[str, None] = {}
    for depth in range(1, len(parts)):
        parent = str(Path(*parts[:depth]))
        mode = os.X_OK | (os.R_OK if has_magic(parts[depth]) else 0)
        folders = sorted(glob(f"{parent}/", recursive=True)) if has_magic(parent) else [parent]  # noqa: PTH207
        # os.path.isdir, because Path.is_dir may raise
        closed |= dict.fromkeys(f for f in folders if os.path.isdir(f) and not os.access(f, mode))  # noqa: PTH112
    return list(closed)


def _walk(root: str, problems: list[str]) -> Iterator[str]:
    def report(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    real_root = os.path.realpath(root)
    below_link: dict[str, set[str]] = {}  # folder at or below a link -> real paths of it and the folders above
    for folder, folders, names in os.walk(root, onerror=report, followlinks=True):
        above = below_link.pop(folder, None)
        followed = []
        for name in sorted(folders):
            path = os.path.join(folder, name)  # noqa: PTH118 - as os.walk joins
            if above is not None or os.path.islink(path):  # noqa: PTH114
                real, real_folder = os.path.realpath(path), Path(os.path.realpath(folder))
                ancestors = above or {
                    str(p) for p in (real_folder, *real_folder.parents) if p.is_relative_to(real_root)
                }
                if real in ancestors:  # a link to an ancestor is not followed
                    continue
                below_link[path] = ancestors | {real}
            followed.append(name)
        folders[:] = followed
        names.sort()
        beginning = str(Path(folder) / "_")[:-1]
        yield from (beginning + n for n in names if format_of(n)[0] and not n.startswith(_HIDDEN))


def count_skipped(source: DataSource) -> dict[str, int]:
    """Suffix -> number of files below the source's folders that have no known format and are not read."""
    names = (name for path in source.paths if Path(path).is_dir() for _, _, files in os.walk(path) for name in files)
    counts = Counter(Path(n).suffix or n for n in names if format_of(n)[0] is None and not n.startswith(_HIDDEN))
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def format_of(name: str) -> tuple[str | None, str]:
    """("jsonl", "zst") from a file name; None for an unknown format."""
    packing = "gz" if name.endswith(".gz") else "zst" if name.endswith(".zst") else ""
    suffix = os.path.splitext(name.removesuffix(f".{packing}"))[1]  # noqa: PTH122 - Path takes ten times as long
    return _FORMATS.get(suffix.lower()), packing


def _describe(path: str, source: DataSource, problems: list[str]) -> InputFile | None:
    format, packing = format_of(path)
    format = source.format if source.format != "auto" else format
    if path.endswith(".json") and Path(path).name in ("dataset_info.json", "state.json", "dataset_dict.json"):
        return None
    if format is None:
        problems.append(f"{path}: unknown format; set `format` in the source's table")
        return None
    if packing and format in ROW_FORMATS:
        problems.append(f"{path}: a {format} file is compressed inside; unpack it")
        return None
    try:
        path.encode()  # a store lists its files by name, in JSON
    except UnicodeEncodeError:
        problems.append(f"{path!a}: the file name is not UTF-8; rename it")
        return None
    try:
        # Not Path.open, because there may be a million files; a named pipe must not be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(handle)
        os.close(handle)
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{path}: not a regular file")
            return None
        state = Path(path).with_name("state.json") if format == "arrow" else None
        # save_to_disk keeps the order of a selected or shuffled dataset in a second file
        if state is None or not state.is_file() or not (read_json(state) or {}).get("_indices_data_files"):
            return InputFile(path, format, packing, status.st_size, status.st_mtime_ns)
        problems.append(f"{state.parent}: saved with an index of rows; call flatten_indices() before save_to_disk()")
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
    return None


def plan_items(
    file: DataFile, files: Mapping[str, Sequence[InputFile]], settings: str, template: str | None = None
) -> list[WorkItem]:
    """All work of a data file in the order of the store. `settings` is a hash of what shapes every output, `template`
    the chat template of conversations."""
    from windlass.data.readers import count_rows

    items: list[WorkItem] = []
    for source, source_files in files.items():
        table = file.sources[source]
        shape = [table.field, table.document, table.min_chars, table.max_chars, table.validation]
        shape += [table.form, table.max_tokens, template] if table.form != "text" else []
        parts: list[tuple[int, int, int | None, int, int]] = []  # (first file, stop, chunks, rows, step)
        first, group_weight = 0, 0  # files from `first` on share a chunk
        for number, one in enumerate(source_files):
            weight = one.weight
            if number > first and group_weight + weight > file.chunk:
                parts.append((first, number, 1, 0, 0))
                first, group_weight = number, 0
            if weight <= file.chunk or (one.format == "text" and table.document == "file"):
                group_weight += weight
                continue
            if one.format in ROW_FORMATS:
                rows, size = count_rows(one)
                rows_per_chunk = max(1, int(rows * file.chunk / max(1, size)))
                parts.append((number, number + 1, max(1, -(-rows // rows_per_chunk)), rows_per_chunk, 0))
            else:
                step = file.chunk
                while step >= 2 * _MIN_CHUNK_BYTES and weight < _MIN_CHUNKS * step:
                    step //= 2
                parts.append((number, number + 1, None if one.packing else max(1, -(-one.size // step)), 0, step))
            first = number + 1
        parts += [(first, len(source_files), 1, 0, 0)] if first < len(source_files) else []
        for start, stop, chunks, rows, step in parts:
            members = source_files[start:stop]
            # The hash of json.dumps([settings, source, shape, [file, ...], step]), without its text in memory.
            digest = hashlib.sha256(f"{json.dumps([settings, source, shape])[:-1]}, [".encode())
            for number, f in enumerate(members):
                described = json.dumps([f.path, f.format, f.packing, f.size, f.modified])
                digest.update(f"{', ' if number else ''}{described}".encode())
            digest.update(f"], {step}]".encode())
            items.append(WorkItem(digest.hexdigest()[:20], source, members, chunks, rows, step))
    return items


# -- the order of chunks: big compressed files first, with one reader each; a second one joins at the end ------------


@dataclass
class CompressedFile:
    """A big compressed file of unknown length: chunks cursor, cursor + step, ... until one of them was the last."""

    item: WorkItem
    cursor: int
    step: int
    readers: int = 0
    ended: bool = False

    def chunks_left(self) -> int:
        """Estimated."""
        estimated_chunks = max(1, -(-self.item.weight // self.item.step))
        return 0 if self.ended else max(0, (estimated_chunks - self.cursor) // self.step)


@dataclass
class ChunkSchedule:
    """Hands out the chunks that are not done, and learns where compressed files end."""

    waiting: deque[tuple[WorkItem, int]]
    compressed: list[CompressedFile]
    done: Container[ChunkKey]
    held: dict[int, CompressedFile] = field(default_factory=dict)  # worker -> the compressed file it has open

    def next(self, worker: int) -> tuple[WorkItem, int] | None:
        """The worker's next chunk, or None when nothing is left that it could usefully do."""
        if worker in self.held and not self.held[worker].ended:
            return self._advance(self.held[worker])
        self.release(worker)
        unread = [file for file in self.compressed if file.readers == 0 and not file.ended]
        if self.waiting and not unread:
            return self.waiting.popleft()
        # A second reader must first decompress all that is done: worth it only if clearly more than that is left.
        worthwhile = [file for file in self.compressed if file.chunks_left() > 1 + file.cursor // _SKIP_SPEED]
        file = next(iter(unread or sorted(worthwhile, key=lambda file: file.readers)), None)
        if file is None:
            return None
        self.held[worker] = file
        file.readers += 1
        return self._advance(file)

    def release(self, worker: int) -> None:
        """The worker reads its compressed file no further."""
        if (file := self.held.pop(worker, None)) is not None:
            file.readers -= 1

    def chunks_left(self) -> int:
        """Chunks still to be handed out; estimated for compressed files."""
        return len(self.waiting) + sum(file.chunks_left() for file in self.compressed)

    def finished(self, item: WorkItem, last: bool) -> None:
        """A chunk is done; `last`: its file ended in it."""
        if last and item.chunks is None:
            for file in self.compressed:
                file.ended = file.ended or file.item.id == item.id

    def _advance(self, file: CompressedFile) -> tuple[WorkItem, int]:
        while (file.item.id, file.cursor) in self.done:
            file.cursor += file.step
        file.cursor += file.step
        return file.item, file.cursor - file.step


def make_schedule(
    items: Sequence[WorkItem], done: Mapping[ChunkKey, bool], task: tuple[int, int] | None = None
) -> ChunkSchedule:
    """Every chunk that is missing, or the share of array task (index, count). `done` maps a chunk to "was the last".

    Shares are balanced by bytes; every task computes the same division.
    """
    index, count = task or (0, 1)
    waiting: list[deque[tuple[WorkItem, int]]] = [deque() for _ in range(count)]
    compressed: list[list[CompressedFile]] = [[] for _ in range(count)]
    load = [(0, number) for number in range(count)]
    fair_weight = sum(item.weight for item in items) / count
    for item in sorted((i for i in items if i.chunks is None), key=lambda i: -i.weight):
        lanes = min(count, max(1, round(item.weight / max(1.0, fair_weight))))
        for lane, (weight, number) in enumerate([heapq.heappop(load) for _ in range(lanes)]):
            compressed[number].append(CompressedFile(item, lane, lanes))
            heapq.heappush(load, (weight + item.weight // lanes, number))
    for item in items:
        for chunk in range(item.chunks or 0):
            weight, lightest = heapq.heappop(load)
            if (item.id, chunk) not in done:
                waiting[lightest].append((item, chunk))
            heapq.heappush(load, (weight + item.weight // (item.chunks or 1), lightest))
    ends = last_chunks(done)
    unfinished = [file for file in compressed[index] if not _is_done(file.item, done, ends, file.cursor, file.step)]
    return ChunkSchedule(waiting[index], unfinished, done)


def last_chunks(done: Mapping[ChunkKey, bool]) -> dict[str, int]:
    """Item id -> chunk in which the item ended. A second reader may have looked beyond it."""
    # In reverse order the first of several last chunks wins.
    return {item: chunk for (item, chunk), last in sorted(done.items(), reverse=True) if last}


def _is_done(item: WorkItem, done: Container[ChunkKey], ends: Mapping[str, int], first: int = 0, step: int = 1) -> bool:
    if item.chunks is None and item.id not in ends:
        return False
    count = item.chunks if item.chunks is not None else ends[item.id] + 1
    return all((item.id, chunk) in done for chunk in range(first, count, step))


def unfinished_files(items: Iterable[WorkItem], done: Mapping[ChunkKey, bool]) -> list[str]:
    """The first file of each item with chunks that are not done."""
    ends = last_chunks(done)
    return [item.files[0].path for item in items if not _is_done(item, done, ends)]
