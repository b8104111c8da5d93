"""What cannot run is refused with the numbers and the nearest value that can."""

import pytest
from windlass.planner.layouts import enumerate_choices, from_config, problems, work_of

from windlass.config import LayoutConfig
from windlass.layout.rules import divisors, nearest
from windlass.planner.task import make_task


def found(task, recompute="none", **layout):
    return "; ".join(problems(task, from_config(LayoutConfig(**layout), recompute, task)))


@pytest.fixture
def task(small, cluster_of):
    return make_task(small(), cluster_of("snellius-h100"))


def test_a_plain_layout_has_no_problems(task):
    assert found(task, micro_batch=4) == ""


def test_heads_not_divisible_by_tensor(task):
    text = found(task, tensor=8)
    assert "layout.tensor (8) does not divide model.heads (12)" in text
    assert "nearest legal: 4" in text
    assert "more than the 4 devices of a node" in text


def test_kv_heads_not_divisible_by_tensor(small, cluster_of):
    task = make_task(small(model={"kv_heads": 2}), cluster_of("snellius-h100"))
    assert "layout.tensor (4) does not divide model.kv_heads (2); nearest legal: 2" in found(task, tensor=4)


def test_layers_not_divisible_by_pipeline(task):
    assert "layout.pipeline (8) does not divide model.layers (12); nearest legal: 6 or 12" in found(task, pipeline=8)


def test_devices_not_divisible(task):
    text = found(task, pipeline=3)
    assert "= 3 does not divide 8 devices; nearest legal: 2 or 4" in text
    assert "batch_tokens" not in text  # said once is enough


def test_more_than_there_is_names_the_nodes(task):
    assert "is more than 8 devices; at least 3 nodes are needed" in found(task, pipeline=12)


def test_batch_that_does_not_divide(task):
    # 128 sequences over 8 replicas x 3: a unit is 24 sequences; 5 x 24 = 120 and 6 x 24 = 144 sequences of 2048 tokens.
    text = found(task, micro_batch=3)
    assert (
        "data.batch_tokens (262,144) is not a multiple of 49,152 = micro_batch 3 x seq_len 2,048 x 8 replicas" in text
    )
    assert "nearest legal: 245,760 or 294,912" in text


def test_pipeline_needs_micro_batches(task):
    assert "1 micro-batches cannot fill 4 pipeline stages" in found(task, pipeline=4, micro_batch=64)


def test_interleaved_needs_a_multiple(small, cluster_of):
    task = make_task(small(data={"batch_tokens": 2048 * 20}), cluster_of("snellius-h100"))
    text = found(task, pipeline=4, schedule="interleaved", micro_batch=2)
    assert "interleaved: 5 micro-batches are not a multiple of pipeline 4; nearest legal: 4" in text


def test_chunks_must_divide_a_stage(task):
    assert "layout.pipeline_chunks (2) does not divide the 3 layers of a stage" in found(
        task, pipeline=4, schedule="interleaved", micro_batch=8
    )


def test_context_needs_even_pieces(small, cluster_of):
    task = make_task(small(data={"seq_len": 2046, "batch_tokens": 2046 * 128}), cluster_of("snellius-h100"))
    assert "is not a multiple of 2 x layout.context (8); the next larger one is 2,048" in found(task, context=4)


def test_hybrid_size_must_divide_replicas(task):
    assert "layout.shard_size (3) does not divide 8 replicas; nearest legal: 2 or 4" in found(
        task, shard="hybrid", shard_size=3
    )


def test_nothing_to_shard_over(small, cluster_of):
    task = make_task(small(data={"batch_tokens": 2048 * 16}), cluster_of("snellius-h100"), 1)
    assert "has one replica and nothing to divide over; nearest legal: none" in found(task, shard="full", tensor=4)


def test_engine_limits(small, cluster_of):
    task = make_task(small(train={"engine": "deepspeed"}), cluster_of("snellius-h100"))
    assert "deepspeed engine divides data and states only" in found(task, tensor=2)
    assert "hybrid: not built for the deepspeed engine" in found(task, shard="hybrid")
    retnet = make_task(small(model={"family": "retnet"}), cluster_of("snellius-h100"))
    assert "what it costs is not known here" in found(retnet, context=2)


def test_what_the_engine_divides_of_a_retnet_is_listed(small, cluster_of):
    task = make_task(small(model={"family": "retnet"}), cluster_of("snellius-h100"))
    choices = list(enumerate_choices(task))
    assert {c.tensor for c in choices} >= {1, 2, 4} and {c.context for c in choices} == {1}
    assert not problems(task, next(c for c in choices if c.tensor == 2))


def test_a_rank_holds_a_whole_share_of_the_sequence(small, cluster_of):
    task = make_task(small(data={"seq_len": 2050, "batch_tokens": None}), cluster_of("snellius-h100"))
    assert "layout.tensor (4) does not divide the 2,050 positions of a rank; nearest legal: 2" in found(task, tensor=4)
    assert {c.tensor for c in enumerate_choices(task)} == {1, 2}


@pytest.mark.parametrize("name", ["gptnl_8b_snellius", "study_140b_lumi", "llama_70b_jupiter", "tiny_cpu"])
def test_everything_the_search_enumerates_is_legal_and_keeps_the_batch(name, recipe_of, cluster_of):
    recipe = recipe_of(name)
    task = make_task(recipe, cluster_of(recipe.cluster))
    choices = list(enumerate_choices(task))
    assert choices
    for choice in choices:
        assert problems(task, choice) == []
        assert choice.micro_batch * choice.accumulation * choice.data == task.sequences
        assert choice.data * choice.tensor * choice.pipeline * choice.context == task.devices


def test_choice_and_config_say_the_same(task):
    for choice in enumerate_choices(task):
        assert from_config(choice.config(), choice.recompute, task) == choice


def test_small_logits_are_not_chunked(recipe_of, cluster_of, task):
    tiny = make_task(recipe_of("tiny_cpu"), cluster_of("workstation"))
    assert work_of(tiny, from_config(LayoutConfig(micro_batch=8), "none", tiny)).loss == "plain"
    assert work_of(task, from_config(LayoutConfig(micro_batch=8), "none", task)).loss == "chunked"


def test_nearest_and_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert nearest(5, [1, 2, 4, 8]) == "4 or 8"
    assert nearest(9, [1, 2]) == "2"


def test_offload_that_overflows_the_host(small, cluster_of):
    lumi = cluster_of("lumi-g")
    tiny_host = lumi.model_copy(update={"node": lumi.node.model_copy(update={"memory": 2**26, "memory_usable": 2**26})})
    task = make_task(small(cluster="lumi-g"), tiny_host, 2)
    text = found(task, shard="full", offload="optimizer")
    assert "layout.offload (optimizer) puts" in text and "nodes are needed" in text
    assert "needs sharded weights; nearest legal: shard full or hybrid" in found(task, offload="optimizer")
