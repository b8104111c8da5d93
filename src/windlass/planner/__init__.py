"""Legal layouts -> estimates -> ranked plans with reasons; budget curves; calibration from measured runs."""

from windlass.planner.explain import Why, why
from windlass.planner.record import plan_json, plan_record, plans_json, write_plan
from windlass.planner.search import Plan, Plans, Rejected, fill_layout, fill_recipe, plan

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
