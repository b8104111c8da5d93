"""How is the next token computed without doing the past again? Llama keeps keys and values, RetNet a state of constant size.

A decoder takes tokens and gives the logits of the last one; `state_bytes` says what it carries from token to token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.errors import ConfigError
from windlass.evaluate.losses import head_weight
from windlass.models.hf import HFModel
from windlass.models.llama import Llama, rope_table, rotate
from windlass.models.retnet import RetNet, decay_matrix, decays, rotate_every_two


class Decoder(Protocol):
    position: int
    """Tokens taken so far."""

    def feed(self, tokens: Tensor) -> Tensor:
        """(batch, time) new tokens -> (batch, vocab) logits after the last of them, in fp32."""
        ...

    def state_bytes(self) -> int:
        """Memory that is carried from token to token."""
        ...


def decoder(model: Any, *, batch: int = 1, limit: int, replays: bool = False) -> Decoder:
    """The decoder of a model's family, for at most `limit` tokens (prompt and answer together).

    With `replays` a GPU gets the kernels of a token all at once, as a recorded graph: starting them one by one takes most of the
    time of a small model. On a CPU it changes nothing.
    """
    if isinstance(model, HFModel):
        refuse_positions(model, limit)
        return HFDecoder(model)
    made: RetNetDecoder | LlamaDecoder
    made = RetNetDecoder(model, batch) if isinstance(model, RetNet) else LlamaDecoder(model, batch, limit)
    if replays and next(model.parameters()).is_cuda:
        made.replay = Replay(made, batch)
    return made


def refuse_positions(model: HFModel, limit: int) -> None:
    """Learned positions end; rotary ones and slopes do not."""
    positions = getattr(model.net.config, "max_position_embeddings", None)
    words = model.net.get_input_embeddings()
    learned = any(isinstance(m, torch.nn.Embedding) and m is not words for m in model.net.modules())
    if learned and positions is not None and limit > positions:
        raise ConfigError(
            "evaluate.tokens-prompt-answer-model",
            f"{limit:,} tokens of prompt and answer are more than the model's {positions:,} positions",
            hint="give a shorter prompt, or ask for fewer tokens",
        )


class Replay:
    """The kernels of one token, recorded at the first and started again for every other."""

    def __init__(self, of: RetNetDecoder | LlamaDecoder, batch: int) -> None:
        device = next(of.model.parameters()).device
        self.of, self.graph = of, None
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.place.fill_(self.of.position)
        if self.graph is None:
            self.graph, self.logits = self._record()
        self.graph.replay()
        return self.logits.clone()

    def _record(self) -> tuple[Any, Tensor]:
        """Libraries set themselves up in a first pass, which must leave no trace; what is recorded is not computed yet."""
        kept, aside = self.of.keep(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.of.one(self.token, self.place)
        torch.cuda.current_stream().wait_stream(aside)
        self.of.put_back(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.of.one(self.token, self.place)
        return graph, logits


def last_logits(model: Any, hidden: Tensor) -> Tensor:
    return F.linear(model.norm(hidden[:, -1]), head_weight(model)).float()


class LlamaDecoder:
    """Keys and values of the past in memory that is taken once."""

    replay: Replay | None = None

    def __init__(self, model: Llama, batch: int, limit: int) -> None:
        self.model, self.position, self.limit = model, 0, limit
        weight = next(model.parameters())
        heads = next(iter(model.layers.values())).attention.wk.weight.shape[0] // model.head_dim
        shape = (model.num_layers, 2, batch, heads, limit, model.head_dim)
        # Zeros, not what memory happens to hold: what lies behind the last token is multiplied by a weight of 0.
        self.cache = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.cos, self.sin = rope_table(limit, model.head_dim, model.theta, weight.device)

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        if self.replay is not None and tokens.shape[1] == 1:
            logits = self.replay(tokens)
        else:
            logits = self._through(tokens, self._attend)
        self.position += tokens.shape[1]
        return logits

    def _through(self, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.model.embed(tokens)
        for block, cache in zip(self.model.layers.values(), self.cache, strict=True):
            x = x + attend(block.attention, block.attention_norm(x), cache)
            x = x + block.feed_forward(block.ffn_norm(x))
        return last_logits(self.model, x)

    @torch.inference_mode()
    def one(self, token: Tensor, place: Tensor) -> Tensor:
        """Logits after one token, with its place as a tensor: the same kernels whatever the place is."""
        seen = torch.arange(self.limit, device=place.device) <= place
        cos, sin = self.cos.index_select(0, place), self.sin.index_select(0, place)

        def attend(attention: Any, x: Tensor, cache: Tensor) -> Tensor:
            q, k, v = (part.view(len(x), 1, -1, attention.head_dim).transpose(1, 2) for part in attention.project(x))
            cache[0].index_copy_(2, place, rotate(k, cos, sin))
            cache[1].index_copy_(2, place, v)
            q = rotate(q, cos, sin).reshape(len(x), cache.shape[2], -1, attention.head_dim)
            scores = (q @ cache[0].transpose(-1, -2)).float() * attention.head_dim**-0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(x.dtype)
            return attention.wo((weights @ cache[1]).reshape(len(x), 1, -1))

        return self._through(token, attend)

    def keep(self) -> None:
        """Nothing: the same token at the same place writes the same keys and values."""

    def put_back(self, kept: None) -> None: ...

    def _attend(self, attention: Any, x: Tensor, cache: Tensor) -> Tensor:
        batch, time = x.shape[:2]
        begin, end = self.position, self.position + time
        q, k, v = (part.view(batch, time, -1, attention.head_dim).transpose(1, 2) for part in attention.project(x))
        cos, sin = self.cos[begin:end], self.sin[begin:end]
        cache[0, :, :, begin:end], cache[1, :, :, begin:end] = rotate(k, cos, sin), v
        keys, values = cache[0, :, :, :end], cache[1, :, :, :end]
        mask = _past(begin, time, x.device) if begin and time > 1 else None
        causal = begin == 0 and time > 1
        gqa = q.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), keys, values, attn_mask=mask, is_causal=causal, enable_gqa=gqa
        )
        return attention.wo(out.transpose(1, 2).reshape(batch, time, -1))

    def state_bytes(self) -> int:
        """Of the positions taken so far; the memory for the rest is already reserved."""
        return self.cache[..., : self.position, :].numel() * self.cache.element_size()


def _past(begin: int, time: int, device: torch.device) -> Tensor:
    return torch.arange(begin + time, device=device) <= begin + torch.arange(time, device=device)[:, None]


class RetNetDecoder:
    """One state per layer and head; a long prompt goes through in chunks, so that memory does not grow with it."""

    replay: Replay | None = None

    def __init__(self, model: RetNet, batch: int, chunk: int = 512) -> None:
        self.model, self.position, self.chunk = model, 0, chunk
        weight = next(model.parameters())
        self.device = weight.device
        one = next(iter(model.layers.values())).retention
        shape = (model.num_layers, batch, model.heads, one.key_dim, one.value_dim)
        # In fp32 whatever the weights are: what is added at every token must not be rounded away.
        self.state = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.gamma = decays(model.heads, self.device)

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        if self.replay is not None and tokens.shape[1] == 1:
            logits = self.replay(tokens)
            self.position += 1
            return logits
        for part in tokens.split(self.chunk, dim=1):
            places = torch.arange(self.position, self.position + part.shape[1], device=self.device)
            logits = self.one(part, places)
            self.position += part.shape[1]
        return logits

    @torch.inference_mode()
    def one(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits after some tokens, with their places as a tensor: the same kernels wherever they stand."""
        x = self.model.embed(tokens)
        turn = angles_at(places, self.model.key_dim)
        for number, block in enumerate(self.model.layers.values()):
            x = x + self._retain(block.retention, block.retention_norm(x), number, turn)
            x = x + block.feed_forward(block.ffn_norm(x))
        return last_logits(self.model, x)

    def keep(self) -> Tensor:
        return self.state.clone()

    def put_back(self, kept: Tensor) -> None:
        self.state.copy_(kept)

    def _retain(self, retention: Any, x: Tensor, number: int, turn: tuple[Tensor, Tensor]) -> Tensor:
        batch, time = x.shape[:2]
        both = torch.stack((retention.wq(x), retention.wk(x))).view(2, batch, time, -1, retention.key_dim)
        q, k = rotate_every_two(both.transpose(2, 3), *turn).float()
        v = retention.wv(x).view(batch, time, -1, retention.value_dim).transpose(1, 2).float()
        retain = retain_one if time == 1 else retain_from
        out = retain(q, k * retention.key_dim**-0.5, v, self.gamma, self.state[number])
        out = retention._norm(out).to(x.dtype).transpose(1, 2).reshape(batch, time, -1)
        return retention.wo(F.silu(retention.wg(x)) * out)

    def state_bytes(self) -> int:
        return self.state.numel() * self.state.element_size()


def retain_from(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> Tensor:
    """Retention of some tokens after a state, which becomes the state after them: the recurrence, all tokens at once."""
    time = q.shape[-2]
    place = torch.arange(time, device=q.device)
    grown = (gamma[:, None] ** (place + 1))[:, :, None]
    left = (gamma[:, None] ** (time - 1 - place))[:, :, None]
    out = ((q @ k.transpose(-1, -2)) * decay_matrix(time, gamma, q.dtype)) @ v + (q * grown) @ state
    state.mul_(gamma[:, None, None] ** time).add_((k * left).transpose(-1, -2) @ v)
    return out


def retain_one(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> Tensor:
    """The same for a single token, in three kernels: at that size the time goes into starting them."""
    state.mul_(gamma[:, None, None]).addcmul_(k.transpose(-1, -2), v)
    return q @ state


def angles_at(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The rows of `retnet.angle_table` at these places, without the table around them."""
    frequency = 10000.0 ** -torch.linspace(0, 1, head_dim // 2, device=places.device).repeat_interleave(2)
    angle = torch.outer(places.float(), frequency)
    return angle.cos(), angle.sin()


class HFDecoder:
    """transformers' own cache."""

    def __init__(self, model: HFModel) -> None:
        self.model, self.position, self.cache = model, 0, None

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        out = self.model.net(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        self.position += tokens.shape[1]
        return out.logits[:, -1, : self.model.vocab].float()

    def state_bytes(self) -> int:
        layers = getattr(self.cache, "layers", [])
        tensors = [
            t
            for layer in layers
            for t in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if t is not None
        ]
        return sum(t.numel() * t.element_size() for t in tensors)
