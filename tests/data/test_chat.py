"""Chat templates render as transformers renders them, and bad ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.data.chat import load_chat_template
from windlass.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from windlass.errors import DataError

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}\n"
    "    {%- else %}{{ message.content | trim }}{%- endif %}\n"
    "    {{- '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}{{ {'é': 1} | tojson }}"
)
TALK = [
    {"role": "user", "content": "  Wat is een lier? "},
    {"role": "assistant", "content": "Een <machine> & meer."},
    {"role": "user", "content": "Dank je"},
]


def make_tokenizer(folder: Path, template: Any = None, **config: Any) -> Tokenizer:
    train_bpe(["een schip op zee en een lier"] * 5, 300, folder)
    value = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    first = len(value["model"]["vocab"])
    value["added_tokens"] += [{"id": first + i, "content": name, **flags} for i, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps(value))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", **flags},
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
    return load_tokenizer(folder)


@pytest.mark.parametrize("template", [CHATML, STRICT], ids=["chatml", "strict"])
@pytest.mark.parametrize("form", ["text", "list", "file"])
def test_renders_as_transformers(template: str, form: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    forms = {"text": template, "list": [{"name": "default", "template": template}], "file": None}
    tokenizer = make_tokenizer(tmp_path, forms[form])
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_chat_template(tokenizer)
    for messages, begins in ((TALK, True), (TALK, False), (TALK[:1], True)):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins)
        assert ours.render(messages, add_generation_prompt=begins) == expected
        ids = theirs(expected, add_special_tokens=False)["input_ids"]
        assert ours.encode(messages, add_generation_prompt=begins) == ids


def test_the_end_of_an_answer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "a", CHATML)
    (end,) = tokenizer.encode("<|im_end|>", specials=True)
    assert load_chat_template(tokenizer).end_token == end != tokenizer.eos
    plain = make_tokenizer(tmp_path / "b", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert load_chat_template(plain).end_token == plain.eos


def test_refusals(tmp_path: Path) -> None:
    cases = [
        (None, TALK, "data.chat-template-missing", "tokenizer.json"),
        ("{% for m in %}", TALK, "data.chat-template-invalid", "line 1"),
        (STRICT, TALK[1:], "data.conversation-refused", "assistant, user"),
        ("{{ messages[0].content + 1 }}", TALK, "data.conversation-refused", "user, assistant, user"),
    ]
    for number, (template, messages, code, part) in enumerate(cases):
        tokenizer = make_tokenizer(tmp_path / str(number), template)
        with pytest.raises(DataError) as error:
            load_chat_template(tokenizer).render(messages)
        assert error.value.code == code and part in error.value.message


def test_a_sentencepiece_file_is_refused(tmp_path: Path) -> None:
    from windlass.data.tokenizer import SentencePieceTokenizer

    (tmp_path / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(DataError) as error:
        load_chat_template(SentencePieceTokenizer(tmp_path / "tokenizer.model", "sentencepiece", 100, 2, None))
    assert error.value.code == "data.chat-needs-special-tokens"
