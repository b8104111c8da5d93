"""Which files does a source consist of, and how are they cut into pieces of work? A pure plan: the same files give the same pieces.

Work is cut by bytes, not by files. A big file becomes chunks; small files are bundled into one. A chunk of lines owns the lines that
*begin* in its byte range, so neighbours never share or miss one. How many chunks a big compressed file has is known only at its end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

from windlass.config.sources import DataFile, Source
from windlass.errors import DataError

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".arrow": "arrow",
}
_COMPRESSED = {".gz": "gz", ".zst": "zst"}
_EXPANSION = 4
"""Text grows about this much when it is decompressed; only used to decide what is small and to balance work."""

_MANY, _FINE = 32, 8 * 2**20
"""A big file is cut into at least so many chunks, unless they would become smaller than so many bytes."""


@dataclass(frozen=True)
class InputFile:
    path: str
    format: str
    packing: str
    """"", "gz" or "zst"."""
    size: int
    modified: int
    """Nanoseconds; a file that changed between two runs is done again."""

    @property
    def weight(self) -> int:
        """Bytes of text it probably holds."""
        return self.size * _EXPANSION if self.packing or self.format == "parquet" else self.size


@dataclass(frozen=True)
class Item:
    """A bundle of small files, or one big file; its chunks are numbered from 0."""

    id: str
    """Hash of everything that its output depends on: when a file or a setting changes, its pieces are no longer found."""
    source: str
    files: tuple[InputFile, ...]
    chunks: int | None
    """None: a big compressed file, whose end is not known yet."""
    rows: int = 0
    """Rows per chunk where a file consists of rows, not lines."""
    step: int = 0
    """Bytes per chunk where it consists of lines; 0 for a bundle, which is one chunk."""

    @property
    def weight(self) -> int:
        return sum(file.weight for file in self.files)


def find_files(name: str, source: Source) -> list[InputFile]:
    """All files of a source in a fixed order; everything that cannot be read is named at once."""
    found: dict[str, InputFile] = {}
    problems: list[str] = []
    for given in source.paths:
        some = False
        for path in _expand(given, problems):
            file = _describe(path, source, problems)
            if file is not None:
                some = True
                # By its real path: links lead to one file by many ways, and a loop of them by dozens.
                found.setdefault(os.path.realpath(path), file)
        if not some and not problems:
            problems.append(
                f"{given}: no file there"
                if not Path(given).is_dir()
                else f"{given}: no file of a known kind in this folder"
            )
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise DataError(
            "data.source-cannot-read",
            f"source {name!r} cannot be read:\n  {shown}",
            hint="relative paths start in the current folder; known kinds: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .txt, save_to_disk folders",
        )
    return list(found.values())


def _expand(given: str, problems: list[str]) -> Iterator[str]:
    if has_magic(given):
        problems.extend(f"{folder}: Permission denied" for folder in _closed(given))
        matches = sorted(glob(given, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
        for match in matches:
            yield from _walk(match, problems) if Path(match).is_dir() else [match]
        return
    try:
        is_folder, exists = Path(given).is_dir(), Path(given).exists()
    except OSError as error:
        problems.append(f"{given}: {error.strerror}")
        return
    if is_folder:
        yield from _walk(given, problems)
    elif exists:
        yield given


def _closed(pattern: str) -> list[str]:
    """Folders on the way of a pattern that may not be looked into: glob passes over them, and all they hold, without a word."""
    parts = Path(pattern).parts
    found: dict[str, None] = {}
    for depth in range(1, len(parts)):
        way = str(Path(*parts[:depth]))
        needed = os.X_OK | (os.R_OK if has_magic(parts[depth]) else 0)
        folders = sorted(glob(f"{way}/", recursive=True)) if has_magic(way) else [way]  # noqa: PTH207 - as above
        found.update(dict.fromkeys(f for f in folders if os.path.isdir(f) and not os.access(f, needed)))  # noqa: PTH112 - never raises
    return list(found)


def _walk(folder: str, problems: list[str]) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    above = {folder: {os.path.realpath(folder)}}
    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = {name: os.path.realpath(Path(here) / name) for name in sorted(folders)}
        chain = above.pop(here)
        folders[:] = [name for name in real if real[name] not in chain]  # a link to where we came from is not followed
        above.update({os.path.join(here, name): chain | {real[name]} for name in folders})  # noqa: PTH118 - as os.walk joins
        yield from (
            str(Path(here) / name)
            for name in sorted(names)
            if kind_of(name)[0] is not None and not name.startswith((".", "cache-"))
        )


def passed_over(source: Source) -> dict[str, int]:
    """Ending -> how many files below the source's folders are of no known kind, and so are not taken."""
    names = (name for given in source.paths if Path(given).is_dir() for _, _, here in os.walk(given) for name in here)
    found = Counter(Path(n).suffix or n for n in names if kind_of(n)[0] is None and not n.startswith((".", "cache-")))
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def kind_of(name: str) -> tuple[str | None, str]:
    """("jsonl", "zst") from a file name; the first is None when the kind is not known."""
    stem, packing = name, ""
    for suffix, packed in _COMPRESSED.items():
        if name.endswith(suffix):
            stem, packing = name.removesuffix(suffix), packed
    return _SUFFIXES.get(Path(stem).suffix.lower()), packing


def _describe(path: str, source: Source, problems: list[str]) -> InputFile | None:
    format, packing = kind_of(path)
    if source.format != "auto":
        format = source.format
    if Path(path).name in ("dataset_info.json", "state.json", "dataset_dict.json"):
        return None
    if format is None:
        problems.append(f"{path}: its kind is not known; set `format` in the source's table")
        return None
    if packing and format in ("parquet", "arrow"):
        problems.append(f"{path}: a {format} file is compressed inside; unpack it")
        return None
    try:
        status = Path(path).stat()
        with Path(path).open("rb"):
            pass
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return None
    if format == "arrow" and (trouble := _indirect(Path(path))):
        problems.append(trouble)
        return None
    return InputFile(path, format, packing, status.st_size, status.st_mtime_ns)


def _indirect(path: Path) -> str | None:
    """save_to_disk of a selected or shuffled dataset keeps the order in a second file, which the rows alone do not tell."""
    state = path.with_name("state.json")
    if state.is_file() and json.loads(state.read_text()).get("_indices_data_files"):
        return f"{path.parent}: saved with an index of rows; call flatten_indices() before save_to_disk()"
    return None


def plan_items(file: DataFile, files: Mapping[str, list[InputFile]], settings: str) -> list[Item]:
    """All work of a data file in the order in which it is stored. `settings` is a hash of what shapes every output."""
    return [item for name, found in files.items() for item in _source_items(file, name, found, settings)]


def _source_items(file: DataFile, name: str, found: list[InputFile], settings: str) -> Iterator[Item]:
    bundle: list[InputFile] = []
    for one in found:
        if bundle and sum(f.weight for f in bundle) + one.weight > file.chunk:
            yield _item(file, name, bundle, settings, 1)
            bundle = []
        if one.weight <= file.chunk:
            bundle.append(one)
        else:
            yield _big(file, name, one, settings)
    if bundle:
        yield _item(file, name, bundle, settings, 1)


def _item(
    file: DataFile, name: str, files: list[InputFile], settings: str, chunks: int | None, rows: int = 0, step: int = 0
) -> Item:
    source = file.sources[name]
    shape = [source.field, source.document, source.min_chars, source.max_chars, source.validation]
    value = [settings, name, shape, [[f.path, f.format, f.packing, f.size, f.modified] for f in files], step]
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]
    return Item(digest, name, tuple(files), chunks, rows, step)


def _big(file: DataFile, name: str, one: InputFile, settings: str) -> Item:
    whole = one.format == "text" and file.sources[name].document == "file"
    if one.format in ("parquet", "arrow"):
        from windlass.data.read import count_rows

        rows, size = count_rows(one)
        per_chunk = max(1, int(rows * file.chunk / max(1, size)))
        return _item(file, name, [one], settings, max(1, -(-rows // per_chunk)), per_chunk)
    if whole:
        return _item(file, name, [one], settings, 1)
    step = _step(one.weight, file.chunk)
    return _item(file, name, [one], settings, None if one.packing else max(1, -(-one.size // step)), step=step)


def _step(weight: int, chunk: int) -> int:
    """A chunk, or less where a file is only a few of them: at the end the others wait for whoever has the last."""
    while chunk >= 2 * _FINE and weight < _MANY * chunk:
        chunk //= 2
    return chunk
