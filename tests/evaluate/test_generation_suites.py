"""Tasks of generated text: prompts, engines, scores of scripted answers, and every bad file refused."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_chat import CHATML
from tests.data.test_chat import make_tokenizer as make_chat_tokenizer

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.answers import NativeEngine, VllmEngine, fill, generate_answers
from windlass.evaluate.generate import Sampling, generate
from windlass.evaluate.open_model import open_model
from windlass.evaluate.suites.code import item_tests, pass_at_k, program_of
from windlass.evaluate.suites.instructions import Checks, follows
from windlass.evaluate.suites.question_answering import FORM
from windlass.evaluate.task_files import TaskFile, check_task, read_task_file, run_task
from windlass.runs.folder import Run
from windlass.runs.scores import EvalScore, wilson_interval


class ScriptedEngine:
    """Answers in the order of the prompts, and keeps what it was asked."""

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.asked: list[Any] = []

    def complete(self, prompts: Any, samplings: Any, *, ends: Any, stops: Any, **more: Any) -> list[list[int]]:
        self.asked = [(self.tokenizer.decode(p), s) for p, s in zip(prompts, samplings, strict=True)]
        self.ends, self.stops = set(ends), list(stops)
        return [self.tokenizer.encode(answer) for answer in self.answers]


class Wide:
    """A model with room for every prompt; the scripted engine needs no weights."""

    max_length, batch_tokens = 4096, 2048


def write(path: Path, items: list[Any]) -> TaskFile:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return read_task_file(path)


def scored(
    task: TaskFile, tokenizer: Tokenizer, answers: Sequence[str], **options: Any
) -> tuple[dict[tuple[str, str], EvalScore], ScriptedEngine]:
    engine = ScriptedEngine(tokenizer, answers)
    scores = run_task(Wide(), tokenizer, task, task.options(engine=engine, **options))  # type: ignore[arg-type]
    return {(score.group, score.metric): score for score in scores}, engine


def test_question_answering(tokenizer: Tokenizer, tmp_path: Path) -> None:
    items = [
        {"question": "Where?", "answers": ["the harbour", "port"], "context": "A ship.", "language": "en"},
        {"question": "Wie?", "answers": "de mannen", "language": "nl"},
        {"question": "Wat?", "answers": ["een lier"], "language": "nl"},
    ]
    task = write(tmp_path / "qa.jsonl", items)
    answers = [" Harbour.\nQuestion: next", "\n\nmannen", " de grote lier"]
    scores, engine = scored(task, tokenizer, answers)
    assert engine.asked[0][0] == "A ship.\n\nQuestion: Where?\nAnswer:"
    assert engine.asked[1][0] == "Question: Wie?\nAnswer:" and engine.stops == ["\n"]
    whole = scores["all", "exact_match"]
    assert whole.value == pytest.approx(2 / 3) and (whole.low, whole.high) == wilson_interval(2, 3)
    assert scores["language en", "exact_match"].value == 1.0
    assert scores["language nl", "f1"].value == pytest.approx((1 + 2 / 3) / 2)
    _, engine = scored(task, tokenizer, answers, shots=1)
    assert engine.asked[2][0].startswith("A ship.\n\nQuestion: Where?\nAnswer: the harbour\n\nQuestion: Wat?")


def test_summarisation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    items = [
        {"document": "long text", "summary": ["de wind en de zee", "het water"], "language": "nl"},
        {"document": "other", "summary": "the men turn", "language": "en"},
    ]
    scores, engine = scored(write(tmp_path / "s.jsonl", items), tokenizer, [" het water\n\nmore", "the ship"])
    assert engine.asked[0][0] == "long text\n\nSummary:"
    assert scores["language nl", "rouge1"].value == pytest.approx(100)
    assert scores["language en", "rougeL"].value == pytest.approx(100 * 2 * 1 / 5)
    assert scores["all", "rouge1"].value == pytest.approx(70) and scores["all", "rouge1"].low is not None
    assert scores["language nl", "chrf"].value == pytest.approx(100)


HEADER = {"stop": ["\nprint("], "samples": 2, "pass_at": [1, 2], "temperature": 0.8, "cpu_seconds": 1}
ITEMS = [
    {"prompt": "def double(x):\n", "test": ["assert double(2) == 4", "assert double(0) == 0"], "group": "easy"},
    {
        "prompt": 'from math import pi\n\ndef area(r):\n    """Area."""\n',
        "test": "def check(candidate):\n    assert candidate(1) == 3.141592653589793",
        "entry_point": "area",
    },
]


def test_code_is_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = write(tmp_path / "code.jsonl", [{"task": HEADER}, *ITEMS])
    answers = [
        "    return 2 * x\n\nprint(double(1))",
        "    return x",
        "Here:\n```python\ndef area(r):\n    return pi * r * r\n```\nDone.",
        "    while True: pass",
    ]
    scores, engine = scored(task, tokenizer, answers, run_code=True, max_tokens=40)
    assert [sampling.seed for _, sampling in engine.asked] == [0, 1, 2, 3] and engine.asked[1][1].temperature == 0.8
    assert scores["all", "pass@1"].value == 0.5 and scores["all", "pass@2"].value == 1.0
    assert scores["group easy", "pass@1"].count == 1
    reasons = scores["all", "pass@1"].detail["reasons"]
    assert reasons == {"passed": 2, "AssertionError": 1, "time": 1}
    assert scores["all", "pass@1"].detail["missing"] == ()


def test_one_sample_has_the_interval_of_a_share(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = write(tmp_path / "code.jsonl", ITEMS)
    scores, _ = scored(task, tokenizer, ["    return x + x", "    return r"], run_code=True)
    score = scores["all", "pass@1"]
    assert score.value == 0.5 and (score.low, score.high) == wilson_interval(1, 2)


def test_programs_by_hand() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - (7 * 6 * 5 * 4 * 3) / (10 * 9 * 8 * 7 * 6))
    assert pass_at_k(5, 5, 5) == 1.0 and pass_at_k(5, 0, 5) == 0.0
    assert program_of("def f():\n", "    return 1") == "def f():\n    return 1"
    assert program_of("Write f.", "```\ndef f(): pass\n```\ntext") == "def f(): pass\n"
    assert program_of("import os\n", "```python\nx = 1").endswith("\nx = 1")  # a block that was cut off
    assert item_tests(ITEMS[1]).endswith("\ncheck(area)") and "check" not in item_tests(ITEMS[0])


def test_code_is_off_by_default(tmp_path: Path) -> None:
    task = write(tmp_path / "code.jsonl", ITEMS)
    cases = [
        ({}, "evaluate.code-not-run"),
        ({"run_code": True, "samples": 3}, "evaluate.too-few-samples"),
        ({"run_code": True, "pass_at": [5], "samples": 4, "temperature": 1.0}, "evaluate.too-few-samples"),
        ({"run_code": True, "shots": 2}, "evaluate.too-many-shots"),
        ({"run_code": True, "memory": "1 house"}, "units.unknown-unit"),
    ]
    for options, code in cases:
        with pytest.raises(ConfigError) as error:
            check_task(task, task.options(**options))
        assert error.value.code == code
    check_task(task, task.options(run_code=True))


CHECKS = [
    ({"words": 3}, "Een, twee drie!", "een twee"),
    ({"words": {"at_least": 2, "at_most": 3}}, "een twee", "een"),
    ({"words": {"at_most": 2}}, "een twee", ""),  # an empty answer follows nothing
    ({"sentences": 2}, "De zee. Is dat zo?", "De zee is groot."),
    ({"bullets": 2}, "List:\n- a\n* b", "- a\n-b"),
    ({"bullets": {"at_least": 1}}, "1. a", "a"),
    ({"lines": 2}, "a\n\nb", "a"),
    ({"paragraphs": 2}, "a\nb\n\nc", "a\nb"),
    ({"characters": {"at_most": 5}}, "haven", "havens"),
    ({"contains": ["Zee", "wind"]}, "wind op ZEE", "zee"),
    ({"excludes": "zee"}, "wind", "de Zee"),
    ({"begins_with": "Dear"}, "dear all", "all"),
    ({"ends_with": "Groet."}, "Dag. groet.", "Groet. Dag"),
    ({"matches": r"\b\d{4}\b"}, "in 1999", "in 199"),
    ({"case": "lower"}, "de zee 1", "De zee"),
    ({"case": "upper"}, "ZEE", "Zee"),
    ({"language": "nl"}, "Het schip is in de haven.", "The ship is in the harbour."),
    ({"json": True}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ({"json": ["a", "b"]}, '{"a": 1, "b": 2}', '{"a": 1}'),
]


@pytest.mark.parametrize("case", CHECKS, ids=lambda case: json.dumps(case[0]))
def test_checks_of_instructions(case: tuple[dict[str, Any], str, str]) -> None:
    value, right, wrong = case
    checks = Checks.model_validate(value)
    assert follows(right, checks) == dict.fromkeys(value, True)
    assert follows(wrong, checks) == dict.fromkeys(value, False)


def test_instructions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    items = [
        {"prompt": "Name two.", "checks": {"words": 2, "contains": "zee"}, "language": "nl"},
        {"prompt": "Be short.", "checks": {"words": {"at_most": 1}}, "language": "en"},
    ]
    scores, engine = scored(write(tmp_path / "i.jsonl", items), tokenizer, ["de haven", "sea"])
    assert engine.asked[0][0] == "Name two.\n"
    assert scores["all", "prompts_followed"].value == 0.5
    assert scores["all", "checks_followed"].value == pytest.approx(2 / 3)
    assert scores["all", "checks_followed"].detail["by_check"] == {"contains": "0 of 1", "words": "2 of 2"}


BAD_ITEMS = [
    ({"document": "x", "summary": []}, "summary"),
    ({"document": "", "summary": "y"}, "document"),
    ({"question": "x", "answers": [" "]}, "answers"),
    ({"question": "x", "answers": "y", "context": 3}, "context"),
    ({"prompt": "x", "test": "assert ("}, "not Python"),
    ({"prompt": "x", "test": []}, "test"),
    ({"prompt": "x", "checks": {}}, "at least one"),
    ({"prompt": "x", "checks": {"wrds": 3}}, "wrds"),
    ({"prompt": "x", "checks": {"words": {"at_least": 5, "at_most": 3}}}, "at_most 3"),
    ({"prompt": "x", "checks": {"language": "xx"}}, "xx"),
    ({"prompt": "x", "checks": {"matches": "("}}, "regular expression"),
    ({"prompt": "x", "checks": {"words": -1}}, "words"),
]


def test_bad_items(tmp_path: Path) -> None:
    for item, part in BAD_ITEMS:
        with pytest.raises(DataError) as error:
            write(tmp_path / "bad.jsonl", [item])
        assert error.value.code == "evaluate.task-file-invalid"
        assert "line 1" in error.value.message and part in error.value.message, error.value.message


def test_the_header_of_a_task_file(tmp_path: Path) -> None:
    item = {"question": "x", "answers": "y"}
    header = {"template": "Q: {question}\nA:", "max_tokens": 5, "stop": ["."], "shots": 1}
    task = write(tmp_path / "t.jsonl", [{"task": header}, item, item])
    assert len(task.items) == 2
    options = task.options(shots=None, template=None)
    assert (options.template, options.max_tokens, options.stop, options.shots) == ("Q: {question}\nA:", 5, ["."], 1)
    assert task.options(shots=0, template="{question}").shots == 0  # the command line wins
    for wrong, part in (
        ({"tokens": 3}, "tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ("x", "task"),
        ({"stop": "."}, "stop"),
    ):
        with pytest.raises(DataError) as error:
            write(tmp_path / "t.jsonl", [{"task": wrong}, item])
        assert error.value.code == "evaluate.task-header-invalid" and part in error.value.message
    with pytest.raises(DataError) as error:
        write(tmp_path / "t.jsonl", [{"task": header}])
    assert error.value.code == "evaluate.task-file-empty"


def test_prompts_are_filled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert fill('{"a": 1} {x}{y}', {"x": "{y}", "y": "b"}) == '{"a": 1} {y}b'
    assert fill("{context}\n\nQ: {question}", {"question": "q"}) == "Q: q"
    task = write(tmp_path / "c.jsonl", ITEMS)
    for options, code in (
        ({"template": "x"}, "evaluate.template-without-source"),
        ({"shots": 1}, "evaluate.example-unsolved"),
    ):
        with pytest.raises(ConfigError) as error:
            scored(task, tokenizer, ["", ""], run_code=True, **options)
        assert error.value.code == code


def test_a_chat(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path, CHATML)
    (end,) = tokenizer.encode("<|im_end|>", specials=True)
    item = {"question": "een lier?", "answers": "ja"}
    task = write(tmp_path / "t.jsonl", [{"task": {"system": "Kort.", "template": "{question}"}}, item, item])
    scores, engine = scored(task, tokenizer, ["ja", "nee"], chat=True, shots=1)
    assert engine.asked[0][0] == (
        "<|im_start|>system\nKort.<|im_end|>\n<|im_start|>user\neen lier?<|im_end|>\n<|im_start|>assistant\nja<|im_end|>\n"
        "<|im_start|>user\neen lier?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.ends == {tokenizer.eos, end} and engine.stops == []  # a token ends an answer, not a new line
    assert scores["all", "exact_match"].value == 0.5 and scores["all", "exact_match"].detail["chat"]
    plain = make_chat_tokenizer(tmp_path / "plain")
    with pytest.raises(DataError) as error:
        scored(task, plain, ["ja", "nee"], chat=True)
    assert error.value.code == "data.chat-template-missing"


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_batches_change_no_answer(which: str, request: Any, tokenizer: Tokenizer) -> None:
    opened = open_model(request.getfixturevalue(which).path)
    words = ["de", "het", "een", "water", "schip", "lier", "touw", "wind"]
    items = [{"question": " ".join(words[: 1 + n % 7]), "answers": "x"} for n in range(9)]
    task = TaskFile("t", None, items)  # type: ignore[arg-type]
    calls: list[tuple[int, int]] = []
    kept = {"template": "{question}", "max_tokens": 6, "stop": ["."]}
    texts = [
        generate_answers(
            opened, tokenizer, items, task.options(batch=batch, progress=lambda *done: calls.append(done), **kept), FORM
        ).texts
        for batch in (1, 4, None)
    ]
    assert texts[0] == texts[1] == texts[2] and calls[:9] == [(n, 9) for n in range(1, 10)]
    for item, (text,) in zip(items, texts[0], strict=True):
        ids = generate(
            opened.model, tokenizer.encode(item["question"]), Sampling(tokens=6, temperature=0), eos=tokenizer.eos
        ).ids
        assert text == tokenizer.decode(ids).lstrip().split(".")[0].strip()


def test_long_prompts_come_first_and_similar_ones_together(
    llama_run: Run, tokenizer: Tokenizer, monkeypatch: Any
) -> None:
    batches: list[list[int]] = []

    def record(model: Any, prompts: Any, samplings: Any, **more: Any) -> list[Any]:
        batches.append([len(prompt) for prompt in prompts])
        return [types.SimpleNamespace(ids=[len(prompt)]) for prompt in prompts]

    monkeypatch.setattr("windlass.evaluate.answers.generate_batch", record)
    lengths = [5, 90, 40, 7, 80]
    engine = NativeEngine(open_model(llama_run.path), tokenizer, batch=3)
    answers = engine.complete([[1] * n for n in lengths], [Sampling(tokens=4)] * 5, ends=(), stops=())
    assert batches == [[90, 80], [40], [7, 5]] and answers == [[n] for n in lengths]


def test_vllm(llama_run: Run, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the library: what it is asked, and what is read from it."""
    with pytest.raises(ConfigError) as error:
        monkeypatch.setitem(sys.modules, "vllm", None)
        VllmEngine(open_model(llama_run.path, weights=False))
    assert error.value.code == "evaluate.vllm-missing"
    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, **options: Any) -> None:
            asked["options"] = options

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            asked.update(prompts=prompts, params=params)
            ids = [[7, 8, tokenizer.eos], [9]]
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=one)]) for one in ids]

    fake = types.SimpleNamespace(__version__="0", LLM=LLM, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    with pytest.raises(ConfigError) as error:
        VllmEngine(open_model(llama_run.path, weights=False))
    assert error.value.code == "evaluate.vllm-needs-export" and str(llama_run.path) in (error.value.hint or "")
    from windlass.convert.export import export

    export(llama_run.path, tmp_path / "hf", verify=False)
    opened = open_model(tmp_path / "hf", weights=False)
    assert opened.model is None
    engine = VllmEngine(opened)
    share = asked["options"].pop("gpu_memory_utilization")  # of a CPU's memory: half of what is free
    assert 0 < share < 0.5
    assert asked["options"] == {"model": str(tmp_path / "hf"), "dtype": "float32", "max_model_len": 32}
    samplings = [Sampling(tokens=4, temperature=0, seed=n) for n in range(2)]
    ids = engine.complete([[1], [2, 3]], samplings, ends=[tokenizer.eos or 0], stops=["\n", "END"], strip=True)
    assert ids == [[7, 8], [9]] and asked["prompts"] == [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]
    params = asked["params"][1]
    assert (params["max_tokens"], params["seed"], params["stop"]) == (4, 1, ["END"])

    def fail(**options: Any) -> None:
        raise RuntimeError("Engine core initialization failed\nmore")

    monkeypatch.setattr(fake, "LLM", fail)
    with pytest.raises(ConfigError) as error:
        VllmEngine(opened)
    assert error.value.code == "evaluate.vllm-failed" and "more" not in error.value.message
