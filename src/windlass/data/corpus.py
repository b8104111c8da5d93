"""What can a fresh machine without a network train on? Python's own library: its sources as code, its docstrings as prose."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.config.sources import DataFile, Source
from windlass.errors import DataError
from windlass.files import write_atomic

_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@dataclass(frozen=True)
class Gathered:
    """One source of the demo corpus: enough to fill a `[sources.NAME]` table."""

    name: str
    file: Path
    documents: int
    bytes: int
    language: str
    licence: str
    origin: str


def gather(out_dir: Path | str, max_bytes: int = 4_000_000) -> dict[str, Gathered]:
    """Write code.jsonl and docs.jsonl, at most `max_bytes` of text together. The same Python gives the same files."""
    out = Path(out_dir)
    library = Path(sysconfig.get_paths()["stdlib"])
    if max_bytes < 1:
        raise DataError(
            "data.corpus-bytes-empty",
            f"a corpus of {max_bytes} bytes is empty",
            hint="1 MB is enough to see a loss fall",
        )
    version = ".".join(sysconfig.get_python_version().split(".")[:2])
    code = list(_limited(_sources(library), int(max_bytes * 0.6)))
    docs = list(_limited(_docstrings(library), max_bytes - sum(len(t.encode()) for _, t in code)))
    origin = f"Python {version} standard library (https://www.python.org)"
    return {
        name: _write(out / f"{name}.jsonl", name, texts, language, f"{origin}, {what}")
        for name, texts, language, what in (
            ("code", code, "python", "source files"),
            ("docs", docs, "en", "docstrings"),
        )
    }


def _files(library: Path) -> Iterator[Path]:
    if not library.is_dir():
        raise DataError(
            "data.python-s-library",
            f"Python's library is not at {library}",
            hint="the demo corpus needs a Python installed with its sources",
        )
    for path in sorted(library.rglob("*.py")):
        if not _SKIP & set(path.relative_to(library).parts):
            yield path


def _sources(library: Path) -> Iterator[tuple[str, str]]:
    for path in _files(library):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) > 200:
            yield str(path.relative_to(library)), text


def _docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """One document per module: its docstrings, from the module's to the last method's."""
    for name, text in _sources(library):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        parts = [
            f"{_title(node, name)}\n\n{doc}"
            for node in ast.walk(tree)
            if isinstance(node, _DOCUMENTED) and (doc := ast.get_docstring(node))
        ]
        if sum(map(len, parts)) > 200:
            yield name, "\n\n\n".join(parts) + "\n"


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _title(node: ast.AST, name: str) -> str:
    return str(getattr(node, "name", name.removesuffix(".py").replace("/", ".")))


def _limited(texts: Iterator[tuple[str, str]], limit: int) -> Iterator[tuple[str, str]]:
    room = limit
    for name, text in texts:
        size = len(text.encode())
        if size <= room:
            room -= size
            yield name, text
        if room < limit // 100:
            return


def _write(file: Path, name: str, texts: list[tuple[str, str]], language: str, origin: str) -> Gathered:
    lines = "".join(json.dumps({"id": key, "text": text}, ensure_ascii=False) + "\n" for key, text in texts)
    write_atomic(file, lines)
    return Gathered(name, file, len(texts), sum(len(text.encode()) for _, text in texts), language, "PSF-2.0", origin)


def data_file(
    gathered: Mapping[str, Gathered], *, tokenizer: Path | str, output: Path | str, validation: float = 0.02
) -> DataFile:
    """The data file that tokenizes a gathered corpus."""
    sources = {
        name: Source(
            paths=[str(one.file)],
            language=one.language,
            licence=one.licence,
            origin=one.origin,
            consent="licence",
            kind="other",  # neither a published dataset nor a crawl: the library that lies on this disk
        )
        for name, one in gathered.items()
    }
    return DataFile(
        output=str(output), tokenizer=str(tokenizer), validation=validation, policy="lawful", sources=sources
    )
