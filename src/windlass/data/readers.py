"""Readers of JSON lines, text, Parquet and Arrow files, plain or compressed.

A bad line loses only that line; a truncated file loses only what is missing. Both are reported.
"""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, BinaryIO

from windlass.config.sources import DataSource
from windlass.data import import_optional, orjson
from windlass.data.inputs import ROW_FORMATS, InputFile, WorkItem
from windlass.errors import DataError

BLOCK_BYTES = 1 << 20  # per read: large enough for a parallel file system, small enough for a flat memory
MAX_KEPT_BYTES = 1 << 16  # of a rejected line

Line = memoryview | None  # without its line end; None: the line was too long to be kept


@dataclass(frozen=True, slots=True)
class RejectedDocument:
    reason: str
    raw: bytes = b""


Record = str | RejectedDocument | None  # None: a blank line, which is not a document
EncodeRecord = Callable[[Any, bytes], Record]  # from an object and its line: conversations


class DamagedFileError(Exception):
    """The file ends too early or its compression is broken; what came before the damage is good."""


# -- bytes ---------------------------------------------------------------------------------------------------------


def read_blocks(file: BinaryIO, packing: str) -> Iterator[bytes]:
    """The decompressed bytes of a file. Several gzip members or zstd frames in one file are read as one text."""
    if not packing:
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    new_decompressor: Callable[[], Any]
    if packing == "gz":
        new_decompressor, failure, max_size = lambda: zlib.decompressobj(31), zlib.error, BLOCK_BYTES // 16
    else:
        zstandard = import_optional("zstandard")
        new_decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        failure, max_size = zstandard.ZstdError, BLOCK_BYTES // 2
    name = {"gz": "gzip", "zst": "zstd"}[packing]
    decompressor, inside, started, size = new_decompressor(), False, False, BLOCK_BYTES // 256
    try:
        while block := file.read(size):
            # zero padding after the last gzip member is allowed
            while block and (inside or packing != "gz" or block.strip(b"\0")):
                inside = started = True
                text = decompressor.decompress(block)
                yield text
                # Large blocks are cheaper, because the window that the decompressor looks back into is still in the
                # cache. But a repetitive text expands ten thousandfold, and memory must stay flat.
                size = min(2 * size, max_size) if len(text) < 4 * BLOCK_BYTES else max(size // 2, 256)
                block = b""
                if decompressor.eof:
                    block, decompressor, inside = decompressor.unused_data, new_decompressor(), False
    except failure as error:
        raise DamagedFileError(f"the {name} data is broken ({error})") from None
    if inside or not started:  # the zstandard library itself accepts a truncated file as complete
        raise DamagedFileError(f"the {name} file is truncated: its end is missing")


# -- lines ---------------------------------------------------------------------------------------------------------


class LineReader:
    """The lines of one file, forwards. `position` is where the next line begins, in decompressed bytes."""

    def __init__(self, file: InputFile, max_document: int) -> None:
        self.file, self.max_document = file, max_document
        self.position, self.ended, self._buffer = 0, False, b""
        self.damage: str | None = None
        self._opened = Path(file.path).open("rb")  # noqa: SIM115 - closed by close()
        self._blocks = read_blocks(self._opened, file.packing)

    def close(self) -> None:
        self._opened.close()

    def go_to(self, start: int) -> None:
        """Move to the first line that begins at or after `start`; a plain file seeks, a compressed one reads on."""
        if start <= self.position:
            return
        if not self.file.packing:
            self._opened.seek(start - 1)
            self._buffer, self.position = b"", start - 1
        while self.position + len(self._buffer) < start and self._read_block(drop=True):
            pass
        self._buffer, self.position = self._buffer[max(0, start - 1 - self.position) :], max(self.position, start - 1)
        self._skip_line()

    def _skip_line(self) -> None:
        while (end := self._buffer.find(b"\n")) < 0:
            if not self._read_block(drop=True):
                self.position += len(self._buffer)
                self._buffer = b""
                return
        self.position += end + 1
        self._buffer = self._buffer[end + 1 :]

    def _read_block(self, *, drop: bool = False) -> bool:
        """Append one block to the buffer; with `drop` the buffer is emptied first. False: the file has ended."""
        try:
            block = next(self._blocks, None)
        except DamagedFileError as error:
            self.damage, block = str(error), None
        if block is None:
            self.ended = True
            return False
        if drop:
            self.position += len(self._buffer)
            self._buffer = block
        else:
            self._buffer = self._buffer + block if self._buffer else block
        return True

    def until(self, stop: int | None) -> Iterator[list[Line]]:
        """Lists of the lines that begin before `stop`.

        Lines are views of the block they came in: copying every line costs as much as decompressing it.
        """
        while stop is None or self.position < stop:
            cut = self._buffer.rfind(b"\n") + 1
            if cut == 0:
                if self.ended or not self._read_block():
                    last, self._buffer = self._buffer, b""
                    self.position += len(last)
                    if last and self.damage is None:  # in a damaged file this is a torn line
                        yield [memoryview(last)]
                    return
                if len(self._buffer) > self.max_document and b"\n" not in self._buffer:
                    self._skip_line()
                    yield [None]
                continue
            if stop is not None and self.position + cut > stop:
                # The last line that begins before `stop` is the one that holds the byte before it.
                cut = self._buffer.index(b"\n", stop - self.position - 1) + 1
            block, self._buffer = self._buffer, self._buffer[cut:]
            self.position += cut
            view, lines, start = memoryview(block), list[Line](), 0
            while start < cut:
                end = block.index(b"\n", start)
                lines.append(view[start:end])
                start = end + 1
            if cut > self.max_document:
                lines = [line if line is not None and len(line) <= self.max_document else None for line in lines]
            yield lines

    def at_end(self) -> bool:
        """Whether no line is left; reads ahead to know it."""
        while not self._buffer and not self.ended:
            self._read_block()
        return self.ended and (not self._buffer or self.damage is not None)


# -- texts ---------------------------------------------------------------------------------------------------------


def line_parser(
    source: DataSource, format: str, utf8: str, max_document: int, encode: EncodeRecord | None = None
) -> Callable[[Line], Record]:
    """A function from one line to its text, or to what `encode` makes of its object. Nothing is stripped from a
    text."""
    too_long = RejectedDocument(f"longer than max_document ({max_document:,} bytes)")
    if format == "text":
        return lambda line: too_long if line is None else _decode(bytes(line).removesuffix(b"\r"), utf8)
    keys = source.field.split(".")
    loads: Callable[[memoryview], Any] = orjson.loads if orjson else lambda line: json.loads(bytes(line))

    def parse_object(line: Line) -> Record:
        if line is None or not bytes(line).strip():
            return too_long if line is None else None
        try:
            record = loads(line)
        except ValueError as error:
            return RejectedDocument(f"not JSON ({str(error)[:80]}; one record per line)", bytes(line)[:MAX_KEPT_BYTES])
        assert encode is not None
        return encode(record, bytes(line))

    def parse(line: Line) -> Record:
        if line is None:
            return too_long
        try:
            value = loads(line)
            text = value[keys[0]] if len(keys) == 1 else reduce(getitem, keys, value)
        except (KeyError, TypeError, IndexError):
            return _text_of(value, keys, bytes(line))
        except ValueError:
            return _parse_slowly(bytes(line), utf8, keys)
        return text if type(text) is str else _text_of(value, keys, bytes(line))

    return parse if encode is None else parse_object


_JSON_KINDS = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object",
    str: "a text",
}  # fmt: skip


def _text_of(value: Any, keys: list[str], line: bytes) -> str | RejectedDocument:
    field = ".".join(keys)
    try:
        text = reduce(getitem, keys, value)
        reason = f"{field!r} is {_JSON_KINDS[type(text)]}, not a text"
    except (KeyError, IndexError, TypeError):
        text, reason = None, f"no field {field!r}"
    if not isinstance(value, dict):
        reason = f"not a JSON object but {_JSON_KINDS[type(value)]}"
    return text if type(text) is str else RejectedDocument(reason, line[:MAX_KEPT_BYTES])


def _parse_slowly(line: bytes, utf8: str, keys: list[str]) -> Record:
    """A line that the fast parser refused: blank, invalid UTF-8, a lone surrogate, or not JSON at all."""
    if not line.strip():
        return None
    text = _decode(line, utf8, " of the line")
    if not isinstance(text, str):
        return text
    try:
        text = _text_of(json.loads(text), keys, line)
    except (ValueError, RecursionError) as error:
        return RejectedDocument(f"not JSON ({str(error)[:80]})", line[:MAX_KEPT_BYTES])
    if isinstance(text, RejectedDocument):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        if utf8 == "reject":
            return RejectedDocument("a lone surrogate, which is not Unicode text", line[:MAX_KEPT_BYTES])
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _decode(raw: bytes, utf8: str, place: str = "") -> Record:
    if not raw:
        return None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if utf8 == "reject":
            return RejectedDocument(f"invalid UTF-8 at byte {error.start}{place}", raw[:MAX_KEPT_BYTES])
        return raw.decode("utf-8", errors="replace")


def read_text_file(file: InputFile, utf8: str, max_document: int) -> Record:
    text = bytearray()
    with Path(file.path).open("rb") as opened:
        try:
            for block in read_blocks(opened, file.packing):
                text += block
                if len(text) > max_document:
                    return RejectedDocument(f"longer than max_document ({max_document:,} bytes)")
        except DamagedFileError as error:
            return RejectedDocument(f"damaged: {error}")
    return _decode(bytes(text), utf8)


# -- rows ----------------------------------------------------------------------------------------------------------


def count_rows(file: InputFile) -> tuple[int, int]:
    """(rows, bytes of data) without reading the data."""
    pyarrow = import_optional("pyarrow")
    try:
        if file.format == "parquet":
            metadata = import_optional("pyarrow.parquet").ParquetFile(file.path).metadata
            return metadata.num_rows, sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        return sum(batch.num_rows for batch in _arrow_batches(file.path)), file.size
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: InputFile, error: Exception) -> DataError:
    return DataError(
        "data.input-unreadable",
        f"{file.path} cannot be read as a {file.format} file: {str(error).splitlines()[0]}",
        hint="check that the file is complete and has this format",
    )


def _arrow_batches(path: str) -> Iterator[Any]:
    pyarrow = import_optional("pyarrow")
    with pyarrow.memory_map(path) as mapped:
        try:
            reader = pyarrow.ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            opened = pyarrow.ipc.open_file(mapped)
            yield from (opened.get_batch(i) for i in range(opened.num_record_batches))
            return
        yield from reader


def read_rows(
    file: InputFile,
    source: DataSource,
    utf8: str,
    start: int = 0,
    stop: int | None = None,
    encode: EncodeRecord | None = None,
) -> Iterator[list[Record]]:
    """Lists of the texts of rows start..stop-1, or of what `encode` makes of each row."""
    pyarrow = import_optional("pyarrow")
    null = RejectedDocument(f"{source.field!r} is null, not a text")
    try:
        for first, column in _columns(file, source.field if encode is None else None, start):
            if stop is not None and first >= stop:
                return
            low, high = max(start - first, 0), len(column) if stop is None else min(len(column), stop - first)
            if low < high:
                rows = column.slice(low, high - low)
                if encode is not None:
                    yield [encode(row, b"") for row in rows.to_pylist()]
                    continue
                try:
                    values = rows.to_pylist()
                except UnicodeDecodeError:
                    values = rows.cast("binary").to_pylist()
                yield [
                    null if value is None else (_decode(value, utf8) or "") if isinstance(value, bytes) else str(value)
                    for value in values
                ]
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def _columns(file: InputFile, field: str | None, start: int) -> Iterator[tuple[int, Any]]:
    """(number of its first row, text column) of each batch, or the batch itself without `field`; Parquet row groups
    that end before `start` are skipped."""
    first = 0
    if file.format == "arrow":
        for batch in _arrow_batches(file.path):
            if field is not None:
                _check_column(batch.schema, file.path, field)
            yield first, batch if field is None else batch.column(field)
            first += batch.num_rows
        return
    opened = import_optional("pyarrow.parquet").ParquetFile(file.path)
    if field is not None:
        _check_column(opened.schema_arrow, file.path, field)
    for group in range(opened.metadata.num_row_groups):
        group_end = first + opened.metadata.row_group(group).num_rows
        if group_end > start:
            columns = None if field is None else [field]
            for batch in opened.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                yield first, batch if field is None else batch.column(0)
                first += batch.num_rows
        first = group_end


def _check_column(schema: Any, path: str, field: str) -> None:
    if field not in schema.names:
        raise DataError(
            "data.column-missing",
            f"{path} has no column {field!r}",
            hint=f"it has {', '.join(schema.names)}: set `field` in the source's table",
        )
    kind = str(schema.field(field).type)
    if kind not in ("string", "large_string", "binary", "large_binary") and not kind.startswith("string_view"):
        raise DataError(
            "data.column-not-text",
            f"{path}: column {field!r} has type {kind}, not text",
            hint="set `field` to the column that holds the text",
        )


# -- whole files ---------------------------------------------------------------------------------------------------


def read_records(
    file: InputFile,
    source: DataSource,
    utf8: str,
    max_document: int,
    start: int = 0,
    stop: int | None = None,
    encode: EncodeRecord | None = None,
) -> Iterator[list[Record]]:
    """All documents of a file in lists; `start` and `stop` are rows, where a file has them."""
    if file.format in ROW_FORMATS:
        yield from read_rows(file, source, utf8, start, stop, encode)
    elif file.format == "text" and source.document == "file":
        yield [read_text_file(file, utf8, max_document)]
    else:
        parse = line_parser(source, file.format, utf8, max_document, encode)
        with contextlib.closing(LineReader(file, max_document)) as lines:
            for part in lines.until(None):
                yield [parse(line) for line in part]


def first_texts(item: WorkItem, source: DataSource, count: int, max_chars: int) -> list[str]:
    """Texts from the beginning of an item, to compare engines on. What cannot be read is left for the run to report."""
    try:
        records = next(read_records(item.files[0], source, "replace", 1 << 20), [])
    except (DataError, OSError):
        return []
    return [text[:max_chars] for text in records[:16] if isinstance(text, str)][:count]
