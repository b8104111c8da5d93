"""Tokenizing: formats, restarts, counts, splits, arrays and locks."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.conftest import make_text
from tests.data.helpers import refused

from windlass.config.sources import DataFile, DataSource
from windlass.data import chunks, joining
from windlass.data.store import Store, open_store
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import Tokenizer, train_bpe

zstandard = pytest.importorskip("zstandard")
Make = Callable[..., DataFile]


def digest(folder: Path) -> dict[str, str]:
    """Every visible file of a store but its history."""
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.iterdir())
        if not p.name.startswith(".") and p.name != "history.jsonl"
    }


def texts_of(store: Store, source: str, tokenizer: Tokenizer, split: str = "train") -> list[str]:
    array = store.tokens(source, split)
    return [tokenizer.decode(array[a : b - 1].tolist()) for a, b in array.documents()]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts).encode()


def write_all_formats(folder: Path, texts: list[str]) -> dict[str, Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    raw = lines(texts)
    (folder / "a.jsonl").write_bytes(raw)
    (folder / "a.jsonl.gz").write_bytes(
        gzip.compress(raw[: len(raw) // 2]) + gzip.compress(raw[len(raw) // 2 :])
    )  # two members
    half = zstandard.ZstdCompressor().compress
    (folder / "a.jsonl.zst").write_bytes(half(raw[:1000]) + half(raw[1000:]))  # two frames
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    pq.write_table(table, folder / "a.parquet", row_group_size=70)
    saved = folder / "saved" / "train"
    saved.mkdir(parents=True)
    with pa.ipc.new_stream(str(saved / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return {
        "jsonl": folder / "a.jsonl",
        "gz": folder / "a.jsonl.gz",
        "zst": folder / "a.jsonl.zst",
        "parquet": folder / "a.parquet",
        "arrow": folder / "saved",
    }


@pytest.mark.parametrize("chunk", [4096, 1 << 20])
def test_every_format_gives_the_same_documents_in_the_same_order(
    data_file: Make, tmp_path: Path, tokenizer: Tokenizer, text: Any, chunk: int
) -> None:
    texts = [text(i) for i in range(250)] + ["", " \n ", "x" * 9000, "one\r\ntwo\r"]
    paths = write_all_formats(tmp_path / "in", texts)
    tokenize(data_file({name: [path] for name, path in paths.items()}, chunk=chunk))
    store = open_store(tmp_path / "store")
    for name in paths:
        assert texts_of(store, name, tokenizer) == [t for t in texts if t], name
        assert store.manifest["sources"][name]["filtered"] == {"empty": 1}
    assert store.verify() == []


def test_plain_text_by_file_and_by_line(data_file: Make, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "one.txt").write_text("first line\n\n  second line \n")
    (tmp_path / "t" / "two.txt.gz").write_bytes(gzip.compress(b"packed\ntext"))
    whole, by_line = (
        DataSource(paths=[str(tmp_path / "t")]),
        DataSource(paths=[str(tmp_path / "t" / "*.txt")], document="line"),
    )
    tokenize(data_file({"whole": whole, "line": by_line}))
    store = open_store(tmp_path / "store")
    assert texts_of(store, "whole", tokenizer) == ["first line\n\n  second line \n", "packed\ntext"]
    assert texts_of(store, "line", tokenizer) == ["first line", "  second line "]


def test_inner_fields(data_file: Make, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"doc": {"body": "hello"}}\n')
    tokenize(data_file({"s": DataSource(paths=[str(tmp_path / "a.jsonl")], field="doc.body")}))
    assert texts_of(open_store(tmp_path / "store"), "s", tokenizer) == ["hello"]


@pytest.mark.parametrize("chunk", [4096, 5000, 65_536])
@pytest.mark.parametrize("kind", ["plain", "zst"])
def test_chunk_borders_split_no_line(
    data_file: Make, tmp_path: Path, tokenizer: Tokenizer, text: Any, chunk: int, kind: str
) -> None:
    dice = random.Random(chunk)
    texts = [f"{i} " + "y" * dice.choice([0, 1, 100, 4000, 4085, 9000, 20_000]) for i in range(60)]
    raw = lines(texts)
    path = tmp_path / ("a.jsonl" if kind == "plain" else "a.jsonl.zst")
    path.write_bytes(
        raw
        if kind == "plain"
        else zstandard.ZstdCompressor(level=1).compress(raw + b'{"text": "last, without a line end"}')
    )
    texts += ["last, without a line end"] if kind == "zst" else []
    # A repetitive file packs so well that it would be taken for a small one: say that text grows more.
    module_weight = 200 if kind == "zst" else 4
    from windlass.data import inputs

    before, inputs._EXPANSION = inputs._EXPANSION, module_weight
    try:
        tokenize(data_file({"s": [path]}, chunk=chunk))
    finally:
        inputs._EXPANSION = before
    assert texts_of(open_store(tmp_path / "store"), "s", tokenizer) == texts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One big plain file, one big compressed one, and many small ones."""
    folder = tmp_path_factory.mktemp("in")
    (folder / "big.jsonl").write_bytes(lines([make_text(i, 200) for i in range(250)]))
    packed = zstandard.ZstdCompressor().compress(lines([make_text(10_000 + i, 200) for i in range(250)]))
    (folder / "packed.jsonl.zst").write_bytes(packed)
    for number in range(8):
        texts = [make_text(20_000 + 10 * number + i, 60) for i in range(10)]
        (folder / f"small-{number}.jsonl").write_bytes(lines(texts))
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(
    files: list[Path], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, str]]:
    """The digest of a store that was result in one go by one worker; each is result once."""
    result: dict[str, dict[str, str]] = {}

    def digest_of(**keys: Any) -> dict[str, str]:
        if repr(keys) not in result:
            output = tmp_path_factory.mktemp("store")
            source = DataSource(paths=[str(file) for file in files])
            tokenize(
                DataFile(
                    output=str(output),
                    tokenizer=str(tokenizer.path),
                    sources={"s": source},
                    workers=1,
                    engine="tokenizers",
                    **keys,
                )
            )
            result[repr(keys)] = digest(output)
        return result[repr(keys)]

    return digest_of


RUN = """
import sys
from windlass.config.sources import load_data_file
from windlass.data import chunks
from windlass.data.tokenize import tokenize
slow = float(sys.argv[2])
if slow:
    import time
    do = chunks.ChunkWorker.process
    def late(self, item, chunk):
        line = do(self, item, chunk)
        time.sleep(slow)
        return line
    chunks.ChunkWorker.process = late
tokenize(load_data_file(sys.argv[1]))
"""


@pytest.mark.multi
def test_killed_at_any_moment_any_number_of_times_it_ends_in_the_same_bytes(
    tmp_path: Path, tokenizer: Tokenizer, files: list[Path], undisturbed: Any
) -> None:
    """Two engines at that: the one of the killed runs does its first chunk before it forks, and its ids are the same."""
    (tmp_path / "killed.toml").write_text(
        f'output = "{tmp_path / "killed"}"\nengine = "gigatoken"\ntokenizer = "{tokenizer.path}"\nworkers = 2\nchunk = "8KiB"\n'
        f'validation = 0.1\ndedup = "exact"\nshard_tokens = 20_000\n[sources.s]\npaths = {json.dumps([str(f) for f in files])}\n'
    )
    dice, kills = random.Random(7), 0
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path / "killed.toml"), "0.03"], stderr=subprocess.PIPE, text=True
        )
        began, journals = time.monotonic(), tmp_path / "killed" / "work" / "journal"
        wanted = _journal_lines(journals) + dice.randint(1, 8)
        while process.poll() is None and (_journal_lines(journals) < wanted) and time.monotonic() - began < 60:
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL if attempt % 3 else signal.SIGTERM)
            kills += 1
        process.wait(30)
        if process.returncode == 0:
            break
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "killed.toml"), "0"], check=True)
    assert kills >= 3
    keys = {"chunk": 8192, "validation": 0.1, "dedup": "exact", "shard_tokens": 20_000}
    assert digest(tmp_path / "killed") == undisturbed(**keys)
    assert not (tmp_path / "killed" / "work").exists()


def _journal_lines(folder: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in folder.glob("*.jsonl")) if folder.is_dir() else 0


@pytest.mark.parametrize(
    "step", ["find_duplicates", "_write_shard:1", "_write_shard:3", "_write_manifest", "_write_lines", "append_line"]
)
def test_an_end_in_the_middle_of_joining_is_no_harm(
    data_file: Make, tmp_path: Path, files: list[Path], undisturbed: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"chunk": 8192, "validation": 0.1, "dedup": "exact", "shard_tokens": 20_000}
    name, _, after = step.partition(":")
    calls, real = [0], getattr(joining, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        result = real(*args, **kwargs) if name in ("_write_shard", "append_line") else None
        if calls[0] >= int(after or 1):
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(joining, name, fail)
        with pytest.raises(KeyboardInterrupt):
            tokenize(data_file({"s": files}, output=str(tmp_path / "cut"), **keys))
    tokenize(data_file({"s": files}, output=str(tmp_path / "cut"), **keys))
    assert digest(tmp_path / "cut") == undisturbed(**keys)


@pytest.mark.parametrize("change", ["a file", "the tokenizer", "the order"])
def test_what_was_joined_before_a_change_is_made_anew(
    data_file: Make, tmp_path: Path, write_jsonl: Any, text: Any, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards have the names of their places: one that a killed run left must not stand for other pieces."""
    first = write_jsonl(tmp_path / "in" / "b.jsonl", [text(i) for i in range(300)])
    second = write_jsonl(tmp_path / "second.jsonl", [text(i) for i in range(200, 260)])
    keys: dict[str, Any] = {"chunk": 8192, "dedup": "exact", "shard_tokens": 4000, "workers": 1}
    sources = {"s": [first.parent], "t": [second]}

    def killed(path: Path, line: Any, real: Any = joining.append_line) -> None:
        real(path, line)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(joining, "append_line", killed)
        with pytest.raises(KeyboardInterrupt):
            tokenize(data_file(sources, **keys))
    if change == "a file":
        write_jsonl(tmp_path / "in" / "a.jsonl", [text(i) for i in range(250, 300)])
    elif change == "the tokenizer":
        keys["tokenizer"] = str(train_bpe([text(i) for i in range(50)], 400, tmp_path / "other").path)
    else:
        sources = dict(reversed(sources.items()))
    tokenize(data_file(sources, **keys))
    tokenize(data_file(sources, output=str(tmp_path / "whole"), **keys))
    assert digest(tmp_path / "store") == digest(tmp_path / "whole")


@pytest.mark.multi
def test_shards_are_joined_by_several_processes_into_the_same_bytes(
    data_file: Make, tmp_path: Path, files: list[Path], undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"chunk": 8192, "shard_tokens": 4000, "validation": 0.2}
    expected, seen = undisturbed(**keys), tmp_path / "seen"
    seen.mkdir()
    original = joining._write_shard

    def noted(job: Any, group: Any, path: Path) -> Any:
        (seen / f"{os.getpid()}").touch()
        return original(job, group, path)

    monkeypatch.setattr(joining, "_write_shard", noted)
    tokenize(data_file({"s": files}, output=str(tmp_path / "many"), **{**keys, "workers": 3}))
    assert digest(tmp_path / "many") == expected
    assert len(list(seen.iterdir())) == 3 and not (seen / str(os.getpid())).exists()


@pytest.mark.multi
@pytest.mark.parametrize("trouble", ["disk", "death"])
def test_trouble_while_joining_is_said_and_the_next_run_goes_on(
    data_file: Make, tmp_path: Path, files: list[Path], undisturbed: Any, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    keys: dict[str, Any] = {"chunk": 8192, "shard_tokens": 4000, "workers": 2}
    original = joining._append_piece

    def fail(file: Any, part: Any, dtype: Any) -> Any:
        if "00002" in file.name:
            if trouble == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device", file.name)
        return original(file, part, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(joining, "_append_piece", fail)
        with refused({"disk": "data.disk-failed", "death": "data.worker-died"}[trouble]):
            tokenize(data_file({"s": files}, output=str(tmp_path / "cut"), **keys))
    if trouble == "death":
        assert list((tmp_path / "cut").glob(".*.tmp")), "a killed process leaves what it wrote"
    tokenize(data_file({"s": files}, output=str(tmp_path / "cut"), **keys))
    assert digest(tmp_path / "cut") == undisturbed(chunk=8192, shard_tokens=4000)
    assert not list((tmp_path / "cut").glob(".*.tmp")), "nothing torn stays behind"


def test_trouble_in_the_chunk_before_the_fork(
    data_file: Make, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done in this process, and says what a worker would say; nothing half-done stays, and the next run goes on."""
    pids: list[int] = []
    file = data_file({"s": files}, chunk=8192, workers=2, engine="gigatoken")

    def full(*args: Any) -> None:
        pids.append(os.getpid())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "write_fully", full)
        with refused("data.disk-failed", "No space left on device"):
            tokenize(file)
    assert pids == [os.getpid()]
    assert list((tmp_path / "store" / "work" / "pieces").iterdir()) == []
    done = tokenize(file)
    assert done.complete and done.engine.startswith("gigatoken")


@pytest.mark.multi
@pytest.mark.parametrize("deep", [False, True], ids=["a new worker", "the engine anew"])
@pytest.mark.parametrize("engine", ["gigatoken", "fastokens"])
def test_a_worker_with_too_much_memory_is_relieved_and_the_bytes_stay(
    data_file: Make, tmp_path: Path, text: Any, monkeypatch: pytest.MonkeyPatch, engine: str, deep: bool
) -> None:
    """An engine remembers every word; in a long compressed file it is loaded anew, else another worker goes on."""
    from windlass.data import engines
    from windlass.data import tokenize as module
    from windlass.processes import ForkedWorkers

    pytest.importorskip(engine)
    raw = lines([text(i) for i in range(600)])
    (tmp_path / "long.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(raw))
    sources, keys = {"s": [tmp_path / "long.jsonl.zst"]}, {"chunk": 16_384, "workers": 2, "engine": engine}
    tokenize(data_file(sources, output=str(tmp_path / "plain"), **keys))
    replaced, reloaded = [], tmp_path / "reloaded"
    replace, reload = ForkedWorkers.replace, engines.Engine.reload

    def counted_replace(workers: Any, number: int) -> None:
        replaced.append(number)
        replace(workers, number)

    def noted_reload(self: engines.Engine) -> None:
        reloaded.touch()  # in a worker: this process sees only files
        reload(self)

    monkeypatch.setattr(ForkedWorkers, "replace", counted_replace)
    monkeypatch.setattr(engines.Engine, "reload", noted_reload)
    monkeypatch.setattr(module, "resident_bytes", lambda: 1 << 40)
    monkeypatch.setattr(module, "_MIN_GROWTH_BYTES", -(1 << 50))
    monkeypatch.setattr(module, "_REREAD_BYTES", 1 if deep else 1 << 50)
    tokenize(data_file(sources, output=str(tmp_path / "stout"), **keys))
    assert digest(tmp_path / "stout") == digest(tmp_path / "plain")
    assert (reloaded.is_file(), len(replaced) > 3) == (deep, not deep)


def test_the_job_itself_loads_neither_the_reference_nor_the_models_of_machines(
    data_file: Make, tmp_path: Path, write_jsonl: Any, text: Any
) -> None:
    """The reference is only needed for the check, in a process of its own; every worker inherits what is loaded before the fork."""
    pytest.importorskip("gigatoken")
    file = data_file({"s": [write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(9)])]}, engine="gigatoken")
    (tmp_path / "file.json").write_text(file.model_dump_json())
    code = (
        "import sys; from pathlib import Path; from windlass.config.sources import DataFile; from windlass.data.tokenize import tokenize; "
        "done = tokenize(DataFile.model_validate_json(Path(sys.argv[1]).read_text())); assert done.engine.startswith('gigatoken'), done; "
        "print(sorted({'tokenizers', 'windlass.clusters.model', 'torch', 'awkward', 'rich', 'typer'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file.json")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_a_file_that_only_the_reference_finds_wrong(
    data_file: Make, tmp_path: Path, write_jsonl: Any, text: Any, tokenizer: Tokenizer
) -> None:
    pytest.importorskip("gigatoken")
    value = json.loads(tokenizer.path.read_text())
    value["pre_tokenizer"] = {"type": "Nonsense"}
    (tmp_path / "odd.json").write_text(json.dumps(value))
    source = {"s": [write_jsonl(tmp_path / "a.jsonl", [text(1)])]}
    for engine in ("gigatoken", "auto"):
        with refused("data.engine-unusable", "odd.json"):
            tokenize(data_file(source, tokenizer=str(tmp_path / "odd.json"), engine=engine))
    assert not (tmp_path / "store" / "manifest.json").exists()


@pytest.mark.multi
def test_workers_and_arrays_end_in_the_same_bytes(
    data_file: Make, tmp_path: Path, files: list[Path], undisturbed: Any
) -> None:
    tokenize(data_file({"s": files}, output=str(tmp_path / "three"), chunk=8192, workers=3, engine="gigatoken"))
    array = data_file({"s": files}, output=str(tmp_path / "array"), chunk=8192)
    parts = [tokenize(array, task=(index, 4)) for index in (2, 0, 3, 1)]
    assert all(not part.complete and part.chunks_done > 0 for part in parts)
    assert max(p.tokens for p in parts) < 2.2 * min(p.tokens for p in parts)  # balanced by bytes
    assert tokenize(array).chunks_done == 0
    lost = data_file({"s": files}, output=str(tmp_path / "lost"), chunk=8192)
    for index in (0, 2):  # task 1 is lost: the joining run does its share
        tokenize(lost, task=(index, 3))
    assert tokenize(lost).chunks_done > 0
    expected = undisturbed(chunk=8192)
    assert digest(tmp_path / "three") == digest(tmp_path / "array") == digest(tmp_path / "lost") == expected
    assert tokenize(array).chunks_done == 0  # once more: nothing to do


def test_a_changed_file_is_done_again_and_the_others_are_not(
    data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer, text: Any
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [text(i, 300) for i in range(100)])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": "cut')
    file = data_file({"good": [good], "bad": [bad]}, chunk=8192)
    with refused("data.documents-rejected", "1 rejected document, 0 allowed"):
        tokenize(file)
    bad.write_text('{"text": "fine"}\n{"text": "cut no more"}\n')
    result = tokenize(file)
    assert result.chunks_done == 1
    assert result.chunks_kept > 3
    assert texts_of(open_store(tmp_path / "store"), "bad", tokenizer) == ["fine", "cut no more"]


def test_special_looking_text_stays_text_unless_asked(
    data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["before <|end_of_text|> after"])
    tokenize(data_file({"s": [path]}))
    assert open_store(tmp_path / "store").tokens("s")[:].tolist().count(tokenizer.eos) == 1
    tokenize(data_file({"s": [path]}, output=str(tmp_path / "parsed"), special_tokens="parse"))
    assert open_store(tmp_path / "parsed").tokens("s")[:].tolist().count(tokenizer.eos) == 2


def test_validation_follows_the_text_not_the_place(
    data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer, text: Any
) -> None:
    texts = [text(i) for i in range(400)]
    one = write_jsonl(tmp_path / "a.jsonl", texts)
    other = write_jsonl(tmp_path / "b.jsonl", texts[::-1])
    tokenize(data_file({"s": [one]}, validation=0.1))
    tokenize(data_file({"s": [other]}, validation=0.1, output=str(tmp_path / "b"), chunk=4096))
    a, b = open_store(tmp_path / "store"), open_store(tmp_path / "b")
    held = texts_of(a, "s", tokenizer, "validation")
    assert sorted(held) == sorted(texts_of(b, "s", tokenizer, "validation"))
    assert 20 <= len(held) <= 62  # 40 expected; five standard deviations of six
    assert sorted(held + texts_of(a, "s", tokenizer)) == sorted(texts)


def test_exact_duplicates_go_and_are_counted_per_file(
    data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer, text: Any
) -> None:
    texts = [text(i, 400) for i in range(60)]
    first = write_jsonl(tmp_path / "1.jsonl", texts + texts[:10])
    second = write_jsonl(tmp_path / "2.jsonl", texts[5:8] + ["new", "new"])
    tokenize(data_file({"a": [first], "b": [second]}, dedup="exact", chunk=8192, shard_tokens=5000))
    store = open_store(tmp_path / "store")
    assert texts_of(store, "a", tokenizer) == texts
    assert texts_of(store, "b", tokenizer) == ["new"]
    accounts = [json.loads(line) for line in (tmp_path / "store" / "files.jsonl").read_text().splitlines()]
    assert [(a["documents"], a["out"], a["filtered"]) for a in accounts] == [
        (70, {"train": 60}, {"duplicate": 10}),
        (5, {"train": 1}, {"duplicate": 4}),
    ]
    assert store.sources["a"].bytes == sum(len(t.encode()) for t in texts)
    assert store.verify() == []


def test_where_only_duplicates_were_there_is_no_shard(
    data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer, text: Any
) -> None:
    """Nobody can map a file of no bytes, Megatron neither."""
    texts = [text(i, 400) for i in range(60)]
    first = write_jsonl(tmp_path / "1.jsonl", texts)
    second = write_jsonl(tmp_path / "2.jsonl", [*texts, "new"])
    sources = {"a": [first], "b": [second], "c": [first]}
    tokenize(data_file(sources, dedup="exact", chunk=8192, shard_tokens=5000))
    store = open_store(tmp_path / "store")
    assert [path.stat().st_size for path in (tmp_path / "store").glob("[bc]-*.bin")] == [2 * store.sources["b"].tokens]
    assert texts_of(store, "b", tokenizer) == ["new"]
    assert (store.sources["c"].documents, store.shards["c"]) == (0, {})
    assert store.verify() == []


def test_hashes_in_partitions_find_the_same_duplicates(
    data_file: Make, write_jsonl: Any, tmp_path: Path, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "1.jsonl", [text(i % 50) for i in range(200)])
    tokenize(data_file({"a": [path]}, dedup="exact", chunk=4096, output=str(tmp_path / "one")))
    monkeypatch.setattr("windlass.data.joining._MAX_HASHES", 30)
    tokenize(data_file({"a": [path]}, dedup="exact", chunk=4096, output=str(tmp_path / "many")))
    assert open_store(tmp_path / "one").sources["a"].documents == 50
    assert digest(tmp_path / "one") == digest(tmp_path / "many")


def test_length_filters_per_source(data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "abcd", "abcdefgh"])
    tight = DataSource(paths=[str(path)], min_chars=3, max_chars=5)
    tokenize(data_file({"tight": tight, "loose": [path]}))
    store = open_store(tmp_path / "store")
    assert texts_of(store, "tight", tokenizer) == ["abcd"]
    assert store.manifest["sources"]["tight"]["filtered"] == {"too long": 1, "too short": 1}
    assert len(texts_of(store, "loose", tokenizer)) == 3


def test_without_eos(data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["water", "wind"])
    tokenize(data_file({"s": [path]}, add_eos=False))
    assert open_store(tmp_path / "store").tokens("s")[:].tolist() == tokenizer.encode("water") + tokenizer.encode(
        "wind"
    )


def test_shards_are_cut_at_their_size(
    data_file: Make, write_jsonl: Any, tmp_path: Path, text: Any, tokenizer: Tokenizer
) -> None:
    texts = [text(i, 300) for i in range(100)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    tokenize(data_file({"s": [path]}, chunk=4096, shard_tokens=4000))
    store = open_store(tmp_path / "store")
    sizes = [entry["tokens"] for entry in store.manifest["sources"]["s"]["shards"]["train"]]
    assert len(sizes) > 3
    assert max(sizes) <= 4000
    assert texts_of(store, "s", tokenizer) == texts


@pytest.mark.parametrize(("marks", "document", "shard"), [(False, 12, 50), (True, 20, 42)])
@pytest.mark.parametrize("shard_tokens", [500, 3000, 10**9])
@pytest.mark.parametrize("max_words", [1, 60])
def test_what_a_token_and_a_document_cost_on_disk(
    data_file: Make, write_jsonl: Any, tmp_path: Path, text: Any, shard_tokens: int, max_words: int, marks: bool, document: int, shard: int
) -> None:  # fmt: skip
    """Two bytes a token below 65,536 ids, 12 a document, 50 a shard: what readers of Megatron's format need, and nothing else."""
    path = write_jsonl(tmp_path / "a.jsonl", [text(i, max_words) for i in range(200)])
    result = tokenize(data_file({"s": [path]}, chunk=4096, shard_tokens=shard_tokens, document_marks=marks))
    files = [p for p in (tmp_path / "store").iterdir() if p.suffix in (".bin", ".idx")]
    shards = len(files) // 2
    assert (shards == 1) == (shard_tokens > result.tokens)
    assert sum(p.stat().st_size for p in files) == 2 * result.tokens + document * result.documents + shard * shards


def test_sources_can_be_added_to_a_finished_store(
    data_file: Make, write_jsonl: Any, tmp_path: Path, tokenizer: Tokenizer, text: Any
) -> None:
    a, b = write_jsonl(tmp_path / "a.jsonl", [text(1)]), write_jsonl(tmp_path / "b.jsonl", [text(2)])
    tokenize(data_file({"a": [a]}))
    before = digest(tmp_path / "store")
    assert tokenize(data_file({"a": [a], "b": [b]})).chunks_done == 1
    store = open_store(tmp_path / "store")
    assert texts_of(store, "a", tokenizer) + texts_of(store, "b", tokenizer) == [text(1), text(2)]
    assert digest(tmp_path / "store")["a-train-00000.bin"] == before["a-train-00000.bin"]
    assert store.verify() == []
    assert len((tmp_path / "store" / "files.jsonl").read_text().splitlines()) == 2


def test_an_addition_that_fails_leaves_the_store_as_it_was(
    data_file: Make, write_jsonl: Any, tmp_path: Path, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = write_jsonl(tmp_path / "a.jsonl", [text(1)]), write_jsonl(tmp_path / "b.jsonl", [text(2)])
    for path in (a, b):
        path.write_text(path.read_text() + "not JSON\n")
    tokenize(data_file({"a": [a]}, max_rejects=1))
    before = digest(tmp_path / "store")
    with refused("data.documents-rejected", "1 rejected document, 0 allowed"):
        tokenize(data_file({"a": [a], "b": [b]}))
    assert open_store(tmp_path / "store").verify() == []

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(joining, "_write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            tokenize(data_file({"a": [a], "b": [b]}, max_rejects=1))
    tokenize(data_file({"a": [a]}, max_rejects=1))  # not wanted any more
    assert digest(tmp_path / "store") == before


def test_another_tokenizer_does_not_mix_into_a_store(
    data_file: Make, write_jsonl: Any, tmp_path: Path, text: Any
) -> None:
    a, b = write_jsonl(tmp_path / "a.jsonl", [text(1)]), write_jsonl(tmp_path / "b.jsonl", [text(2)])
    tokenize(data_file({"a": [a]}))
    before = digest(tmp_path / "store")
    other = train_bpe([text(i) for i in range(50)], 400, tmp_path / "other")
    with refused("data.store-settings-differ", "vocab_size: 600 there, 400 here"):
        tokenize(data_file({"a": [a], "b": [b]}, tokenizer=str(other.path)))
    a.write_text(a.read_text() + '{"text": "more"}\n')
    with refused("data.source-files-changed", "files of a "):
        tokenize(data_file({"a": [a], "b": [b]}))
    assert digest(tmp_path / "store") == before


def test_two_jobs_on_one_output(data_file: Make, write_jsonl: Any, tmp_path: Path, text: Any) -> None:
    from windlass.runs.lock import locked

    file = data_file({"a": [write_jsonl(tmp_path / "a.jsonl", [text(1)])]})
    (tmp_path / "store" / "work").mkdir(parents=True)
    with (
        locked(tmp_path / "store" / ".tokenize.lock", "4711"),
        refused("data.store-locked", "job 4711"),
    ):
        tokenize(file)
    with locked(tmp_path / "store" / ".tokenize.lock"), refused("data.store-locked"):
        tokenize(file, task=(0, 2))
    with (
        locked(tmp_path / "store" / "work" / "task-00001.lock"),
        refused("data.store-locked"),
    ):
        tokenize(file)
    assert tokenize(file).complete


@pytest.mark.multi
def test_a_killed_worker_is_reported_and_the_next_run_goes_on(
    data_file: Make, tmp_path: Path, files: list[Path], undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = chunks.ChunkWorker.process

    def die(self: Any, item: Any, chunk: int) -> Any:
        if chunk == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, item, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(chunks.ChunkWorker, "process", die)
        with refused("data.worker-died", "SIGKILL"):
            tokenize(data_file({"s": files}, chunk=8192))
    assert tokenize(data_file({"s": files}, chunk=8192)).chunks_kept > 0
    assert digest(tmp_path / "store") == undisturbed(chunk=8192)


def test_progress_counts_everything(data_file: Make, write_jsonl: Any, tmp_path: Path, text: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(300)])
    seen: list[tuple[int, int, int]] = []
    result = tokenize(
        data_file({"s": [path]}, chunk=8192), on_progress=lambda p: seen.append((p.done_bytes, p.documents, p.tokens))
    )
    assert seen[-1][1] == result.documents == 300
    assert seen[-1][0] <= path.stat().st_size
    assert seen[-1][0] > 0.9 * path.stat().st_size
