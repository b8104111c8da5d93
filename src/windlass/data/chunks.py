"""From one chunk of input to one piece of output: read, filter, encode, write.

A piece counts as done when its line is in a journal; anything before that is simply done again. A piece file holds the
tokens, then the length of each document in tokens (int32) and, if duplicates are removed, its length in bytes
(int32) and a 16-byte hash of its text; for conversations then a mark (one byte) for each token.
"""

import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from windlass.config.sources import DataFile
from windlass.data import readers
from windlass.data.conversations import ConversationEncoder, MarkedText
from windlass.data.engines import Engine
from windlass.data.inputs import ROW_FORMATS, InputFile, WorkItem
from windlass.data.readers import LineReader, Record, RejectedDocument
from windlass.files import append_line, write_atomic

SPLITS = ("train", "validation")
SAMPLE_EVERY = 64  # words are counted in one of so many documents: enough for tokens per word, and nearly free
REPORT_CHARS = 1 << 22  # characters of text between two reports

# Called with the (tokens, documents, rejects) since the last call.
Report = Callable[[int, int, int], None]


@dataclass(frozen=True)
class TokenizeTask:
    """What all chunks of a run share. `folder` is work/ of the store; without chunks to encode the engine is None."""

    file: DataFile
    settings: dict[str, Any]  # all that shapes the output, apart from the texts
    engine: Engine | None
    eos: int | None
    dtype: np.dtype[Any]
    folder: Path
    chat: ConversationEncoder | None = None  # where a source holds conversations

    def piece(self, item: str, chunk: int, split: str) -> Path:
        """`split` may also be "rejects"."""
        return self.folder / "pieces" / piece_name(item, chunk, split)


def piece_name(item: str, chunk: int, split: str) -> str:
    return f"{item}-{chunk:06d}.{split}"


def write_fully(file: Any, data: Any) -> None:
    """Write all of `data`: an unbuffered file may take less per call (nearly full disk, more than 2 GiB)."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[file.write(view) :]


class PieceWriter:
    """The output of one chunk for one split: written under a temporary name and renamed when complete."""

    def __init__(self, path: Path, task: TokenizeTask) -> None:
        assert task.engine is not None
        self.path, self.eos, self.dtype = path, task.eos, task.dtype
        self.encode, self.batch_chars = task.engine.encode, task.engine.batch_chars
        self.temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self.tokens = self.documents = self.bytes = self.sample_words = self.sample_tokens = 0
        self.max_token = -1
        self._file: BinaryIO | None = None
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._hashes: list[bytes] = []
        self._marks: list[npt.NDArray[np.uint8]] = []
        self._texts: list[str] = []
        self._chars = self._crc32 = 0

    def add(self, texts: list[str], hashes: Iterable[bytes] = ()) -> int:
        """Take documents; returns the tokens written by this call (most calls only collect)."""
        self._hashes.extend(hashes)
        tokens, batch, collected = 0, self.batch_chars, self._texts
        for text in texts:
            collected.append(text)
            self._chars += len(text)
            if self._chars >= batch:
                tokens += self.flush()
                collected = self._texts
        return tokens

    def flush(self) -> int:
        if not self._texts:
            return 0
        texts, self._texts, self._chars = self._texts, [], 0
        end_tokens = 0 if self.eos is None else 1  # not counted as a token of the text
        if conversations := [text for text in texts if isinstance(text, MarkedText)]:  # then all of them are
            ids, end_tokens = np.concatenate([text.ids for text in conversations]), 0
            lengths = np.array([len(text.ids) for text in conversations], dtype=np.int32)
            self._marks += [text.marks for text in conversations]
        else:
            ids, offsets = self.encode(texts, self.eos)
            lengths = np.diff(offsets).astype(np.int32)
        for number in range((-self.documents) % SAMPLE_EVERY, len(texts), SAMPLE_EVERY):
            self.sample_words += len(texts[number].split())
            self.sample_tokens += int(lengths[number]) - end_tokens
        sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
        self.bytes += sum(sizes)
        if self._hashes:
            self._sizes.append(np.array(sizes, dtype="<i4"))
        if len(ids):
            self.max_token = max(self.max_token, int(ids.max()))
        # Ids of four bytes are the same bytes with and without a sign.
        tokens = ids if self.dtype.itemsize == 4 else ids.astype(self.dtype)
        self._crc32 = zlib.crc32(tokens, self._crc32)  # type: ignore[arg-type]
        if self._file is None:
            self._file = self.temporary.open("wb", buffering=0)
        write_fully(self._file, tokens)
        self._lengths.append(lengths)
        self.tokens, self.documents = self.tokens + len(ids), self.documents + len(lengths)
        return len(ids)

    def close(self) -> dict[str, Any] | None:
        """Complete the piece and give it its name; returns its entry in the journal, None for an empty piece."""
        self.flush()
        if self._file is None:
            return None
        lengths = np.concatenate(self._lengths).astype("<i4")
        tail = lengths.tobytes() + b"".join(part.tobytes() for part in self._sizes) + b"".join(self._hashes)
        tail += b"".join(part.tobytes() for part in self._marks)
        write_fully(self._file, tail)
        os.fsync(self._file.fileno())
        self._file.close()
        self.temporary.replace(self.path)
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "max_token": self.max_token,
            "crc32": f"{self._crc32:08x}",
            "tail": hashlib.sha256(tail).hexdigest(),
            "sample_words": self.sample_words,
            "sample_tokens": self.sample_tokens,
            **({"marked": True} if self._marks else {}),
        }

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
        self.temporary.unlink(missing_ok=True)


@dataclass
class FileCounts:
    """What became of the documents of one input file in one chunk: documents = out + rejected + filtered."""

    file: str
    lines: int = 0  # or rows, blank ones included
    documents: int = 0
    out: Counter[str] = field(default_factory=Counter)  # by split
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    filtered: Counter[str] = field(default_factory=Counter)  # by reason
    damage: str | None = None


class ChunkWriter:
    """The output of one chunk: a piece per split, the counts of its files, and its rejected documents."""

    def __init__(self, task: TokenizeTask, item: WorkItem, chunk: int, report: Report) -> None:
        self.task, self.item, self.chunk, self.report = task, item, chunk, report
        self.pieces = {split: PieceWriter(task.piece(item.id, chunk, split), task) for split in SPLITS}
        self.counts: list[FileCounts] = []
        self.rejects: list[dict[str, Any]] = []
        self._unreported = (0, 0, 0, 0)
        file, source = task.file, task.file.sources[item.source]
        self.min_chars = source.min_chars if source.min_chars is not None else file.min_chars
        self.max_chars, self.max_tokens = source.max_chars or file.max_chars, source.max_tokens
        validation = source.validation if source.validation is not None else file.validation
        self.validation_below = int(validation * 2**64)  # of the first 8 bytes of a document's hash
        self.removes_duplicates = file.dedup == "exact"
        self.hashes = self.validation_below > 0 or self.removes_duplicates
        self.is_plain = not self.hashes and self.max_chars is None

    def add(self, records: list[Record]) -> None:
        """Add records of the file that `counts` ends with; every document is counted exactly once."""
        counts, rejected = self.counts[-1], len(self.rejects)
        texts: dict[str, list[str]] = {}  # by split, without what is rejected or filtered out
        hashes: dict[str, list[bytes]] = {}
        plain: list[Any] = records if self.is_plain and set(map(type, records)) == {str} else []
        if plain and min(map(len, plain)) >= self.min_chars:  # the usual block: nothing to reject, filter or hash
            texts["train"] = plain
            counts.documents += len(records)
        for line, record in enumerate(() if texts else records, start=counts.lines):
            if record is None:
                continue
            counts.documents += 1
            if isinstance(record, RejectedDocument):
                reason, text = record.reason, record.raw.decode("utf-8", errors="backslashreplace")
                counts.rejected[reason.split(" (")[0].split(" at byte")[0]] += 1  # the reason without its numbers
                # `line` counts from 0 in the chunk; its number in the file is known when all earlier chunks are done
                self.rejects.append({"file": len(self.counts) - 1, "line": line, "reason": reason, "text": text})
            elif len(record) < self.min_chars:
                counts.filtered["too short" if record else "empty"] += 1
            elif self.max_chars is not None and len(record) > self.max_chars:
                counts.filtered["too long"] += 1
            elif isinstance(record, MarkedText) and len(record.ids) > (self.max_tokens or len(record.ids)):
                counts.filtered["more than max_tokens"] += 1
            else:
                split = "train"
                if self.hashes:
                    digest = hashlib.blake2b(record.encode(), digest_size=16).digest()
                    if int.from_bytes(digest[:8], "little") < self.validation_below:
                        split = "validation"
                    if self.removes_duplicates:
                        hashes.setdefault(split, []).append(digest)
                texts.setdefault(split, []).append(record)
        counts.lines += len(records)
        tokens = 0
        for split, split_texts in texts.items():
            counts.out[split] += len(split_texts)
            tokens += self.pieces[split].add(split_texts, hashes.get(split, ()))
        chars = sum(len(text) for split_texts in texts.values() for text in split_texts)
        self._report(chars, tokens, sum(map(len, texts.values())), len(self.rejects) - rejected)

    def _report(self, chars: int, tokens: int, documents: int, rejects: int, *, now: bool = False) -> None:
        """Report in larger steps: one message per block would cost the receiving process too much."""
        a, b, c, d = self._unreported
        self._unreported = (a + chars, b + tokens, c + documents, d + rejects)
        if now or self._unreported[0] >= REPORT_CHARS or self._unreported[3]:
            self.report(*self._unreported[1:])
            self._unreported = (0, 0, 0, 0)

    def close(self, last: bool) -> dict[str, Any]:
        """Complete the pieces; returns the chunk's line for the journal."""
        self._report(0, sum(piece.flush() for piece in self.pieces.values()), 0, 0, now=True)
        pieces = {split: entry for split, piece in self.pieces.items() if (entry := piece.close()) is not None}
        if self.rejects:
            lines = "".join(json.dumps(line) + "\n" for line in self.rejects)
            write_atomic(self.task.piece(self.item.id, self.chunk, "rejects"), lines, sync=False)
        return {
            "item": self.item.id,
            "chunk": self.chunk,
            "last": last,
            "pieces": pieces,
            "files": [vars(counts) for counts in self.counts],
            "rejects": len(self.rejects),
        }


class ChunkWorker:
    """Processes chunks, one after the other; keeps a compressed file open between neighbouring chunks."""

    def __init__(self, task: TokenizeTask, journal: Path, report: Report) -> None:
        self.task, self.journal, self.report = task, journal, report
        self._item = ""
        self._lines: LineReader | None = None

    def process(self, item: WorkItem, chunk: int) -> dict[str, Any]:
        """One chunk; returns its journal line, which is on disk by then."""
        out = ChunkWriter(self.task, item, chunk, self.report)
        try:
            for file in item.files:
                out.counts.append(FileCounts(file.path))
                last = self._read(out, item, chunk, file)
            line = out.close(last)
        except BaseException:
            for piece in out.pieces.values():
                piece.abandon()
            raise
        append_line(self.journal, line)
        return line

    def _read(self, out: ChunkWriter, item: WorkItem, chunk: int, file: InputFile) -> bool:
        """Read the part of `file` that belongs to the chunk; True when the file ends in it."""
        config = self.task.file
        source = config.sources[item.source]
        encode: readers.EncodeRecord | None = None
        if source.form != "text" and (chat := self.task.chat) is not None:
            encode = lambda record, raw: chat.encode(record, source.form, raw)  # noqa: E731
        if file.format in ROW_FORMATS or (file.format == "text" and source.document == "file"):
            start, stop = (chunk * item.rows, (chunk + 1) * item.rows) if item.rows else (0, None)
            for records in readers.read_records(file, source, config.utf8, config.max_document, start, stop, encode):
                out.add(records)
            return True
        has_parts = item.chunks != 1
        start = chunk * item.step if has_parts else 0
        # A compressed file that is open is used again if it is not beyond `start`.
        if self._lines and (self._item != item.id or self._lines.position > start + config.max_document):
            self.close()
        if self._lines is None:
            self._item, self._lines = item.id, LineReader(file, config.max_document)
        lines = self._lines
        lines.go_to(start)
        parse = readers.line_parser(source, file.format, config.utf8, config.max_document, encode)
        for part in lines.until((chunk + 1) * item.step if has_parts else None):
            out.add([parse(line) for line in part])
        ended = lines.at_end() if item.chunks is None else True
        out.counts[-1].damage = lines.damage
        if ended:
            self.close()
        return ended

    @property
    def decompressed_bytes(self) -> int:
        """Bytes that another worker would have to decompress to reach the current place; 0 without an open file."""
        return self._lines.position if self._lines is not None and self._lines.file.packing else 0

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None
