"""Incremental decoding: Llama keeps the keys and values of past tokens, RetNet a state of constant size.

A decoder takes tokens and returns the logits after the last one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.errors import ConfigError
from windlass.evaluate.likelihood import head_weight
from windlass.models.hf import HFModel
from windlass.models.llama import rope_table, rotate
from windlass.models.retnet import RetNet, decays, retain_parallel, retain_state, rotate_every_two, state_left


class TextDecoder:
    """Takes tokens and returns logits; one token's kernels may be recorded as a CUDA graph and replayed.

    A subclass computes with the past in `run` (some tokens at the current position) and `one` (one token with its
    position as a tensor: the same kernels at every position, so that they can be replayed).
    """

    replays = False
    graph: Any = None

    def __init__(self, model: Any, batch: int = 1) -> None:
        self.model, self.position = model, 0  # tokens taken so far
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.token_position = torch.zeros(1, dtype=torch.long, device=self.device)

    def run(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def one(self, token: Tensor, position: Tensor) -> Tensor:
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Memory carried from token to token."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """State that must be restored before the same token is computed again."""

    def restore(self, snapshot: Any) -> None:
        """Undo what was computed since `snapshot`."""

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        """(batch, time) new tokens -> (batch, vocab) logits after the last of them, in fp32."""
        logits = self._replay(tokens) if self.replays and tokens.shape[1] == 1 else self.run(tokens)
        self.position += tokens.shape[1]
        return logits

    def _replay(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.token_position.fill_(self.position)
        if self.graph is None:
            # Libraries set themselves up in a first pass, which must leave no trace; recording computes nothing.
            saved, stream = self.snapshot(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.one(self.token, self.token_position)
            torch.cuda.current_stream().wait_stream(stream)
            self.restore(saved)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.one(self.token, self.token_position)
        self.graph.replay()
        return self.logits.clone()

    def through_layers(self, tokens: Tensor, mix: Callable[[Any, Tensor, int], Tensor]) -> Tensor:
        """Logits after the last token; `mix` is the layer's attention or retention with the past."""
        x = self.model.embed(tokens)
        for number, block in enumerate(self.model.layers.values()):
            x = x + mix(block, x, number)
            x = x + block.feed_forward(block.ffn_norm(x))
        return F.linear(self.model.norm(x[:, -1]), head_weight(self.model)).float()


class LlamaDecoder(TextDecoder):
    """Keys and values of the past, in memory that is allocated once."""

    def __init__(self, model: Any, batch: int, limit: int) -> None:
        super().__init__(model, batch)
        heads = next(iter(model.layers.values())).attention.wk.weight.shape[0] // model.head_dim
        shape = (model.num_layers, 2, batch, heads, limit, model.head_dim)
        # Zeros, not what memory happens to hold: values after the last token are multiplied by a weight of 0.
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.cos, self.sin = rope_table(limit, model.head_dim, model.theta, self.device)

    def _project(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = attention.project(x)
        q, k, v = (part.view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2) for part in parts)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def run(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        start, end = self.position, self.position + time
        mask = None
        if start and time > 1:
            later = start + torch.arange(time, device=self.device)[:, None]
            mask = torch.arange(end, device=self.device) <= later

        def attend(block: Any, x: Tensor, number: int) -> Tensor:
            cos, sin = self.cos[start:end], self.sin[start:end]
            q, k, v = self._project(block.attention, block.attention_norm(x), cos, sin)
            cache = self.cache[number]
            cache[0, :, :, start:end], cache[1, :, :, start:end] = k, v
            keys, values = cache[0, :, :, :end], cache[1, :, :, :end]
            causal, grouped = start == 0 and time > 1, q.shape[1] != keys.shape[1]
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
            return block.attention.wo(out.transpose(1, 2).reshape(len(x), time, -1))

        return self.through_layers(tokens, attend)

    @torch.inference_mode()
    def one(self, token: Tensor, position: Tensor) -> Tensor:
        past = torch.arange(self.cache.shape[4], device=position.device) <= position
        cos, sin = self.cos.index_select(0, position), self.sin.index_select(0, position)

        def attend(block: Any, x: Tensor, number: int) -> Tensor:
            q, k, v = self._project(block.attention, block.attention_norm(x), cos, sin)
            keys, values = self.cache[number]
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            head_dim = block.attention.head_dim
            q = q.reshape(len(x), keys.shape[1], -1, head_dim)
            scores = (q @ keys.transpose(-1, -2)).float() * head_dim**-0.5
            weights = scores.masked_fill(~past, float("-inf")).softmax(-1).to(x.dtype)
            return block.attention.wo((weights @ values).reshape(len(x), 1, -1))

        return self.through_layers(token, attend)

    def state_bytes(self) -> int:
        """Of the positions taken so far; the memory for the others is already allocated."""
        return int(self.cache[..., : self.position, :].numel() * self.cache.element_size())


class RetNetDecoder(TextDecoder):
    """One state per layer and head; a long prompt is taken in chunks, so that memory does not grow with it."""

    chunk = 512

    def __init__(self, model: RetNet, batch: int) -> None:
        super().__init__(model, batch)
        retention = next(iter(model.layers.values())).retention
        shape = (model.num_layers, batch, model.heads, retention.key_dim, retention.value_dim)
        # In fp32 whatever the weights are: what is added at every token must not be rounded away.
        self.state = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.gamma = decays(model.heads, self.device)

    def run(self, tokens: Tensor) -> Tensor:
        position = self.position
        for part in tokens.split(self.chunk, dim=1):
            logits = self.one(part, torch.arange(position, position + part.shape[1], device=self.device))
            position += part.shape[1]
        return logits

    @torch.inference_mode()
    def one(self, token: Tensor, position: Tensor) -> Tensor:
        """Also for several tokens with their positions."""
        angles = angles_at(position, self.model.key_dim)

        def retain(block: Any, x: Tensor, number: int) -> Tensor:
            retention, normed = block.retention, block.retention_norm(x)
            batch, time = x.shape[:2]
            both = torch.stack((retention.wq(normed), retention.wk(normed))).view(2, batch, time, -1, retention.key_dim)
            q, k = rotate_every_two(both.transpose(2, 3), *angles).float()
            v = retention.wv(normed).view(batch, time, -1, retention.value_dim).transpose(1, 2).float()
            out = retain_step(q, k * retention.key_dim**-0.5, v, self.gamma, self.state[number])
            out = retention._norm(out).to(x.dtype).transpose(1, 2).reshape(batch, time, -1)
            return retention.wo(F.silu(retention.wg(normed)) * out)

        return self.through_layers(token, retain)

    def snapshot(self) -> Tensor:
        return self.state.clone()

    def restore(self, snapshot: Tensor) -> None:
        self.state.copy_(snapshot)

    def state_bytes(self) -> int:
        return int(self.state.numel() * self.state.element_size())


def retain_step(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> Tensor:
    """Retention of some tokens after a state, which becomes the state after them."""
    time, decay = q.shape[-2], gamma[:, None, None]
    if time == 1:  # three kernels: at this size the time goes into starting them
        state.mul_(decay).addcmul_(k.transpose(-1, -2), v)
        return q @ state
    out = retain_parallel(q, k, v, gamma) + retain_state(q, state, gamma)
    state.mul_(decay**time).add_(state_left(k, v, gamma))
    return out


def angles_at(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The rows of `retnet.angle_table` at these positions, without the table around them."""
    frequency = 10000.0 ** -torch.linspace(0, 1, head_dim // 2, device=positions.device).repeat_interleave(2)
    angle = torch.outer(positions.float(), frequency)
    return angle.cos(), angle.sin()


class TransformersDecoder(TextDecoder):
    """The cache of a transformers model."""

    def __init__(self, model: HFModel, limit: int) -> None:
        super().__init__(model)
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

    def run(self, tokens: Tensor) -> Tensor:
        output = self.model.net(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        return output.logits[:, -1, : self.model.vocab].float()

    def state_bytes(self) -> int:
        layers = getattr(self.cache, "layers", [])
        tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def make_decoder(model: Any, *, batch: int = 1, limit: int, replays: bool = False) -> TextDecoder:
    """The decoder of a model, for at most `limit` tokens of prompt and answer together.

    With `replays` a GPU gets the kernels of a token all at once, as a recorded CUDA graph: starting them one by one
    takes most of the time of a small model. On a CPU it changes nothing.
    """
    if isinstance(model, HFModel):
        return TransformersDecoder(model, limit)
    retnet = isinstance(model, RetNet)
    decoder: TextDecoder = RetNetDecoder(model, batch) if retnet else LlamaDecoder(model, batch, limit)
    decoder.replays = replays and decoder.device.type == "cuda"
    return decoder
