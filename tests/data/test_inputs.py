"""Chunks are handed out once, compressed files have one reader, and no worker idles at the end."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from windlass.config.sources import DataFile, DataSource
from windlass.data.inputs import (
    ChunkSchedule,
    FileList,
    InputFile,
    WorkItem,
    find_files,
    last_chunks,
    make_schedule,
    plan_items,
    unfinished_files,
)

MB = 2**20


def plain(name: str, chunks: int) -> WorkItem:
    return WorkItem(name, "s", (InputFile(f"{name}.jsonl", "jsonl", "", chunks * MB, 0),), chunks, step=MB)


def packed(name: str, chunks: int) -> WorkItem:
    return WorkItem(name, "s", (InputFile(f"{name}.zst", "jsonl", "zst", chunks * MB // 4, 0),), None, step=MB)


def play(schedule: ChunkSchedule, workers: int, lengths: dict[str, int]) -> list[tuple[float, str, int]]:
    """Workers that take one second a chunk, plus a twentieth for each chunk they must skip; (end, item, chunk) of all that was done."""
    clock, place, done = dict.fromkeys(range(workers), 0.0), {}, []
    idle: set[int] = set()
    while len(idle) < workers:
        worker = min((w for w in clock if w not in idle), key=lambda w: clock[w])
        assigned = schedule.next(worker)
        if assigned is None:
            idle.add(worker)
            continue
        item, chunk = assigned
        skip = (
            0
            if item.chunks is not None
            else chunk - (place.get(worker, (None, 0))[1] if place.get(worker, (None,))[0] == item.id else 0)
        )
        real = item.chunks is not None or chunk < lengths[item.id]
        clock[worker] += max(0, skip) / 20 + (1.0 if real else 0.0)
        place[worker] = (item.id, chunk + 1)
        done.append((clock[worker], item.id, chunk))
        schedule.finished(item, item.chunks is None and chunk >= lengths[item.id] - 1)
    return sorted(done)


def test_every_chunk_once() -> None:
    items = [plain("a", 7), packed("p", 5), plain("b", 1), packed("q", 3)]
    done = play(make_schedule(items, {}), 3, {"p": 5, "q": 3})
    real = [(i, c) for _, i, c in done if i in "ab" or c < {"p": 5, "q": 3}[i]]
    assert sorted(real) == sorted(
        [("a", n) for n in range(7)] + [("b", 0)] + [("p", n) for n in range(5)] + [("q", n) for n in range(3)]
    )


def test_one_file_a_hundred_times_larger_does_not_drag_on() -> None:
    # The last tenth of the work takes at most 15 % of the time, plain and compressed, with 8 workers.
    for big in (plain("big", 1000), packed("big", 1000)):
        items = [plain(f"s{n}", 10) for n in range(20)] + [big]
        ends = [end for end, _, _ in play(make_schedule(items, {}), 8, {"big": 1000})]
        assert (ends[-1] - ends[int(len(ends) * 0.9)]) / ends[-1] <= 0.15, big.files[0].path


def test_only_what_is_missing_is_handed_out() -> None:
    items = [plain("a", 3), packed("p", 4)]
    done = {("a", 1): True, ("p", 0): False, ("p", 2): False}
    assert [(i, c) for _, i, c in play(make_schedule(items, done), 1, {"p": 4}) if i == "a" or c < 4] == [
        ("p", 1),
        ("p", 3),
        ("a", 0),
        ("a", 2),
    ]
    complete = {("a", n): True for n in range(3)} | {("p", n): n == 3 for n in range(4)}
    assert play(make_schedule(items, complete), 2, {"p": 4}) == []
    assert unfinished_files(items, complete) == []
    assert unfinished_files(items, done) == ["a.jsonl", "p.zst"]


def test_a_reader_beyond_the_end_does_not_move_the_end() -> None:
    assert last_chunks({("p", 0): False, ("p", 1): True, ("p", 5): True}) == {"p": 1}


def test_array_tasks_divide_the_work_evenly_and_without_overlap() -> None:
    items = [plain(f"s{n}", 3) for n in range(10)] + [packed("big", 100), plain("c", 60)]
    handed_out: list[tuple[str, int]] = []
    loads = []
    for index in range(8):
        mine = [
            (i, c) for _, i, c in play(make_schedule(items, {}, (index, 8)), 1, {"big": 100}) if i != "big" or c < 100
        ]
        handed_out += mine
        loads.append(len(mine))
    assert len(handed_out) == len(set(handed_out)) == 190
    assert max(loads) <= 1.4 * 190 / 8


@pytest.mark.parametrize(
    ("size", "chunk", "step"),
    [
        (100 * MB, 9 * MB, 9 * MB),  # half of it would be too small
        (40 * MB, 32 * MB, 8 * MB),  # few chunks: smaller ones, down to 8 MB
        (300 * MB, 32 * MB, 8 * MB),
        (700 * MB, 32 * MB, 16 * MB),
        (5000 * MB, 32 * MB, 32 * MB),
        (40 * MB, 1 * MB, 1 * MB),  # whoever asks for smaller ones gets them
    ],
)
def test_a_big_file_has_many_chunks(tmp_path: Path, size: int, chunk: int, step: int) -> None:
    file = DataFile(output="o", tokenizer="t", chunk=chunk, sources={"s": DataSource(paths=["x"])})
    one = InputFile("x.jsonl", "jsonl", "", size, 0)
    (item,) = plan_items(file, {"s": [one]}, "settings")
    assert (item.step, item.chunks) == (step, -(-size // step))
    (packed_one,) = plan_items(file, {"s": [replace(one, packing="zst", size=size // 4)]}, "settings")
    assert (packed_one.step, packed_one.chunks) == (step, None)


def test_the_effort_of_planning_grows_with_the_files_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    weight = InputFile.weight.fget  # type: ignore[attr-defined]

    def counted(file: InputFile) -> int:
        nonlocal calls
        calls += 1
        return weight(file)

    monkeypatch.setattr(InputFile, "weight", property(counted))
    file = DataFile(output="o", tokenizer="t", sources={"s": DataSource(paths=["x"])})
    files = [InputFile(f"{number}.txt", "text", "", 100, number) for number in range(2000)]
    (item,) = plan_items(file, {"s": files}, "settings")
    assert calls <= 4 * len(files)
    # The id names the pieces of a run that was stopped: it stays what it was in earlier releases.
    described = [[f.path, f.format, f.packing, f.size, f.modified] for f in files]
    value = json.dumps(["settings", "s", ["text", "file", None, None, None], described, 0])
    assert item.id == hashlib.sha256(value.encode()).hexdigest()[:20]


def test_a_list_of_files_keeps_every_field_in_little_memory() -> None:
    described = [
        InputFile("a/x.txt", "text", "", 0, -1),
        InputFile("a/y.jsonl.gz", "jsonl", "gz", 2**40, 7 * 10**18 + 3),
        InputFile("/b/\u00fc/x.txt", "text", "", 5, 10**9 * 2**40 + 999_999_999),  # long after the year 2262
        InputFile("x.txt", "text", "", 1, 0),
        InputFile("a/z.txt", "text", "", 1, 0),
    ]
    files = FileList()
    for file in described:
        files.append(file)
    assert list(files) == described and len(files) == 5 and files[-1] == described[-1]
    assert (
        list(files[1:4]) == described[1:4] and files[1:4][2] == described[3] and list(files[1:4][1:]) == described[2:4]
    )
    before = tracemalloc_bytes(lambda: [replace(described[0], path=f"/data/part/{n:06}.txt") for n in range(20_000)])

    def compact() -> FileList:
        files = FileList()
        for n in range(20_000):
            files.append(replace(described[0], path=f"/data/part/{n:06}.txt", size=n))
        return files

    assert tracemalloc_bytes(compact) < min(70 * 20_000, before / 2)


def tracemalloc_bytes(make: Callable[[], object]) -> int:
    tracemalloc.start()
    value = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value is not None
    return size


def test_one_file_by_many_ways_is_read_once_under_its_first_name(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    for name in ("b/one.txt", "b/deep/two.txt", "b/deep/three.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "a").symlink_to("b/deep")
    (tmp_path / "b" / "deep" / "up").symlink_to("..")
    (tmp_path / "b" / "link.txt").symlink_to("one.txt")

    def names(*patterns: str) -> list[str]:
        source = DataSource(paths=[str(tmp_path / pattern) for pattern in patterns])
        return [str(Path(file.path).relative_to(tmp_path)) for file in find_files("s", source)]

    assert names("b") == ["b/link.txt", "b/deep/three.txt", "b/deep/two.txt"]
    assert names("b/*.txt", "b/*.txt") == ["b/link.txt"]
    assert names("a") == ["a/three.txt", "a/two.txt", "a/up/link.txt"]
    assert names("b/deep/two.txt", "a/*.txt") == ["b/deep/two.txt", "a/three.txt"]
