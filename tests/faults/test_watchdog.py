"""Naming the rank that holds the others up."""

from __future__ import annotations

import threading
import time

import pytest

from windlass.errors import EXIT_HANG
from windlass.files import write_json
from windlass.train.watchdog import Heartbeat, count_collectives, find_hang, read_heartbeats


def beat(rank: int, beats: int, writes: int = 5, phase: str = "reduce", **more) -> dict:
    return {
        "rank": rank,
        "host": f"node{rank // 4}",
        "pid": 100 + rank,
        "step": 7,
        "phase": phase,
        "beats": beats,
        "writes": writes,
        **more,
    }


def two_looks(*records: dict, frozen: tuple[int, ...] = ()) -> tuple[dict, dict]:
    second = {r["rank"]: r for r in records}
    return {rank: {**r, "writes": r["writes"] - (rank not in frozen)} for rank, r in second.items()}, second


def test_the_rank_that_did_not_come_to_the_collective() -> None:
    cause = find_hang(*two_looks(beat(0, 22), beat(1, 22), beat(2, 21, phase="data"), beat(3, 22)), 4)
    assert cause.rank == 2
    assert "rank 2 on node0 (pid 102, step 7, data)" in cause.text and "(step 7, reduce)" in cause.text


def test_a_process_that_no_longer_writes_is_frozen_whatever_it_said_last() -> None:
    cause = find_hang(*two_looks(beat(0, 21, phase="data"), beat(1, 22), frozen=(1,)), 2)
    assert cause.rank == 1 and "frozen" in cause.text


def test_a_rank_that_reported_and_left_is_not_taken_for_frozen() -> None:
    cause = find_hang(*two_looks(beat(0, 22, stuck=True), beat(1, 21, phase="data"), frozen=(0,)), 2)
    assert cause.rank == 1 and "frozen" not in cause.text


def test_a_rank_that_never_started() -> None:
    assert find_hang(*two_looks(beat(0, 1), beat(2, 1)), 3).rank == 1


def test_all_in_the_same_place_names_nobody() -> None:
    cause = find_hang(*two_looks(beat(0, 22), beat(1, 22)), 2)
    assert cause.rank is None and "(step 7, reduce)" in cause.text


def test_flight_recorders_decide_when_hosts_ran_ahead() -> None:
    flights = [{"0/default": {"entered": 50 - (rank == 3), "completed": 49}} for rank in range(4)]
    cause = find_hang(*two_looks(*(beat(r, 22, flight=flights[r]) for r in range(4))), 4)
    assert cause.rank == 3 and all(number in cause.text for number in ("49", "50", "0/default"))


def test_a_flight_recorders_dump_is_summed_up() -> None:
    trace = {"entries": [
        {"process_group": ["0", "default"], "collective_seq_id": 4, "state": "completed"},
        {"process_group": ["0", "default"], "collective_seq_id": 5, "state": "started"},
        {"process_group": ["1", "dp"], "collective_seq_id": 2, "state": "completed"},
    ]}  # fmt: skip
    assert count_collectives(trace) == {
        "0/default": {"entered": 5, "completed": 4},
        "1/dp": {"entered": 2, "completed": 2},
    }


def test_the_rank_outside_the_collective_when_all_came_equally_far() -> None:
    waiting = {"stack": ["  File /x/torch/distributed/c10d.py, line 1"]}
    elsewhere = {"stack": ["  File /x/data/loader.py, line 7, in read"]}
    cause = find_hang(*two_looks(beat(0, 22, **waiting), beat(1, 22, **elsewhere)), 2)
    assert cause.rank == 1 and "loader.py, line 7" in cause.text


def test_a_hang_ends_the_job_and_leaves_records(run) -> None:
    left: dict[int, int] = {}
    done = [threading.Event(), threading.Event()]

    def leave(rank):
        return lambda code: (left.__setitem__(rank, code), done[rank].set())

    ranks = [
        Heartbeat(run, r, world_size=2, timeout_seconds=0.6, write_seconds=0.1, leave=leave(r)).start()
        for r in range(2)
    ]
    begin = time.monotonic()
    ranks[0].beat(1, "data")
    ranks[1].beat(1, "data")
    ranks[0].beat(1, "reduce")  # rank 1 never gets there
    assert all(event.wait(20) for event in done)
    assert left == {0: EXIT_HANG, 1: EXIT_HANG} and time.monotonic() - begin < 20
    errors = {e.rank: e for e in run.faults()}
    assert errors[0].kind == "hang" and errors[0].culprit == errors[1].culprit == 1
    assert any("wait" in line for line in errors[0].traceback)  # where the main thread stood
    [event] = [e for e in run.events() if e.event == "hang"]
    assert event.rank == 1 and event.seconds >= 0.6


def test_progress_and_patient_phases_do_not_count_as_hanging(run) -> None:
    left: list[int] = []
    heart = Heartbeat(run, 0, timeout_seconds=0.7, write_seconds=0.1, leave=left.append).start()
    heart.step_phase("forward")  # the first step of a process compiles
    assert read_heartbeats(run, None)[0]["phase"] in ("start", "compile")
    time.sleep(1.0)  # longer than a step may take, not than compiling may
    for step in range(8):
        heart.beat(step, "data")
        time.sleep(0.1)
    heart.close()
    assert left == [] and read_heartbeats(run, None)[0]["phase"] == "ended"


def test_a_timeout_of_zero_is_off(run) -> None:
    left: list[int] = []
    heart = Heartbeat(run, 0, timeout_seconds=0, write_seconds=0.05, leave=left.append).start()
    time.sleep(0.3)
    heart.close()
    assert left == []


def test_a_heartbeat_of_an_earlier_start_is_not_blamed(run) -> None:
    """Rank 1 of this start never came; the file is from the start before, where its pid and step were others."""
    write_json(run.heartbeat_file(1), {**beat(1, 99), "started_at": 1.0})
    left = threading.Event()
    Heartbeat(run, 0, world_size=2, timeout_seconds=0.3, started_at=2.0, leave=lambda code: left.set()).start()
    assert left.wait(20)
    [fault] = run.faults()
    assert fault.culprit == 1 and "101" not in fault.error and "1 of 2" in fault.error


def test_one_of_1000_ranks_reads_the_heartbeats_and_the_others_learn_the_cause(run) -> None:
    """Stand-ins: 997 ranks that report being stuck, rank 617 that no longer writes, and two real watchdogs."""
    for rank in range(2, 1000):
        stuck = {"stuck": True} if rank != 617 else {}
        write_json(run.heartbeat_file(rank), {**beat(rank, 22), "started_at": 3.0, **stuck}, sync=False)
    reads: list[int] = []
    done = [threading.Event(), threading.Event()]
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windlass.train.watchdog.read_heartbeats", lambda *a: (reads.append(1), read_heartbeats(*a))[1])
        for rank in range(2):
            options = {"world_size": 1000, "timeout_seconds": 1.0, "started_at": 3.0}
            heart = Heartbeat(run, rank, leave=lambda code, rank=rank: done[rank].set(), **options).start()
            heart.beat(7, "reduce")
        assert all(event.wait(40) for event in done)
    assert {fault.culprit for fault in run.faults()} == {617} and len(run.faults()) == 2
    assert len(reads) == 2 and len([e for e in run.events() if e.event == "hang"]) == 1
    assert time.monotonic() - begin < 1.0 + 10.0 + 10.0  # the last for a busy test machine


def test_a_rank_that_writes_seldom_does_so_at_once_when_another_reports_a_hang(run) -> None:
    """On 1,000 ranks: a look, a wait of two and a half looks, and two reads of 1,000 small files are below 10 s."""
    heart = Heartbeat(run, 5, world_size=1000, timeout_seconds=600.0, started_at=3.0).start()
    assert (heart._every, heart._look) == (30.0, 2.0) and 3.5 * heart._look < 10.0
    run.hang_file(3.0).touch()
    writes, until = read_heartbeats(run, 3.0)[5]["writes"], time.monotonic() + 10.0
    while (now := read_heartbeats(run, 3.0)[5]["writes"]) == writes and time.monotonic() < until:
        time.sleep(0.1)
    heart.close()
    assert now > writes


def test_the_cause_of_an_earlier_start_is_not_taken(run) -> None:
    write_json(run.hang_file(1.0), {"rank": 9, "text": "old"})
    left = threading.Event()
    Heartbeat(run, 0, world_size=2, timeout_seconds=0.3, started_at=2.0, leave=lambda code: left.set()).start()
    assert not run.hang_file(1.0).exists() and left.wait(30) and run.faults()[0].culprit == 1
