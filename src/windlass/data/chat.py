"""Chat templates: a conversation as the text and tokens that a model is tuned on and asked with. No torch.

The text is that of transformers' `apply_chat_template`, which a test compares.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.data import import_optional
from windlass.data.tokenizer import SentencePieceTokenizer, Tokenizer
from windlass.errors import DataError
from windlass.files import read_json

Message = Mapping[str, Any]  # "role" (system, user, assistant) and "content"
Spans = list[tuple[int, int]]  # begin and end of parts of a text
TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
# Stand around a marked answer until the text is complete.
_OPEN, _CLOSE = "\x00<generation>\x00", "\x00</generation>\x00"


@dataclass(frozen=True)
class ChatTemplate:
    tokenizer: Tokenizer
    source: str  # Jinja
    specials: Mapping[str, str]  # bos_token, eos_token, ...: names that a template uses

    @cached_property
    def _compiled(self) -> Any:
        jinja2, sandbox = import_optional("jinja2"), import_optional("jinja2.sandbox")

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        class Generation(import_optional("jinja2.ext").Extension):  # type: ignore[misc]
            """{% generation %} marks the answers of a conversation; the text is the same without it."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

            def _enclose(self, caller: Any) -> str:
                return f"{_OPEN}{caller()}{_CLOSE}"

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        # Jinja's own filter escapes HTML.
        environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
            value, ensure_ascii=ensure_ascii, **options
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                "data.chat-template-invalid",
                f"the chat template of {self.tokenizer.path}, line {error.lineno}: {error.message}",
                hint="copy chat_template.jinja or tokenizer_config.json of the model again",
            ) from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text; `add_generation_prompt`: with the beginning of the next answer."""
        return self._render(messages, add_generation_prompt).replace(_OPEN, "").replace(_CLOSE, "")

    def marked_answers(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """The conversation as text, and what `{% generation %}` marks in it: nothing where the template has no
        marks."""
        parts = re.split(f"{_OPEN}|{_CLOSE}", self._render(messages, False))
        ends = [sum(map(len, parts[: number + 1])) for number in range(len(parts))]
        return "".join(parts), [(ends[number - 1], ends[number]) for number in range(1, len(parts), 2)]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        compiled = self._compiled
        try:
            return str(
                compiled.render(
                    messages=[dict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self.specials,
                )
            )
        except (import_optional("jinja2").TemplateError, TypeError, KeyError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                "data.conversation-refused",
                f"the chat template of {self.tokenizer.path} refuses a conversation of {roles}: {error}",
                hint="use an optional system message, then user and assistant in turn, as most templates require",
            ) from None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> list[int]:
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        return self.tokenizer.encode(text, specials=True)

    @cached_property
    def end_token(self) -> int | None:
        """The token that the template writes after an answer; the tokenizer's end token where it writes none."""
        answer = "windlass"
        text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}])
        after = text.rpartition(answer)[2].strip()
        tokens = self.tokenizer.encode(after, specials=True)
        # What is no special token could also stand inside an answer.
        is_special = bool(tokens) and tokens != self.tokenizer.encode(after)
        return tokens[0] if is_special else self.tokenizer.eos


def load_chat_template(tokenizer: Tokenizer, named: str | None = None) -> ChatTemplate:
    """The template of a named file, or beside a tokenizer: chat_template.jinja, or the default one of
    tokenizer_config.json."""
    folder = tokenizer.path.parent
    config = read_json(folder / SETTINGS_FILE) or {}
    if named is not None and not Path(named).is_file():
        raise DataError(
            "data.chat-template-missing", f"template = {named!r} is not a file", hint="give the path of a Jinja file"
        )
    source: Any = None
    if (file := Path(named or folder / TEMPLATE_FILE)).is_file():
        source = file.read_text(encoding="utf-8")
    else:
        source = config.get("chat_template")
        if isinstance(source, list):  # several templates: [{"name": "default", "template": "..."}]
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not source:
        raise DataError(
            "data.chat-template-missing",
            f"the tokenizer {tokenizer.path} has no chat template",
            hint="put chat_template.jinja or tokenizer_config.json of a tuned model next to it; a data file can name a "
            "Jinja file as `template`",
        )
    if isinstance(tokenizer, SentencePieceTokenizer):
        raise DataError(
            "data.chat-needs-special-tokens",
            f"{tokenizer.path} is a SentencePiece file, which reads the special tokens of a chat template as plain text",
            hint="use the tokenizer.json of the model",
        )
    entries = {**(read_json(folder / "special_tokens_map.json") or {}), **config}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in entries.items()
        if name.endswith("_token")
    }
    return ChatTemplate(tokenizer, source, {name: text for name, text in texts.items() if isinstance(text, str)})
