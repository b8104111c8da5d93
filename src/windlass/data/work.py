"""How does one chunk of input become one piece of output? A worker's whole job: read, filter, encode, write beside, rename, note it down.

A piece is done when its line stands in a journal; everything before that can be lost and is simply done again.
A piece file holds tokens, then the length of each document in tokens (int32) and, if duplicates are looked for, its length in bytes
(int32) and a 16-byte hash of its text.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from windlass.config.sources import DataFile, Source
from windlass.data import read
from windlass.data.engines import Engine
from windlass.data.inputs import InputFile, Item
from windlass.data.read import Lines, Record, Reject
from windlass.files import append_line

SAMPLE_EVERY = 64
"""Words are counted in each so-many-th document: enough for tokens per word, and nearly free."""
SAY_EVERY = 1 << 22
"""Characters of text between two reports."""
SPLITS = ("train", "validation")
Report = Callable[[int, int, int, int], None]
"""Called with (bytes of text, tokens, documents, rejects) since the last call."""


@dataclass(frozen=True)
class Job:
    """What all chunks of a run share."""

    file: DataFile
    engine: Engine
    eos: int | None
    dtype: np.dtype[Any]
    folder: Path
    """work/ of the store."""

    def piece(self, item: str, chunk: int, split: str) -> Path:
        """`split` may also be "rejects"."""
        return self.folder / "pieces" / piece_name(item, chunk, split)


def piece_name(item: str, chunk: int, split: str) -> str:
    return f"{item}-{chunk:06d}.{split}"


@dataclass
class Account:
    """What became of the documents of one input file in one chunk."""

    file: str
    lines: int = 0
    """Lines or rows seen, blank ones too."""
    documents: int = 0
    """Documents met: out + rejected + filtered."""
    out: Counter[str] = field(default_factory=Counter)
    """By split."""
    rejected: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    damage: str | None = None


class Piece:
    """The output of one chunk for one split: written beside its final name and renamed when whole."""

    def __init__(self, path: Path, job: Job) -> None:
        self.path, self.job = path, job
        self.beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self.tokens = self.documents = self.bytes = self.sample_words = self.sample_tokens = 0
        self.max_token = -1
        self._file: BinaryIO | None = None
        self._sum = 0
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._hashes: list[bytes] = []
        self._texts: list[str] = []
        self._chars = 0

    def add(self, text: str, digest: bytes | None) -> int:
        """Take a document; returns the tokens written by this call (most calls only collect)."""
        self._texts.append(text)
        self._chars += len(text)
        if digest is not None:
            self._hashes.append(digest)
        return self.flush() if self._chars >= self.job.engine.batch else 0

    def add_all(self, texts: list[str]) -> int:
        """The same for many of which no hash is wanted: without a call for each, which for short documents is most of the time."""
        tokens, batch, taken = 0, self.job.engine.batch, self._texts
        for text in texts:
            taken.append(text)
            self._chars += len(text)
            if self._chars >= batch:
                tokens += self.flush()
                taken = self._texts
        return tokens

    def flush(self) -> int:
        if not self._texts:
            return 0
        texts, self._texts, self._chars = self._texts, [], 0
        ids, offsets = self.job.engine.encode(texts, self.job.eos)
        lengths = np.diff(offsets).astype(np.int32)
        ends = 0 if self.job.eos is None else 1  # not counted as a token of the text
        for number in range((-self.documents) % SAMPLE_EVERY, len(texts), SAMPLE_EVERY):
            self.sample_words += len(texts[number].split())
            self.sample_tokens += int(lengths[number]) - ends
        sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
        self.bytes += sum(sizes)
        if self._hashes:
            self._sizes.append(np.array(sizes, dtype="<i4"))
        self._write(ids, lengths)
        return len(ids)

    def _write(self, ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int32]) -> None:
        if len(ids):
            self.max_token = max(self.max_token, int(ids.max()))
        # Ids of four bytes are the same bytes with and without a sign.
        out = ids if self.job.dtype.itemsize == 4 else ids.astype(self.job.dtype)
        self._sum = zlib.crc32(out, self._sum)  # type: ignore[arg-type]
        write_all(self._open(), out)
        self._lengths.append(lengths)
        self.tokens, self.documents = self.tokens + len(out), self.documents + len(lengths)

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = self.beside.open("wb", buffering=0)
        return self._file

    def close(self) -> dict[str, Any] | None:
        """Make the piece whole and give it its name; what the journal keeps of it, or None for an empty one."""
        self.flush()
        if self._file is None:
            return None
        lengths = np.concatenate(self._lengths).astype("<i4")
        tail = lengths.tobytes() + b"".join(part.tobytes() for part in self._sizes) + b"".join(self._hashes)
        write_all(self._file, tail)
        os.fsync(self._file.fileno())
        self._file.close()
        self.beside.replace(self.path)
        return {
            "tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "max_token": self.max_token, "crc32": f"{self._sum:08x}",
            "tail": hashlib.sha256(tail).hexdigest(), "sample_words": self.sample_words, "sample_tokens": self.sample_tokens,
        }  # fmt: skip

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
        self.beside.unlink(missing_ok=True)


def cores() -> int:
    """CPU cores that this process may use, which under a scheduler are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stay_with_parent() -> None:
    """In a forked process: die with the parent (Linux), leave Ctrl-C to it, and hold no copy of its lock."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handles = Path("/proc/self/fd")
    for handle in list(handles.iterdir()) if handles.is_dir() else []:
        with contextlib.suppress(OSError):
            if handle.readlink().name.endswith(".lock"):
                os.close(int(handle.name))


def write_all(file: Any, data: Any) -> None:
    """An unbuffered file may take less than it is given (a nearly full disk, more than 2 GiB): go on until all is written."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[file.write(view) :]


class Worker:
    """Does chunks, one after the other; keeps a compressed file open between neighbouring chunks."""

    def __init__(self, job: Job, journal: Path, report: Report) -> None:
        self.job, self.journal, self.report = job, journal, report
        self._lines: tuple[str, Lines] | None = None

    def do(self, item: Item, chunk: int) -> dict[str, Any]:
        """One chunk; returns its journal line, which stands on disk when this returns."""
        source = self.job.file.sources[item.source]
        out = Chunk(self.job, item, chunk, source, self.report)
        try:
            last = True
            for number, file in enumerate(item.files):
                last = self._read(out, item, chunk, number, file, source)
            line = out.close(last)
        except BaseException:
            out.abandon()
            raise
        append_line(self.journal, line)
        return line

    def _read(self, out: Chunk, item: Item, chunk: int, number: int, file: InputFile, source: Source) -> bool:
        """Read the part of `file` that belongs to the chunk; True when the file ends in it."""
        account = out.account(number, file)
        if file.format in ("parquet", "arrow"):
            start, stop = (chunk * item.rows, (chunk + 1) * item.rows) if item.rows else (0, None)
            for records in read.rows(file, source, self.job.file.utf8, start, stop):
                out.take(account, records, number)
            return True
        if file.format == "text" and source.document == "file":
            record = read.whole_text(file, self.job.file.utf8, self.job.file.max_document)
            out.take(account, [record], number)
            return True
        return self._read_lines(out, account, item, chunk, number, file, source)

    def _read_lines(
        self, out: Chunk, account: Account, item: Item, chunk: int, number: int, file: InputFile, source: Source
    ) -> bool:
        size, alone = item.step, item.chunks != 1
        lines = self._opened(item, file, chunk * size if alone else 0)
        parse = read.line_parser(source, file.format, self.job.file.utf8, self.job.file.max_document)
        for part in lines.until((chunk + 1) * size if alone else None):
            out.take(account, [parse(line) for line in part], number)
        ended = lines.at_end if alone and item.chunks is None else True
        if lines.damage is not None:
            account.damage = lines.damage
        if not alone or ended:
            self.close()
        return ended

    def _opened(self, item: Item, file: InputFile, start: int) -> Lines:
        """The lines of a file from `start` on; an open compressed file is used again when it has not gone too far."""
        if self._lines is not None and (
            self._lines[0] != item.id
            or len(item.files) > 1
            or self._lines[1].position > start + self.job.file.max_document
        ):
            self.close()
        if self._lines is None:
            self._lines = (item.id, Lines(file, self.job.file.max_document))
        self._lines[1].go_to(start)
        return self._lines[1]

    @property
    def depth(self) -> int:
        """Bytes that were decompressed to reach the place in the open file; 0 when none is open that cannot simply be opened there."""
        return self._lines[1].position if self._lines is not None and self._lines[1].file.packing else 0

    def close(self) -> None:
        """Let go of the open file, if there is one."""
        if self._lines is not None:
            self._lines[1].close()
            self._lines = None


class Chunk:
    """What one chunk gives: a piece per split, the accounts of its files, and its rejects."""

    def __init__(self, job: Job, item: Item, chunk: int, source: Source, report: Report) -> None:
        self.job, self.item, self.chunk, self.report = job, item, chunk, report
        self.pieces = {split: Piece(job.piece(item.id, chunk, split), job) for split in SPLITS}
        self.accounts: list[Account] = []
        self.rejects: list[dict[str, Any]] = []
        self._unsaid = [0, 0, 0, 0]
        file = job.file
        self.min_chars = source.min_chars if source.min_chars is not None else file.min_chars
        self.max_chars = source.max_chars or file.max_chars
        share = source.validation if source.validation is not None else file.validation
        self.held_out = int(share * 2**64)
        self.hashing = self.held_out > 0 or file.dedup == "exact"
        self.plain = not self.hashing and self.max_chars is None

    def account(self, number: int, file: InputFile) -> Account:
        self.accounts.append(Account(file.path))
        return self.accounts[-1]

    def take(self, account: Account, records: list[Record], number: int) -> None:
        """Send each record where it belongs; every one is counted exactly once."""
        if self.plain and set(map(type, records)) == {str} and min(map(len, records)) >= self.min_chars:  # type: ignore[arg-type]
            self._take_all(account, records)  # type: ignore[arg-type]
            return
        before, tokens, taken, refused = account.lines, 0, 0, 0
        size = 0
        for place, record in enumerate(records):
            if type(record) is str:
                if self._wanted(account, record):
                    tokens += self._add(account, record)
                    taken += 1
                size += len(record)
            elif isinstance(record, Reject):
                account.rejected[_general(record.reason)] += 1
                refused += 1
                self.rejects.append(_reject_line(number, before + place, record))
            else:
                continue
            account.documents += 1
        account.lines += len(records)
        self._say(size, tokens, taken, refused)

    def _take_all(self, account: Account, texts: list[str]) -> None:
        """The usual block: nothing to reject, to leave out or to hash."""
        account.lines += len(texts)
        account.documents += len(texts)
        account.out["train"] += len(texts)
        self._say(sum(map(len, texts)), self.pieces["train"].add_all(texts), len(texts), 0)

    def _say(self, *numbers: int, now: bool = False) -> None:
        """Report now and then: a message per block would cost the one who hears them all more than it tells."""
        self._unsaid = [a + b for a, b in zip(self._unsaid, numbers, strict=True)]
        if now or self._unsaid[0] >= SAY_EVERY or self._unsaid[3]:
            self.report(*self._unsaid)
            self._unsaid = [0, 0, 0, 0]

    def _wanted(self, account: Account, text: str) -> bool:
        if len(text) < self.min_chars:
            account.filtered["too short" if text else "empty"] += 1
            return False
        if self.max_chars is not None and len(text) > self.max_chars:
            account.filtered["too long"] += 1
            return False
        return True

    def _add(self, account: Account, text: str) -> int:
        split, digest = "train", None
        if self.hashing:
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if int.from_bytes(digest[:8], "little") < self.held_out:
                split = "validation"
        account.out[split] += 1
        return self.pieces[split].add(text, digest if self.job.file.dedup == "exact" else None)

    def close(self, last: bool) -> dict[str, Any]:
        """Write what was still collected, make the pieces whole; the line that goes into the journal."""
        self._say(0, sum(piece.flush() for piece in self.pieces.values()), 0, 0, now=True)
        pieces = {split: made for split, piece in self.pieces.items() if (made := piece.close()) is not None}
        if self.rejects:
            path = self.job.piece(self.item.id, self.chunk, "rejects")
            beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            beside.write_text("".join(json.dumps(line) + "\n" for line in self.rejects))
            beside.replace(path)
        accounts = [
            {**vars(a), "out": dict(a.out), "rejected": dict(a.rejected), "filtered": dict(a.filtered)}
            for a in self.accounts
        ]
        return {
            "item": self.item.id,
            "chunk": self.chunk,
            "last": last,
            "pieces": pieces,
            "files": accounts,
            "rejects": len(self.rejects),
        }

    def abandon(self) -> None:
        for piece in self.pieces.values():
            piece.abandon()


def _general(reason: str) -> str:
    """The kind of a reason, without its particulars, for counting."""
    return reason.split(" (")[0].split(" at byte")[0]


def _reject_line(file: int, line: int, record: Reject) -> dict[str, Any]:
    """`line` counts from 0 inside the chunk; the number in the file is known when all chunks before it are done."""
    text = record.raw.decode("utf-8", errors="backslashreplace")
    return {"file": file, "line": line, "reason": record.reason, "text": text}
