"""The teams' recipes with one value broken each: refused with the numbers and the nearest valid choice."""

from pathlib import Path

import pytest

from windlass.clusters import load_cluster
from windlass.config import load_recipe
from windlass.errors import WindlassError
from windlass.planner import plan

FOLDER = Path(__file__).parents[2] / "recipes"
# recipe, broken values, code, numbers of the message, nearest valid choice
BROKEN = [
    # GPT-NL on Snellius
    ("gptnl_8b_snellius", ["nodes=0"], "config.invalid", ("nodes",), "greater than 0"),
    ("gptnl_8b_snellius", ["nodes=89"], "planner.too-many-nodes", ("89", "88"), "88"),
    ("gptnl_8b_snellius", ["nodes=21", "train.engine=deepspeed"], "layout.batch-not-divisible",
     ("5,242,880", "84 replicas"), "4,816,896 or 5,505,024"),
    ("gptnl_8b_snellius", ["data.batch_tokens=5242881"], "config.invalid", ("5,242,881", "8,192"),
     "5,242,880 or 5,251,072"),
    ("gptnl_8b_snellius", ["model.kv_heads=7"], "config.invalid", ("7", "32"), "4 or 8"),
    ("gptnl_8b_snellius", ["model.heads=33"], "config.invalid", ("33", "4096"), "32 or 64"),
    ("gptnl_8b_snellius", ["model.experts.count=8", "model.experts.top_k=9"], "config.invalid", ("8", "9"), "at most 8"),
    ("gptnl_8b_snellius", ["cluster=snellius-h1000"], "clusters.unknown-cluster", ("snellius-h1000",), "snellius-h100"),
    ("gptnl_8b_snellius", ["model.family=hf", "model.config=absent"], "model.config-unreadable", ("absent",), "config.json"),
    ("gptnl_30b_snellius", ["model.heads=52", "model.kv_heads=13", "model.width=6656", "layout.tensor=2"],
     "layout.tensor-not-divisible", ("2", "13"), "1"),
    ("gptnl_30b_snellius", ["model.heads=52", "model.width=6656", "model.kv_heads=8"], "config.invalid", ("8", "52"), "4 or 13"),
    # Italia on Leonardo
    ("italia_9b_leonardo", ["nodes=63"], "layout.batch-not-divisible", ("4,194,304", "252 replicas"),
     "4,128,768 or 5,160,960"),
    ("italia_9b_leonardo", ["layout.tensor=3"], "layout.tensor-not-divisible", ("3",), "2 or 4"),
    # Poro on LUMI
    ("poro_34b_lumi", ["nodes=3000"], "planner.too-many-nodes", ("3,000", "2,978"), "2,978"),
    ("poro_34b_lumi", ["layout.pipeline=64"], "layout.too-many-stages", ("54", "64"), "54"),
    ("poro_34b_lumi", ["model.heads=54"], "config.invalid", ("54", "7168"), "32 or 56"),
    # RetNet of the hackathon
    ("retnet_300m_lumi", ["nodes=17"], "layout.batch-not-divisible", ("1,048,576", "136 replicas"),
     "835,584 or 1,114,112"),
    # Hybrids
    ("luciole_8b_jupiter", ["model.layers=53"], "config.invalid", ("52 letters", "53 layers"), "model.layers = 52"),
    ("luciole_8b_jupiter", ["model.pattern=M-F..."], "config.invalid", ("M-F",), "M, *, -, E"),
    ("luciole_8b_jupiter", ["model.pattern=ME..."], "config.invalid", ("E layers",), "model.experts.count"),
    ("luciole_8b_jupiter", ["model.pattern=*-..."], "config.invalid", ("model.mamba",), "remove the table"),
    ("luciole_8b_jupiter", ["model.mamba.groups=7"], "config.invalid", ("7", "128"), "4 or 8"),
    ("luciole_8b_jupiter", ["model.mamba.groups=2", "layout.tensor=4"], "layout.tensor-not-divisible",
     ("4", "model.mamba.groups (2)"), "2"),
    ("luciole_8b_jupiter", ["model.family=llama"], "config.invalid", ("'llama'",), "F, W, N"),
    ("nemotron3_nano_jupiter", ["model.experts.dense_layers=1"], "config.invalid", ("1",), "remove it"),
    ("nemotron3_nano_jupiter", ["model.pattern=M*-M..."], "config.invalid", ("M*-M",), "write E"),
    ("nemotron3_nano_jupiter", ["model.activation=xielu"], "config.invalid", ("xielu",), "relu2"),
]  # fmt: skip
# recipe, its own layout, numbers of the reason, nearest valid choice: the planner shows others beside it
REJECTED = [
    ("gptnl_8b_snellius", ["layout.micro_batch=10"], ("5,242,880", "6,553,600", "80 replicas"), "6,553,600"),
    ("gptnl_8b_snellius", ["layout.micro_batch=24", "nodes=4"], ("3,145,728", "16 replicas"), "3,145,728 or 6,291,456"),
    ("gptnl_8b_snellius", ["layout.pipeline=3"], ("3", "80 devices"), "2 or 4"),
    ("poro_34b_lumi", ["layout.tensor=2", "layout.pipeline=3"], ("6", "1024 devices"), "4 or 8"),
    ("italia_9b_leonardo", ["layout.shard=hybrid", "layout.shard_size=3"], ("3", "256 replicas"), "2 or 4"),
]


@pytest.mark.parametrize(("name", "values", "code", "numbers", "nearest"), BROKEN, ids=lambda v: str(v)[:40])
def test_a_broken_value_is_refused_with_the_nearest_valid(name, values, code, numbers, nearest):
    with pytest.raises(WindlassError) as error:
        recipe = load_recipe(FOLDER / f"{name}.toml", values).recipe
        plan(recipe, load_cluster(recipe.cluster))
    assert error.value.code == code
    text = f"{error.value.message} {error.value.hint}"
    assert all(number in text for number in (*numbers, nearest)), text


@pytest.mark.parametrize(("name", "values", "numbers", "nearest"), REJECTED, ids=lambda v: str(v)[:40])
def test_a_layout_that_cannot_run_is_rejected_beside_those_that_can(name, values, numbers, nearest):
    recipe = load_recipe(FOLDER / f"{name}.toml", values).recipe
    plans = plan(recipe, load_cluster(recipe.cluster))
    assert plans.plans and not any(p.from_recipe for p in plans.plans)
    reason = next(r.reason for r in plans.rejected if r.from_recipe)
    assert all(number in reason for number in (*numbers, nearest)), reason
