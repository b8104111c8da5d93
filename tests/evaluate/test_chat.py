"""`windlass chat`: one question as JSON, a conversation of several turns, and folders that cannot answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.chat_store import TEMPLATE, make_store, recipe_table
from tests.train.helpers import new_run, run_here
from typer.testing import CliRunner

from windlass.cli import build
from windlass.config import Recipe
from windlass.convert.export import export
from windlass.convert.source import find_tokenizer
from windlass.data.chat import load_chat_template
from windlass.errors import ConfigError, DataError
from windlass.evaluate import chat
from windlass.evaluate.generate import Sampling
from windlass.evaluate.open_model import open_model
from windlass.runs.folder import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("chat")
    recipe = Recipe.model_validate(recipe_table(make_store(folder), {"task": "chat", "lora": {"rank": 4}}))
    made = new_run(folder / "run")
    run_here(recipe, made)
    made.config_file.write_text(json.dumps(recipe.model_dump(mode="json")))
    return made


def call(*argv: Any, text: str = "") -> str:
    result = CliRunner().invoke(build(), ["chat", *map(str, argv)], input=text, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_one_question_and_a_conversation(run: Run) -> None:
    answer = json.loads(call(run.path, "--prompt", "lier?", "--system", "kort", "--tokens", 8, "--json"))
    assert [m["role"] for m in answer["messages"]] == ["system", "user", "assistant"]
    assert answer["answer"] == answer["messages"][-1]["content"]
    again = json.loads(call(run.path, "--prompt", "lier?", "--system", "kort", "--tokens", 8, "--json"))
    assert again["answer"] == answer["answer"]
    # Two turns, then the end of input.
    assert call(run.path, "--tokens", 4, text="lier?\n\nen touw?\n").count("> ") >= 2
    with pytest.raises(ConfigError) as error:
        call(run.path, "--json")
    assert error.value.code == "evaluate.chat-json"
    with pytest.raises(DataError) as long:
        call(run.path, "--prompt", "zee " * 500)
    assert long.value.code == "evaluate.question-too-long"
    printed = call(run.path, "--tokens", 4, text="zee " * 500 + "\nlier?\n")
    assert printed.count("> ") >= 2 and "tokens, but the model reads" in printed, "the conversation goes on"


def test_an_answer_sees_the_conversation_and_forgets_its_beginning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(run.path)
    template = load_chat_template(find_tokenizer(opened.source))
    prompts = []

    def interrupted(model: Any, prompt: list[int], *args: Any, **options: Any) -> None:
        prompts.append(template.tokenizer.decode(prompt))
        options["stop"](template.tokenizer.encode("zee"))
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "generate", interrupted)
    turns = [{"role": role, "content": f"{role} {i} zee"} for i in range(6) for role in ("user", "assistant")]
    pieces: list[str] = []
    reply = chat.answer(opened, template, [*turns, {"role": "user", "content": "en?"}], Sampling(), pieces.append)
    assert reply.text == "".join(pieces) == "zee" and reply.generated is None
    assert (
        reply.dropped > 0
        and "user 0 zee" not in prompts[0]
        and prompts[0].endswith("en?<|im_end|>\n<|im_start|>assistant\n")
    )


def test_an_export_has_the_template_and_the_merged_weights(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert export(run.path, tmp_path / "hf").check.ok  # type: ignore[union-attr]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "lier?"}]
    opened = open_model(tmp_path / "hf")
    template = load_chat_template(find_tokenizer(opened.source))
    assert template.source == TEMPLATE
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == template.encode(messages, add_generation_prompt=True)
    ends = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert ends[0] == tokenizer.convert_tokens_to_ids("<|im_end|>") and tokenizer.eos_token_id in ends
    tokens = torch.tensor([ids])
    with torch.no_grad():
        assert torch.allclose(opened.model(tokens), open_model(run.path).model(tokens), atol=1e-5)


def test_a_tokenizer_without_a_template_is_refused(run: Run, tmp_path: Path) -> None:
    from windlass.data.tokenizer import train_bpe

    train_bpe(["een schip op zee"] * 5, 290, tmp_path)
    with pytest.raises(DataError) as error:
        call(run.path, "--prompt", "x", "--tokenizer", tmp_path)
    assert error.value.code == "data.chat-template-missing"
