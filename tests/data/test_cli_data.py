"""Do the commands print what the store holds, as a table and as JSON, and exit as they should?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError


@pytest.fixture
def toml(tmp_path: Path, tokenizer: Tokenizer, write_jsonl: Any, text: Callable[[int], str]) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [text(i) for i in range(100)])
    (tmp_path / "data.toml").write_text(
        f'output = "{tmp_path / "store"}"\ntokenizer = "{tokenizer.path}"\nengine = "tokenizers"\nworkers = 1\n'
        f'[sources.news]\npaths = ["{tmp_path / "a.jsonl"}"]\nlanguage = "nl"\nlicence = "CC0-1.0"\norigin = "here"\n'
    )
    return tmp_path / "data.toml"


def call(*words: object) -> str:
    result = CliRunner().invoke(build(), [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_tokenize_data_verify_and_ledger(toml: Path, tmp_path: Path) -> None:
    made = json.loads(call("tokenize", toml, "validation=0.1", "--json"))
    assert (made["complete"], made["documents"], made["rejects"]) == (True, 100, 0)
    again = json.loads(call("tokenize", toml, "validation=0.1", "--json"))
    assert again["chunks_done"] == 0
    shown = json.loads(call("data", tmp_path / "store", "--samples", "2", "--json"))
    assert shown["sources"]["news"]["documents"] == 100
    assert shown["sources"]["news"]["tokens_per_word"] > 1
    assert len(shown["samples"]) == 2
    assert "news" in call("data", tmp_path / "store", "--samples", "1")
    assert "all checksums match" in call("data", tmp_path / "store", "--verify")
    assert json.loads(call("data", tmp_path / "store", "--verify", "--json"))["whole"] is True
    assert "CC0-1.0" in call("data", tmp_path / "store", "--ledger")
    assert "| news | nl | CC0-1.0 | here |" in (tmp_path / "store" / "training-content.md").read_text()


def test_verify_fails_with_the_place(toml: Path, tmp_path: Path) -> None:
    call("tokenize", toml)
    binary = tmp_path / "store" / "news-train-00000.bin"
    binary.write_bytes(b"\xff" + binary.read_bytes()[1:])
    with pytest.raises(DataError, match=r"damaged in 1 place:\n  news-train-00000\.bin bytes 0 to"):
        call("data", tmp_path / "store", "--verify")


def test_a_store_that_is_only_joined_says_so_and_counts_its_rejects(toml: Path, tmp_path: Path) -> None:
    """Rejected in one run, allowed in the next: the second does no chunk, but it writes the store and knows what was left out."""
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('"a string"\nno json\n')
    with pytest.raises(DataError, match="2 rejected documents") as caught:
        call("tokenize", toml)
    assert caught.value.code == "data.documents-rejected"
    assert "not a JSON object but a text" in caught.value.message
    assert "allow_damaged" not in (caught.value.hint or "")
    said = call("tokenize", toml, "max_rejects=2")
    assert "resumed: 1 chunk was already done" in said
    assert "written" in said and "nothing to do" not in said
    assert "rejected: 2, each with its reason in" in said
    assert "nothing to do" in call("tokenize", toml, "max_rejects=2")
    assert json.loads(call("tokenize", toml, "max_rejects=2", "--json"))["rejects"] == 2


def test_array_tasks_then_join(toml: Path) -> None:
    assert "share is done" in call("tokenize", toml, "--array-task", "0/2")
    assert json.loads(call("tokenize", toml, "--array-task", "1/2", "--json"))["complete"] is False
    assert json.loads(call("tokenize", toml, "--json"))["complete"] is True


@pytest.mark.parametrize("word", ["2/2", "x", "1", "-1/2"])
def test_bad_array_tasks(toml: Path, word: str) -> None:
    with pytest.raises(ConfigError, match="is not a task"):
        call("tokenize", toml, f"--array-task={word}")


def test_auto_outside_a_job(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    with pytest.raises(ConfigError, match="--array-task auto"):
        call("tokenize", toml, "--array-task", "auto")


def test_train_a_tokenizer_and_compare(toml: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = json.loads(
        call(
            "tokenizer",
            "train",
            toml,
            "--vocab",
            "400",
            "--out",
            tmp_path / "new",
            "--reference",
            tokenizer.path,
            "--json",
        )
    )
    assert Path(made["tokenizer"]).is_file()
    assert [(row["language"], row["tokenizer"], row["vocab_size"]) for row in made["fertility"]] == [
        ("nl", "trained", 400),
        ("nl", "reference", 600),
    ]
    assert "tokens/word" in call("tokenizer", "compare", toml, tokenizer.path)
    with pytest.raises(ConfigError) as refused:
        call("tokenizer", "train", toml, "--out", tmp_path / "new")
    assert refused.value.code == "data.tokenizer-exists"


def test_the_smallest_vocabulary_is_all_bytes_and_the_end_token(toml: Path, tmp_path: Path) -> None:
    made = json.loads(call("tokenizer", "train", toml, "--vocab", "257", "--out", tmp_path / "bytes", "--json"))
    assert made["fertility"][0]["vocab_size"] == 257


def test_an_array_is_submitted_with_a_job_that_joins(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.launch import array

    asked: dict[str, Any] = {}

    def submit(command: list[str], **rest: Any) -> array.SubmittedArray:
        asked.update(rest, command=command)
        return array.SubmittedArray(Path("runs/x"), "11", "12", "cpu: 1 h of 4 h")

    monkeypatch.setattr(array, "submit_array", submit)
    made = json.loads(call("tokenize", toml, "validation=0.1", "--array", "4", "--account", "p1", "--json"))
    assert (made["array_job"], made["merge_job"], made["tasks"]) == ("11", "12", 4)
    assert asked["command"] == ["windlass", "tokenize", str(toml), "validation=0.1", "--array-task", "auto"]
    assert asked["then"] == ["windlass", "tokenize", str(toml), "validation=0.1"]
    assert (asked["count"], asked["account"]) == (4, "p1")


def test_files_of_a_folder_that_are_not_taken_are_told(toml: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.py", "deep/c.py", "deep/LICENSE", ".hidden"):
        (folder / name).write_text("some text")
    toml.write_text(toml.read_text().replace(str(tmp_path / "a.jsonl"), str(folder)))
    made = json.loads(call("tokenize", toml, "--json"))
    assert (made["documents"], made["passed_over"]) == (1, {"news": {".py": 2, "LICENSE": 1}})
    assert "note: news: 3 files" in call("tokenize", toml)
    toml.write_text(toml.read_text().replace(f'"{folder}"', f'"{folder}/a.txt"'))
    assert json.loads(call("tokenize", toml, f"output={tmp_path / 'other'}", "--json"))["passed_over"] == {}
