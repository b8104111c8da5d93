"""A demo corpus for a machine without a network: the code of Python's own library, and its docstrings as prose."""

import ast
import contextlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.config.sources import DataFile, DataSource
from windlass.errors import DataError
from windlass.files import write_atomic

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_MIN_CHARS = 200
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class CorpusSource:
    """One source of the demo corpus: enough to fill a `[sources.NAME]` table."""

    name: str
    file: Path
    documents: int
    bytes: int
    language: str
    licence: str
    origin: str


def gather(out_dir: Path | str, max_bytes: int = 4_000_000) -> dict[str, CorpusSource]:
    """Write code.jsonl and docs.jsonl, at most `max_bytes` of text together. The same Python gives the same files."""
    if max_bytes < 1:
        raise DataError(
            "data.corpus-empty",
            f"a corpus of {max_bytes} bytes is empty",
            hint="use 1 MB or more, which is enough to see the loss fall",
        )
    library = Path(sysconfig.get_paths()["stdlib"])
    if not library.is_dir():
        raise DataError(
            "data.python-library-missing",
            f"Python's library is not at {library}",
            hint="use a Python that is installed with its sources: the demo corpus is made from them",
        )
    origin = f"Python {sysconfig.get_python_version()} standard library (https://www.python.org)"
    paths: list[Path] = []
    for folder, folders, names in os.walk(library):
        folders[:] = set(folders) - _SKIPPED  # pruned here: site-packages may hold a hundred thousand files
        paths += [Path(folder) / name for name in names if name.endswith(".py")]
    sources: dict[str, str] = {}
    for path in sorted(paths):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if len(text := path.read_text(encoding="utf-8")) > _MIN_CHARS:
                sources[str(path.relative_to(library))] = text
    gathered: dict[str, CorpusSource] = {}
    left = max_bytes
    for name, texts, share, language, kind in (
        ("code", iter(sources.items()), 0.6, "python", "source files"),
        ("docs", _docstrings(sources), 1.0, "en", "docstrings"),
    ):
        limit, lines, size = int(left * share), [], 0
        for key, text in texts:
            if size + len(text.encode()) <= limit:
                size += len(text.encode())
                lines.append(json.dumps({"id": key, "text": text}, ensure_ascii=False))
            if limit - size < limit // 100:
                break
        file = Path(out_dir) / f"{name}.jsonl"
        write_atomic(file, "".join(f"{line}\n" for line in lines))
        gathered[name] = CorpusSource(name, file, len(lines), size, language, "PSF-2.0", f"{origin}, {kind}")
        left -= size
    return gathered


def _docstrings(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """One document per module: its docstrings, from the module's to the last method's."""
    for name, text in sources.items():
        try:
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _WITH_DOCSTRING)]
        except (SyntaxError, ValueError):
            continue
        module = name.removesuffix(".py").replace("/", ".")
        parts = [f"{getattr(node, 'name', module)}\n\n{doc}" for node in nodes if (doc := ast.get_docstring(node))]
        if sum(map(len, parts)) > _MIN_CHARS:
            yield name, "\n\n\n".join(parts) + "\n"


def data_file(
    gathered: Mapping[str, CorpusSource], *, tokenizer: Path | str, output: Path | str, validation: float = 0.02
) -> DataFile:
    sources = {
        name: DataSource(
            paths=[str(source.file)],
            language=source.language,
            licence=source.licence,
            origin=source.origin,
            consent="licence",
            kind="other",  # neither a published dataset nor a crawl: the library on this disk
        )
        for name, source in gathered.items()
    }
    return DataFile(
        output=str(output), tokenizer=str(tokenizer), validation=validation, policy="lawful", sources=sources
    )
