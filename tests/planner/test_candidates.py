"""Which layouts the search tries, and that every one of them can run."""

import pytest

from windlass.config import LayoutConfig
from windlass.planner.candidates import candidate_of, enumerate_candidates, problems, ruled_out
from windlass.planner.task import make_task


@pytest.fixture
def task(small, cluster_of):
    return make_task(small(), cluster_of("snellius-h100"))


def codes(task, recompute="none", **layout):
    return [p.code for p in problems(task, candidate_of(LayoutConfig(**layout), recompute, task))]


def test_problems_are_those_of_the_rules(task, small, cluster_of):
    assert codes(task, micro_batch=4) == []
    assert codes(task, tensor=8) == ["layout.tensor-not-divisible"] * 2 + ["layout.tensor-across-nodes"]
    assert codes(task, shard="zero2", pipeline=2) == ["layout.shard-with-pipeline"]
    deepspeed = make_task(small(train={"engine": "deepspeed"}), cluster_of("snellius-h100"))
    assert codes(deepspeed, tensor=2) == ["layout.axis-unsupported"]
    assert codes(deepspeed, shard="hybrid") == ["layout.hybrid-unsupported"]


@pytest.mark.parametrize("name", ["gptnl_8b_snellius", "study_140b_lumi", "llama_70b_jupiter", "tiny_cpu"])
def test_all_candidates_are_valid_and_keep_the_batch(name, recipe_of, cluster_of):
    recipe = recipe_of(name)
    task = make_task(recipe, cluster_of(recipe.cluster))
    candidates = list(enumerate_candidates(task))
    assert candidates
    for candidate in candidates:
        assert problems(task, candidate) == []
        assert candidate.layout.sequences_per_step == task.size.sequences
        assert candidate.layout.devices == task.devices


def test_experts_are_divided_inside_a_node_and_beyond(small, cluster_of):
    experts = {"family": "qwen3_moe", "experts": {"count": 24, "top_k": 2, "ffn": 256}}
    task = make_task(small(nodes=4, model=experts), cluster_of("snellius-h100"))
    layouts = [c for c in enumerate_candidates(task) if not problems(task, c)]
    assert len(layouts) == sum(1 for _ in enumerate_candidates(task))
    assert {c.layout.expert for c in layouts} == {1, 2, 4, 8}, "16 does not divide 24 experts"
    assert "expert 4" in next(c for c in layouts if c.layout.expert == 4).describe()
    assert {c.layout.expert for c in enumerate_candidates(make_task(small(), cluster_of("snellius-h100")))} == {1}


def test_uneven_pipelines_are_tried(small, cluster_of):
    task = make_task(small(nodes=8), cluster_of("snellius-h100"))
    assert {c.layout.pipeline for c in enumerate_candidates(task)} == {1, 2, 4, 8}, "8 does not divide the 12 layers"


def test_what_the_engine_divides_of_a_retnet(small, cluster_of):
    task = make_task(small(model={"family": "retnet", "kv_heads": None}), cluster_of("snellius-h100"))
    layouts = [c.layout for c in enumerate_candidates(task)]
    assert {layout.tensor for layout in layouts} >= {1, 2, 4} and {layout.context for layout in layouts} == {1}
    assert codes(task, context=2) == ["layout.context-not-priced"]


def test_a_rank_holds_an_equal_share_of_the_sequence(small, cluster_of):
    task = make_task(small(data={"seq_len": 2050, "batch_tokens": None}), cluster_of("snellius-h100"))
    assert codes(task, tensor=4) == ["layout.sequence-not-divisible"]
    assert {c.layout.tensor for c in enumerate_candidates(task)} == {1, 2}


def test_layout_and_table_say_the_same(task):
    for candidate in enumerate_candidates(task):
        assert candidate_of(candidate.layout.config(), candidate.recompute, task) == candidate


def test_offload_that_overflows_the_host(small, cluster_of):
    lumi = cluster_of("lumi-g")
    tiny_host = lumi.model_copy(update={"node": lumi.node.model_copy(update={"memory": 2**26, "memory_usable": 2**26})})
    task = make_task(small(cluster="lumi-g"), tiny_host, 2)
    assert codes(task, shard="full", offload="optimizer") == ["layout.host-memory-too-small"]
    assert "layout.offload-needs-sharding" in codes(task, offload="optimizer")


def test_degrees_that_a_rule_forbids_are_listed_once(task):
    forbidden = [violation for _, violation in ruled_out(task)]
    assert "layout.tensor-not-divisible" in {v.code for v in forbidden}
    assert len(forbidden) == len(set(forbidden))
