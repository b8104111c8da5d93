"""How are plans written down? The JSON of `windlass plan --json` and of a run's plan.json."""

from __future__ import annotations

from typing import Any

from windlass.files import write_json
from windlass.planner.explain import Why
from windlass.planner.search import Plan, Plans, Rejected
from windlass.planner.task import PlanTask
from windlass.runs.folder import Run
from windlass.units import GIB


def mfu_words(task: PlanTask) -> str:
    """What every MFU here is a share of."""
    peak, own = task.device.bf16_tflops, task.device.silicon_tflops
    if peak is None:
        return "the device's peak is unknown"
    words = f"{peak:g} TFLOP/s dense bf16 peak of {task.device.name}"
    return words + (f" as quoted (time is computed from the part's own {own:g})" if own else "")


def plan_json(p: Plan, task: PlanTask) -> dict[str, Any]:
    e = p.energy
    return {
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
        "mfu_denominator": mfu_words(task),
        "mfu_of_achievable": p.mfu_of_achievable,
        "hfu": p.step.hfu,
        "days": p.days,
        "node_hours": p.node_hours,
        "node_watts": p.power.node_watts,
        "mwh": None if e.kwh is None else e.kwh / 1000,
        "mwh_at_nodes": None if e.it_kwh is None else e.it_kwh / 1000,
        "pue": e.pue,
        "kwh_per_billion_tokens": e.kwh_per_billion_tokens,
        "tco2e": e.tco2e,
        "tco2e_market": e.market_tco2e,
        "euros": e.euros,
        "allocation": None if p.units is None else {"unit": task.cluster.billing.unit, "amount": p.units},
        "reason": p.reason,
    }


def rejected_json(r: Rejected) -> dict[str, Any]:
    return {
        "layout": r.candidate.layout.config().model_dump(mode="json"),
        "recompute": r.candidate.recompute,
        "given": r.from_recipe,
        "memory_gib": r.memory_gib,
        "reason": r.reason,
    }


def plans_json(plans: Plans) -> dict[str, Any]:
    task = plans.task
    return {
        "recipe": task.recipe.name,
        "cluster": task.cluster.name,
        "nodes": task.nodes,
        "devices": task.devices,
        "device": task.device.name,
        "parameters": task.model.params.total,
        "plans": [plan_json(p, task) for p in plans.plans],
        "rejected": [rejected_json(r) for r in plans.rejected],
        "considered": plans.considered,
        "fitting": plans.fitting,
        "warnings": list(task.warnings),
        "search_seconds": plans.search_seconds,
    }


def why_json(answer: Why, task: PlanTask) -> dict[str, Any]:
    return {
        "asked": answer.asked,
        "layout": answer.candidate.layout.config().model_dump(mode="json"),
        "recompute": answer.candidate.recompute,
        "verdict": answer.verdict,
        "sentences": list(answer.sentences),
        "plan": None if answer.plan is None else plan_json(answer.plan, task),
        "best": None if answer.best is None else plan_json(answer.best, task),
    }


def write_plan(run: Run, plans: Plans, chosen: Plan | None = None) -> None:
    """Keep the plan in the run's folder: the report lays it beside what was measured."""
    write_json(run.plan_file, plan_record(plans, chosen))


def plan_record(plans: Plans, chosen: Plan | None = None) -> dict[str, Any]:
    """What a run keeps in plan.json: the plan it was started with, its runners-up in short, and what the estimate rests on."""
    task = plans.task
    picked = chosen or next((p for p in plans.plans if p.from_recipe), None) or plans.best
    return {
        "version": 1,
        "recipe": task.recipe.name,
        "cluster": task.cluster.name,
        "nodes": task.nodes,
        "devices": task.devices,
        "device": task.device.name,
        "parameters": task.model.params.total,
        "plan": plan_json(picked, task),
        "alternatives": [
            {
                "layout": p.layout.config().model_dump(mode="json"),
                "recompute": p.recompute,
                "days": p.days,
                "reason": p.reason,
            }
            for p in plans.plans
            if p is not picked
        ][:10],
        "warnings": list(task.warnings),
    }
