"""How are documents read from a file, losing none and stopping at none? A bad line costs that line; a cut file costs what is missing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from windlass.config.sources import Source
from windlass.data.inputs import InputFile, Item
from windlass.errors import DataError

BLOCK = 1 << 20
"""Bytes per read: large enough for a parallel file system, small enough for a flat memory."""
KEPT = 1 << 16
"""Bytes of a rejected line that are kept."""


@dataclass(frozen=True, slots=True)
class Reject:
    reason: str
    raw: bytes = b""


Record = str | Reject | None
"""A text, a rejected document, or nothing (a blank line)."""


Line = memoryview | None
"""The bytes of a line, without its end; None: it was too long to be kept."""


class DamagedError(Exception):
    """The file ends too early or its compression is broken; what came before it is good."""


# -- bytes ---------------------------------------------------------------------------------------------------------


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def _gz(file: BinaryIO) -> Iterator[bytes]:
    """Members one after the other, as `cat a.gz b.gz` makes them; zero padding at the end is allowed."""
    inflate, inside, fed = zlib.decompressobj(31), False, False
    try:
        while block := file.read(BLOCK // 16):
            while block and (inside or block.strip(b"\0")):
                inside = fed = True
                yield inflate.decompress(block)
                block = b""
                if inflate.eof:
                    block, inflate, inside = inflate.unused_data, zlib.decompressobj(31), False
    except zlib.error as error:
        raise DamagedError(f"the gzip data is broken ({error})") from None
    if inside or not fed:
        raise DamagedError("the gzip file was cut: its end is missing")


def _zst(file: BinaryIO) -> Iterator[bytes]:
    """Frames one after the other. zstandard's own reader takes a cut file for a complete one; the frame's end is checked here."""
    zstandard = _need("zstandard")
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    inflate, inside, fed, size = context.decompressobj(), False, False, BLOCK // 256
    try:
        while block := file.read(size):
            while block:
                inside = fed = True
                text = inflate.decompress(block)
                yield text
                # What the decompressor looks back into has left the cache by now: the more at once, the cheaper. But a text that
                # repeats itself grows ten thousandfold, and memory is to stay flat.
                size = min(2 * size, BLOCK // 2) if len(text) < 4 * BLOCK else max(size // 2, 256)
                block = b""
                if inflate.eof:
                    block, inflate, inside = inflate.unused_data, context.decompressobj(), False
    except zstandard.ZstdError as error:
        raise DamagedError(f"the zstd data is broken ({error})") from None
    if inside or not fed:
        raise DamagedError("the zstd file was cut: its end is missing")


def _need(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(
            "data.input-needs-package-installed",
            f"this input needs the package {package!r}, which is not installed",
            hint="pip install 'windlass[data]'",
        ) from None


_READERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {"": _plain, "gz": _gz, "zst": _zst}


# -- lines ---------------------------------------------------------------------------------------------------------


class Lines:
    """The lines of one file, forwards. `position` is where the next line begins, counted in decompressed bytes."""

    def __init__(self, file: InputFile, max_document: int) -> None:
        self.file, self.max_document = file, max_document
        self.position = 0
        self.ended = False
        self.damage: str | None = None
        self._opened = Path(file.path).open("rb")  # noqa: SIM115 - lives as long as this object; closed by close()
        self._blocks = _READERS[file.packing](self._opened)
        self._held = b""

    def close(self) -> None:
        self._opened.close()

    def go_to(self, start: int) -> None:
        """Move to the first line that begins at or after `start`; a plain file jumps, a compressed one reads on."""
        if start <= self.position:
            return
        if not self.file.packing:
            self._opened.seek(start - 1)
            self._held, self.position = b"", start - 1
        while self.position + len(self._held) < start and self._more(drop=True):
            pass
        self._held, self.position = self._held[max(0, start - 1 - self.position) :], max(self.position, start - 1)
        self._skip_line()

    def _skip_line(self) -> None:
        """Drop everything up to and including the next line end."""
        while (end := self._held.find(b"\n")) < 0:
            if not self._more(drop=True):
                self.position += len(self._held)
                self._held = b""
                return
        self.position += end + 1
        self._held = self._held[end + 1 :]

    def _more(self, *, drop: bool = False) -> bool:
        """One block more into the buffer; with `drop` the buffer is emptied first."""
        try:
            block = next(self._blocks, None)
        except DamagedError as error:
            self.damage, block = str(error), None
        if block is None:
            self.ended = True
            return False
        if drop:
            self.position += len(self._held)
            self._held = block
        else:
            self._held = self._held + block if self._held else block
        return True

    def until(self, stop: int | None) -> Iterator[list[Line]]:
        """Lists of the lines that begin before `stop`; None stands for a line longer than max_document, which is not kept.

        Lines are views of the block they came in: a copy of every line costs as much as decompressing it.
        """
        while stop is None or self.position < stop:
            cut = self._held.rfind(b"\n") + 1
            if cut == 0:
                if self.ended or not self._more():
                    yield from self._last()
                    return
                if len(self._held) > self.max_document and b"\n" not in self._held:
                    self._skip_line()
                    yield [None]
                continue
            if stop is not None and self.position + cut > stop:
                # The last line that begins before `stop` is the one that holds the byte before it.
                cut = self._held.index(b"\n", stop - self.position - 1) + 1
            whole, self._held = self._held, self._held[cut:]
            self.position += cut
            lines = _views(whole, cut)
            if cut > self.max_document:
                lines = [line if line is not None and len(line) <= self.max_document else None for line in lines]
            yield lines

    def _last(self) -> Iterator[list[Line]]:
        """What stands after the last line end. In a damaged file that is a torn line, which the caller rejects."""
        rest, self._held = self._held, b""
        self.position += len(rest)
        if rest and self.damage is None:
            yield [memoryview(rest)]

    @property
    def at_end(self) -> bool:
        """No line is left (looks ahead if it must)."""
        while not self._held and not self.ended:
            self._more()
        return self.ended and (not self._held or self.damage is not None)


def _views(block: bytes, stop: int) -> list[Line]:
    """The lines of block[:stop], which ends in a line end."""
    view, lines, start = memoryview(block), list[Line](), 0
    while start < stop:
        end = block.index(b"\n", start)
        lines.append(view[start:end])
        start = end + 1
    return lines


# -- texts ---------------------------------------------------------------------------------------------------------


def line_parser(source: Source, format: str, utf8: str, max_document: int) -> Callable[[Line], Record]:
    """A function from one line to its text. Nothing is stripped from a text."""
    too_long = Reject(f"longer than max_document ({max_document:,} bytes)")
    if format == "text":
        return lambda line: too_long if line is None else _decode(bytes(line).removesuffix(b"\r"), utf8)
    loads, failures = _json_reader()
    path = source.field.split(".")

    def parse(line: Line) -> Record:
        if line is None:
            return too_long
        try:
            value = loads(line)
            text = value[path[0]] if len(path) == 1 else _reach(value, path)
        except (KeyError, TypeError, IndexError):
            return _no_text(value, source.field, bytes(line))
        except failures:
            return _repair(bytes(line), utf8, path, source.field)
        if type(text) is not str:
            return Reject(f"{source.field!r} is {_kind(text)}, not a text", bytes(line[:KEPT]))
        return text

    return parse


def _json_reader() -> tuple[Callable[[memoryview], Any], tuple[type[Exception], ...]]:
    try:
        import orjson

        return orjson.loads, (orjson.JSONDecodeError,)
    except ImportError:  # ten times slower, same answers
        return lambda line: json.loads(bytes(line)), (ValueError,)


def _reach(value: Any, path: list[str]) -> Any:
    for key in path:
        value = value[key]
    return value


def _kind(value: Any) -> str:
    return {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "a text",
    }.get(type(value), type(value).__name__)


def _no_text(value: Any, field: str, line: bytes) -> Record:
    if not isinstance(value, dict):
        return Reject(f"not a JSON object but {_kind(value)}", line[:KEPT])
    return Reject(f"no field {field!r}", line[:KEPT])


def _repair(line: bytes, utf8: str, path: list[str], field: str) -> Record:
    """A line that the fast reader refused: blank, invalid UTF-8, a lone surrogate, or no JSON at all."""
    if not line.strip():
        return None
    try:
        readable = line.decode("utf-8")
    except UnicodeDecodeError as error:
        if utf8 == "reject":
            return Reject(f"invalid UTF-8 at byte {error.start} of the line", line[:KEPT])
        readable = line.decode("utf-8", errors="replace")
    try:
        text = _reach(json.loads(readable), path)
    except (KeyError, IndexError, TypeError):
        return _no_text(json.loads(readable), field, line)
    except (ValueError, RecursionError) as error:
        return Reject(f"not JSON ({str(error)[:80]})", line[:KEPT])
    if type(text) is not str:
        return Reject(f"{field!r} is {_kind(text)}, not a text", line[:KEPT])
    try:
        text.encode()
    except UnicodeEncodeError:
        if utf8 == "reject":
            return Reject("a lone surrogate, which is not Unicode text", line[:KEPT])
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _decode(raw: bytes, utf8: str) -> Record:
    if not raw:
        return None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if utf8 == "reject":
            return Reject(f"invalid UTF-8 at byte {error.start}", raw[:KEPT])
        return raw.decode("utf-8", errors="replace")


def whole_text(file: InputFile, utf8: str, max_document: int) -> Record:
    """A text file as one document."""
    parts: list[bytes] = []
    size = 0
    with Path(file.path).open("rb") as opened:
        try:
            for block in _READERS[file.packing](opened):
                size += len(block)
                if size > max_document:
                    return Reject(f"longer than max_document ({max_document:,} bytes)")
                parts.append(block)
        except DamagedError as error:
            return Reject(f"damaged: {error}")
    return _decode(b"".join(parts), utf8)


# -- rows ----------------------------------------------------------------------------------------------------------


def count_rows(file: InputFile) -> tuple[int, int]:
    """(rows, bytes of data) without reading the data."""
    pyarrow = _need("pyarrow")
    try:
        if file.format == "parquet":
            metadata = _need("pyarrow.parquet").ParquetFile(file.path).metadata
            return metadata.num_rows, sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        return sum(batch.num_rows for batch in _arrow_batches(file.path)), file.size
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            "data.file",
            f"{file.path} is not a {file.format} file: {str(error).splitlines()[0]}",
            hint="was it cut, or is it of another format?",
        ) from None


def _arrow_batches(path: str) -> Iterator[Any]:
    pyarrow = _need("pyarrow")
    with pyarrow.memory_map(path) as mapped:
        try:
            reader = pyarrow.ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            opened = pyarrow.ipc.open_file(mapped)
            yield from (opened.get_batch(i) for i in range(opened.num_record_batches))
            return
        yield from reader


def rows(file: InputFile, source: Source, utf8: str, start: int, stop: int | None) -> Iterator[list[Record]]:
    """Lists of the texts of rows start..stop-1."""
    pyarrow = _need("pyarrow")
    try:
        batches = (
            _parquet_batches(file.path, source.field, start)
            if file.format == "parquet"
            else _column(_arrow_batches(file.path), file.path, source.field)
        )
        for first, column in batches:
            low, high = max(start - first, 0), len(column) if stop is None else min(len(column), stop - first)
            if stop is not None and first >= stop:
                return
            if low < high:
                yield _texts(column.slice(low, high - low), source.field, utf8)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            "data.cannot-read", f"{file.path} cannot be read: {str(error).splitlines()[0]}", hint="was the file cut?"
        ) from None


def _parquet_batches(path: str, field: str, start: int) -> Iterator[tuple[int, Any]]:
    opened = _need("pyarrow.parquet").ParquetFile(path)
    _check_column(opened.schema_arrow, path, field)
    first = 0
    for group in range(opened.metadata.num_row_groups):
        count = opened.metadata.row_group(group).num_rows
        if first + count > start:
            here = first
            for batch in opened.iter_batches(batch_size=1024, row_groups=[group], columns=[field]):
                yield here, batch.column(0)
                here += batch.num_rows
        first += count


def _column(batches: Iterator[Any], path: str, field: str) -> Iterator[tuple[int, Any]]:
    first = 0
    for batch in batches:
        _check_column(batch.schema, path, field)
        yield first, batch.column(batch.schema.get_field_index(field))
        first += batch.num_rows


def _check_column(schema: Any, path: str, field: str) -> None:
    pyarrow = _need("pyarrow")
    if field not in schema.names:
        raise DataError(
            "data.column",
            f"{path} has no column {field!r}",
            hint=f"it has {', '.join(schema.names)}: set `field` in the source's table",
        )
    kind = schema.field(field).type
    if not any(
        check(kind)
        for check in (
            pyarrow.types.is_string,
            pyarrow.types.is_large_string,
            pyarrow.types.is_binary,
            pyarrow.types.is_large_binary,
        )
    ) and not str(kind).startswith("string_view"):
        raise DataError(
            "data.column-text",
            f"{path}: column {field!r} is {kind}, not text",
            hint="set `field` to the column that holds the text",
        )


def _texts(column: Any, field: str, utf8: str) -> list[Record]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast("binary").to_pylist()
    return [_row(value, field, utf8) for value in values]


def _row(value: Any, field: str, utf8: str) -> Record:
    if value is None:
        return Reject(f"{field!r} is null, not a text")
    if isinstance(value, bytes):
        return _decode(value, utf8) or ""
    return str(value)


def peek(item: Item, source: Source, limit: int = 16_384) -> list[str]:
    """A few texts from the beginning of an item, for the comparison of engines; whatever cannot be read is left for the run to report."""
    file = item.files[0]
    try:
        if file.format in ("parquet", "arrow"):
            first = next(rows(file, source, "replace", 0, 16), [])
        elif file.format == "text":
            first = [whole_text(file, "replace", 1 << 20)]
        else:
            lines = Lines(file, 1 << 20)
            parse = line_parser(source, file.format, "replace", 1 << 20)
            first = [parse(line) for line in next(lines.until(None), [])[:16]]
            lines.close()
    except (DataError, OSError):
        return []
    return [text[:limit] for text in first if isinstance(text, str)]
