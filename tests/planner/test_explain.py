"""--why answers with numbers: what is illegal, what does not fit and by how much, what is slower and by which term."""

import pytest

from windlass.errors import ConfigError
from windlass.planner import explain_layout, plan
from windlass.planner.explain import parse_question


@pytest.fixture
def plans(recipe_of, cluster_of):
    recipe = recipe_of("gptnl_8b_snellius")
    return plan(recipe, cluster_of(recipe.cluster))


def test_a_layout_that_does_not_fit(plans):
    answer = explain_layout(plans, "shard=full,micro_batch=8")
    assert answer.verdict == "does not fit"
    assert (
        answer.candidate.layout.shard == "full"
        and answer.candidate.layout.micro_batch == 8
        and answer.candidate.layout.tensor == 1
    )
    text = "\n".join(answer.sentences)
    assert "GiB too much" in text and "activations:" in text
    assert "the smallest change that fits:" in text
    assert "with the other values chosen by the planner:" in text
    assert answer.plan is not None and not answer.plan.fits


def test_a_layout_that_is_slower_names_the_terms(plans):
    answer = explain_layout(plans, "tensor=4,shard=full,micro_batch=4")
    assert answer.verdict == "fits"
    text = "\n".join(answer.sentences)
    assert "times as long as the first" in text
    assert "tensor-parallel traffic:" in text and "s/step in the first" in text
    assert "20 replicas instead of" in text


def test_the_best_layout_explains_itself(plans):
    best = plans.best
    keys = ("shard", "shard_size", "micro_batch", "tensor", "pipeline", "context", "schedule", "recompute")
    values = {**best.layout.config().model_dump(), "recompute": best.recompute}
    question = ",".join(f"{key}={values[key]}" for key in keys if values[key] is not None)
    answer = explain_layout(plans, question)
    assert any("ranked first" in s for s in answer.sentences)


def test_an_illegal_layout_names_the_rule_and_the_nearest_value(plans):
    answer = explain_layout(plans, "tensor=3")
    assert answer.verdict == "illegal" and answer.plan is None
    assert any("(3)" in s and "(32)" in s and "2 or 4" in s for s in answer.sentences)


def test_open_keys_are_those_of_the_recipe(recipe_of, cluster_of):
    recipe = recipe_of("italia_9b_leonardo")
    answer = explain_layout(plan(recipe, cluster_of(recipe.cluster)), "micro_batch=4")
    assert (
        answer.candidate.layout.shard == "hybrid"
        and answer.candidate.recompute == "full"
        and answer.candidate.layout.micro_batch == 4
    )


def test_questions_that_make_no_sense():
    codes = {
        "shards=full": "planner.why-unknown-key",
        " , ": "planner.why-empty",
        "recompute=some": "planner.why-unknown-recompute",
    }
    for question, code in codes.items():
        with pytest.raises(ConfigError) as error:
            parse_question(question)
        assert error.value.code == code
    for question in ("full", "shard=everything"):  # refused by windlass.config
        with pytest.raises(ConfigError):
            parse_question(question)
    assert parse_question("layout.micro_batch=8; shard=full") == {"micro_batch": 8, "shard": "full"}
