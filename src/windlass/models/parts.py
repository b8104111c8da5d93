"""What do our families share? Embedding, norm, head and the skeleton of a decoder; blocks are the families' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.models.attention import document_mask
from windlass.models.init import fill_normal, fill_parameter
from windlass.models.loss import next_token_loss
from windlass.models.recompute import added

LossFunction = Callable[..., Tensor]


class Norm(nn.Module):
    """RMSNorm with its statistics in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class Embedding(nn.Embedding):
    """Tokens to vectors. `lookup` finds them where a rank holds only some rows; set by `train.parallelize`."""

    lookup: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) if self.lookup is None else self.lookup(tokens, self.weight)


class Head(nn.Module):
    """Hidden states to logits, or straight to the summed loss, so that the logits need never exist whole."""

    def __init__(self, width: int, rows: int, vocab: int, tied: bool = False) -> None:
        super().__init__()
        self.vocab = vocab
        """True size; the padded rows above it never win."""
        self.weight = None if tied else nn.Parameter(torch.empty(rows, width))
        """None: the embedding's weights are handed in."""
        self.loss: LossFunction = next_token_loss
        """Replaced by `train.parallelize` (chunked, fused, vocabulary-parallel)."""
        self.logits: Callable[[Tensor, Tensor], Tensor] | None = None
        """Brings vocabulary-parallel logits together; set by `train.parallelize`."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        if targets is not None:
            return self.loss(hidden, weight, targets, vocab=self.vocab)
        logits = nn.functional.linear(hidden, weight) if self.logits is None else self.logits(hidden, weight)
        return mask_padding(logits, self.vocab)


def mask_padding(logits: Tensor, vocab: int) -> Tensor:
    """Padded rows get the lowest value, so that neither softmax nor argmax ever picks them."""
    if logits.shape[-1] == vocab:
        return logits
    column = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(column >= vocab, torch.finfo(logits.dtype).min)


class Model(nn.Module):
    """Embedding, blocks keyed "0".."N-1", norm, head. A pipeline stage keeps some of them: the names stay the same."""

    stackable = True
    """Blocks are alike and may be divided over pipeline stages."""
    embeds = True
    """Tokens come in. Not so in a later pipeline stage, even where it holds the embedding's weights for a tied head."""
    has_dropout = False
    """Parts may be dropped at random in training: they must know when they are only asked."""
    undecayed = frozenset({"embed.weight"})
    """Matrices without weight decay."""

    def __init__(
        self,
        *,
        width: int,
        rows: int,
        vocab: int,
        eps: float,
        seq_len: int,
        std: float,
        blocks: list[nn.Module],
        tied: bool,
    ) -> None:
        super().__init__()
        self.seq_len, self.std, self.vocab, self.tied, self.width = seq_len, std, vocab, tied, width
        self.embed: Embedding | None = Embedding(rows, width)
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm: Norm | None = Norm(width, eps)
        self.head: Head | None = Head(width, rows, vocab, tied)
        self.num_layers = len(blocks)
        self.position_start = 0
        """First position of this rank's part of the sequence; not 0 only under context parallelism."""
        self.whole_mask = True
        """Attention of this rank sees all keys it needs, so one mask serves all blocks; not under context parallelism."""
        self.table: Any = None
        """Constants of positions that all blocks share (rotary angles, decay); made by `prepare`."""

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Drop what belongs to other pipeline stages. A tied head takes the embedding's weights with it."""
        for key in [k for k in self.layers if int(k) not in layers]:
            del self.layers[key]
        self.embeds = first
        if not first and not (last and self.tied):
            self.embed = None
        if not last:
            self.norm = self.head = None

    def make_table(self, device: torch.device) -> Any:
        """Constants shared by all blocks; a family overrides this."""
        return None

    def prepare(self, device: torch.device | str) -> None:
        """Make what is derived and not trained. Call once the parameters are on their device."""
        self.table = self.make_table(torch.device(device))

    def init_weights(self, seed: int) -> None:
        """Every parameter from (seed, its name) alone, so that the layout does not matter; then `prepare`."""
        for name, parameter in self.named_parameters():
            self.fill(name, parameter, seed)
        self.prepare(next(self.parameters()).device)

    def fill(self, name: str, tensor: Tensor, seed: int) -> None:
        """Begin `tensor` as the parameter of that name begins; also used for an fp32 master copy of bf16 weights."""
        fill_parameter(tensor, f"{seed}/{name}", self.filler(name))

    def filler(self, name: str) -> Callable[[Tensor, torch.Generator], None]:
        """How a parameter of that name begins: norms at one, matrices normal, those that end a residual branch smaller."""
        if name.endswith("norm.weight"):
            return lambda tensor, generator: tensor.fill_(1.0)
        residual = name.endswith(("wo.weight", "w2.weight"))
        return partial(fill_normal, std=self.std / (2 * self.num_layers) ** 0.5 if residual else self.std)

    def body(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Tokens (or the previous stage's hidden states) -> hidden states."""
        if documents is not None and self.whole_mask:
            documents = document_mask(documents, documents)  # once for all blocks
        if self.embeds:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x, self.table, documents)
        x = added(x)
        return x if self.norm is None else self.norm(x)

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits; with `targets` instead the two sums (loss to descend, cross-entropy) over all tokens."""
        hidden = self.body(x, documents)
        if self.head is None:
            return hidden
        return self.head(hidden, targets, self.embed.weight if self.tied else None)
