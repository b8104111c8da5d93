"""What small changes gain, the adjusted batch, and the changes with which a model fits."""

import json

import pytest

from windlass.errors import ConfigError, PlanError
from windlass.planner import plan
from windlass.planner.changes import adjust_batch, nothing_fits, recommended, small_changes, ways_to_fit
from windlass.planner.page import plan_page
from windlass.planner.record import plans_json
from windlass.planner.search import most_replicas
from windlass.units import GIB


@pytest.fixture
def one_h200(cluster_of):
    """A workstation with one H200 and this much host memory."""

    def make(host_gib=None):
        cluster = cluster_of("workstation")
        memory = None if host_gib is None else host_gib * GIB
        node = cluster.node.model_copy(update={"devices": 1, "memory": memory})
        return cluster.model_copy(update={"device": "h200", "node": node})

    return make


def gains(found):
    return {next(iter(change.values.items())): change for change in small_changes(found)}


@pytest.mark.parametrize("name", ["gptnl_1b_snellius", "gptnl_8b_snellius", "gptnl_30b_snellius"])
def test_all_22_nodes_of_gptnl_are_planned(recipe_of, cluster_of, name):
    best = plan(recipe_of(name), cluster_of("snellius-h100"), nodes=22).best
    assert best.layout.devices == 88 and best.fits
    if name == "gptnl_1b_snellius":
        assert best.layout.pipeline == 1 and best.layout.data == 88


# 88 = 8 x 11 devices share only the 8 with 512, 640 and 1,024 sequences, so each of 8 replicas has 11 devices.
AWKWARD = {
    "gptnl_1b_snellius": ("2Mi", 512, 528, 0.46),
    "gptnl_8b_snellius": ("5Mi", 640, 660, 0.34),
    "gptnl_30b_snellius": ("4Mi", 1024, 1056, 0.09),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_another_batch_is_recommended_where_a_count_forces_a_pipeline_of_11(recipe_of, cluster_of, name):
    batch, sequences, proposed, gain = AWKWARD[name]
    plans = plan(recipe_of(name, f"data.batch_tokens={batch}"), cluster_of("snellius-h100"), nodes=22)
    assert most_replicas(plans.task) == 8 and all(p.layout.pipeline % 11 == 0 for p in plans.plans)
    reason = plans.best.reason
    assert f"{sequences:,} sequences" in reason and "8 replicas of 11 devices" in reason
    assert "fastest of" not in reason and "preferred of" not in reason
    change = recommended(small_changes(plans))
    assert change.values == {"data.batch_tokens": proposed * plans.task.seq_len}
    assert change.plan.layout.pipeline <= 4 and change.gain == pytest.approx(gain, abs=0.03)
    faster = change.plan.step.tokens_per_second_per_device / plans.best.step.tokens_per_second_per_device
    assert change.gain == pytest.approx(faster - 1)
    assert plans_json(plans, [change])["recommended"]["gain"] == change.gain
    advice = change.advise(plans.best.batch_tokens)
    assert f"{100 * (proposed / sequences - 1):+.1f} %" in advice and advice in plan_page(plans, changes=[change])


def test_fewer_nodes_are_a_change_and_not_the_recommendation(recipe_of, cluster_of):
    plans = plan(recipe_of("gptnl_1b_snellius", "data.batch_tokens=2Mi"), cluster_of("snellius-h100"), nodes=22)
    change = gains(plans)["nodes", 16]  # 16 of the 22 nodes are faster than all
    assert change.gain == pytest.approx(0.08, abs=0.06) and recommended([change]) is None


@pytest.mark.parametrize(("nodes", "sequences"), [(4, 512), (22, 528), (22, 44)])
def test_a_batch_that_divides_or_is_small_is_not_called_awkward(recipe_of, cluster_of, nodes, sequences):
    recipe = recipe_of("gptnl_1b_snellius", f"data.batch_tokens={sequences * 4096}")
    plans = plan(recipe, cluster_of("snellius-h100"), nodes=nodes)
    assert recommended(small_changes(plans)) is None and "first of" not in plans.best.reason


def test_adjust_takes_the_nearest_batch_and_says_so(recipe_of, cluster_of):
    cluster = cluster_of("snellius-h100")
    recipe, note = adjust_batch(recipe_of("gptnl_1b_snellius", "data.batch_tokens=2Mi"), cluster, 22)
    assert recipe.data.batch_tokens == 528 * 4096
    assert all(number in note for number in ("2,097,152", "2,162,688", "+3.1 %", "528", "88"))
    assert adjust_batch(recipe, cluster, 22) == (recipe, None)
    # A batch that no layout divides: DeepSpeed has replicas only.
    recipe, note = adjust_batch(recipe_of("gptnl_8b_snellius", "train.engine=deepspeed"), cluster, 22)
    assert recipe.data.batch_tokens == 616 * 8192 and "5,242,880 -> 5,046,272 (-3.7 %)" in note
    # A layout of the recipe: five sequences on each of 84 devices.
    own = recipe_of("gptnl_1b_snellius", "layout.micro_batch=5", "data.batch_tokens=2Mi")
    assert adjust_batch(own, cluster, 21)[0].data.batch_tokens == 84 * 5 * 4096


def test_a_batch_is_not_changed_much_for_speed(recipe_of, cluster_of):
    # 44 sequences are half of 88 devices: legal with tensor parallelism, and 88 would be another experiment.
    recipe = recipe_of("gptnl_1b_snellius", f"data.batch_tokens={44 * 4096}")
    assert adjust_batch(recipe, cluster_of("snellius-h100"), 22) == (recipe, None)


def test_key_value_heads_that_leave_tensor_parallelism_out(recipe_of, cluster_of):
    shape = ["layers=60", "width=6656", "ffn=17920", "heads=52", "kv_heads=13"]
    recipe = recipe_of("gptnl_30b_snellius", *(f"model.{size}" for size in shape))
    found = plan(recipe, cluster_of("snellius-h100"))
    assert {p.layout.tensor for p in found.plans} == {1}
    ((key, count), change) = next(iter(gains(found).items()))
    assert key == "model.kv_heads" and count in (4, 26) and change.plan.layout.tensor > 1 and change.gain > 0.03


def test_uneven_stages_show_what_equal_ones_gain(recipe_of, cluster_of):
    # Nine layers in eight stages: one rank has two, and all others wait for it.
    layout = ("nodes=2", "layout.pipeline=8", "data.batch_tokens=256Ki", "model.layers=9")
    found = plan(recipe_of("gptnl_1b_snellius", *layout), cluster_of("snellius-h100"))
    change = gains(found)["model.layers", 8]
    assert change.gain > 0.3


def test_a_batch_that_divides_costs_no_further_search(recipe_of, cluster_of, monkeypatch):
    found = plan(recipe_of("gptnl_8b_snellius"), cluster_of("snellius-h100"))
    monkeypatch.setattr("windlass.planner.changes.plan", lambda *_, **__: pytest.fail("searched again"))
    assert small_changes(found) == []


def test_8b_on_one_h200_lists_bf16_moments(recipe_of, one_h200):
    recipe = recipe_of("gptnl_8b_snellius", "nodes=1", "data.batch_tokens=512Ki")
    found = plan(recipe, one_h200())
    assert not found.plans
    ways = {tuple(way.values): way for way in ways_to_fit(found)}
    moments = ways[("optim.moments",)]
    # Measured on an H200: 10,400 tokens/s.
    assert moments.plan.step.tokens_per_second_per_device == pytest.approx(10_400, rel=0.05)
    assert moments.plan.memory.needed / GIB == pytest.approx(136, abs=3)
    assert ways[("layout.offload", "train.recompute")].plan.layout.offload == "optimizer"
    error = nothing_fits(found)
    assert error.code == "planner.nothing-fits"
    assert all(text in error.hint for text in ("optim.moments=bf16: ", "136.3 GiB of 139.8 GiB", "tokens/s"))
    with pytest.raises(PlanError) as caught:
        _ = found.best
    assert caught.value.hint == error.hint
    # A machine whose network is unknown cannot have more nodes planned.
    alone = one_h200().model_copy(update={"nodes": None})
    alone = alone.model_copy(update={"links": alone.links.model_copy(update={"inter_gbs_per_node": None})})
    assert {tuple(way.values) for way in ways_to_fit(plan(recipe, alone))} == set(ways)
    # 64 GiB of moments do not fit into this host.
    few = {tuple(way.values) for way in ways_to_fit(plan(recipe, one_h200(48)))}
    assert ("optim.moments",) in few and ("layout.offload", "train.recompute") not in few


def test_a_way_that_is_taken_fits(recipe_of, one_h200):
    base = ["nodes=1", "data.batch_tokens=512Ki", "train.recompute=none"]
    ways = ways_to_fit(plan(recipe_of("gptnl_8b_snellius", *base), one_h200()))
    assert {"train.recompute", "data.seq_len", "layout.offload"} <= {key for way in ways for key in way.values}
    for way in ways:
        changed = recipe_of("gptnl_8b_snellius", *base, *way.overrides)
        best = plan(changed, one_h200())
        chosen = next((p for p in best.plans if p.from_recipe), best.plans[0])
        assert chosen.fits and chosen.candidate == way.plan.candidate


def test_more_nodes_and_shorter_sequences(recipe_of, cluster_of):
    ways = ways_to_fit(plan(recipe_of("study_140b_lumi"), cluster_of("lumi-g"), nodes=1))
    assert [way.values for way in ways] == [{"nodes": 4}]
    long = recipe_of("gptnl_8b_snellius", "data.seq_len=524288", "data.batch_tokens=4Mi", "nodes=1")
    values = [way.values for way in ways_to_fit(plan(long, cluster_of("snellius-h100")))]
    assert any("data.seq_len" in value for value in values) and any("nodes" in value for value in values)


def test_a_model_that_no_change_makes_fit(recipe_of, one_h200):
    error = nothing_fits(plan(recipe_of("study_140b_lumi", "nodes=1"), one_h200()))
    assert error.code == "planner.nothing-fits" and "smaller" in error.hint


def test_experts_are_refused_not_priced_as_a_dense_model(recipe_of, cluster_of, tmp_path):
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8, **sizes}))
    recipe = recipe_of("gptnl_8b_snellius", "model.family=hf", f"model.config={tmp_path}")
    with pytest.raises(ConfigError) as error:
        plan(recipe, cluster_of("snellius-h100"))
    assert error.value.code == "planner.experts-not-priced" and "8 experts" in error.value.message


@pytest.mark.parametrize(("batch", "noted"), [("1Mi", True), ("4Mi", False), ("60Mi", False), ("256Mi", True)])
def test_a_batch_far_from_the_usual_is_noted(recipe_of, cluster_of, batch, noted):
    recipe = recipe_of("gptnl_8b_snellius", "nodes=16", f"data.batch_tokens={batch}")
    notes = [text for text in plan(recipe, cluster_of("snellius-h100")).task.warnings if "60M" in text]
    assert bool(notes) is noted
