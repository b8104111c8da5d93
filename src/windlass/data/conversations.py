"""Conversations as tokens with a mark each: the forms of the field, and which tokens are learned.

What counts is the assistant's answers: the text inside `{% generation %}` where the chat template has it, else what
rendering one message more adds to the prompt before it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.data.chat import ChatTemplate, Spans, load_chat_template
from windlass.data.readers import MAX_KEPT_BYTES, Record, RejectedDocument
from windlass.data.tokenizer import JsonTokenizer, Tokenizer
from windlass.errors import DataError

Message = dict[str, Any]
# Bits of a token's mark: the loss counts it; it belongs to the rejected answer of a pair.
COUNTED, REJECTED = 1, 2
_ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool",
}  # fmt: skip
_MAY_FOLLOW = {
    None: ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}  # fmt: skip


class UnusableConversationError(Exception):
    """Why a record is rejected; counted by this text without what stands in brackets."""


class MarkedText(str):
    """A rendered conversation with its tokens and their marks."""

    ids: npt.NDArray[np.uint32]
    marks: npt.NDArray[np.uint8]


# -- forms of a record ---------------------------------------------------------------------------------------------


def read_messages(record: Any, form: str) -> list[Message]:
    """The messages of a record in the form `messages`, `sharegpt` or `alpaca`; `chat` recognises which."""
    if not isinstance(record, Mapping):
        raise UnusableConversationError("not a JSON object (a file has one record per line)")
    if form == "chat":
        forms = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca"}
        form = next((form for key, form in forms.items() if key in record), "unknown")
    if form == "alpaca":
        question = "\n\n".join(part for part in (record.get("instruction"), record.get("input")) if part)
        turns = [*(record.get("history") or []), (question, record.get("output"))]
        begin = [("system", record["system"])] if record.get("system") else []
        pairs = [*begin, *(pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=False))]
        return check_order([{"role": role, "content": content} for role, content in pairs])
    key = {"messages": "messages", "sharegpt": "conversations"}.get(form)
    if key is None or not isinstance(record.get(key), list):
        raise UnusableConversationError("it has no messages, conversations or instruction")
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    return check_order([*system, *map(_message, record[key])])


def _message(entry: Any) -> Message:
    """One message with the field's usual names; other keys (tool calls) stay for the template."""
    if not isinstance(entry, Mapping):
        raise UnusableConversationError("a message is not an object")
    role = entry.get("role", entry.get("from"))
    if role not in _ROLES:
        raise UnusableConversationError(f"unknown role ({role!r})")
    others = {key: value for key, value in entry.items() if key not in ("from", "value") and value is not None}
    return {**others, "role": _ROLES[role], "content": entry.get("content", entry.get("value"))}


def check_order(messages: list[Message], *, answered: bool = True) -> list[Message]:
    """The same messages; a system prompt comes first, user and assistant take turns, and an answer is last."""
    before: str | None = None
    for message in messages:
        role, content = message["role"], message.get("content")
        if role not in _MAY_FOLLOW.get(before, ()):
            raise UnusableConversationError(f"roles out of order ({role} after {before or 'nothing'})")
        is_empty = not content or (isinstance(content, str) and not content.strip())
        if is_empty and not message.get("tool_calls"):
            raise UnusableConversationError("empty answer" if role == "assistant" else f"empty {role} message")
        before = role
    if answered and before != "assistant":
        raise UnusableConversationError("no answer at the end")
    return messages


def read_pair(record: Any) -> tuple[list[Message], list[Message], list[Message]]:
    """(prompt, chosen answer, rejected answer); an answer may be a text, messages, or the complete conversation."""
    if not isinstance(record, Mapping) or not {"chosen", "rejected"} <= record.keys():
        raise UnusableConversationError("it has no chosen and rejected answer")

    def listed(value: Any, role: str) -> list[Message]:
        return [{"role": role, "content": value}] if isinstance(value, str) else [_message(entry) for entry in value]

    chosen, rejected = (listed(record[key], "assistant") for key in ("chosen", "rejected"))
    if chosen and chosen[0]["role"] != "assistant":  # the complete conversation: what both share is the prompt
        pairs = zip(chosen, rejected, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    else:
        prompt = listed(record.get("prompt") or record.get("messages") or [], "user")
        prompt = [*listed(record.get("system") or [], "system"), *prompt]
    for answer in (chosen, rejected):
        check_order([*prompt, *answer])
    if chosen == rejected:
        raise UnusableConversationError("chosen and rejected answer are the same")
    return prompt, chosen, rejected


# -- tokens --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConversationEncoder:
    """Turns the records of a source into marked tokens. The template ends a conversation: no end token is added."""

    tokenizer: JsonTokenizer
    template: ChatTemplate

    def encode(self, record: Any, form: str, raw: bytes = b"") -> Record:
        try:
            if form == "pairs":
                prompt, *answers = read_pair(record)
                parts = [self._marked([*prompt, *answer], len(prompt)) for answer in answers]
            else:
                parts = [self._marked(read_messages(record, form), 0)]
        except UnusableConversationError as error:
            return RejectedDocument(str(error), (raw or json.dumps(record, default=str).encode())[:MAX_KEPT_BYTES])
        text = MarkedText("".join(part for part, _, _ in parts))
        text.ids = np.concatenate([ids for _, ids, _ in parts])
        text.marks = np.concatenate([marks + REJECTED * number for number, (_, _, marks) in enumerate(parts)])
        return text

    def _answers(self, messages: Sequence[Message], first: int) -> tuple[str, Spans]:
        """The rendered text, and where in it the answers stand that are message number `first` or later."""
        text, spans = self.template.marked_answers(messages)
        if spans and first == 0:
            return text, spans
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and number >= first:
                prompt = self.template.render(messages[:number], add_generation_prompt=True)
                answer = self.template.render(messages[: number + 1])
                if not (answer.startswith(prompt) and text.startswith(answer)):
                    raise UnusableConversationError(
                        "the template renders an earlier turn differently once more turns follow"
                    )
                spans.append((len(prompt), len(answer)))
        return text, spans

    def _marked(self, messages: list[Message], first: int) -> tuple[str, npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        try:
            text, spans = self._answers(messages, first)
        except DataError as error:
            raise UnusableConversationError(f"the chat template refuses it ({error.message[-80:]})") from None
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        begins, ends = offsets[:, 0], offsets[:, 1]
        marks = np.zeros(len(ids), dtype=np.uint8)
        for start, stop in spans:
            marks[(begins < stop) & (ends > start)] = COUNTED
        if not marks.any():
            raise UnusableConversationError("the template marks no token of an answer")
        return text, ids, marks


def conversation_encoder(tokenizer: Tokenizer, named: str | None) -> ConversationEncoder:
    if not isinstance(tokenizer, JsonTokenizer):
        raise DataError(
            "data.chat-tokenizer-kind",
            f"conversations need a tokenizer.json; {tokenizer.path} is of kind {tokenizer.kind}",
            hint="use the tokenizer.json of the same model",
        )
    return ConversationEncoder(tokenizer, load_chat_template(tokenizer, named))
