"""Can we read what others wrote? Megatron's .bin/.idx, OLMo's flat numpy arrays and datatrove's token files, without conversion."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data import megatron
from windlass.data.store import Shard, SourceInfo, Store
from windlass.errors import DataError


def open_foreign(path: Path) -> Store:
    """Looks for the three formats in a folder (or behind a Megatron prefix); one source per folder or prefix."""
    for kind, find in (("megatron", _megatron), ("datatrove", _datatrove), ("olmo", _olmo)):
        if found := find(path):
            return _store(path, kind, found)
    what = "does not exist" if not path.exists() else "is no token store"
    raise DataError(
        "data.failed",
        f"{path} {what}",
        hint="a store is a folder written by `windlass tokenize`, or holds Megatron .bin/.idx, OLMo .npy or datatrove .ds files",
    )


def _store(path: Path, kind: str, found: dict[str, list[Shard]]) -> Store:
    infos = {
        name: SourceInfo(
            name=name,
            tokens=sum(s.tokens for s in shards),
            documents=_documents(shards),
            splits={"train": sum(s.tokens for s in shards)},
        )
        for name, shards in found.items()
    }
    return Store(
        path=path, kind=kind, sources=infos, shards={name: {"train": shards} for name, shards in found.items()}
    )


def _documents(shards: list[Shard]) -> int | None:
    counts = [shard.documents for shard in shards]
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


def _megatron(path: Path) -> dict[str, list[Shard]]:
    if path.with_name(path.name + ".idx").is_file():
        files = [path.with_name(path.name + ".idx")]
    else:
        files = sorted(path.rglob("*.idx")) if path.is_dir() else []
    return {_name(file, path): [_megatron_shard(file)] for file in files}


def _name(file: Path, root: Path) -> str:
    relative = file.relative_to(root) if root.is_dir() else Path(file.name)
    return str(relative.with_suffix("")).replace("/", ".")


def _megatron_shard(file: Path) -> Shard:
    binary, index = file.with_suffix(".bin"), megatron.read_index(file)
    if not binary.is_file():
        raise DataError(
            "data.bin-beside",
            f"{file} has no .bin beside it",
            hint="copy both files; a killed Megatron job leaves one without the other",
        )
    size = index.tokens * index.dtype.itemsize
    if binary.stat().st_size != size:
        raise DataError(
            "data.bytes-index-says",
            f"{binary} has {binary.stat().st_size:,} bytes, its index says {size:,}",
            hint="the two files do not belong together, or one was cut",
        )
    return Shard(binary, index.tokens, index.dtype, index.documents, file)


def _datatrove(path: Path) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for file in sorted(path.rglob("*.ds")) if path.is_dir() else []:
        found.setdefault(_folder(file, path), []).append(_datatrove_shard(file))
    return found


def _folder(file: Path, root: Path) -> str:
    return str(file.parent.relative_to(root)).replace("/", ".") if file.parent != root else root.resolve().name


def _datatrove_shard(file: Path) -> Shard:
    index, width = file.with_name(file.name + ".index"), _datatrove_width(file)
    documents = index.stat().st_size // 8 if index.is_file() else None
    dtype = np.dtype("<u2") if width == 2 else np.dtype("<u4")
    return Shard(file, file.stat().st_size // width, dtype, documents, index if documents is not None else None)


def _datatrove_width(file: Path) -> int:
    """The metadata's first line is `tokenizer|bytes per token`; without it the last document end decides."""
    metadata, index = file.with_name(file.name + ".metadata"), file.with_name(file.name + ".index")
    if metadata.is_file():
        width = metadata.read_text().split("\n", 1)[0].rpartition("|")[2].strip()
        if width in ("2", "4"):
            return int(width)
    if index.is_file() and (ends := np.fromfile(index, dtype="<u8")).size:
        return _width(file, int(ends[-1]))
    raise DataError(
        "data.bytes-per-token-known",
        f"{file}: bytes per token are not known",
        hint="keep the .ds.metadata or .ds.index file beside it",
    )


def _width(file: Path, tokens: int) -> int:
    for width in (2, 4):
        if tokens * width == file.stat().st_size:
            return width
    raise DataError(
        "data.bytes-neither-nor-each",
        f"{file} has {file.stat().st_size:,} bytes, which is neither 2 nor 4 for each of its {tokens:,} tokens",
        hint="the file was cut, or its index belongs to another",
    )


def _olmo(path: Path) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for file in sorted(path.rglob("*.npy")) if path.is_dir() else []:
        found.setdefault(_folder(file, path), []).append(_olmo_shard(file))
    return found


def _olmo_shard(file: Path) -> Shard:
    """OLMo's .npy has no header: the .csv.gz beside it (start, end, ...) says how many tokens there are, hence how wide they are."""
    with file.open("rb") as opened:
        if opened.read(6) == b"\x93NUMPY":
            return _numpy_shard(file)
    listing = file.with_suffix(".csv.gz")
    if not listing.is_file():
        raise DataError(
            "data.header-beside",
            f"{file} has no header and no {listing.name} beside it",
            hint="OLMo's metadata file says how wide its tokens are: copy it too",
        )
    last, documents = _olmo_end(listing)
    width = _width(file, last)
    return Shard(file, last, np.dtype("<u2") if width == 2 else np.dtype("<u4"), documents)


def _olmo_end(listing: Path) -> tuple[int, int]:
    """(end of the last document in tokens, documents)."""
    end, documents = 0, 0
    with gzip.open(listing, "rt") as lines:
        for line in lines:
            end, documents = int(line.split(",", 2)[1]), documents + 1
    return end, documents


def _numpy_shard(file: Path) -> Shard:
    array: Any = np.load(file, mmap_mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            "data.holds-shape-one-row", f"{file} holds {array.dtype} of shape {array.shape}, not one row of token ids"
        )
    return Shard(file, array.shape[0], array.dtype, None, offset=array.offset)
