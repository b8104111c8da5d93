"""A model as plain values: embedding, groups of equal layers, final norm, head. Torch-free; parameter counts and
FLOPs are sums."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from windlass.blocks.embedding.spec import EmbeddingSpec
from windlass.blocks.interface import BlockSpec, Product
from windlass.blocks.norm.spec import NormSpec
from windlass.layout.types import Layout, StepSpec


@dataclass(frozen=True)
class Branch:
    """One residual branch of a layer: x + post_norm(block(pre_norm(x)))."""

    name: str  # of the module, and so of its parameters ("attention", "feed_forward")
    block: BlockSpec
    pre_norm: NormSpec | None
    pre_norm_name: str = ""
    post_norm: NormSpec | None = None
    post_norm_name: str = ""

    @property
    def norms(self) -> list[NormSpec]:
        return [norm for norm in (self.pre_norm, self.post_norm) if norm is not None]


@dataclass(frozen=True)
class LayerSpec:
    branches: tuple[Branch, ...]

    @cached_property
    def products(self) -> tuple[tuple[Product, int], ...]:
        """All matrix products in execution order, each with the index of its branch."""
        return tuple((p, i) for i, branch in enumerate(self.branches) for p in branch.block.products())

    @cached_property
    def params(self) -> dict[str, int]:
        terms = Counter[str]()
        for branch in self.branches:
            terms.update(branch.block.params())
        return {**terms, "norms": sum(norm.params() for branch in self.branches for norm in branch.norms)}

    @cached_property
    def num_params(self) -> int:
        return sum(self.params.values())

    @cached_property
    def active_params(self) -> int:
        return self.params["norms"] + sum(branch.block.active_params() for branch in self.branches)

    @cached_property
    def expert_params(self) -> int:
        return sum(branch.block.expert_params() for branch in self.branches)

    def rank_params(self, layout: Layout) -> float:
        """Parameters that a rank holds before sharding."""
        return (self.num_params - self.expert_params) / layout.tensor + self.expert_params / layout.expert_split

    @cached_property
    def fusable_weights(self) -> int:
        """Weights of products that read the same tensor, which a fused projection lays side by side."""
        return sum(sum(p.weights for p in group) for group in self.product_groups if len(group) > 1)

    @cached_property
    def product_groups(self) -> tuple[tuple[Product, ...], ...]:
        """Products of the same input, in execution order; each group runs (and is priced) as one product."""
        groups: dict[tuple[int, str], list[Product]] = {}
        for product, branch in self.products:
            groups.setdefault((branch, product.reads), []).append(product)
        return tuple(tuple(group) for group in groups.values())

    def mixing_flops(self, seq_len: int) -> float:
        return sum(branch.block.mixing_flops(seq_len) for branch in self.branches)


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive equal layers."""

    layer: LayerSpec
    count: int


@dataclass(frozen=True)
class ParameterCount:
    total: int  # with the true vocabulary, as papers state it
    stored: int  # with the padded vocabulary, as in memory and in a checkpoint
    body: int  # all layers and the norms outside them
    active: int  # used for each token: without the input embedding, with the head even if it is tied
    terms: dict[str, int]  # by part; sums to `total`


@dataclass(frozen=True)
class ModelSpec:
    embedding: EmbeddingSpec
    groups: tuple[LayerGroup, ...]
    norm: NormSpec
    tied: bool = False  # input embedding and output head share their weights
    init_std: float = 0.02
    # The modules are not ours (Hugging Face): sharding works, tensor, pipeline and context parallelism do not.
    foreign: bool = False
    # Experts of a layer; the sums here would count one of them, so the planner refuses the model.
    experts: int = 0
    # Blocks of this kind were compared with measured runs; False: predictions are outside the validated range.
    measured: bool = True

    @property
    def width(self) -> int:
        return self.embedding.width

    @cached_property
    def num_layers(self) -> int:
        return sum(group.count for group in self.groups)

    @cached_property
    def num_branches(self) -> int:
        """Residual branches of all layers."""
        return sum(group.count * len(group.layer.branches) for group in self.groups)

    @cached_property
    def params(self) -> ParameterCount:
        table, norms = self.embedding.vocab * self.width, self.norm.params() * (2 if self.embedding.norm else 1)
        layers = Counter[str]()
        for group in self.groups:
            layers.update({name: value * group.count for name, value in group.layer.params.items()})
        terms = {
            **layers,
            "final norm": norms,
            "embedding": table,
            "positions": self.embedding.positions * self.width,
            "head": 0 if self.tied else table,
        }
        total = sum(terms.values())
        padding = (self.embedding.rows - self.embedding.vocab) * self.width * (1 if self.tied else 2)
        active = sum(group.layer.active_params * group.count for group in self.groups)
        return ParameterCount(
            total=total,
            stored=total + padding,
            body=layers.total() + norms,
            active=active + norms + table,
            terms=terms,
        )

    @cached_property
    def distinct_layers(self) -> tuple[LayerGroup, ...]:
        """Each distinct layer once, with its number of occurrences in the model."""
        counts = Counter[LayerSpec]()
        for group in self.groups:
            counts[group.layer] += group.count
        return tuple(LayerGroup(layer, count) for layer, count in counts.items())

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """For each group, the index of its layer in `distinct_layers`."""
        numbers = {kind.layer: number for number, kind in enumerate(self.distinct_layers)}
        return tuple(numbers[group.layer] for group in self.groups)

    @cached_property
    def expert_params(self) -> int:
        """Parameters that expert parallelism divides."""
        return sum(group.layer.expert_params * group.count for group in self.groups)

    def layers(self) -> Iterator[LayerSpec]:
        """All layers, first to last."""
        return (group.layer for group in self.groups for _ in range(group.count))

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Each distinct block once."""
        return tuple(dict.fromkeys(branch.block for group in self.groups for branch in group.layer.branches))

    def mixing_flops(self, seq_len: int) -> float:
        """FLOPs between positions in a forward pass over all layers, per token."""
        return sum(group.count * group.layer.mixing_flops(seq_len) for group in self.groups)

    def sizes_divided_by(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        """Sizes that a degree of this axis must divide, each once; None: some block does not support the axis."""
        divided = [block.divides(axis) for block in self.blocks]
        if self.foreign or None in divided:
            return None
        return tuple(dict.fromkeys(size for sizes in divided for size in sizes or ()))

    def prices(self, axis: str) -> bool:
        """Whether the planner knows what this axis costs."""
        probe = StepSpec(seq_len=1), Layout()
        return axis != "context" or all(block.context_bytes(*probe) is not None for block in self.blocks)
