"""Token stores of other tools, read without conversion: Megatron .bin/.idx, OLMo .npy and datatrove .ds files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data import megatron
from windlass.data.store import Shard, SourceInfo, Store
from windlass.errors import DataError


def open_foreign(path: Path) -> Store:
    """The store in a folder, or behind a Megatron prefix; one source per folder or prefix."""
    prefix = path.with_name(path.name + ".idx")
    for kind, suffix, read_shard in (
        ("megatron", ".idx", _megatron_shard),
        ("datatrove", ".ds", _datatrove_shard),
        ("olmo", ".npy", _olmo_shard),
    ):
        if kind == "megatron" and prefix.is_file():
            files = [prefix]
        else:
            files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else []
        shards: dict[str, list[Shard]] = {}
        for file in files:
            if kind == "megatron":
                place = file.relative_to(path).with_suffix("") if path.is_dir() else Path(file.stem)
            else:
                place = file.parent.relative_to(path) if file.parent != path else Path(path.resolve().name)
            shards.setdefault(str(place).replace("/", "."), []).append(read_shard(file))
        if shards:
            sources = {name: _source_info(name, parts) for name, parts in shards.items()}
            by_split = {name: {"train": parts} for name, parts in shards.items()}
            return Store(path=path, kind=kind, sources=sources, shards=by_split)
    raise DataError(
        "data.store-missing",
        f"{path} {'is not a token store' if path.exists() else 'does not exist'}",
        hint="a store is a folder written by `windlass tokenize`, or one with Megatron .bin/.idx, OLMo .npy "
        "or datatrove .ds files",
    )


def _source_info(name: str, shards: list[Shard]) -> SourceInfo:
    tokens = sum(shard.tokens for shard in shards)
    counts = [shard.documents for shard in shards if shard.documents is not None]
    documents = sum(counts) if len(counts) == len(shards) else None
    return SourceInfo(name=name, tokens=tokens, documents=documents, splits={"train": tokens})


def _megatron_shard(file: Path) -> Shard:
    binary, index = file.with_suffix(".bin"), megatron.read_index(file)
    if not binary.is_file():
        raise DataError(
            "data.store-incomplete",
            f"{file} has no .bin beside it",
            hint="copy both files; a killed Megatron job leaves one without the other",
        )
    size = index.tokens * index.dtype.itemsize
    if binary.stat().st_size != size:
        raise DataError(
            "data.store-file-cut",
            f"{binary} has {binary.stat().st_size:,} bytes, its index says {size:,}",
            hint="the two files do not belong together, or one was cut",
        )
    return Shard(binary, index.tokens, index.dtype, index.documents, file)


def _datatrove_shard(file: Path) -> Shard:
    """The metadata's first line is `tokenizer|bytes per token`; without it the last document end gives the width."""
    index, metadata = file.with_name(file.name + ".index"), file.with_name(file.name + ".metadata")
    documents = index.stat().st_size // 8 if index.is_file() else None
    width = metadata.read_text().split("\n", 1)[0].rpartition("|")[2].strip() if metadata.is_file() else ""
    if width in ("2", "4"):
        dtype = np.dtype(f"<u{width}")
    elif documents:
        dtype = _dtype_by_size(file, int(np.fromfile(index, dtype="<u8", offset=8 * (documents - 1))[0]))
    else:
        raise DataError(
            "data.token-width-unknown",
            f"{file}: the number of bytes per token is unknown",
            hint="keep the .ds.metadata or .ds.index file beside it",
        )
    tokens = file.stat().st_size // dtype.itemsize
    return Shard(file, tokens, dtype, documents, None if documents is None else index)


def _dtype_by_size(file: Path, tokens: int) -> np.dtype[Any]:
    for dtype in (np.dtype("<u2"), np.dtype("<u4")):
        if tokens * dtype.itemsize == file.stat().st_size:
            return dtype
    raise DataError(
        "data.store-file-cut",
        f"{file} has {file.stat().st_size:,} bytes, which is neither 2 nor 4 for each of its {tokens:,} tokens",
        hint="the file was cut, or its index belongs to another file",
    )


def _olmo_shard(file: Path) -> Shard:
    """OLMo's .npy has no header: the .csv.gz beside it (start, end, ...) gives the number of tokens, so their width."""
    with file.open("rb") as opened:
        has_header = opened.read(6) == b"\x93NUMPY"
    if has_header:
        array: Any = np.load(file, mmap_mode="r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                "data.token-array-invalid",
                f"{file} holds {array.dtype} of shape {array.shape}, not one row of token ids",
            )
        return Shard(file, array.shape[0], array.dtype, None, offset=array.offset)
    listing = file.with_suffix(".csv.gz")
    if not listing.is_file():
        raise DataError(
            "data.token-width-unknown",
            f"{file} has no header and no {listing.name} beside it",
            hint="OLMo's metadata file gives the number of bytes per token: copy it too",
        )
    tokens = documents = 0
    with gzip.open(listing, "rt") as lines:
        for line in lines:
            tokens, documents = int(line.split(",", 2)[1]), documents + 1
    return Shard(file, tokens, _dtype_by_size(file, tokens), documents)
