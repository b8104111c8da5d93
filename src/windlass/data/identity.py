"""The identity of a token store: what a run writes down about its data and compares at every start.

Sizes of all files, the checksums that the store lists, and a few blocks that are really read: about a second for ten
thousand shards. `windlass data STORE --verify` reads every byte.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from windlass.data.store import CHECKSUMS, Store, check_file, hash_json
from windlass.files import read_json

SAMPLED_BLOCK_BYTES = 4096
# Blocks read from all files together; each file has at least one and at most MAX_FILE_BLOCKS.
TOTAL_BLOCKS, MAX_FILE_BLOCKS = 8192, 64
# Files that were written since the last start are compared completely, up to this many bytes together.
RECHECKED_BYTES = 1 << 30
_THREADS = 16  # a parallel file system answers many small requests at a time
_COMPARED_KEYS = {
    "kind": "kind",
    "ledger_hash": "ledger",
    "tokenizer_hash": "tokenizer",
    "manifest_hash": "manifest.json",
}
_FILE_KEYS = ("bytes", "checksum", "sample")


def identify(store: Store | None, sampling: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The identity as JSON; None is the identity of synthetic tokens. `sampling`: as in the identity to compare with.

    A store without checksums has None for them."""
    if store is None:
        return {"store": None, "kind": "synthetic", "files": {}}
    beginning = f"{store.path if store.path.is_dir() else store.path.parent}/"
    shards = [shard for by_split in store.shards.values() for split in by_split.values() for shard in split]
    paths = {str(f).removeprefix(beginning): f for shard in shards for f in (shard.file, shard.index, shard.marks) if f}
    blocks = max(1, min(MAX_FILE_BLOCKS, TOTAL_BLOCKS // max(1, len(paths))))
    sampling = sampling or {"blocks": blocks, "block_bytes": SAMPLED_BLOCK_BYTES}
    names, checksums = list(paths), _listed_checksums(store)
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [[paths[name] for name in names[number::_THREADS]] for number in range(_THREADS)]
        samples = list(pool.map(lambda part: [_sample(path, **sampling) for path in part], parts))
    files = {}
    for number, name in enumerate(names):
        files[name] = samples[number % _THREADS][number // _THREADS]
        files[name]["checksum"] = (
            f"{zlib.crc32(json.dumps(checksums[name]).encode()):08x}" if name in checksums else None
        )
    return {
        "store": str(store.path),
        "kind": store.kind,
        "ledger_hash": store.ledger_hash,
        "tokenizer_hash": store.tokenizer_hash,
        "manifest_hash": hash_json(store.manifest) if store.manifest else None,
        "sampling": sampling,
        "files": files,
    }


def _listed_checksums(store: Store) -> dict[str, Any]:
    return ((read_json(store.path / CHECKSUMS) or {}).get("files") or {}) if store.kind == "windlass" else {}


def _sample(path: Path, blocks: int, block_bytes: int) -> dict[str, Any]:
    """Size, time of the last change in nanoseconds, and CRC-32 of evenly spaced blocks; all None for a missing file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return dict.fromkeys(("bytes", "modified", "sample"))
    try:
        status = os.fstat(handle)
        last = max(0, status.st_size - block_bytes)
        crc32 = 0
        for number in range(blocks):  # from the first to the last block of the file; one block alone is the first
            crc32 = zlib.crc32(os.pread(handle, block_bytes, last * number // max(1, blocks - 1)), crc32)
    finally:
        os.close(handle)
    return {"bytes": status.st_size, "modified": status.st_mtime_ns, "sample": f"{crc32:08x}"}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs, one line each, with both values. The folder and the times of files may differ; what one side does
    not know is not compared."""
    lines = [
        f"{label}: {_short(old[key])} -> {_short(new.get(key))}"
        for key, label in _COMPARED_KEYS.items()
        if old.get(key) is not None and old[key] != new.get(key)
    ]
    if "files" not in old:
        return lines
    before, after = old["files"], new["files"]
    for text, names in (
        ("is missing", [name for name in before if name not in after]),
        ("was added", [name for name in after if name not in before]),
    ):
        lines += [f"{name}: {text}" for name in names]
    for name in (name for name in before if name in after):
        one, two = before[name], after[name]
        if two["bytes"] is None:
            lines.append(f"{name}: is missing, had {one['bytes']:,} bytes")
        elif key := next((k for k in _FILE_KEYS if None not in (one[k], two[k]) and one[k] != two[k]), None):
            unit = {"bytes": "bytes", "checksum": "listed checksum", "sample": "checksum of sampled blocks"}[key]
            lines.append(f"{name}: {unit} {_short(one[key])} -> {_short(two[key])}")
    if not lines and list(before) != list(after):
        lines.append("the order of the shards has changed")
    return lines


def _short(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)[:16]


def recheck(store: Store, names: Iterable[str]) -> list[str]:
    """Compare these files with the store's checksums completely, until RECHECKED_BYTES are read."""
    checksums, left = _listed_checksums(store), RECHECKED_BYTES
    lines = []
    for name in (name for name in names if name in checksums):
        left -= sum(length for length, _ in checksums[name])
        if left < 0:
            break
        lines += [f"{problem.file}: {problem.problem}" for problem in check_file(store.path / name, checksums[name])]
    return lines
