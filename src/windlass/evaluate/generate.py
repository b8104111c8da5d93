"""Text generation with temperature, nucleus and top-k sampling, one token at a time."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.errors import ConfigError
from windlass.evaluate.decode import make_decoder
from windlass.evaluate.open_model import OpenModel


@dataclass(frozen=True, kw_only=True)
class Sampling:
    tokens: int = 100  # at most; generation also ends with the end token
    temperature: float = 0.8  # 0: the most likely token
    top_p: float = 0.95  # sample from the most likely tokens that together have this probability
    top_k: int | None = None  # sample from the k most likely tokens; None: all
    seed: int = 0
    ignore_eos: bool = False  # never pick the end token

    def __post_init__(self) -> None:
        bad_top_k = self.top_k is not None and self.top_k < 1
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.tokens < 1 or bad_top_k:
            raise ConfigError(
                "evaluate.sampling-invalid",
                f"cannot sample with temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}, "
                f"{self.tokens} tokens",
                hint="temperature >= 0, 0 < top_p <= 1, top_k >= 1 and tokens >= 1",
            )


@dataclass(frozen=True)
class Generated:
    ids: list[int]
    prompt_tokens: int
    prompt_seconds: float
    seconds: float  # from the first new token to the last, without the prompt
    state_bytes: int  # carried by the decoder at the end
    ended: bool  # the model itself ended the text

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first, which comes with the prompt."""
        return (len(self.ids) - 1) / self.seconds if len(self.ids) > 1 and self.seconds > 0 else None


def generate(
    model: Any,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    eos: int | None = None,
    stop: Callable[[list[int]], bool] = lambda ids: False,
    replays: bool = True,
) -> Generated:
    """Continue a prompt; `stop` sees the new tokens so far and may end the text. `replays`: see `make_decoder`."""
    if not prompt:
        raise ConfigError(
            "evaluate.prompt-empty", "the prompt has no tokens", hint="give at least one character with --prompt"
        )
    device = next(model.parameters()).device
    decoder = make_decoder(model, limit=len(prompt) + sampling.tokens, replays=replays)
    random = torch.Generator(device="cpu").manual_seed(sampling.seed)
    started = time.perf_counter()
    logits = decoder.feed(torch.tensor([list(prompt)], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first_token = time.perf_counter()
    ids: list[int] = []
    ended = False
    while len(ids) < sampling.tokens:
        if sampling.ignore_eos and eos is not None:
            logits = logits.index_fill(1, torch.tensor([eos], device=device), float("-inf"))
        token = pick_token(logits[0], sampling, random)
        if token == eos:
            ended = True
            break
        ids.append(token)
        if stop(ids):
            break
        if len(ids) < sampling.tokens:
            logits = decoder.feed(torch.tensor([[token]], device=device))
    seconds = time.perf_counter() - first_token
    return Generated(ids, len(prompt), first_token - started, seconds, decoder.state_bytes(), ended)


def pick_token(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """One token id. On the CPU, so that a seed gives the same text on every device that computes the same logits."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    chances, order = torch.softmax(logits.double().cpu() / sampling.temperature, -1).sort(descending=True)
    # The token that crosses top_p still counts: at least one is always left.
    kept = chances * (chances.cumsum(-1) - chances < sampling.top_p)
    if sampling.top_k is not None:
        kept[sampling.top_k :] = 0
    return int(order[torch.multinomial(kept / kept.sum(), 1, generator=random)])


def prompt_room(opened: OpenModel, tokens: int) -> int:
    """Tokens of a prompt that fit before an answer; at least half of the model's sequence."""
    return max(opened.max_length - tokens, opened.max_length // 2, 1)


def stop_condition(stops: Sequence[str], decode: Callable[[list[int]], str]) -> Callable[[list[int]], bool]:
    """Ends a text once it has one of these strings; a token may hold more than that, see `text_before`."""
    return lambda ids: any(stop in decode(ids) for stop in stops if stop)


def text_before(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    for stop in stops:
        text = text.split(stop)[0] if stop else text
    return text
