"""Chat templates: a conversation as the text and tokens that a model is tuned on and asked with. No torch.

The text is that of transformers' `apply_chat_template`, which a test compares.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from windlass.data import import_optional
from windlass.data.tokenizer import SentencePieceTokenizer, Tokenizer
from windlass.errors import DataError
from windlass.files import read_json

Message = Mapping[str, Any]  # "role" (system, user, assistant) and "content"


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
                next(parser.stream)
                return parser.parse_statements(["name:endgeneration"], drop_needle=True)

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
                hint="most templates take an optional system message, then user and assistant in turn",
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


def load_chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The template beside a tokenizer: chat_template.jinja, or the default one of tokenizer_config.json."""
    folder = tokenizer.path.parent
    config = read_json(folder / "tokenizer_config.json") or {}
    source: Any = config.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        source = file.read_text(encoding="utf-8")
    elif isinstance(source, list):  # several templates: [{"name": "default", "template": "..."}]
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not source:
        raise DataError(
            "data.chat-template-missing",
            f"the tokenizer {tokenizer.path} has no chat template",
            hint="put chat_template.jinja or tokenizer_config.json of a tuned model beside it, or leave out --chat",
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
