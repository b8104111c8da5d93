"""JSON of `windlass plan --json` and of a run's plan.json."""

from collections.abc import Sequence
from typing import Any

from windlass.files import write_json
from windlass.planner.changes import RecipeChange, recommended
from windlass.planner.explain import LayoutExplanation
from windlass.planner.measured import tokens_beyond
from windlass.planner.search import Plan, Plans, Rejected
from windlass.planner.task import PlanTask
from windlass.runs.folder import Run
from windlass.units import GIB


def mfu_denominator(task: PlanTask) -> str:
    """The peak that every MFU is a share of, as text."""
    peak, silicon = task.device.bf16_tflops, task.device.silicon_tflops
    if peak is None:
        return "the device's peak is unknown"
    quoted = f" as its maker quotes it (step times use the {silicon:g} TFLOP/s of this variant)" if silicon else ""
    return f"{peak:g} TFLOP/s dense bf16 peak of {task.device.name}{quoted}"


def plan_json(p: Plan, task: PlanTask) -> dict[str, Any]:
    e = p.energy
    return {
        "rank": p.rank or None,
        "layout": p.layout.config().model_dump(mode="json"),
        "recompute": p.recompute,
        "data_parallel": p.layout.data,
        "accumulation": p.layout.accumulation,
        "batch_tokens": p.batch_tokens,
        "given": p.from_recipe,
        "fits": p.fits,
        "memory_gib": p.memory.needed / GIB,
        "memory_limit_gib": p.limit_bytes / GIB,
        "memory_allocated_gib": p.memory.allocated / GIB,
        "memory_moment": p.memory.moment,
        "memory_terms_gib": {name: size / GIB for name, size in p.memory_terms.items()},
        "tokens_per_second_per_device": p.step.tokens_per_second_per_device,
        "tokens_per_second": p.step.tokens_per_second_per_device * task.devices,
        "step_seconds": p.step.seconds,
        "step_terms_seconds": dict(p.step.terms),
        "mfu": p.step.mfu,
        "mfu_convention": p.step.mfu_convention,
        "mfu_denominator": mfu_denominator(task),
        "mfu_of_achievable": p.mfu_of_achievable,
        "hfu": p.step.hfu,
        "days": p.days,
        "node_hours": p.node_hours,
        "device_watts": p.power.device_watts,
        "node_watts": p.power.node_watts,
        "mwh": None if e.kwh is None else e.kwh / 1000,
        "mwh_at_nodes": None if e.it_kwh is None else e.it_kwh / 1000,
        "mwh_of_devices": None if e.device_kwh is None else e.device_kwh / 1000,
        "pue": e.pue,
        "kwh_per_billion_tokens": e.kwh_per_billion_tokens,
        "tco2e": e.tco2e,
        "tco2e_market": e.market_tco2e,
        "euros": e.euros,
        "allocation": None if p.units is None else {"unit": task.cluster.billing.unit, "amount": p.units},
        "slower_than_first": p.slower,
        "ranked_by": p.ranked_by or None,
        "reason": p.reason,
        "outside_measured": list(p.outside_measured),
    }


def rejected_json(r: Rejected) -> dict[str, Any]:
    return {
        "layout": r.candidate.layout.config().model_dump(mode="json"),
        "recompute": r.candidate.recompute,
        "given": r.from_recipe,
        "memory_gib": r.memory_gib,
        "reason": r.reason,
    }


def _header(task: PlanTask) -> dict[str, Any]:
    return {
        "recipe": task.recipe.name,
        "cluster": task.cluster.name,
        "nodes": task.nodes,
        "devices": task.devices,
        "device": task.device.name,
        "parameters": task.model.params.total,
    }


def change_json(change: RecipeChange) -> dict[str, Any]:
    p = change.plan
    return {
        "values": change.values,
        "layout": p.layout.config().model_dump(mode="json"),
        "recompute": p.recompute,
        "nodes": change.task.nodes,
        "batch_tokens": p.batch_tokens,
        "memory_gib": p.memory.needed / GIB,
        "memory_limit_gib": p.limit_bytes / GIB,
        "tokens_per_second_per_device": p.step.tokens_per_second_per_device,
        "gain": change.gain,
    }


def plans_json(plans: Plans, changes: Sequence[RecipeChange] = ()) -> dict[str, Any]:
    first = recommended(changes)
    return {
        **_header(plans.task),
        "recommended": None if first is None else change_json(first),
        "plans": [plan_json(p, plans.task) for p in plans.plans],
        "rejected": [rejected_json(r) for r in plans.rejected],
        "considered": plans.considered,
        "fitting": plans.fitting,
        "warnings": list(plans.task.warnings),
        "outside_measured": tokens_beyond(plans.best.tokens if plans.plans else None, plans.task.model.params.total),
        "changes": [change_json(change) for change in changes],
        "search_seconds": plans.search_seconds,
    }


def explanation_json(explanation: LayoutExplanation, task: PlanTask) -> dict[str, Any]:
    plan, best = explanation.plan, explanation.best
    return {
        "asked": explanation.asked,
        "layout": explanation.candidate.layout.config().model_dump(mode="json"),
        "recompute": explanation.candidate.recompute,
        "verdict": explanation.verdict,
        "sentences": list(explanation.sentences),
        "plan": None if plan is None else plan_json(plan, task),
        "best": None if best is None else plan_json(best, task),
    }


def write_plan(run: Run, plans: Plans, chosen: Plan | None = None) -> None:
    """Store the plan in the run folder, where report and energy compare it with measurements."""
    write_json(run.plan_file, plan_record(plans, chosen))


def plan_record(plans: Plans, chosen: Plan | None = None) -> dict[str, Any]:
    """The content of plan.json: the plan that the run uses, ten alternatives in short, and warnings."""
    used = chosen or next((p for p in plans.plans if p.from_recipe), None) or plans.best
    alternatives = [
        {
            "layout": p.layout.config().model_dump(mode="json"),
            "recompute": p.recompute,
            "days": p.days,
            "reason": p.reason,
        }
        for p in plans.plans
        if p is not used
    ]
    return {
        "version": 1,
        **_header(plans.task),
        "plan": plan_json(used, plans.task),
        "alternatives": alternatives[:10],
        "warnings": list(plans.task.warnings),
    }
