from __future__ import annotations

import subprocess
import threading
import time

import pytest

from windlass.errors import LaunchError, RunError
from windlass.files import append_line
from windlass.report.sync import ask_for_part, is_live, parts, sync_once, sync_watch
from windlass.runs.events import Finished, Started, Stopped
from windlass.runs.folder import Run
from windlass.runs.lock import locked


def add_part(run: Run, stamp: str, content: str = "x") -> None:
    folder = run.trackers / "wandb" / "wandb" / f"offline-run-{stamp}-id1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run-id1.wandb").write_text(content)


class Wandb:
    """What `wandb sync` is told, in order."""

    def __init__(self, code: int = 0, stderr: str = "", help_text: str = "--append") -> None:
        self.sent: list[str] = []
        self._code, self._stderr, self._help = code, stderr, help_text
        self.words: list[list[str]] = []

    def __call__(self, words):
        if "--help" in words:
            return subprocess.CompletedProcess(words, 0, self._help, "")
        self.words.append(list(words))
        self.sent.append(words[-1].rsplit("/", 1)[-1])
        return subprocess.CompletedProcess(words, self._code, "", self._stderr)


@pytest.fixture
def two(tmp_path) -> Run:
    run = Run(tmp_path)
    add_part(run, "20261115_040000")
    add_part(run, "20261114_235959")
    return run


def test_oldest_first_and_each_once(two):
    wandb = Wandb()
    assert [p["state"] for p in sync_once(two, send=wandb)] == ["sent", "sent"]
    assert wandb.sent == ["offline-run-20261114_235959-id1", "offline-run-20261115_040000-id1"]
    assert [p["state"] for p in sync_once(two, send=wandb)] == ["sent before", "sent before"]
    add_part(two, "20261115_040000", "more than before")
    first, second = (p["state"] for p in sync_once(two, send=wandb))
    assert first == "sent before" and second.startswith("sent again, because it has grown")


@pytest.mark.parametrize(("help_text", "told"), [("  --append  Append run", True), ("  --id TEXT", False)])
def test_append_only_where_the_release_knows_it(two, help_text, told):
    wandb = Wandb(help_text=help_text)
    sync_once(two, send=wandb)
    assert all(("--append" in words) == told for words in wandb.words)


def test_a_failure_stops_and_hides_keys(two):
    wandb = Wandb(1, "401 WANDB_API_KEY=0123456789abcdef")
    with pytest.raises(LaunchError) as caught:
        sync_once(two, send=wandb)
    assert "0123456789abcdef" not in str(caught.value)
    assert len(wandb.sent) == 1  # a later part before an earlier one would tear the curve


def test_dry_run_sends_nothing(two):
    assert [p["state"] for p in sync_once(two, dry_run=True)] == ["would be sent", "would be sent"]
    assert not (two.trackers / "sent.jsonl").exists()


def test_an_empty_part_of_a_half_copied_tree_is_passed_over(two):
    (parts(two)[0] / "run-id1.wandb").unlink()
    assert sync_once(two, send=Wandb())[0]["state"] == "empty, skipped"


def test_missing_program_is_explained(two):
    def absent(words):
        raise FileNotFoundError

    with pytest.raises(LaunchError, match="wandb"):
        sync_once(two, send=absent)


def alive(run: Run, seconds_ago: float = 1.0) -> None:
    run.record(Started(world_size=1))
    append_line(run.metrics_file, {"step": 1, "time": time.time() - seconds_ago})


def test_a_part_that_may_still_grow_stays_until_the_job_ends(two):
    alive(two)
    wandb = Wandb()
    assert [p["state"] for p in sync_once(two, send=wandb)] == ["sent", "still being written"]
    two.record(Stopped(step=1))
    assert [p["state"] for p in sync_once(two, send=wandb)] == ["sent before", "sent"]


def test_a_job_that_was_killed_long_ago_is_not_alive(two):
    alive(two, seconds_ago=3600)
    assert not is_live(two)
    assert [p["state"] for p in sync_once(two, send=Wandb())] == ["sent", "sent"]


def test_the_job_is_asked_for_a_part_and_a_new_one_is_the_answer(two):
    assert not ask_for_part(two, wait=0.0)  # nobody is there to answer
    assert not (two.requests / "part").exists()
    alive(two)
    assert not ask_for_part(two, wait=0.3)  # alive, but silent
    assert (two.requests / "part").exists()

    def answer() -> None:
        time.sleep(0.3)
        add_part(two, "20261115_060000")
        (two.requests / "part").unlink()

    threading.Thread(target=answer).start()
    assert ask_for_part(two, wait=20.0)
    assert [p["state"] for p in sync_once(two, dry_run=True)] == [
        "would be sent",
        "would be sent",
        "still being written",
    ]


def test_two_that_send_at_once_are_kept_apart(two):
    with locked(two.trackers / "sync.lock"), pytest.raises(RunError, match="process"):
        sync_once(two, send=Wandb())
    assert len(sync_once(two, send=Wandb())) == 2


def test_a_failure_while_watching_is_said_and_tried_again(two):
    wandb, said = Wandb(1, "no route to host"), []
    two.record(Finished(step=1))
    sync_watch(two, 0.0, say=said.append, rounds=2, send=wandb)
    assert len(said) == 2 and "no route to host; the next check tries again" in said[0]
    wandb._code = 0
    sync_watch(two, 0.0, say=said.append, send=wandb)
    assert said[2:] == ["offline-run-20261114_235959-id1: sent", "offline-run-20261115_040000-id1: sent"]


def test_watch_waits_for_the_trigger_and_ends_with_the_run(two):
    wandb, said = Wandb(), []
    sync_watch(two, 0.0, say=said.append, rounds=3, send=wandb)
    assert len(wandb.sent) == 2
    add_part(two, "20261115_050000")
    two.requests.mkdir()
    (two.requests / "sync").write_text("now")
    two.record(Finished(step=1))
    sync_watch(two, 0.0, say=said.append, send=wandb)
    assert wandb.sent[-1] == "offline-run-20261115_050000-id1"
    assert not (two.requests / "sync").exists()
