"""Every layout that the planner lists as valid runs: its own list for small machines, one of each class."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.train.helpers import build, place_here, steps

from windlass.clusters import load_cluster
from windlass.clusters.scheduler import Place
from windlass.config import Recipe
from windlass.planner import candidates
from windlass.planner.candidates import LayoutCandidate
from windlass.planner.task import make_task

SEQUENCES = 8
TOGETHER = 12
"""Layouts that the same processes try one after another: start-up is shared, but each leaves its groups and their threads behind."""


def make_recipe(family: str = "llama", **model: Any) -> Recipe:
    own: dict[str, Any] = {"value_width": 48, "chunk": 8} if family == "retnet" else {"kv_heads": 2}
    if family == "qwen3_moe":
        own["experts"] = {"count": 8, "top_k": 2, "ffn": 16}
    return Recipe.model_validate({
        "name": "planned", "model": {"family": family, "layers": 4, "width": 32, "ffn": 48, "heads": 4, "vocab": 250, **own, **model},
        "data": {"seq_len": 16, "batch_tokens": SEQUENCES * 16}, "optim": {"lr": 1e-2},
        "train": {"steps": 2, "precision": "bf16", "loss_chunk": 48}, "energy": {"enabled": False}, "save": {"at_end": False, "every": 10**6},
    })  # fmt: skip


def listed(recipe: Recipe, nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[LayoutCandidate]:
    """What the planner enumerates and finds no fault with, on `nodes` x `per_node` devices; short sequences count as long here."""
    monkeypatch.setattr(candidates, "MIN_CONTEXT_TOKENS", 8)
    machine = load_cluster("workstation")
    node = machine.node.model_copy(update={"devices": per_node})
    task = make_task(recipe, machine.model_copy(update={"nodes": nodes, "node": node}), nodes)
    for offload in ("none", "optimizer", "parameters"):
        for choice in candidates.enumerate_candidates(task, offload):
            if not candidates.problems(task, choice):
                yield choice


def features(c: LayoutCandidate) -> dict[str, Any]:
    layout = c.layout
    return {
        "shard": layout.shard, "tensor": layout.tensor > 1, "pipeline": layout.pipeline > 1 and layout.schedule,
        "context": layout.context > 1, "expert": layout.expert > 1, "offload": layout.offload, "recompute": c.recompute, "accumulates": layout.accumulation > 1,
    }  # fmt: skip


def classes(choices: Iterator[LayoutCandidate]) -> list[LayoutCandidate]:
    """One choice for each way of dividing: degrees above two and the exact micro-batch make no class of their own.

    Of a class one with the fewest micro-batches: each costs every rank a pass through DTensor, which is most of the time here.
    """
    by_class: dict[Any, list[LayoutCandidate]] = {}
    for c in choices:
        by_class.setdefault(tuple(v for k, v in features(c).items() if k != "recompute"), []).append(c)
    return [short[(7 * number) % len(short)] for number, short in enumerate(map(_shortest, by_class.values()))]


def _shortest(members: list[LayoutCandidate]) -> list[LayoutCandidate]:
    least = min(c.layout.accumulation for c in members)
    return [c for c in members if c.layout.accumulation == least]


def pairs(choices: Iterator[LayoutCandidate]) -> list[LayoutCandidate]:
    """Few choices in which any two features that occur together in the list occur together: always the one with most new pairs."""
    waiting = {c: set(itertools.combinations(features(c).items(), 2)) for c in choices}
    chosen: list[LayoutCandidate] = []
    while waiting:
        best = max(waiting, key=lambda c: (len(waiting[c]), -c.layout.accumulation))
        new = waiting.pop(best)
        if not new:
            break
        chosen.append(best)
        for left in waiting.values():
            left -= new
    return chosen


def run_all(recipe: Recipe, choices: list[LayoutCandidate], per_node: int) -> list[tuple[str, float | str, float]]:
    """Two steps of each on this rank: (layout, loss of the second, seconds), or the error instead."""
    return [(c.describe(), *_two_steps(recipe, c, place_here(per_node))) for c in choices]


def _two_steps(recipe: Recipe, choice: LayoutCandidate, here: Place) -> tuple[float | str, float]:
    train = recipe.train.model_copy(update={"recompute": choice.recompute})
    chosen = recipe.model_copy(update={"layout": choice.layout.config(), "train": train})
    started_at = time.monotonic()
    try:
        loss = steps(build(chosen, here), 2)[1][0]
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started_at
    return loss, time.monotonic() - started_at


def needs_eight(c: LayoutCandidate) -> bool:
    """What four processes cannot hold; they have shown all else."""
    layout = c.layout
    deep = layout.pipeline > 1 and layout.context > 1
    return layout.offload == "none" and layout.tensor > 1 and (layout.is_hybrid or deep)


CASES: list[Any] = [
    ("llama", 1, 2, lambda c: True),
    pytest.param("llama", 2, 2, lambda c: True, marks=pytest.mark.slow),
    pytest.param("llama", 2, 4, needs_eight, marks=pytest.mark.slow),
    pytest.param("retnet", 1, 2, lambda c: c.layout.offload == "none", marks=pytest.mark.slow),
    pytest.param(
        "retnet", 2, 2, lambda c: c.layout.offload == "none" and c.layout.pipeline > 1, marks=pytest.mark.slow
    ),
    pytest.param("qwen3_moe", 2, 2, lambda c: c.layout.expert > 1, marks=pytest.mark.slow),
]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("family", "nodes", "per_node", "wanted"), CASES, ids=["2", "4", "8", "retnet-2", "retnet-4", "experts-4"]
)
def test_what_the_planner_lists_runs(
    spawn: Any, monkeypatch: pytest.MonkeyPatch, family: str, nodes: int, per_node: int, wanted: Any
) -> None:
    recipe = make_recipe(family)
    check(spawn, recipe, pairs(filter(wanted, listed(recipe, nodes, per_node, monkeypatch))), nodes, per_node)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_class_that_the_planner_lists_runs(
    spawn: Any, monkeypatch: pytest.MonkeyPatch, nodes: int, per_node: int, tied: bool
) -> None:
    recipe = make_recipe(tied=tied)
    check(spawn, recipe, classes(listed(recipe, nodes, per_node, monkeypatch)), nodes, per_node, timeout=900.0)


def check(
    spawn: Any, recipe: Recipe, chosen: list[LayoutCandidate], nodes: int, per_node: int, timeout: float = 240.0
) -> None:
    assert len(chosen) >= 4
    torch.set_num_threads(1)
    results = []
    for start in range(0, len(chosen), TOGETHER):
        results += spawn(
            run_all, nodes * per_node, recipe, chosen[start : start + TOGETHER], per_node, timeout=timeout
        )[0]
    print(*(f"{seconds:5.1f} s  {name}: {loss}" for name, loss, seconds in results), sep="\n")
    failed = [f"{name}: {loss}" for name, loss, _ in results if isinstance(loss, str)]
    assert not failed, "\n".join(failed)
    # The second loss follows from the gradients of the first step, so it is the same for all layouts up to bf16.
    losses = {name: loss for name, loss, _ in results}
    assert max(losses.values()) - min(losses.values()) < 0.02, losses
