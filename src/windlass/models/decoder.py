"""A decoder built from a `ModelSpec`: embedding, layers of residual branches, norm, head. Knows no mesh and no rank."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from windlass.blocks import block_part
from windlass.blocks.attention.kernels import block_mask
from windlass.blocks.base import Block, BlockContext, Table
from windlass.blocks.embedding.module import TokenEmbedding
from windlass.blocks.head.module import OutputHead
from windlass.blocks.initial_values import Filler, fill_constant, fill_normal, fill_parameter
from windlass.blocks.linear import Adapter
from windlass.blocks.norm.module import Norm
from windlass.models.spec import LayerSpec, ModelSpec

Carried = tuple[Tensor, Tensor]

_aten = torch.ops.aten
# Operators whose results selective recomputation keeps, beside every second matrix product.
SAVED = {
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.higher_order.flex_attention,
}

PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default, _aten._grouped_mm.default}


def selective() -> Any:
    """Save attention, collectives and every second matrix product; recompute the rest."""
    products = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in PRODUCTS
        products[context.is_recompute] += is_product
        saves = products[context.is_recompute] % 2 if is_product else op in SAVED
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def added(x: Tensor | Carried) -> Tensor:
    """The residual stream with the last branch added."""
    return x[0] + x[1] if isinstance(x, tuple) else x


def document_positions(documents: Tensor) -> Tensor:
    """Position of each token in its document, from the document numbers (batch, positions) of a sequence."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


class Layer(nn.Module):
    """Residual branches, each a block with norms around it: x + post_norm(block(pre_norm(x))).

    The forward pass runs once, or again in the backward pass. That choice sits inside the module, so that neither
    parameter names nor the hooks of sharding around it change.
    """

    __call__: Callable[..., Tensor | Carried]

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec, self.recompute = spec, "none"
        # Return the last branch unadded, so that its addition and the next layer's norm become one compiled kernel.
        self.carries = False
        for branch in spec.branches:
            if branch.pre_norm is not None:
                self.add_module(branch.pre_norm_name, Norm(branch.pre_norm))
            self.add_module(branch.name, block_part(branch.block.kind, "module").BLOCK(branch.block))
            if branch.post_norm is not None:
                self.add_module(branch.post_norm_name, Norm(branch.post_norm))

    def blocks(self) -> list[Block]:
        return [getattr(self, branch.name) for branch in self.spec.branches]

    def pre_norms(self) -> list[Norm]:
        return [getattr(self, branch.pre_norm_name) for branch in self.spec.branches if branch.pre_norm is not None]

    def post_norms(self) -> list[Norm]:
        return [getattr(self, branch.post_norm_name) for branch in self.spec.branches if branch.post_norm is not None]

    def branches(self, x: Tensor, context: BlockContext) -> Carried:
        """The residual stream before the layer's last branch, and that branch."""
        delta: Tensor | None = None
        for branch in self.spec.branches:
            x = x if delta is None else x + delta
            delta = x if branch.pre_norm is None else getattr(self, branch.pre_norm_name)(x)
            delta = getattr(self, branch.name)(delta, context)
            if branch.post_norm is not None:
                delta = getattr(self, branch.post_norm_name)(delta)
        assert delta is not None
        return x, delta

    def run(self, x: Tensor, context: BlockContext) -> Tensor:
        return added(self.branches(x, context))

    def forward(self, x: Tensor | Carried, context: BlockContext) -> Tensor | Carried:
        if self.carries:
            return self.branches(added(x), context)
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.run(added(x), context)
        extra: dict[str, Any] = {"context_fn": partial(selective)} if self.recompute == "selective" else {}
        out: Tensor = checkpoint(self.run, added(x), context, use_reentrant=False, **extra)
        return out

    def decode(
        self, x: Tensor, states: list[Any], places: Tensor, start: int | None, tables: dict[str, Table]
    ) -> Tensor:
        """New tokens after those that the blocks' states hold."""
        for branch, block, state in zip(self.spec.branches, self.blocks(), states, strict=True):
            delta = x if branch.pre_norm is None else getattr(self, branch.pre_norm_name)(x)
            delta = block.decode(delta, state, places, start, tables.get(block.table_key or ""))
            x = x + (delta if branch.post_norm is None else getattr(self, branch.post_norm_name)(delta))
        return x


class DecoderModel(nn.Module):
    """Layers are keyed "0".."N-1". A pipeline stage keeps some of them: the names stay the same."""

    __call__: Callable[..., Tensor]
    family = "hf"  # whose Hugging Face folders it can be filled from
    divisible = True  # made of our own blocks: can be divided into stages, by heads and by positions
    divides_head = True  # its vocabulary, where tensor parallelism divides blocks
    has_dropout = False
    undecayed = frozenset({"embed.weight"})  # matrices without weight decay
    new_names: frozenset[str] = frozenset()  # weights that a folder to start from need not have

    def __init__(self, spec: ModelSpec, seq_len: int) -> None:
        super().__init__()
        self.spec, self.seq_len = spec, seq_len
        self.vocab, self.tied, self.width = spec.embedding.vocab, spec.tied, spec.width
        self.num_layers = spec.num_layers
        self.embed: TokenEmbedding | None = TokenEmbedding(spec.embedding)
        self.layers = nn.ModuleDict({str(i): Layer(layer) for i, layer in enumerate(spec.layers())})
        self.norm: Norm | None = Norm(spec.norm)
        self.head: OutputHead | None = OutputHead(self.width, spec.embedding.rows, self.vocab, self.tied)
        # Tokens come in. Not so in a later pipeline stage, even where it holds the embedding's weights for a tied head.
        self.embeds = True
        self.position_start = 0  # first position of this rank's part of the sequence
        self.divided_positions = False  # other ranks hold the other positions
        self.resets_positions = False  # they begin again at each document
        # `observe` gets the number of each layer and its output, where a step is measured (train/instruments.py).
        self.observer: Any = None
        self._window_masks: dict[tuple[int, int], Any] = {}
        self.tables: dict[str, Table] = {}
        self._table_end = 0

    def keep_stage(self, layers: range, *, first: bool, last: bool) -> None:
        """Drop what belongs to other pipeline stages. A tied head takes the embedding's weights with it."""
        for key in [k for k in self.layers if int(k) not in layers]:
            del self.layers[key]
        self.embeds = first
        if not first and not (last and self.tied):
            self.embed = None
        if not last:
            self.norm = self.head = None

    def start_at(self, position: int) -> None:
        """Hold the part of each sequence that begins at `position` (context parallelism)."""
        self.position_start, self.divided_positions = position, True

    def typed_layers(self) -> list[Layer]:
        """Our own layers, first to last; none where transformers built the model."""
        return [cast(Layer, layer) for layer in self.layers.values()]

    def layer_modules(self) -> list[nn.Module]:
        """The units of sharding and compilation."""
        return list(self.layers.values())

    def blocks(self) -> list[Block]:
        return [block for layer in self.typed_layers() for block in layer.blocks()]

    def set_recompute(self, policy: str) -> None:
        """What the backward pass computes again: none, selective or full."""
        for layer in self.typed_layers():
            layer.recompute = policy
            for block in layer.blocks():
                block.repeats = type(block).repeats and policy == "none"

    def prepare(self, device: torch.device | str, length: int | None = None) -> None:
        """Make what is derived and not trained. Call once the parameters are on their device."""
        self._table_end = self.position_start + (length or self.seq_len)
        distinct = {block.table_key: block for block in self.blocks() if block.table_key is not None}
        start = 0 if self.resets_positions else self.position_start
        self.tables = {
            key: block.make_table(start, self._table_end, torch.device(device)) for key, block in distinct.items()
        }

    def init_weights(self, seed: int) -> None:
        """Every parameter from (seed, its name) alone, so that the layout does not matter; then `prepare`."""
        for name, parameter in self.named_parameters():
            self.fill(name, parameter, seed)
        for block in self.blocks():  # biases and counts of routers
            for buffer in block.buffers():
                buffer.zero_()
        self.prepare(next(self.parameters()).device)

    def fill(self, name: str, tensor: Tensor, seed: int) -> None:
        """Give `tensor` the initial values of the parameter `name`; also used for the fp32 master copy of bf16
        weights."""
        fill_parameter(tensor, f"{seed}/{name}", self.filler(name))

    def filler(self, name: str) -> Filler:
        """Initial values of a parameter: norms and blocks by their own rule, the others normal."""
        module, _, parameter = name.rpartition(".")
        if isinstance(adapter := self.get_submodule(module), Adapter):
            return adapter.filler(parameter)
        if isinstance(norm := self.get_submodule(module), Norm):
            return partial(fill_constant, value=norm.initial(parameter))
        if name.startswith("layers."):
            _, number, branch, local = name.split(".", 3)
            block = cast(Block, getattr(self.layers[number], branch))
            return block.filler(local, self.spec.init_std, max(1, self.spec.num_branches // 2))
        return partial(fill_normal, std=self.spec.init_std)

    def body(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Tokens (or the previous stage's hidden states) -> hidden states."""
        if self.embeds and self.position_start + x.shape[1] > self._table_end:
            self.prepare(x.device, x.shape[1])
        tables = self.tables
        if self.resets_positions and documents is not None:
            places = document_positions(documents)[:, self.position_start :][:, : x.shape[1]]
            tables = {key: tuple(part[places].unsqueeze(1) for part in table) for key, table in tables.items()}
        context = BlockContext(tables, documents, self.block_masks(x, documents))
        hidden: Tensor | Carried = self.embed(x) if self.embeds and self.embed is not None else x
        for number, layer in zip(self.layers, self.typed_layers(), strict=True):
            hidden = layer(hidden, context)
            if self.observer is not None:
                self.observer.observe(int(number), added(hidden))
        return added(hidden) if self.norm is None else self.norm(added(hidden))

    def block_masks(self, x: Tensor, documents: Tensor | None) -> dict[int, Any]:
        """Masks for the kernel that skips hidden blocks: one for each window of the model's attention blocks."""
        if not x.is_cuda or self.divided_positions:
            return {}
        length, masks = x.shape[1], {}
        needs = {block.window: block.needs_mask for block in self.blocks() if block.window is not None}
        for window, needed in needs.items():
            if documents is not None:
                masks[window] = block_mask(window, length, documents, x.device)
            elif needed or 0 < window < length:
                if (window, length) not in self._window_masks:
                    self._window_masks[window, length] = block_mask(window, length, None, x.device)
                masks[window] = self._window_masks[window, length]
        return masks

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits; with `targets` instead the two sums (loss to descend, cross-entropy) over all tokens."""
        hidden = self.body(x, documents)
        if self.head is None:
            return hidden
        tied_weight = self.embed.weight if self.tied and self.embed is not None else None
        return self.head(hidden, targets, tied_weight)
