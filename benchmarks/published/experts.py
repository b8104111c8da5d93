"""Models with experts and with latent attention from the columns of a table of published runs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from benchmarks.published.cells import NO, Row, flag, lower_text, number, positive

from windlass.blocks.attention.rope import Rope
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec, padded_rows
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.blocks.interface import BlockSpec
from windlass.blocks.latent.spec import LatentSpec
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec

GPT_OSS_WINDOW = 128
"""Positions that every second layer of gpt-oss sees."""


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
        # In DeepSeek's sizes, which tables do not state: 64 of the numbers of a head are turned.
        attention = other = LatentSpec(
            width=width,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim + 64,
            rope=Rope(10_000.0, 64),
            value_dim=head_dim,
            kv_rank=512,
        )
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
        LayerGroup(LayerSpec((replace(mixer, block=replace(mixer.block, q_rank=1536)), other)), group.count)
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


def is_balanced(row: Row) -> bool | None:
    """Routing is forced to be even, or what exceeds an expert's capacity is dropped; None: not stated."""
    capacity = lower_text(row, "capacity")
    drops = bool(capacity and "dropless" not in capacity and capacity not in NO)
    return True if drops else flag(row, "force_balance")


def recomputed_modules(row: Row) -> tuple[str, ...]:
    """Those of Megatron's selective recomputation."""
    match = re.search(r"modules:([a-z_ ,]+)", lower_text(row, "recompute_detail"))
    return tuple(re.findall(r"[a-z_]+", match.group(1))) if match else ()


EVERY = re.compile(r"every (\d+)(?:st|nd|rd|th) layer recomputed in full")


def recomputed_layers(row: Row) -> float | None:
    """Share of the layers that are recomputed; None: not stated."""
    match = EVERY.search(lower_text(row, "recompute_detail"))
    return 1.0 / int(match.group(1)) if match else None
