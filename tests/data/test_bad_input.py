"""Bad input: an error code with file, line and numbers, exact counts, and nothing damaged."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.helpers import refused

from windlass.config.sources import DataFile, DataSource, load_data_file
from windlass.data.store import open_store
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError

zstandard = pytest.importorskip("zstandard")
Make = Callable[..., DataFile]


def rejects(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (store / "rejects.jsonl").read_text().splitlines()]


BAD = [
    (b"this is not JSON", "not JSON"),
    (b'{"text": "cut', "not JSON"),
    (b'{"title": "no text"}', "no field 'text'"),
    (b'{"text": null}', "'text' is null"),
    (b'{"text": 17}', "'text' is a number"),
    (b'{"text": ["a"]}', "'text' is a list"),
    (b'["text"]', "not a JSON object but a list"),
    (b'"text"', "not a JSON object but a text"),
    (b'{"text": "bad \xff\xfe bytes"}', "invalid UTF-8"),
    (b'{"text": "lone \\ud800 surrogate"}', "lone surrogate"),
]


@pytest.mark.parametrize("chunk", [4096, 65_536])
def test_a_bad_line_costs_that_line_and_is_named(data_file: Make, tmp_path: Path, chunk: int) -> None:
    good = [json.dumps({"text": f"document {i} " + "z" * 300}).encode() for i in range(len(BAD) * 3)]
    mixed: list[bytes] = []
    for number, (bad, _) in enumerate(BAD):
        mixed += [good[3 * number], b"", good[3 * number + 1], bad, good[3 * number + 2]]  # the bad one is line 5n + 4
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(mixed) + b"\n")
    file = data_file({"s": [tmp_path / "a.jsonl"]}, chunk=chunk)
    with refused(
        "data.documents-rejected", "10 rejected documents, 0 allowed", "a.jsonl, line 4: not JSON", "max_rejects"
    ):
        tokenize(file)
    assert DataError.exit_code == 5
    listed = rejects(tmp_path / "store")
    assert [(r["line"], r["file"]) for r in listed] == [(5 * n + 4, str(tmp_path / "a.jsonl")) for n in range(len(BAD))]
    for (raw, reason), reject in zip(BAD, listed, strict=True):
        assert reason in reject["reason"]
        assert reject["text"] == raw.decode("utf-8", errors="backslashreplace")
    assert not (tmp_path / "store" / "manifest.json").exists()
    result = tokenize(file.model_copy(update={"max_rejects": 10}))
    assert (result.chunks_done, result.documents) == (0, 30)  # nothing was done again
    account = json.loads((tmp_path / "store" / "files.jsonl").read_text())
    assert (account["lines"], account["documents"], account["out"], sum(account["rejected"].values())) == (
        50,
        40,
        {"train": 30},
        10,
    )
    assert rejects(tmp_path / "store") == listed


def test_a_file_name_that_is_not_utf8_is_refused_by_name(data_file: Make, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "source") + b"/b\xff.jsonl")).write_text('{"text": "x"}\n')
    with refused("data.source-unreadable", "b\\udcff.jsonl"):
        tokenize(data_file({"s": [tmp_path / "source"]}))
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_replace_takes_what_reject_refuses(data_file: Make, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "bad \xff byte"}\n{"text": "lone \\ud800 x"}\n')
    tokenize(data_file({"s": [tmp_path / "a.jsonl"]}, utf8="replace"))
    array = open_store(tmp_path / "store").tokens("s")
    assert [tokenizer.decode(array[a : b - 1].tolist()) for a, b in array.documents()] == [
        "bad \ufffd byte",
        "lone \ufffd x",
    ]


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("chunk", [16_384, 1 << 23])
def test_a_cut_file_is_an_error_and_can_be_allowed(data_file: Make, tmp_path: Path, kind: str, chunk: int) -> None:
    dice = os.urandom  # incompressible, so that a half file holds half of the documents
    raw = b"".join(json.dumps({"text": dice(200).hex()}).encode() + b"\n" for _ in range(2000))
    packed = gzip.compress(raw) if kind == "gz" else zstandard.ZstdCompressor(level=1).compress(raw)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(packed[: len(packed) // 2])
    (tmp_path / "good.jsonl").write_text('{"text": "fine"}\n')
    file = data_file({"s": [path], "good": [tmp_path / "good.jsonl"]}, chunk=chunk)
    with refused("data.files-damaged", "1 damaged file", f"a.jsonl.{kind}: "):
        tokenize(file)
    result = tokenize(file.model_copy(update={"allow_damaged": True}))
    taken = open_store(tmp_path / "store").sources["s"].documents or 0
    assert result.chunks_done == 0
    assert 500 < taken < 1200
    assert open_store(tmp_path / "store").manifest["sources"]["s"]["damaged_files"] == 1


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.jsonl.gz", b"\x1f\x8b\x08 broken"),
        ("a.jsonl.zst", b"not zstd at all"),
        ("a.jsonl.gz", b""),
        ("a.jsonl.zst", b""),
    ],
)
def test_broken_compression(data_file: Make, tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    with refused("data.files-damaged", "1 damaged file"):
        tokenize(data_file({"s": [tmp_path / name]}))


def test_a_text_that_repeats_itself_comes_in_small_blocks(tmp_path: Path) -> None:
    """Thousandfold compressed: a block of the file must not become a thousand blocks of memory."""
    from windlass.data.readers import read_blocks

    raw = b'{"text": "the same again"}\n' * 8_000_000
    (tmp_path / "a.zst").write_bytes(zstandard.compress(raw, 19))
    with (tmp_path / "a.zst").open("rb") as file:
        sizes = [len(block) for block in read_blocks(file, "zst")]
    assert sum(sizes) == len(raw)
    assert max(sizes) < 100 * 2**20


def test_an_empty_file_is_an_empty_file(data_file: Make, write_jsonl: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    other = write_jsonl(tmp_path / "b.jsonl", ["x"])
    tokenize(data_file({"e": [tmp_path / "empty.jsonl"], "b": [other]}))
    store = open_store(tmp_path / "store")
    assert (store.sources["e"].tokens, store.sources["e"].documents, store.sources["b"].documents) == (0, 0, 1)
    assert store.verify() == []


def test_parquet_with_another_schema_and_no_parquet_at_all(data_file: Make, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with refused("data.column-missing", "'text'", "content, n"):
        tokenize(data_file({"s": [tmp_path / "a.parquet"]}))
    with refused("data.column-not-text", "'n'", "int64"):
        tokenize(data_file({"s": DataSource(paths=[str(tmp_path / "a.parquet")], field="n")}))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    with refused("data.input-unreadable", "b.parquet"):
        tokenize(data_file({"s": [tmp_path / "b.parquet"]}))


def test_null_rows_are_rejected_with_their_row(data_file: Make, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "a.parquet")
    with refused("data.documents-rejected", "a.parquet, row 2: 'text' is null"):
        tokenize(data_file({"s": [tmp_path / "a.parquet"]}))


def test_missing_files_unknown_kinds_and_forbidden_folders_come_in_one_message(data_file: Make, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"x")
    with refused("data.source-unreadable", "nothing*.jsonl"):
        tokenize(data_file({"s": [tmp_path / "nothing*.jsonl"]}))
    with refused("data.source-unreadable", "data.bin"):
        tokenize(data_file({"s": [tmp_path / "data.bin"]}))
    (tmp_path / "void").mkdir()
    with refused("data.source-unreadable", "void"):
        tokenize(data_file({"s": [tmp_path / "void"]}))


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/usr/bin/setpriv").exists(), reason="root may read everything")
def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_file: Make) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "a.jsonl").write_text('{"text": "x"}\n')
    if os.geteuid() == 0:  # root is not stopped by permissions: let the system say what it says to others
        real = os.scandir

        def refuse(path: Any = ".") -> Any:
            if str(path).endswith("closed"):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, "scandir", refuse)
    else:
        (tmp_path / "closed").chmod(0)
    with refused("data.source-unreadable", "closed: Permission denied"):
        tokenize(data_file({"s": [tmp_path / "closed"]}))
    (tmp_path / "closed").chmod(0o755)


@pytest.mark.parametrize("path", [".", "./in", "in", "in/"])
def test_links_in_a_circle_multiply_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_file: Make, write_jsonl: Any, path: str
) -> None:
    folder = tmp_path / "corpus"
    write_jsonl(folder / "in" / "a" / "x.jsonl", ["one", "two"])
    write_jsonl(folder / "in" / "b" / "y.jsonl", ["three"])
    (folder / "in" / "a" / "up").symlink_to("..")
    (folder / "in" / "a" / "z.jsonl").symlink_to("x.jsonl")
    monkeypatch.chdir(folder)
    assert tokenize(data_file({"s": [path, "in/a"]})).documents == 3


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("in", "in/store"),
        ("in", "in"),
        ("in/../in", "link/store"),
        ("in/**/*.jsonl", "in/deep/store"),
        ("i*", "in/store"),
        ("in/a.jsonl", "in"),
    ],
)
def test_a_store_inside_its_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_file: Make, write_jsonl: Any, path: str, output: str
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["one", "two"])
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with refused("data.output-in-source", path, output):
        tokenize(data_file({"s": [path]}, output=output))
    assert sorted(tmp_path.rglob("*")) == before


def test_sources_in_a_folder_inside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_file: Make, write_jsonl: Any
) -> None:
    """As the demo keeps its raw texts."""
    write_jsonl(tmp_path / "store" / "raw" / "a.jsonl", ["one", "two"])
    monkeypatch.chdir(tmp_path)
    file = data_file({"s": ["store/raw/a.jsonl"]}, output="store")
    assert [tokenize(file).documents for _ in range(2)] == [2, 2]


def test_a_store_beside_the_files_of_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_file: Make, write_jsonl: Any
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["one", "two"])
    write_jsonl(tmp_path / "in" / "b" / "b.jsonl", ["three"])
    monkeypatch.chdir(tmp_path)
    beside = data_file({"s": ["in/*.jsonl"]}, output="in/store")
    assert [tokenize(beside).documents for _ in range(2)] == [2, 2]
    with refused("data.output-in-source", "in/a.jsonl"):
        tokenize(data_file({"s": ["in/*.jsonl"]}, output="in"))
    into = data_file({"s": ["in/*/*.jsonl"]}, output="in/store")
    with refused("data.output-in-source", "in/store/files.jsonl"):  # a file of the store that the pattern matches
        tokenize(into)


def test_a_pattern_that_leads_through_a_closed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_file: Make, write_jsonl: Any
) -> None:
    """glob passes over it without a word, which would lose its files."""
    for name in ("closed", "open"):
        write_jsonl(tmp_path / "in" / name / "deep" / "a.jsonl", ["x"])
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).rstrip("/").endswith("closed"))
    for pattern in ("*/deep/*.jsonl", "**/*.jsonl", "closed/*/a.jsonl"):
        with refused("data.source-unreadable", "in/closed", "Permission denied"):
            tokenize(data_file({"s": [tmp_path / "in" / pattern]}))
    tokenize(data_file({"s": [tmp_path / "in" / "open" / "**" / "*.jsonl"]}))


def test_a_file_behind_a_closed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_file: Make) -> None:
    def refuse(path: Path, real: Any = Path.is_dir) -> bool:
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return bool(real(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with refused("data.source-unreadable", "closed/a.jsonl: Permission denied"):
        tokenize(data_file({"s": [tmp_path / "closed" / "a.jsonl"]}))


def test_a_line_longer_than_the_limit_is_rejected_in_any_chunking(data_file: Make, tmp_path: Path) -> None:
    texts = ["a", "b" * 50_000, "c"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    for chunk in (4096, 1 << 20):
        file = data_file(
            {"s": [tmp_path / "a.jsonl"]},
            chunk=chunk,
            max_document=10_000,
            max_rejects=1,
            output=str(tmp_path / f"s{chunk}"),
        )
        tokenize(file)
        rejected = rejects(tmp_path / f"s{chunk}")
        assert [(r["line"], r["reason"]) for r in rejected] == [(2, "longer than max_document (10,000 bytes)")]


def test_a_wrong_field_name_stops_early(
    data_file: Make, write_jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.data.tokenize._EARLY_STOP_REJECTS", 50)
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 500] * 2000)
    with refused("data.most-documents-rejected", "`field`"):
        tokenize(data_file({"s": DataSource(paths=[str(path)], field="content")}, chunk=8192))


def test_a_selected_dataset_saved_to_disk_is_refused(data_file: Make, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data-00000-of-00001.arrow").write_bytes(b"")
    (tmp_path / "d" / "state.json").write_text('{"_indices_data_files": [{"filename": "indices.arrow"}]}')
    with refused("data.source-unreadable", "flatten_indices"):
        tokenize(data_file({"s": [tmp_path / "d"]}))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing(data_file: Make, tmp_path: Path, text: Any) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("no permission to mount here")
    try:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text(i, 300)}) + "\n" for i in range(900)))
        tokenize(data_file({"s": [path]}, output=str(tmp_path / "whole"), chunk=16_384))
        file = data_file({"s": [path]}, output=str(disk / "store"), chunk=16_384)
        with refused("data.disk-failed", "No space left on device"):
            tokenize(file)
        done = len(list((disk / "store" / "work" / "pieces").glob("*.train")))
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        result = tokenize(file)
        assert result.chunks_kept > 0
        assert result.chunks_kept >= done - 1
        for one in (tmp_path / "whole").glob("*.bin"):
            assert (disk / "store" / one.name).read_bytes() == one.read_bytes()
        assert open_store(disk / "store").verify() == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_data_file_itself(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(
        'output = "x"\ntokenizer = "t"\nvalidatoin = 0.1\nchunk = "1 GiB"\n[sources."a/b"]\npaths = ["p"]\nlicense = "MIT"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_data_file(tmp_path / "d.toml")
    assert "validatoin: unknown key; did you mean validation?" in caught.value.message
    assert "use 4 KiB to 64 MiB" in caught.value.message
    assert "license: unknown key" in caught.value.message


def test_lawful_refuses_before_any_work(data_file: Make, write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with refused("data.source-unlawful", "1 of 2 sources", "b: origin missing"):
        tokenize(
            data_file(
                {
                    "a": DataSource(paths=[str(path)], licence="MIT", origin="here"),
                    "b": DataSource(paths=[str(path)], licence="MIT"),
                },
                policy="lawful",
            )
        )
    assert not (tmp_path / "store").exists()


def test_an_output_that_cannot_be_made(data_file: Make, write_jsonl: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("data.output-not-writable", "Not a directory"):
        tokenize(data_file({"a": [write_jsonl(tmp_path / "a.jsonl", ["x"])]}, output=str(tmp_path / "file" / "store")))
