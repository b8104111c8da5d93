"""The JSON contract of `windlass plan --json` and of plan.json."""

import json

from windlass.planner import explain_layout, plan, plan_record, plans_json, write_plan
from windlass.planner.record import explanation_json
from windlass.runs.folder import Run

CONTRACT = {
    "layout", "fits", "memory_gib", "memory_terms_gib", "tokens_per_second_per_device", "step_seconds", "mfu", "mfu_convention", "days", "mwh", "tco2e", "reason",
}  # fmt: skip


def test_plans_json_keeps_the_contract(recipe_of, cluster_of):
    recipe = recipe_of("gptnl_8b_snellius")
    value = json.loads(json.dumps(plans_json(plan(recipe, cluster_of(recipe.cluster), top=3))))
    assert {"plans", "rejected", "search_seconds"} <= set(value)
    assert len(value["plans"]) == 3
    for row in value["plans"]:
        assert set(row) >= CONTRACT
        assert row["fits"] is True and row["memory_gib"] <= row["memory_limit_gib"]
        assert abs(sum(row["memory_terms_gib"].values()) - row["memory_gib"]) < 1e-6
        assert "989 TFLOP/s" in row["mfu_denominator"] and row["mfu_convention"].startswith("6N")
        assert row["layout"]["shard"] in ("none", "zero1", "zero2", "full", "hybrid")
    for row in value["rejected"]:
        assert row["layout"] and row["reason"]


def test_unknown_is_null(recipe_of, cluster_of):
    recipe = recipe_of("tiny_cpu")
    cluster = cluster_of("workstation")
    unknown = cluster.model_copy(update={"grid": cluster.grid.model_copy(update={"g_per_kwh": None})})
    row = plans_json(plan(recipe, unknown))["plans"][0]
    assert row["tco2e"] is None and row["euros"] is None


def test_plan_record_prefers_the_recipes_layout(recipe_of, cluster_of):
    recipe = recipe_of("italia_9b_leonardo")
    record = json.loads(json.dumps(plan_record(plan(recipe, cluster_of(recipe.cluster)))))
    assert record["plan"]["given"] is True and record["plan"]["layout"]["shard"] == "hybrid"
    assert record["version"] == 1 and 0 < len(record["alternatives"]) <= 10
    assert record["devices"] == 256


def test_why_json(recipe_of, cluster_of):
    recipe = recipe_of("gptnl_8b_snellius")
    plans = plan(recipe, cluster_of(recipe.cluster))
    value = json.loads(json.dumps(explanation_json(explain_layout(plans, "shard=full,micro_batch=8"), plans.task)))
    assert value["verdict"] == "does not fit" and value["plan"]["fits"] is False and value["best"]["fits"] is True
    assert json.loads(json.dumps(explanation_json(explain_layout(plans, "tensor=3"), plans.task)))["plan"] is None


def test_the_plan_is_kept_in_the_run_folder(recipe_of, cluster_of, tmp_path):
    recipe = recipe_of("tiny_cpu")
    run = Run(tmp_path)
    write_plan(run, plan(recipe, cluster_of("workstation")))
    assert run.plan()["plan"]["layout"]["micro_batch"] == 8
    assert run.plan()["plan"]["tco2e"] > 0 and run.plan()["plan"]["euros"] is None
