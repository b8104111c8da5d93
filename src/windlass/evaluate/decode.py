"""Incremental decoding: each block keeps its own state of the past (keys and values, or a state of constant size).

A decoder takes tokens and returns the logits after the last one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.errors import ConfigError
from windlass.evaluate.likelihood import head_weight
from windlass.models.decoder import DecoderModel
from windlass.models.hf import HFModel


class TextDecoder:
    """Takes tokens and returns logits; one token's kernels may be recorded as a CUDA graph and replayed."""

    def __init__(self, model: DecoderModel, batch: int, limit: int, *, replays: bool = False) -> None:
        self.model, self.position = model, 0  # tokens taken so far
        self.device = next(model.parameters()).device
        self.replays = replays and self.device.type == "cuda"
        self.states = [[block.new_state(batch, limit) for block in layer.blocks()] for layer in model.typed_layers()]
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
        if self.replays and tokens.shape[1] == 1:
            logits = self._replay(tokens)
            self.position += 1
            return logits
        for part in tokens.split(self.chunk, dim=1):
            places = torch.arange(self.position, self.position + part.shape[1], device=self.device)
            logits = self.run(part, places, self.position)
            self.position += part.shape[1]
        return logits

    @torch.inference_mode()
    def run(self, tokens: Tensor, places: Tensor, start: int | None) -> Tensor:
        """Logits after some tokens; `start` None: one token, by the same kernels whatever its place is."""
        model = self.model
        assert model.embed is not None and model.norm is not None
        x = model.embed(tokens)
        for layer, states in zip(model.typed_layers(), self.states, strict=True):
            x = layer.decode(x, states, places, start, self.tables)
        return F.linear(model.norm(x[:, -1]), head_weight(model)).float()

    def state_bytes(self) -> int:
        """Memory carried from token to token."""
        pairs = zip(self.model.typed_layers(), self.states, strict=True)
        return sum(
            block.state_bytes(state, self.position)
            for layer, states in pairs
            for block, state in zip(layer.blocks(), states, strict=True)
        )

    def _replay(self, token: Tensor) -> Tensor:
        self._token.copy_(token)
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
        return self._logits.clone()


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
