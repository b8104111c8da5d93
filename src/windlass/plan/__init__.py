"""Legal layouts -> estimates -> ranked plans with reasons; budget curves; calibration from measured runs."""

from windlass.plan.explain import Why, why
from windlass.plan.record import plan_json, plan_record, plans_json, write_plan
from windlass.plan.search import Plan, Plans, Rejected, fill_layout, fill_recipe, plan

__all__ = [
    "Plan",
    "Plans",
    "Rejected",
    "Why",
    "fill_layout",
    "fill_recipe",
    "plan",
    "plan_json",
    "plan_record",
    "plans_json",
    "why",
    "write_plan",
]
