"""The planner's result as launching needs it: the layout, whether it fits, run time, energy, checkpoint size."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.clusters import Cluster
from windlass.config import LayoutConfig, Recipe
from windlass.errors import PlanError, WindlassError
from windlass.launch.checks import Finding
from windlass.models.presets import model_spec
from windlass.planner.search import nothing_fits, plan

# Bytes per parameter on disk by the precision of AdamW's moments: fp32 master weights and two moments.
CHECKPOINT_BYTES = {"fp32": 12, "bf16": 8}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planned layout and its predictions; None where the planner has none."""

    layout: LayoutConfig | None
    reason: str
    overrides: tuple[str, ...] = ()  # recipe keys that give every job of the chain the same layout
    findings: tuple[Finding, ...] = ()
    run_seconds: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_share: float | None = None
    kwh: float | None = None
    steps: int | None = None
    checkpoint_bytes: int | None = None


def planned(recipe: Recipe, cluster: Cluster) -> Planned:
    """Choose the layout, or judge the recipe's own. Never raises: what cannot be planned is a finding."""
    try:
        plans = plan(recipe, cluster)
    except PlanError as error:
        return _not_planned(recipe, Finding("fit", "refuse", error.message, error.hint, "windlass plan"))
    except WindlassError as error:
        return _not_planned(recipe, Finding("fit", "note", f"not planned: {error.message}", error.hint))
    best = next((p for p in plans.plans if recipe.layout is None or p.from_recipe), None)
    if best is None and recipe.layout is None:
        nothing = nothing_fits(plans)
        return _not_planned(recipe, Finding("fit", "refuse", nothing.message, nothing.hint, "windlass plan"))
    if best is None:
        why = next((r.reason for r in plans.rejected if r.from_recipe), "it is not valid here")
        hint = f"the planner would choose {plans.plans[0].candidate.describe()}" if plans.plans else None
        return _not_planned(
            recipe, Finding("fit", "refuse", f"the recipe's layout does not fit: {why}", hint, "windlass plan")
        )
    overrides, reason = [], best.reason
    if recipe.layout is None:
        overrides = [*layout_overrides(best.layout.config()), f"train.recompute={best.recompute}"]
        reason = f"{best.candidate.describe()} ({best.reason})"
    return Planned(
        layout=best.layout.config(),
        reason=reason,
        overrides=tuple(overrides),
        findings=(Finding("fit", "ok", reason),),
        run_seconds=best.days * 86400,
        step_seconds=best.step.seconds,
        tokens_per_second=best.batch_tokens / best.step.seconds,
        mfu=best.step.mfu,
        memory_share=best.memory_share,
        kwh=best.energy.kwh,
        steps=round(best.tokens / best.batch_tokens),
        checkpoint_bytes=checkpoint_bytes(recipe),
    )


def _not_planned(recipe: Recipe, finding: Finding) -> Planned:
    steps, data = recipe.train.steps, recipe.data
    if steps is None and data.tokens and data.batch_tokens:
        steps = data.tokens // data.batch_tokens
    size = checkpoint_bytes(recipe)
    return Planned(layout=recipe.layout, reason="", findings=(finding,), steps=steps, checkpoint_bytes=size)


def layout_overrides(layout: LayoutConfig) -> list[str]:
    """`layout.shard=hybrid` for every value that is not the default; at least one, so that the layout is fixed."""
    value, default = layout.model_dump(), LayoutConfig().model_dump()
    overrides = [f"layout.{key}={item}" for key, item in value.items() if item not in (default[key], None)]
    return overrides or [f"layout.shard={layout.shard}"]


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """One checkpoint on disk: master weights and both moments; None for a model of unknown size."""
    try:
        return int(model_spec(recipe.model).params.stored) * CHECKPOINT_BYTES[recipe.optim.moments]
    except WindlassError:
        return None
