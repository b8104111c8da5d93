"""Conversations become tokens with marks: the forms, the template, what is rejected, and what the store keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import refused

from windlass.config.sources import DataFile, DataSource
from windlass.data.conversations import COUNTED, REJECTED, conversation_encoder, read_messages, read_pair
from windlass.data.readers import RejectedDocument
from windlass.data.store import FILES, open_store
from windlass.data.tokenize import tokenize
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.files import read_json, read_json_lines

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TURNS = [("system", "houd het kort"), ("user", "wat is een lier?"), ("assistant", "een windas, naïve zee"),
         ("user", "en touw?"), ("assistant", "dat hijst de last")]  # fmt: skip
MESSAGES = {"messages": [{"role": role, "content": content} for role, content in TURNS]}


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer as Library

    folder = tmp_path_factory.mktemp("chat-tokenizer")
    library = Library.from_file(str(tokenizer.path))
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("template", [CHATML, PLAIN])
def test_marks_equal_the_assistant_masks_of_transformers(chat_tokenizer: Path, template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(chat_tokenizer).apply_chat_template(
        MESSAGES["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    (tmp_path / "t.jinja").write_text(template)
    ours = conversation_encoder(load_tokenizer(chat_tokenizer), str(tmp_path / "t.jinja")).encode(MESSAGES, "chat")
    assert ours.ids.tolist() == theirs["input_ids"]  # type: ignore[union-attr]
    assert ours.marks.tolist() == theirs["assistant_masks"]  # type: ignore[union-attr]
    assert 0 < sum(theirs["assistant_masks"]) < len(theirs["input_ids"])


def test_the_forms_of_the_field_are_recognised() -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = {"conversations": [{"from": names[role], "value": content} for role, content in TURNS]}
    alpaca = {"instruction": "en touw?", "input": "", "output": "dat hijst de last", "system": "houd het kort",
              "history": [["wat is een lier?", "een windas, naïve zee"]]}  # fmt: skip
    for record in (MESSAGES, sharegpt, alpaca):
        assert read_messages(record, "chat") == MESSAGES["messages"]
    assert read_messages({"instruction": "Vertaal.", "input": "touw", "output": "rope"}, "alpaca")[0]["content"] == (
        "Vertaal.\n\ntouw"
    )


def test_a_pair_is_one_document_of_which_only_the_answers_count(chat_tokenizer: Path) -> None:
    prompt = MESSAGES["messages"][:2]
    texts = {"prompt": prompt, "chosen": "een windas", "rejected": "geen idee"}
    complete = {key: [*prompt, {"role": "assistant", "content": texts[key]}] for key in ("chosen", "rejected")}
    assert read_pair(texts) == read_pair(complete)
    encoder = conversation_encoder(load_tokenizer(chat_tokenizer), None)
    pair = encoder.encode(texts, "pairs")
    assert not isinstance(pair, RejectedDocument | None)
    halves = [pair.ids[(pair.marks & REJECTED) == half] for half in (0, REJECTED)]  # type: ignore[attr-defined]
    for half, name in zip(halves, ("chosen", "rejected"), strict=True):
        single = encoder.encode({"messages": complete[name]}, "chat")
        assert half.tolist() == single.ids.tolist()  # type: ignore[union-attr]
    decoded = encoder.tokenizer.decode(pair.ids[(pair.marks & COUNTED) > 0])  # type: ignore[attr-defined]
    assert decoded == "een windas<|im_end|>\ngeen idee<|im_end|>\n"


@pytest.fixture
def chat_file(chat_tokenizer: Path, data_file: Any, tmp_path: Path) -> Callable[..., DataFile]:
    def make(records: list[Any], *, form: str = "chat", **keys: Any) -> DataFile:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
        source = {"max_tokens": keys.pop("max_tokens", None), "form": form}
        keys = {"tokenizer": str(chat_tokenizer), **keys}
        return data_file({"chat": DataSource(paths=[str(tmp_path / "chat.jsonl")], **source)}, **keys)

    return make


def test_rejects_are_counted_by_reason_and_nothing_is_dropped_silently(
    chat_file: Callable[..., DataFile], tmp_path: Path
) -> None:
    user, answer = {"role": "user", "content": "lier?"}, {"role": "assistant", "content": "windas"}
    wrong: dict[str, Any] = {
        "roles out of order": {"messages": [answer, user]},
        "empty answer": {"messages": [user, {"role": "assistant", "content": " "}]},
        "no answer at the end": {"messages": [user]},
        "unknown role": {"messages": [{"role": "narrator", "content": "x"}]},
        "it has no messages, conversations or instruction": {"text": "x"},
        "not JSON": "{",
    }
    long = {"messages": [user, {"role": "assistant", "content": "water " * 200}]}
    good = [{"messages": [user, answer]}, MESSAGES]
    file = chat_file([*good, *wrong.values(), long, good[0]], max_tokens=100, max_rejects=6, dedup="exact")
    result = tokenize(file)
    entry = result.manifest["sources"]["chat"]
    assert entry["rejected"] == dict.fromkeys(wrong, 1)
    assert entry["filtered"] == {"duplicate": 1, "more than max_tokens": 1}
    assert (entry["documents_in"], entry["documents"]) == (10, 2)
    assert {line["line"] for line in read_json_lines(tmp_path / "store" / "rejects.jsonl")} == set(range(3, 9))
    assert sum(next(iter(read_json_lines(tmp_path / "store" / FILES)))["rejected"].values()) == 6
    with refused("data.documents-rejected", "6"):
        tokenize(chat_file(list(wrong.values()), output=str(tmp_path / "other")))


def test_a_store_keeps_marks_and_template_and_notices_a_changed_mark(
    chat_file: Callable[..., DataFile], chat_tokenizer: Path, tmp_path: Path
) -> None:
    file = chat_file(
        [{"messages": [*MESSAGES["messages"][:4], {"role": "assistant", "content": f"{i} touw"}]} for i in range(9)]
    )
    tokenize(file)
    store = open_store(tmp_path / "store")
    array = store.tokens("chat")
    marks = array.marks(0, len(array))
    assert store.manifest["sources"]["chat"]["counted"] == (marks & COUNTED).sum()
    answers = load_tokenizer(chat_tokenizer).decode(array[0 : len(array)][marks == 1])
    assert answers.endswith("een windas, naïve zee<|im_end|>\n8 touw<|im_end|>\n")
    assert (tmp_path / "store" / "chat_template.jinja").read_text() == CHATML
    assert (read_json(tmp_path / "store" / "tokenizer_config.json") or {})["eos_token"] == "<|im_end|>"
    assert store.verify() == []
    path = tmp_path / "store" / "chat-train-00000.marks"
    changed = bytearray(path.read_bytes())
    changed[7] ^= 1
    path.write_bytes(changed)
    assert [problem.file for problem in open_store(tmp_path / "store").verify()] == [path.name]


def test_rows_of_parquet_are_conversations_too(chat_file: Callable[..., DataFile], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist([MESSAGES] * 5), tmp_path / "chat.parquet")
    source = DataSource(paths=[str(tmp_path / "chat.parquet")], form="messages")
    rows = tokenize(chat_file([], output=str(tmp_path / "p")).model_copy(update={"sources": {"chat": source}}))
    lines = tokenize(chat_file([MESSAGES] * 5, output=str(tmp_path / "j")))
    assert (rows.tokens, rows.documents) == (lines.tokens, 5)


def test_a_tokenizer_without_a_template_is_refused(chat_file: Callable[..., DataFile], tokenizer: Tokenizer) -> None:
    with refused("data.chat-template-missing", "tokenizer.json"):
        tokenize(chat_file([MESSAGES], tokenizer=str(tokenizer.path)))
    with refused("data.chat-template-missing", "no.jinja"):
        tokenize(chat_file([MESSAGES], template="no.jinja"))


def test_marks_of_text_sources_are_all_counted(data_file: Any, write_jsonl: Any, tmp_path: Path) -> None:
    tokenize(data_file({"a": [write_jsonl(tmp_path / "a.jsonl", ["een twee drie"])]}))
    array = open_store(tmp_path / "store").tokens("a")
    assert np.all(array.marks(0, len(array)) == COUNTED)
    assert not list((tmp_path / "store").glob("*.marks"))
