"""What does the planner say of this job? The layout where the recipe has none, the fit verdict, run time, energy, checkpoint size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.clusters import Cluster
from windlass.config import LayoutConfig, Recipe
from windlass.errors import PlanError, WindlassError
from windlass.launch.checks import Finding

if TYPE_CHECKING:
    from windlass.planner.search import Plan, Plans

CHECKPOINT_BYTES = {"fp32": 12, "bf16": 8}
"""Bytes per parameter on disk by the precision of AdamW's moments: fp32 master weights and two moments."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's answer, as far as launching needs it; None where it had none."""

    layout: LayoutConfig | None
    reason: str
    words: tuple[str, ...] = ()
    """Overrides that give every link the same layout."""
    findings: tuple[Finding, ...] = ()
    run_seconds: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_share: float | None = None
    kwh: float | None = None
    steps: int | None = None
    checkpoint_bytes: int | None = None

    @property
    def about(self) -> list[str]:
        return [f"layout: {self.reason}"] if self.reason else []


def planned(recipe: Recipe, cluster: Cluster) -> Planned:
    """Fill the layout, or judge the recipe's own. Never raises: what cannot be planned is a finding."""
    from windlass.planner.search import plan

    try:
        found = plan(recipe, cluster)
    except PlanError as error:
        return _without(recipe, Finding("fit", "refuse", error.message, error.hint, "windlass plan"))
    except WindlassError as error:
        return _without(recipe, Finding("fit", "note", f"not planned: {error.message}", error.hint))
    if recipe.layout is None:
        return _filled(recipe, found)
    mine = next((p for p in found.plans if p.from_recipe), None)
    if mine is None:
        why = next((r.reason for r in found.rejected if r.from_recipe), "it is not legal here")
        hint = f"the planner would take {found.plans[0].candidate.describe()}" if found.plans else None
        return _without(
            recipe, Finding("fit", "refuse", f"the recipe's layout does not fit: {why}", hint, "windlass plan")
        )
    return _of(recipe, mine, (), mine.reason)


def _filled(recipe: Recipe, found: Plans) -> Planned:
    if not found.plans:
        from windlass.planner.search import nothing_fits

        error = nothing_fits(found)
        return _without(recipe, Finding("fit", "refuse", error.message, error.hint, "windlass plan"))
    best = found.plans[0]
    words = [*layout_words(best.layout.config()), f"train.recompute={best.recompute}"]
    return _of(recipe, best, tuple(words), f"{best.candidate.describe()} ({best.reason})")


def layout_words(layout: LayoutConfig) -> list[str]:
    """`layout.shard=hybrid` for every value that is not the default."""
    value, default = layout.model_dump(), LayoutConfig().model_dump()
    words = [f"layout.{key}={item}" for key, item in value.items() if item != default[key] and item is not None]
    return words or [f"layout.shard={layout.shard}"]  # also a plain layout is a choice, made once for all links


def _of(recipe: Recipe, best: Plan, words: tuple[str, ...], reason: str) -> Planned:
    joules = getattr(best.energy, "joules", None)
    kwh = getattr(best.energy, "kwh", None) or (joules / 3.6e6 if joules else None)
    return Planned(
        layout=best.layout.config(), reason=reason, words=words, findings=(Finding("fit", "ok", reason),), run_seconds=best.days * 86400, step_seconds=best.step.seconds,
        tokens_per_second=best.batch_tokens / best.step.seconds, mfu=best.step.mfu, memory_share=best.memory_share, kwh=kwh,
        steps=round(best.tokens / best.batch_tokens), checkpoint_bytes=checkpoint_bytes(recipe),
    )  # fmt: skip


def _without(recipe: Recipe, finding: Finding) -> Planned:
    return Planned(
        layout=recipe.layout,
        reason="",
        findings=(finding,),
        steps=recipe_steps(recipe),
        checkpoint_bytes=checkpoint_bytes(recipe),
    )


def recipe_steps(recipe: Recipe) -> int | None:
    if recipe.train.steps is not None:
        return recipe.train.steps
    if recipe.data.tokens and recipe.data.batch_tokens:
        return recipe.data.tokens // recipe.data.batch_tokens
    return None


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """One checkpoint on disk: master weights and both moments; None for a model whose shape cannot be read here."""
    from windlass.models.presets import model_spec

    try:
        return model_spec(recipe.model).params.stored * CHECKPOINT_BYTES[recipe.optim.moments]
    except WindlassError:
        return None
