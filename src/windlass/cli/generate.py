"""`windlass generate`: what does the model say next, and how fast?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.words import AsJson, AtStep, Device, Dtype, Which


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)


def generate(
    run: Which,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="At most so many new tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the most probable token.")
    ] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of probability to choose from.")] = 0.95,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Only so many of the most probable tokens.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends it; may be repeated.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")] = 0,
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Never pick the end token: the text has the whole length.")
    ] = False,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Tokenizer; the store's when left out.")] = None,
    step: AtStep = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text: with a key/value cache (Llama) or a state of constant size (RetNet)."""
    from windlass.cli.output import print_json
    from windlass.evaluate.generate import Sampling, stops_at, up_to
    from windlass.evaluate.generate import generate as continue_text
    from windlass.evaluate.opened import find_tokenizer, open_model

    how = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, go_on=go_on)
    opened = open_model(run, step=step, device=device, dtype=dtype)
    words = find_tokenizer(opened, tokenizer)
    made = continue_text(
        opened.model, words.encode(prompt), how, eos=words.eos, stop=stops_at(stop or [], words.decode)
    )
    text, rate = up_to(words.decode(made.ids), stop or []), made.tokens_per_second
    if as_json:
        print_json({
            "prompt": prompt, "text": text, "ids": made.ids, "tokens_per_second": rate, "prompt_tokens": made.prompt_tokens,
            "prompt_seconds": made.prompt_seconds, "state_bytes": made.state_bytes, "ended": made.ended, "step": opened.step, "device": opened.where,
        })  # fmt: skip
        return
    _tell(prompt, text, made, opened)


def _tell(prompt: str, text: str, made: Any, opened: Any) -> None:
    from windlass.cli.output import console
    from windlass.evaluate.export import positions_of
    from windlass.units import print_bytes

    out, rate = console(), made.tokens_per_second
    out.print(prompt, style="bold", markup=False, end="", soft_wrap=True)
    out.print(text, markup=False, soft_wrap=True)
    speed = "unknown" if rate is None else f"{rate:,.1f}"
    ended = ", ended by the model," if made.ended else ""
    said = [
        f"{len(made.ids)} tokens{ended} at {speed} tokens/s after a prompt of {made.prompt_tokens}; "
        f"state {print_bytes(made.state_bytes)} ({opened.where})"
    ]
    said += [opened.note] if opened.note else []
    longest, whole = positions_of(opened.recipe, opened.source), made.prompt_tokens + len(made.ids)
    if whole > longest:
        said.append(
            f"{whole:,} tokens in all: the model was trained on sequences of {longest:,}, and what stands behind is a guess"
        )
    for line in said:
        out.print(line, style="dim", markup=False, soft_wrap=True)
