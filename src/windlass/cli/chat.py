"""`windlass chat`: talk to a tuned model in the terminal."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    StepOption,
    TemperatureOption,
    TopPOption,
)
from windlass.cli.output import console, print_json, text_of, working
from windlass.errors import ConfigError, DataError


def chat(
    run: ModelArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Ask this one question instead of starting a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Maximum number of tokens in an answer.")] = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same answers.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Tokenizer with a chat template (default: the run's).")
    ] = None,
    step: StepOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chat with a model, using its chat template. Ctrl-C interrupts an answer; Ctrl-C or Ctrl-D at the prompt ends the
    conversation."""
    with working("importing torch", quiet=as_json):
        from windlass.convert.source import find_tokenizer
        from windlass.data.chat import load_chat_template
        from windlass.evaluate.chat import answer
        from windlass.evaluate.generate import Sampling
        from windlass.evaluate.open_model import open_model

    if as_json and prompt is None:
        raise ConfigError(
            "evaluate.chat-json",
            "--json answers a single question, but none is given",
            hint="give the question with --prompt",
        )
    with working(f"loading the weights of {run}", quiet=as_json):
        opened = open_model(run, step=step, device=device, dtype=dtype)
        template = load_chat_template(find_tokenizer(opened.source, tokenizer))
    sampling = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    out = console()
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def show(piece: str) -> None:
        if not as_json:
            out.print(piece, markup=False, end="", soft_wrap=True)
            sys.stdout.flush()

    while True:
        try:
            question = prompt if prompt is not None else input("> ")
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            reply = answer(opened, template, messages, sampling, show)
        except DataError as error:
            if prompt is not None:
                raise
            out.print(error.message, style="red", markup=False)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply.text})
        result = reply.generated
        if as_json:
            keys = ("prompt_tokens", "tokens_per_second", "ended")
            numbers = {key: getattr(result, key, None) for key in keys}
            print_json({"messages": messages, "answer": reply.text, "step": opened.step, **numbers})
            return
        out.print()
        if reply.dropped:
            out.print(
                f"the first {reply.dropped} messages no longer fit into {opened.max_length:,} tokens", style="dim"
            )
        if prompt is not None:
            speed = text_of(None if result is None else result.tokens_per_second, ",.1f", "not measured")
            out.print(f"tokens/s: {speed} ({opened.device_text})", style="dim", markup=False)
            return
        # Each answer another draw, and the same conversation again from the same seed.
        sampling = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, seed=sampling.seed + 1)
