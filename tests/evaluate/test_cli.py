"""The commands eval, generate, export and import, for people and as JSON."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from tests.evaluate.test_suites import GENERATIVE
from typer.testing import CliRunner

from windlass.cli import build
from windlass.cli.options import option_groups
from windlass.errors import WindlassError
from windlass.files import read_json_lines
from windlass.runs.folder import Run


def call(*argv: Any) -> str:
    result = CliRunner().invoke(build(), [str(word) for word in argv], catch_exceptions=False)
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
    argv = ("generate", run.path, "--prompt", "de zware", "--tokens", 6, "--go-on", "--seed", 3)
    made = json.loads(call(*argv, "--json"))
    assert len(made["ids"]) == 6 and made["state_bytes"] > 0 and made["tokens_per_second"] > 0
    assert "tokens/s" in call(*argv)


def test_export_and_import(llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = call("export", llama_run.path, "--to", "hf")
    assert "(whole)" in text and "128" in text
    card = (tmp_path / "hf/README.md").read_text()
    assert "Model card" in card and "CC0" in card
    assert "runs/hf" in call("import", "hf")
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
    from windlass.evaluate import task_files

    run, real = make_run(tmp_path / "run"), task_files.run_task
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"context": "de zware", "answer": " last"}) + "\n")

    def stopped(opened: Any, tokenizer: Any, task: Any, options: Any) -> Any:
        if task.name == "second":
            raise KeyboardInterrupt
        return real(opened, tokenizer, task, options)

    monkeypatch.setattr(task_files, "run_task", stopped)
    argv = ["eval", run.path, "--task", tmp_path / "first.jsonl", "--task", tmp_path / "second.jsonl"]
    result = CliRunner().invoke(build(), [str(w) for w in [*argv, "--json"]])
    assert result.exit_code == 130
    document = json.loads(result.stdout)  # also shown, since a Hugging Face folder keeps no scores
    assert document["unfinished"] == ["second"] and {s["task"] for s in document["scores"]} == {"first"}
    assert {line["task"] for line in read_json_lines(run.eval_file)} == {"first"}


def test_generate_ends_where_it_is_told(llama_run: Run) -> None:
    argv = (
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
    whole = json.loads(call(*argv))["text"]
    mark = whole[3:5]
    assert json.loads(call(*argv, "--stop", mark, "--stop", "never"))["text"] == whole[: whole.index(mark)]
    # The one most probable token is what temperature 0 takes.
    assert json.loads(call(*argv[:-2], 2.0, "--top-k", 1, "--json"))["text"] == whole
    assert "sequences of 32" in call(*argv[:-1])


def refusal(*argv: Any) -> str:
    result = CliRunner().invoke(build(), [str(word) for word in argv])
    assert isinstance(result.exception, WindlassError), result.output
    return result.exception.code


def test_generation_tasks_and_harness_in_one_table(
    llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tasks = {
        "qa": [
            {"task": {"max_tokens": 3}},
            {"question": "de zee", "answers": "x"},
            {"question": "wind", "answers": "y"},
        ],
        "code": [{"task": {"max_tokens": 3}}, {"prompt": "def f():\n", "test": "assert f() == 1"}],
    }
    argv: list[Any] = ["eval", llama_run.path, "--no-save"]
    for name, items in tasks.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        argv += ["--task", tmp_path / f"{name}.jsonl"]
    (tmp_path / "lines.jsonl").write_text('{"question": "de zee", "answer": "x"}\n')
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ours.yaml").write_text(
        GENERATIVE.format(name="ours", file=tmp_path / "lines.jsonl", tokens=3)
    )
    assert refusal(*argv) == "evaluate.code-not-run"
    argv += ["--run-code", "--harness", "ours", "--harness-folder", tmp_path / "tasks"]
    document = json.loads(call(*argv, "--json"))
    rows = {(score["task"], score["metric"]): score for score in document["scores"]}
    assert list(rows) == [("qa", "exact_match"), ("qa", "f1"), ("code", "pass@1"), ("ours", "exact_match")]
    assert rows["code", "pass@1"]["detail"]["reasons"] and "unfinished" not in document
    assert refusal(*argv, "--chat") == "data.chat-template-missing"
    assert refusal(*argv, "--engine", "vllm") == "evaluate.engine-cannot-score"
    assert refusal("eval", llama_run.path, "--engine", "other") == "evaluate.engine-unknown"
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert (
        refusal("eval", llama_run.path, "--task", tmp_path / "qa.jsonl", "--engine", "vllm") == "evaluate.vllm-missing"
    )


def test_options_of_a_group_reach_the_command() -> None:
    seen: dict[str, Any] = {}

    @dataclass
    class Place:
        name: Annotated[str, typer.Argument()]
        depth: Annotated[int, typer.Option("--depth", min=1)] = 3

    @option_groups
    def dig(place: Place, deep: Annotated[bool, typer.Option("--deep")] = False) -> None:
        """Dig a hole."""
        seen.update(place=place, deep=deep)

    app = typer.Typer()
    app.command()(dig)
    assert CliRunner().invoke(app, ["here", "--depth", "7", "--deep"]).exit_code == 0
    assert seen == {"place": Place("here", 7), "deep": True}
    assert CliRunner().invoke(app, ["here"]).exit_code == 0 and seen == {"place": Place("here", 3), "deep": False}
    assert CliRunner().invoke(app, ["here", "--depth", "0"]).exit_code == 2
