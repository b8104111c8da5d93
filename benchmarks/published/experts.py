"""Models with experts and with latent attention from the columns of a table of published runs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from benchmarks.published.cells import NO, Row, flag, lower_text, number, positive

from windlass.blocks.attention.rope import Rope
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec, padded_rows
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.blocks.interface import BlockSpec, Mixing, Product
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.layout.types import Layout, StepSpec
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec

GPT_OSS_WINDOW = 128
"""Positions that every second layer of gpt-oss sees."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec(BlockSpec):
    """Latent attention in the sizes of DeepSeek, which tables do not state."""

    width: int
    heads: int
    query_rank: int = 0  # 0: queries are not compressed
    key_rank: int = 512
    head_dim: int = 128
    rotated_dim: int = 64

    kind = "latent"
    masks_documents = True
    kept_by_selective = True

    @property
    def key_width(self) -> int:
        return self.heads * (self.head_dim + self.rotated_dim)

    @property
    def value_width(self) -> int:
        return self.heads * self.head_dim

    def params(self) -> dict[str, int]:
        return {
            "latent attention": sum(p.weights for p in self.products()),
            "latent norms": self.query_rank + self.key_rank,
        }

    def products(self) -> tuple[Product, ...]:
        query = (Product("query", self.key_width, self.width, "outputs", "input"),)
        if self.query_rank:
            query = (
                Product("query down", self.query_rank, self.width, "", "input"),
                Product("query up", self.key_width, self.query_rank, "outputs", "query latent"),
            )
        return (
            *query,
            Product("key down", self.key_rank + self.rotated_dim, self.width, "", "input"),
            Product("key up", self.value_width * 2, self.key_rank, "outputs", "key latent"),
            Product("attention output", self.width, self.value_width, "inputs", "mixed"),
        )

    def mixing_flops(self, seq_len: int) -> float:
        return 2.0 * seq_len * (self.key_width + self.value_width)

    def mixing(self, step: StepSpec) -> Mixing:
        return Mixing(0.5 * self.mixing_flops(step.seq_len))

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Latents; queries, keys and values of all heads, the output and its log-sums."""
        latents = step.bytes_per_value * (self.query_rank + self.key_rank + self.rotated_dim)
        up = 2.0 * self.key_width + self.value_width if "mla_up_proj" not in step.recomputed else 0.0
        heads = step.bytes_per_value * (up + self.value_width) + 4.0 * self.heads
        return latents + heads / layout.tensor

    def selective_bytes(self, step: StepSpec, layout: Layout) -> float:
        return (step.bytes_per_value * self.value_width + 4.0 * self.heads) / layout.tensor

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Norms of the latents; heads are put together from a turned and an unturned part."""
        latents = 2.0 * step.bytes_per_value * (self.query_rank + self.key_rank)
        return latents + 2.0 * step.bytes_per_value * 2.0 * self.key_width / layout.tensor

    def context_bytes(self, step: StepSpec, layout: Layout) -> float:
        return (self.key_width + self.value_width) / layout.tensor * step.bytes_per_value

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        return (("model.heads", self.heads),) if axis == "tensor" else ()


def expert_model(row: Row, sizes: dict[str, int], tied: bool) -> ModelSpec:
    """`sizes`: layers, width, ffn, heads, kv_heads, head_dim, vocab, experts, top_k, expert_ffn, shared_ffn."""
    width, heads, head_dim, arch = sizes["width"], sizes["heads"], sizes["head_dim"], lower_text(row, "arch")
    attention: BlockSpec = AttentionSpec(
        width=width,
        heads=heads,
        kv_heads=sizes["kv_heads"],
        head_dim=head_dim,
        rope=Rope(10_000.0, head_dim),
        bias="gpt-oss" in arch,
        qk_norm="head" if "qwen3" in arch else "none",
    )
    other = replace(attention, window=GPT_OSS_WINDOW) if "gpt-oss" in arch else attention
    if flag(row, "mla"):
        attention = other = LatentSpec(width=width, heads=heads, head_dim=head_dim)
    norm = NormSpec(width=width)
    dense = MlpSpec(width=width, hidden=sizes["ffn"], activation="swiglu")
    experts = ExpertsSpec(
        width=width,
        hidden=sizes["expert_ffn"],
        count=sizes["experts"],
        top_k=sizes["top_k"],
        shared_hidden=sizes["shared_ffn"],
    )
    every, first = positive(row, "moe_every") or 1, positive(row, "dense_layers") or 0
    layers = Counter[LayerSpec]()  # in no order: other engines' pipelines are priced by the mean
    for index in range(sizes["layers"]):
        block = experts if index >= first and (index + 1) % every == 0 else dense
        mixer = other if index % 2 else attention
        layers[LayerSpec((Branch("attention", mixer, norm), Branch("feed_forward", block, norm)))] += 1
    model = ModelSpec(
        embedding=EmbeddingSpec(vocab=sizes["vocab"], rows=padded_rows(sizes["vocab"]), width=width),
        groups=tuple(LayerGroup(layer, count) for layer, count in layers.items()),
        norm=norm,
        tied=tied,
        foreign=True,
    )
    return _with_query_rank(model, number(row, "params_b")) if flag(row, "mla") else model


def _with_query_rank(model: ModelSpec, billions: float | None) -> ModelSpec:
    """Queries compressed to DeepSeek's 1,536 values if that explains the stated size better, or, without one, in wide
    models."""
    groups = tuple(
        LayerGroup(LayerSpec((replace(mixer, block=replace(mixer.block, query_rank=1536)), other)), group.count)
        for group in model.groups
        for mixer, other in (group.layer.branches,)
    )
    compressed = replace(model, groups=groups)
    if billions is None:
        return compressed if model.width >= 5120 else model
    return min(model, compressed, key=lambda m: abs(m.params.total / 1e9 - billions))


def dispatch_of(row: Row) -> str | None:
    """alltoall, allgather or fused; None: not stated."""
    text = re.sub(r"[\s_-]+", "", lower_text(row, "dispatcher"))
    marks = {"fused": "deepep|hybridep|asyncep|flex", "allgather": "allgather", "alltoall": "alltoall|a2a"}
    return next((name for name, mark in marks.items() if re.search(mark, text)), None)


def is_balanced(row: Row) -> bool:
    """Routing is forced to be even, or what exceeds an expert's capacity is dropped."""
    capacity = lower_text(row, "capacity")
    return flag(row, "force_balance") is True or bool(capacity and "dropless" not in capacity and capacity not in NO)


def recomputed_modules(row: Row) -> tuple[str, ...]:
    """Those of Megatron's selective recomputation."""
    match = re.search(r"modules:([a-z_ ,]+)", lower_text(row, "recompute_detail"))
    return tuple(re.findall(r"[a-z_]+", match.group(1))) if match else ()


EVERY = re.compile(r"every (\d+)(?:st|nd|rd|th) layer recomputed in full")


def recomputed_layers(row: Row) -> float | None:
    """Share of the layers that are recomputed; None: not stated."""
    match = EVERY.search(lower_text(row, "recompute_detail"))
    return 1.0 / int(match.group(1)) if match else None
