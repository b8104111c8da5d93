"""`windlass generate`: continue a text with a trained model."""

from pathlib import Path
from typing import Annotated

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
from windlass.units import print_bytes


def generate(
    run: ModelArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Maximum number of new tokens.")] = 100,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 0.95,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the k most likely tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop string (repeatable).")] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")] = 0,
    go_on: Annotated[
        bool, typer.Option("--ignore-eos", "--go-on", help="Keep generating past the end-of-text token.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Tokenizer to use (default: the store's).")
    ] = None,
    step: StepOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, with a key/value cache (Llama) or a state of constant size (RetNet)."""
    with working("importing torch", quiet=as_json):
        from windlass.convert.config_json import positions_of
        from windlass.convert.source import find_tokenizer
        from windlass.evaluate import generate as evaluate
        from windlass.evaluate.open_model import open_model

    sampling = evaluate.Sampling(
        tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, ignore_eos=go_on
    )
    with working(f"loading the weights of {run}", quiet=as_json):
        opened = open_model(run, step=step, device=device, dtype=dtype)
        loaded = find_tokenizer(opened.source, tokenizer)
    stops = stop or []
    with working(f"generating up to {tokens:,} tokens", quiet=as_json):
        result = evaluate.generate(
            opened.model,
            loaded.encode(prompt),
            sampling,
            eos=loaded.eos,
            stop=evaluate.stop_condition(stops, loaded.decode),
        )
    text = evaluate.text_before(loaded.decode(result.ids), stops)
    if as_json:
        keys = ("ids", "tokens_per_second", "prompt_tokens", "prompt_seconds", "state_bytes", "ended")
        about = {"prompt": prompt, "text": text, "step": opened.step, "device": opened.device_text}
        print_json({**about, **{key: getattr(result, key) for key in keys}})
        return
    out = console()
    out.print(prompt, style="bold", markup=False, end="", soft_wrap=True)
    out.print(text, markup=False, soft_wrap=True)
    speed = text_of(result.tokens_per_second, ",.1f", "not measured")
    lines = [
        f"{len(result.ids)} tokens{' (ended by the model)' if result.ended else ''} at {speed} tokens/s "
        f"after a prompt of {result.prompt_tokens}; state {print_bytes(result.state_bytes)} ({opened.device_text})",
        *([opened.source.note] if opened.source.note else []),
    ]
    trained, total = positions_of(opened.recipe, opened.source.folder), result.prompt_tokens + len(result.ids)
    if total > trained:
        lines.append(
            f"{total:,} tokens in total, but the model was trained on sequences of {trained:,}: text beyond that is unreliable"
        )
    for line in lines:
        out.print(line, style="dim", markup=False, soft_wrap=True)
