"""What the planner expects of a job: whether the layout fits, run time, energy and checkpoint size."""

from dataclasses import dataclass

from windlass.clusters import Cluster
from windlass.config import LayoutConfig, Recipe
from windlass.errors import PlanError, WindlassError
from windlass.launch.checks import Finding
from windlass.models.presets import model_spec
from windlass.planner.search import plan

CHECKPOINT_BYTES = {"fp32": 12, "bf16": 8}
"""Bytes per parameter on disk by the precision of AdamW's moments: fp32 master weights and two moments."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's answer, as far as launching needs it; None where it had none."""

    layout: LayoutConfig | None
    reason: str = ""
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
    """Plan the recipe's own layout, or the best one. Never raises: what cannot be planned is a finding."""

    def without(finding: Finding) -> Planned:
        return Planned(
            layout=recipe.layout,
            findings=(finding,),
            steps=recipe_steps(recipe),
            checkpoint_bytes=checkpoint_bytes(recipe),
        )

    try:
        plans = plan(recipe, cluster)
        chosen = plans.best if recipe.layout is None else next((p for p in plans.plans if p.from_recipe), None)
    except WindlassError as error:
        if isinstance(error, PlanError) or error.code.startswith("layout."):
            return without(Finding("fit", "refuse", error.message, error.hint, "windlass plan"))
        return without(Finding("fit", "note", f"not planned: {error.message}", error.hint))
    if chosen is None:
        reason = next((r.reason for r in plans.rejected if r.from_recipe), "it is not valid here")
        hint = f"the planner would choose {plans.plans[0].candidate.describe()}" if plans.plans else None
        return without(Finding("fit", "refuse", f"the recipe's layout does not fit: {reason}", hint, "windlass plan"))
    reason = chosen.reason if recipe.layout is not None else f"{chosen.candidate.describe()} ({chosen.reason})"
    return Planned(
        layout=chosen.layout.config(),
        reason=reason,
        findings=(Finding("fit", "ok", reason),),
        run_seconds=chosen.days * 86400,
        step_seconds=chosen.step.seconds,
        tokens_per_second=chosen.batch_tokens / chosen.step.seconds,
        mfu=chosen.step.mfu,
        memory_share=chosen.memory_share,
        kwh=chosen.energy.kwh,
        steps=round(chosen.tokens / chosen.batch_tokens),
        checkpoint_bytes=checkpoint_bytes(recipe),
    )


def recipe_steps(recipe: Recipe) -> int | None:
    if recipe.train.steps is not None:
        return recipe.train.steps
    if recipe.data.tokens and recipe.data.batch_tokens:
        return recipe.data.tokens // recipe.data.batch_tokens
    return None


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """One checkpoint on disk: master weights and both moments; None for a model whose config cannot be read here."""
    try:
        return model_spec(recipe.model).params.stored * CHECKPOINT_BYTES[recipe.optim.moments]
    except WindlassError:
        return None
