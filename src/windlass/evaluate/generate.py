"""Text generation: incremental decoding, sampling and stop strings.

In incremental decoding each block keeps its own state of the past (keys and values, or a state of constant size). A
decoder takes tokens and returns the logits after the last one.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.errors import ConfigError
from windlass.evaluate.likelihood import head_weight
from windlass.evaluate.open_model import OpenModel
from windlass.models.decoder import DecoderModel
from windlass.models.hf import HFModel


class TextDecoder:
    """Takes tokens and returns logits; one token's kernels may be recorded as a CUDA graph and replayed."""

    def __init__(self, model: DecoderModel, batch: int, limit: int, *, replays: bool = False) -> None:
        self.model, self.position = model, 0  # tokens taken so far
        self.device = next(model.parameters()).device
        self.replays = replays and self.device.type == "cuda"
        self.layers = model.typed_layers()
        self.states = [[block.new_state(batch, limit) for block in layer.blocks()] for layer in self.layers]
        blocks = model.blocks()
        keyed = {block.table_key: block for block in blocks if block.table_key is not None}
        self.tables = {key: block.make_table(0, limit, self.device) for key, block in keyed.items()}
        self.chunk = min((block.prefill_chunk for block in blocks if block.prefill_chunk), default=limit)
        self._graph: Any = None
        self._token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self._place = torch.zeros(1, dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        """(batch, time) new tokens -> (batch, vocab) logits after the last of them, in fp32."""
        if not self.replays or tokens.shape[1] > 1:
            for part in tokens.split(self.chunk, dim=1):
                places = torch.arange(self.position, self.position + part.shape[1], device=self.device)
                logits = self.run(part, places, self.position)
                self.position += part.shape[1]
            return logits
        self._token.copy_(tokens)
        self._place.fill_(self.position)
        if self._graph is None:
            # Libraries set themselves up in a first pass, which must leave no trace; recording computes nothing.
            tensors = [state for states in self.states for state in states if state is not None]
            saved, stream = [state.clone() for state in tensors], torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.run(self._token, self._place, None)
            torch.cuda.current_stream().wait_stream(stream)
            for state, before in zip(tensors, saved, strict=True):
                state.copy_(before)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self.run(self._token, self._place, None)
        self._graph.replay()
        self.position += 1
        return self._logits.clone()

    @torch.inference_mode()
    def run(self, tokens: Tensor, places: Tensor, start: int | None) -> Tensor:
        """Logits after some tokens; `start` None: one token, by the same kernels whatever its place is."""
        model = self.model
        assert model.embed is not None and model.norm is not None
        x = model.embed(tokens)
        for layer, states in zip(self.layers, self.states, strict=True):
            x = layer.decode(x, states, places, start, self.tables)
        return F.linear(model.norm(x[:, -1]), head_weight(model)).float()

    def state_bytes(self) -> int:
        return sum(
            block.state_bytes(state, self.position)
            for layer, states in zip(self.layers, self.states, strict=True)
            for block, state in zip(layer.blocks(), states, strict=True)
        )


class TransformersDecoder:
    """The cache of a transformers model."""

    def __init__(self, model: HFModel, limit: int) -> None:
        self.model, self.position = model, 0
        self.cache: Any = None
        # Learned positions end; rotary ones and slopes do not.
        positions = getattr(model.net.config, "max_position_embeddings", None)
        tokens = model.net.get_input_embeddings()
        learned = any(isinstance(m, torch.nn.Embedding) and m is not tokens for m in model.net.modules())
        if learned and positions is not None and limit > positions:
            raise ConfigError(
                "evaluate.too-many-positions",
                f"{limit:,} tokens of prompt and answer are more than the model's {positions:,} positions",
                hint="give a shorter prompt, or ask for fewer tokens",
            )

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        output = self.model.net(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        self.position += tokens.shape[1]
        logits: Tensor = output.logits[:, -1, : self.model.vocab].float()
        return logits

    def state_bytes(self) -> int:
        layers = getattr(self.cache, "layers", [])
        tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def make_decoder(
    model: DecoderModel, *, batch: int = 1, limit: int, replays: bool = False
) -> TextDecoder | TransformersDecoder:
    """The decoder of a model, for at most `limit` tokens of prompt and answer together.

    With `replays` a GPU gets the kernels of a token all at once, as a recorded CUDA graph: starting them one by one
    takes most of the time of a small model. On a CPU it changes nothing.
    """
    if isinstance(model, HFModel):
        return TransformersDecoder(model, limit)
    return TextDecoder(model, batch, limit, replays=replays)


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
                hint="use temperature >= 0, 0 < top_p <= 1, top_k >= 1 and tokens >= 1",
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
    ends = () if eos is None else (eos,)
    return generate_batch(model, [prompt], [sampling], ends=ends, stop=stop, replays=replays)[0]


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    ends: Sequence[int] = (),
    stop: Callable[[list[int]], bool] = lambda ids: False,
    replays: bool = True,
) -> list[Generated]:
    """Continue several prompts together, each as it would be continued alone. `samplings` may differ in their seed.

    All rows take as many tokens as the shortest prompt has at once. From there every step takes one token of each row:
    the next one of its prompt, or the one it picked. Nothing is padded, so the method serves every block; prompts of
    similar length waste little.
    """
    if not all(prompts):
        raise ConfigError(
            "evaluate.prompt-empty", "the prompt has no tokens", hint="give at least one character with --prompt"
        )
    device, sampling = next(model.parameters()).device, samplings[0]
    place, longest = min(map(len, prompts)), max(map(len, prompts))
    decoder = make_decoder(model, batch=len(prompts), limit=longest + sampling.tokens, replays=replays)
    randoms = [torch.Generator(device="cpu").manual_seed(one.seed) for one in samplings]
    started = time.perf_counter()
    logits = decoder.feed(torch.tensor([list(prompt[:place]) for prompt in prompts], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first_token = time.perf_counter()
    answers: list[list[int]] = [[] for _ in prompts]
    ended, finished = [False] * len(prompts), [False] * len(prompts)
    while True:
        if sampling.ignore_eos and ends:
            logits = logits.index_fill(1, torch.tensor(ends, device=device), float("-inf"))
        best = logits.argmax(-1).tolist() if sampling.temperature == 0 else None
        for row, ids in enumerate(answers):
            if finished[row] or len(prompts[row]) > place:
                continue
            token = best[row] if best is not None else pick_token(logits[row], sampling, randoms[row])
            ended[row] = token in ends
            if not ended[row]:
                ids.append(token)
            finished[row] = ended[row] or len(ids) >= sampling.tokens or stop(ids)
        if all(finished):
            break
        # A finished row goes on with any token: what it computes is not read.
        tokens = [
            prompt[place] if place < len(prompt) else ids[place - len(prompt)] if place - len(prompt) < len(ids) else 0
            for prompt, ids in zip(prompts, answers, strict=True)
        ]
        logits = decoder.feed(torch.tensor(tokens, device=device)[:, None])
        place += 1
    seconds = time.perf_counter() - first_token
    return [
        Generated(ids, len(prompt), first_token - started, seconds, decoder.state_bytes(), ends_here)
        for prompt, ids, ends_here in zip(prompts, answers, ended, strict=True)
    ]


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


def stop_condition(
    stops: Sequence[str], decode: Callable[[list[int]], str], *, strip: bool = False
) -> Callable[[list[int]], bool]:
    """Ends a text once it has one of these strings; a token may hold more than that, see `text_before`. `strip`: not
    in white space at the beginning."""
    stops = [stop for stop in stops if stop]
    # A token has at least one byte, so the last tokens tell whether the complete text is worth decoding.
    reach = max((len(stop.encode()) for stop in stops), default=0) + 8

    def has_stop(ids: list[int]) -> bool:
        text = decode(ids)
        return any(stop in (text.lstrip() if strip else text) for stop in stops)

    return lambda ids: any(stop in decode(ids[-reach:]) for stop in stops) and has_stop(ids)


def text_before(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0] if stop else text
    return text
