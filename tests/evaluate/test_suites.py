"""Task scores: against likelihoods by hand, against the harness, and with every bad file refused."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.generate import Sampling, generate, prompt_room
from windlass.evaluate.likelihood import likelihoods, token_pair
from windlass.evaluate.open_model import open_model
from windlass.evaluate.suites import SUITES, Item, SuiteOptions, solved_examples
from windlass.evaluate.suites.translation import translation_scores
from windlass.evaluate.task_files import TaskFile, find_overlap, ngram_hashes, read_task_file, run_task
from windlass.runs.folder import Run
from windlass.runs.scores import EvalScore


def write(path: Path, items: list[Any]) -> Path:
    path.write_text("".join((i if isinstance(i, str) else json.dumps(i)) + "\n" for i in items), encoding="utf-8")
    return path


def questions(count: int = 12) -> list[dict[str, Any]]:
    words = ["water", "schip", "touw", "haven", "wind", "zee"]
    return [
        {
            "context": f"de {words[i % 6]} en het",
            "choices": [f" {words[(i + k) % 6]}" for k in range(3)],
            "answer": i % 3,
            "language": "nl" if i % 2 else "en",
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_likelihood_by_hand(which: str, request: Any, tokenizer: Tokenizer) -> None:
    opened = open_model(request.getfixturevalue(which).path)
    pairs = [
        token_pair(tokenizer, "de zware last ", "hijst het schip"),
        token_pair(tokenizer, "", "water"),
        token_pair(tokenizer, "a b c d", " e"),
    ]
    answers = likelihoods(opened, pairs, first=tokenizer.eos, batch=2)
    for (context, following), (nats, greedy) in zip(pairs, answers, strict=True):
        before = context or [tokenizer.eos]
        logs = torch.log_softmax(opened.model(torch.tensor([[*before, *following]]))[0, :, : opened.model.vocab], -1)
        places = range(len(before) - 1, len(before) + len(following) - 1)
        assert nats == pytest.approx(sum(float(logs[p, t]) for p, t in zip(places, following, strict=True)), abs=1e-3)
        assert greedy == all(int(logs[p].argmax()) == t for p, t in zip(places, following, strict=True))


def test_a_context_that_is_too_long_is_cut_from_the_left(llama_run: Run, tokenizer: Tokenizer) -> None:
    opened = open_model(llama_run.path)
    context, following = tokenizer.encode("de zee " * 60), tokenizer.encode(" haven")
    whole = likelihoods(opened, [(context, following)], first=None)
    assert whole == likelihoods(opened, [(context[-(33 - len(following)) :], following)], first=None)


def test_multiple_choice_counts_what_is_most_probable(llama_run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    opened = open_model(llama_run.path)
    items = questions()
    best = [
        int(
            np.argmax(
                [
                    a[0]
                    for a in likelihoods(
                        opened, [token_pair(tokenizer, q["context"], c) for c in q["choices"]], first=tokenizer.eos
                    )
                ]
            )
        )
        for q in items
    ]
    items = [{**q, "answer": b if n < 9 else (b + 1) % 3} for n, (q, b) in enumerate(zip(items, best, strict=True))]
    scores = run_task(opened, tokenizer, read_task_file(write(tmp_path / "choice.jsonl", items)), SuiteOptions())
    whole = next(s for s in scores if (s.group, s.metric) == ("all", "accuracy"))
    assert whole.value == 9 / 12 and whole.count == 12 and (whole.low or 1) < 0.75 < (whole.high or 0)
    assert {s.group for s in scores} == {"all", "language nl", "language en"}


def test_cloze_is_right_when_the_model_says_it(llama_run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    opened = open_model(llama_run.path)
    items = []
    for word in ("water", "schip", "wind"):
        token = generate(opened.model, tokenizer.encode(word), Sampling(tokens=1, temperature=0)).ids
        items.append({"context": word, "answer": tokenizer.decode(token) or "x"})
    said = [
        likelihoods(opened, [token_pair(tokenizer, i["context"], i["answer"])], first=tokenizer.eos)[0][1]
        for i in items
    ]
    scores = run_task(opened, tokenizer, read_task_file(write(tmp_path / "cloze.jsonl", items)), SuiteOptions())
    assert scores[0].metric == "accuracy" and scores[0].value == sum(said) / 3
    assert scores[-1].metric == "bits_per_byte" and (scores[-1].value or 0) > 0


def test_translation_is_scored_by_sacrebleu(llama_run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    lines = ["the great ship lifts the heavy load", "the men turn the winch together", "wind and water"]
    items = [{"source": "x", "reference": line, "language": "en"} for line in lines]
    perfect = {s.metric: s for s in translation_scores("t", items, lines, {})}
    assert perfect["bleu"].value == pytest.approx(100.0) and perfect["chrf"].value == pytest.approx(100.0)
    answers = ["the great ship lifts a load", "men turn the winch", "sea"]
    part = {s.metric: s for s in translation_scores("t", items, answers, {}) if s.group == "all"}
    assert part["bleu"].value == pytest.approx(sacrebleu.corpus_bleu(answers, [lines]).score)
    assert part["chrf"].value == pytest.approx(sacrebleu.corpus_chrf(answers, [lines]).score)
    assert (part["chrf"].low or 101) <= part["chrf"].value <= (part["chrf"].high or 0)
    file = write(tmp_path / "mt.jsonl", [{"source": "het schip", "reference": "the ship"}] * 2)
    scores = run_task(
        open_model(llama_run.path),
        tokenizer,
        read_task_file(file),
        SuiteOptions(template="nl: {source}\nen:", max_tokens=4),
    )
    assert {s.metric for s in scores} == {"bleu", "chrf"}


def test_examples_never_hold_the_question() -> None:
    items = [{"q": str(i)} for i in range(4)]
    for number in range(4):
        assert str(number) not in solved_examples(items, number, 3, lambda i: i["q"])


CHOICE = {"context": "a", "choices": ["x", "y"], "answer": 0}
BAD_FILES = [
    ([CHOICE, {"context": "a", "choices": ["x", "y"]}], ("line 2", "answer")),
    ([CHOICE, "", {"context": "a", "choices": ["x", "y"]}], ("line 3", "answer")),  # blank lines count
    ([{**CHOICE, "answer": 2}], ("line 1", "answer 2", "2 choices")),
    ([{**CHOICE, "choices": ["x"]}], ("line 1", "choices")),
    ([{"question": "a"}], ("line 1", "question")),
    ([{"context": "a", "answer": ""}], ("line 1", "answer")),
    (["{nonsense", {"context": "a", "answer": "b"}], ("line 1",)),
    (["[1]"], ("line 1",)),
]


def test_bad_task_files(tmp_path: Path) -> None:
    for items, places in BAD_FILES:
        with pytest.raises(DataError) as error:
            read_task_file(write(tmp_path / "bad.jsonl", items))
        assert error.value.code == "evaluate.task-file-invalid"
        assert all(place in error.value.message for place in places)
    cases = [
        (write(tmp_path / "bad.jsonl", []), "evaluate.task-file-empty"),
        (tmp_path / "none.jsonl", "files.missing"),
        (tmp_path / "bytes.jsonl", "files.not-utf8"),
    ]
    (tmp_path / "bytes.jsonl").write_bytes(b'{"context": "a", "answer": "b"}\n\n\xff')
    for path, code in cases:
        with pytest.raises(DataError) as error:
            read_task_file(path)
        assert error.value.code == code
    assert "0xff" in error.value.message and "33" in error.value.message
    separator = write(tmp_path / "task.jsonl", ['{"context": "\u2028a", "answer": "b"}\r'])
    assert read_task_file(separator).items[0]["context"] == "\u2028a"  # a line separator inside a line


def test_refusals(llama_run: Run, tokenizer: Tokenizer) -> None:
    opened = open_model(llama_run.path)
    choice = TaskFile("c", SUITES.load("multiple choice"), questions())
    translation = TaskFile("t", SUITES.load("translation"), [{"source": "a", "reference": "b"}])
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: run_task(opened, tokenizer, choice, SuiteOptions(shots=12)), ConfigError, "evaluate.too-many-shots"),
        (
            lambda: run_task(opened, tokenizer, translation, SuiteOptions(template="x")),
            ConfigError,
            "evaluate.template-without-source",
        ),
        (lambda: likelihoods(opened, [([1], [])], first=0), DataError, "evaluate.nothing-to-score"),
        (lambda: likelihoods(opened, [([], [1])], first=None), DataError, "evaluate.end-token-missing"),
    ]
    for action, kind, code in cases:
        with pytest.raises(kind) as error:
            action()
        assert error.value.code == code


class WordCount:
    """A suite of another package: three fields, so that it wins over cloze."""

    kind = "word count"
    fields = ("context", "answer", "words")

    @staticmethod
    def problem(item: Item) -> str | None:
        return None if isinstance(item["words"], int) else "words must be a number"

    @staticmethod
    def run(opened: Any, tokenizer: Any, task: str, items: Any, options: SuiteOptions) -> list[EvalScore]:
        return [
            EvalScore(task=task, group="all", metric="words", value=sum(i["words"] for i in items), count=len(items))
        ]


def test_another_package_adds_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("word count", f"{__name__}:WordCount", "windlass.suites")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[WordCount.__module__])
    task = read_task_file(write(tmp_path / "count.jsonl", [{"context": "a", "answer": "b", "words": 2}] * 3))
    assert task.suite is WordCount
    assert run_task(None, None, task, SuiteOptions())[0].value == 6  # type: ignore[arg-type]
    with pytest.raises(DataError) as error:
        read_task_file(write(tmp_path / "bad.jsonl", [{"context": "a", "answer": "b", "words": "x"}]))
    assert error.value.code == "evaluate.task-file-invalid" and "line 1" in error.value.message


HARNESS = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
GENERATIVE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: {tokens}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def test_the_harness_says_the_same_three_ways(
    llama_run: Run, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built-in runner, our adapter, and the exported model with the harness's own hf backend."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from lm_eval.tasks import TaskManager

    from windlass.convert.export import export
    from windlass.evaluate.harness import run_harness

    file = write(tmp_path / "choice.jsonl", questions(30))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "ours.yaml").write_text(HARNESS.format(name="ours", file=file))
    opened = open_model(llama_run.path)
    generated = [{"question": f"{q['context']} {n}", "answer": "never"} for n, q in enumerate(questions(12))]
    for item in generated[:7]:  # what the model says is the right answer of seven
        ids = generate(opened.model, tokenizer.encode(item["question"]), Sampling(tokens=5, temperature=0)).ids
        item["answer"] = tokenizer.decode(ids).split(".")[0]
    lines = write(tmp_path / "lines.jsonl", generated)
    (folder / "free.yaml").write_text(GENERATIVE.format(name="free", file=lines, tokens=5))
    scores, free = run_harness(opened, tokenizer, ["ours", "free"], folder=folder)
    native = {s.metric: s.value for s in scores}
    light = {
        s.metric: s.value for s in run_task(opened, tokenizer, read_task_file(file), SuiteOptions()) if s.group == "all"
    }
    export(llama_run.path, tmp_path / "hf")
    hf = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'hf'},dtype=float32",
        tasks=["ours", "free"],
        device="cpu",
        batch_size=4,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=False,
    )["results"]
    assert [s.value for s in free] == [hf["free"]["exact_match,none"]] == [7 / 12]
    hf = hf["ours"]
    assert native["acc"] == hf["acc,none"] == light["accuracy"]
    assert native["acc_norm"] == hf["acc_norm,none"]
    assert 0 < native["acc"] < 1
    with pytest.raises(ConfigError) as error:
        next(run_harness(opened, tokenizer, ["theirs"], folder=folder))
    assert error.value.code == "evaluate.harness-task-unknown" and "theirs" in error.value.message


def test_a_datasets_library_that_runs_scripts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from windlass.evaluate.harness import run_harness

    monkeypatch.setattr("datasets.__version__", "3.6.0")
    with pytest.raises(ConfigError) as error:
        next(run_harness(None, None, ["any"]))  # type: ignore[arg-type]
    assert error.value.code == "evaluate.dataset-scripts" and "3.6.0" in error.value.message


def test_rolling_and_generation_through_the_adapter(llama_run: Run, tokenizer: Tokenizer) -> None:
    pytest.importorskip("lm_eval")
    from windlass.evaluate.harness import generate_until, rolling_likelihood

    opened = open_model(llama_run.path)
    text = "de zware last hijst het schip uit de haven en de zee is groot " * 3
    ids = tokenizer.encode(text)
    assert len(ids) > 64
    whole = [tokenizer.eos, *ids]
    total = 0.0
    for start in range(0, len(ids), 32):  # windows as the harness cuts them
        stop = min(len(ids), start + 32)
        inputs = whole[max(0, stop - 32) : stop]
        logs = torch.log_softmax(opened.model(torch.tensor([inputs]))[0, :, : opened.model.vocab], -1)[
            -(stop - start) :
        ]
        total += sum(float(logs[i, t]) for i, t in enumerate(ids[start:stop]))
    assert rolling_likelihood(opened, tokenizer, text) == pytest.approx(total, rel=1e-5)
    (free,) = generate_until(opened, tokenizer, [("de zee", {"max_gen_toks": 8})])
    assert len(free) > 2
    requests = [("de zee", {"max_gen_toks": 8, "until": [free[2]]}), ("de zee", {"max_gen_toks": 8})]
    assert generate_until(opened, tokenizer, requests) == [free.split(free[2])[0], free]


def test_overlap_finds_what_was_trained_on(store: Store) -> None:
    trained = store.tokens("dutch", "train")
    start, stop = max(trained.documents(), key=lambda span: span[1] - span[0])
    fresh = np.random.default_rng(0).integers(0, 300, 200)
    half = np.concatenate([trained[start : start + 100], fresh[:100]])
    overlap = find_overlap(store, [trained[start:stop], fresh, half, fresh[:5]])
    assert overlap.shares[0] == 1.0 and overlap.shares[1] == 0.0 and overlap.shares[3] is None
    assert overlap.shares[2] == pytest.approx(88 / 188)
    assert overlap.trained_tokens == sum(len(store.tokens(n, "train")) for n in store.sources)
    (score,) = overlap.scores("overlap", {"all": range(4)})
    assert score.value == 1 / 3 and score.detail["too_short"] == 1


def test_ngrams_across_stretches_are_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.evaluate.task_files.READ_TOKENS", 50)
    item = store.tokens("english", "train")[40:60]
    assert find_overlap(store, [item]).shares == [1.0]
    assert len(ngram_hashes(item, 13)) == 8


def test_prompts_that_lost_their_beginning_are_counted(llama_run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A number from cut prompts is one of another question: it must say so."""
    opened = open_model(llama_run.path)
    items = [{"context": "de zee " * 60, "answer": " haven"}, {"context": "de", "answer": " zee"}]
    task = read_task_file(write(tmp_path / "long.jsonl", items))
    assert {s.detail["cut"] for s in run_task(opened, tokenizer, task, SuiteOptions())} == {1}
    turned = [{"source": "de zee " * 60, "reference": "x"}, {"source": "de", "reference": "x"}]
    scores = run_task(opened, tokenizer, read_task_file(write(tmp_path / "turn.jsonl", turned)), SuiteOptions())
    assert {s.detail["cut"] for s in scores} == {1}
    assert prompt_room(opened, 64) == 16  # half of 32: an answer longer than the sequence leaves the question in sight


def test_the_text_that_gives_an_item_away() -> None:
    choice = {"context": "de", "choices": [" zee", " haven"], "answer": 1, "language": "nl"}
    assert SUITES.load("multiple choice").solved_text(choice) == "de haven"
    assert SUITES.load("cloze").solved_text({"context": "de", "answer": " zee"}) == "de zee"
    assert SUITES.load("translation").solved_text({"source": "a", "reference": "b"}) == "a\nb"


def test_the_harness_asks_through_the_chat_template(
    llama_run: Run, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from windlass.evaluate.answers import NativeEngine
    from windlass.evaluate.harness import run_harness

    template = (
        "{% for m in messages %}{{ m.content }}<|end_of_text|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.path.read_bytes())
    chat = load_tokenizer(tmp_path)
    lines = write(tmp_path / "lines.jsonl", [{"question": "de zee", "answer": "x"}])
    (tmp_path / "free.yaml").write_text(GENERATIVE.format(name="free", file=lines, tokens=5))
    asked: list[Any] = []

    def complete(self: Any, prompts: Any, samplings: Any, **more: Any) -> list[list[int]]:
        asked.extend(prompts)
        return [chat.encode("x.")] * len(prompts)

    monkeypatch.setattr(NativeEngine, "complete", complete)
    (scores,) = run_harness(open_model(llama_run.path), chat, ["free"], folder=tmp_path, chat=True)
    assert scores[0].value == 1.0 and asked == [[*chat.encode("de zee"), chat.eos, *chat.encode(">")]]
