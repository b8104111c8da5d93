"""A conversation with a model: its answers, token by token, by the tokenizer's chat template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from windlass.data.chat import ChatTemplate, Message
from windlass.errors import DataError
from windlass.evaluate.generate import Generated, Sampling, generate
from windlass.evaluate.open_model import OpenModel


@dataclass(frozen=True)
class Answer:
    text: str
    generated: Generated | None  # None: interrupted
    dropped: int  # messages at the beginning that no longer fit


def answer(
    opened: OpenModel,
    template: ChatTemplate,
    messages: Sequence[Message],
    sampling: Sampling,
    show: Callable[[str], None] = lambda text: None,
) -> Answer:
    """The next answer; `show` gets each piece of it as it comes. Ctrl-C ends the answer, which is kept as far as it
    is. DataError: the question alone is too long."""
    messages, dropped = list(messages), 0
    prompt = template.encode(messages, add_generation_prompt=True)
    first = int(messages[0]["role"] == "system")
    while len(prompt) >= opened.max_length and len(messages) > first + 2:
        del messages[first : first + 2]  # the oldest question with its answer
        dropped += 2
        prompt = template.encode(messages, add_generation_prompt=True)
    if len(prompt) >= opened.max_length:
        raise DataError(
            "evaluate.question-too-long",
            f"the question has {len(prompt):,} tokens, but the model reads at most {opened.max_length:,}",
            hint="ask a shorter question",
        )
    shown = ""

    def stop(ids: list[int]) -> bool:
        nonlocal shown
        text = template.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else a character is not complete yet
            show(text[len(shown) :])
            shown = text
        return False

    limits = replace(sampling, tokens=min(sampling.tokens, opened.max_length - len(prompt)))
    try:
        generated = generate(opened.model, prompt, limits, eos=template.end_token, stop=stop)
    except KeyboardInterrupt:
        return Answer(shown, None, dropped)
    text = template.tokenizer.decode(generated.ids)
    show(text[len(shown) :])
    return Answer(text, generated, dropped)
