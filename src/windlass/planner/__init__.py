"""Search over layouts, ranking with reasons, budgets, and calibration from measured runs."""

from windlass.planner.explain import LayoutExplanation, explain_layout
from windlass.planner.record import plan_json, plan_record, plans_json, write_plan
from windlass.planner.search import Plan, Plans, Rejected, fill_layout, fill_recipe, plan

__all__ = [
    "LayoutExplanation",
    "Plan",
    "Plans",
    "Rejected",
    "explain_layout",
    "fill_layout",
    "fill_recipe",
    "plan",
    "plan_json",
    "plan_record",
    "plans_json",
    "write_plan",
]
