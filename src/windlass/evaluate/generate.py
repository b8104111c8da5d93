"""What does the model say next? Sampling with temperature and nucleus, one token at a time, and how fast it went."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.errors import ConfigError
from windlass.evaluate.decode import decoder


@dataclass(frozen=True, kw_only=True)
class Sampling:
    tokens: int = 100
    """At most; generation also ends with the end token."""
    temperature: float = 0.8
    """0 takes the most probable token."""
    top_p: float = 0.95
    """Only the most probable tokens that together have this probability."""
    top_k: int | None = None
    """Only the so many most probable tokens; None: all."""
    seed: int = 0
    go_on: bool = False
    """Never pick the end token, so that the text has the whole length."""

    def __post_init__(self) -> None:
        few = self.top_k is not None and self.top_k < 1
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.tokens < 1 or few:
            raise ConfigError(
                "evaluate.temperature-top-p-top",
                f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}, {self.tokens} tokens: not a way to sample",
                hint="temperature is at least 0, top_p above 0 and at most 1, top_k at least 1, and one token or more is asked for",
            )


@dataclass(frozen=True)
class Generated:
    """What came out, and what it took."""

    ids: list[int]
    prompt_tokens: int
    prompt_seconds: float
    seconds: float
    """From the first new token to the last, the prompt not included."""
    state_bytes: int
    """What the decoder carried at the end."""
    ended: bool
    """True when the model itself ended the text."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first: the first comes with the prompt."""
        return (len(self.ids) - 1) / self.seconds if len(self.ids) > 1 and self.seconds > 0 else None


def generate(
    model: Any,
    prompt: Sequence[int],
    how: Sampling,
    *,
    eos: int | None = None,
    stop: Callable[[list[int]], bool] = lambda ids: False,
    replays: bool = True,
) -> Generated:
    """Continue a prompt; `stop` sees what has come so far and may end it. `replays`: see `decoder`."""
    if not prompt:
        raise ConfigError(
            "evaluate.prompt-tokens", "the prompt has no tokens", hint="give at least one character with --prompt"
        )
    device = next(model.parameters()).device
    state = decoder(model, limit=len(prompt) + how.tokens, replays=replays)
    began = time.perf_counter()
    logits = state.feed(torch.tensor([list(prompt)], device=device))
    _wait(device)
    first = time.perf_counter()
    ids: list[int] = []
    ended = False
    for token in _sample(state, logits, how, device, eos if how.go_on else None):
        if token == eos:
            ended = True
            break
        ids.append(token)
        if stop(ids):
            break
    return Generated(ids, len(prompt), first - began, time.perf_counter() - first, state.state_bytes(), ended)


def stops_at(stops: Sequence[str], decode: Callable[[list[int]], str]) -> Callable[[list[int]], bool]:
    """Ends a text once one of these has come; a token may hold more than that, see `up_to`."""
    wanted = [stop for stop in stops if stop]
    return lambda ids: any(stop in decode(ids) for stop in wanted)


def up_to(text: str, stops: Sequence[str]) -> str:
    """The text before the first of them."""
    for stop in stops:
        text = text.split(stop)[0] if stop else text
    return text


def _sample(state: Any, logits: Tensor, how: Sampling, device: torch.device, never: int | None) -> Iterator[int]:
    random = torch.Generator(device="cpu").manual_seed(how.seed)
    for number in range(how.tokens):
        if never is not None:
            logits = logits.index_fill(1, torch.tensor([never], device=device), float("-inf"))
        token = pick(logits[0], how, random)
        yield token
        if number + 1 < how.tokens:
            logits = state.feed(torch.tensor([[token]], device=device))


def pick(logits: Tensor, how: Sampling, random: torch.Generator) -> int:
    """One token id. On the CPU, so that a seed gives the same text on every device that computes the same logits."""
    if how.temperature == 0:
        return int(logits.argmax())
    chances, order = torch.softmax(logits.double().cpu() / how.temperature, -1).sort(descending=True)
    # The token that crosses top_p still counts: at least one is always left.
    kept = chances * (chances.cumsum(-1) - chances < how.top_p)
    if how.top_k is not None:
        kept[how.top_k :] = 0
    return int(order[torch.multinomial(kept / kept.sum(), 1, generator=random)])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
