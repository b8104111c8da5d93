"""Do the commands say what they did, in words and in JSON?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from windlass.cli import build
from windlass.data.store import Store
from windlass.files import read_json_lines
from windlass.runs.folder import Run


def call(*words: Any) -> str:
    result = CliRunner().invoke(build(), [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_eval(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = tmp_path / "eval.html"
    made = json.loads(call("eval", run.path, "--json", "--overlap", "--html", page))
    groups = {(s["group"], s["metric"]) for s in made["scores"]}
    assert {
        ("all", "bits_per_byte"),
        ("language du", "perplexity"),
        ("source english", "overlap_with_training"),
    } <= groups
    assert made["step"] == 7 and made["tokens_per_second"] > 0
    assert len(list(read_json_lines(run.eval_file))) == len(made["scores"])
    assert "bits per byte" in page.read_text()
    text = call("eval", run.path, "--no-save", "--tokens", "2k")
    assert "bits per byte (95 %)" in text and "source dutch" in text
    assert len(list(read_json_lines(run.eval_file))) == len(made["scores"])


def test_eval_of_a_task(llama_run: Run, tmp_path: Path) -> None:
    task = tmp_path / "quiz.jsonl"
    task.write_text(
        "".join(
            json.dumps({"context": f"de {w}", "choices": [" zee", " haven"], "answer": 0}) + "\n"
            for w in ("wind", "lier", "last")
        )
    )
    made = json.loads(call("eval", llama_run.path, "--task", task, "--json", "--no-save", "--overlap"))
    assert [s["metric"] for s in made["scores"]] == ["accuracy", "accuracy_per_byte", "overlap_with_training"]
    assert made["scores"][2]["value"] is None  # three words are fewer than 13 tokens: unknown, not 0
    assert "quiz" in call("eval", llama_run.path, "--task", task, "--no-save")


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_generate(which: str, request: Any) -> None:
    run = request.getfixturevalue(which)
    words = ("generate", run.path, "--prompt", "de zware", "--tokens", 6, "--go-on", "--seed", 3)
    made = json.loads(call(*words, "--json"))
    assert len(made["ids"]) == 6 and made["state_bytes"] > 0 and made["tokens_per_second"] > 0
    assert "tokens/s" in call(*words)


def test_export_and_import(llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = call("export", llama_run.path, "--to", "hf")
    assert "logits verified (whole)" in text
    card = (tmp_path / "hf/README.md").read_text()
    assert "Model card" in card and "CC0" in card
    assert "logits verified" in call("import", "hf")
    assert (tmp_path / "runs/hf/checkpoints/step-000000000").is_dir()
    made = json.loads(call("export", "runs/hf", "--to", "again", "--no-verify", "--json"))
    assert made["check"] is None and made["dtype"] == "fp32"


def test_a_newer_checkpoint_that_is_not_whole_is_told(make_run: Any, tmp_path: Path) -> None:
    """Numbers of an older step must not pass for those of the newest."""
    from windlass.checkpoint.save import Saver
    from windlass.config import SaveConfig

    run = make_run(tmp_path / "run")
    saver = Saver(run, SaveConfig(asynchronous=False))
    saver.save(9, {"model": {"embed.weight": torch.zeros(4, 4)}}, {"tokens": 900}, block=True)
    saver.close()
    data = next(run.checkpoint(9).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:10])
    said = "step 7 is used: 9 is damaged or not finished"
    made = json.loads(call("export", run.path, "--to", tmp_path / "hf", "--json", "--no-verify"))
    assert made["step"] == 7 and made["note"] == said
    assert said in call("generate", run.path, "--prompt", "de", "--tokens", 2)
    assert json.loads(call("eval", run.path, "--tokens", 500, "--json", "--no-save"))["note"] == said
    assert json.loads(call("eval", run.path, "--tokens", 500, "--json", "--no-save", "--step", 7))["note"] is None


def test_what_a_task_found_is_kept_when_the_next_one_is_stopped(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.evaluate import tasks

    run, real = make_run(tmp_path / "run"), tasks.run_task
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"context": "de zware", "answer": " last"}) + "\n")

    def stopped(opened: Any, words: Any, task: Any, **how: Any) -> Any:
        if task.name == "second":
            raise KeyboardInterrupt
        return real(opened, words, task, **how)

    monkeypatch.setattr(tasks, "run_task", stopped)
    words = ["eval", run.path, "--task", tmp_path / "first.jsonl", "--task", tmp_path / "second.jsonl"]
    assert CliRunner().invoke(build(), [str(w) for w in words]).exit_code != 0
    assert {line["task"] for line in read_json_lines(run.eval_file)} == {"first"}


def test_generate_ends_where_it_is_told(llama_run: Run) -> None:
    words = (
        "generate",
        llama_run.path,
        "--prompt",
        "de zware",
        "--tokens",
        40,
        "--go-on",
        "--temperature",
        0,
        "--json",
    )
    whole = json.loads(call(*words))["text"]
    mark = whole[3:5]
    assert json.loads(call(*words, "--stop", mark, "--stop", "never"))["text"] == whole[: whole.index(mark)]
    # The one most probable token is what temperature 0 takes.
    assert json.loads(call(*words[:-2], 2.0, "--top-k", 1, "--json"))["text"] == whole
    assert "the model was trained on sequences of 32" in call(*words[:-1])


@pytest.mark.multi
def test_finetune_on_two_processes(llama_run: Run, store: Store, tmp_path: Path) -> None:
    import subprocess
    import sys

    train = tmp_path / "set.tsv"
    train.write_text("text\tlabel\n" + "".join(f"{w} water\t{w}\n" for w in ("ship", "rope") * 12))
    out = tmp_path / "out.json"
    words = [
        "finetune",
        llama_run.path,
        "--train",
        train,
        "--epochs",
        1,
        "--batch",
        4,
        "--devices",
        2,
        "--output",
        out,
        "--no-save",
    ]
    subprocess.run([sys.executable, "-m", "windlass", *map(str, words)], check=True, capture_output=True, timeout=240)
    made = json.loads(out.read_text())
    assert made["processes"] == 2 and {s["metric"] for s in made["scores"]} == {"accuracy", "macro_f1"}
