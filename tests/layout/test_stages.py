"""Which layers each pipeline stage and rank holds."""

import pytest

from windlass.config import LayoutConfig
from windlass.layout.resolve import JobSize, complete_layout
from windlass.layout.stages import gradient_buckets, layers_of_rank, stages, stages_of_rank
from windlass.layout.types import Layout


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [
        (12, 1, [12]),
        (12, 4, [3, 3, 3, 3]),
        (12, 5, [3, 3, 2, 2, 2]),
        (7, 4, [2, 2, 2, 1]),
        (5, 5, [1, 1, 1, 1, 1]),
        (80, 16, [5] * 16),
    ],
)
def test_layers_are_divided_as_evenly_as_possible(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    split = stages(num_layers, num_stages)
    assert [len(stage.layers) for stage in split] == sizes
    assert [layer for stage in split for layer in stage.layers] == list(range(num_layers))
    assert [stage.has_embedding for stage in split] == [True] + [False] * (num_stages - 1)
    assert [stage.has_head for stage in split] == [False] * (num_stages - 1) + [True]
    assert [stage.index for stage in split] == list(range(num_stages))


@pytest.mark.parametrize(
    ("layout", "held", "num_layers"),
    [
        (Layout(), [[0]], [13]),
        (Layout(pipeline=4), [[0], [1], [2], [3]], [4, 3, 3, 3]),
        (Layout(pipeline=2, schedule="gpipe"), [[0], [1]], [7, 6]),
        (Layout(pipeline=2, schedule="interleaved", chunks=3), [[0, 2, 4], [1, 3, 5]], [7, 6]),
        # zbv: the first rank also holds the last stage, so embedding and head are on one rank.
        (Layout(pipeline=3, schedule="zbv"), [[0, 5], [1, 4], [2, 3]], [5, 4, 4]),
    ],
)
def test_stages_of_each_rank(layout: Layout, held: list[list[int]], num_layers: list[int]) -> None:
    ranks = range(layout.pipeline)
    assert [stages_of_rank(layout, rank) for rank in ranks] == held
    assert [layers_of_rank(13, layout, rank) for rank in ranks] == num_layers
    assert sorted(index for rank in held for index in rank) == list(range(layout.num_stages))


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"shard": "hybrid", "shard_size": 4, "micro_batch": 2},
        {"shard": "zero1", "tensor": 2, "pipeline": 2, "schedule": "interleaved", "pipeline_chunks": 3},
        {"shard": "full", "context": 2, "offload": "optimizer", "sync": "last"},
        {"pipeline": 4, "schedule": "zbv"},
    ],
    ids=str,
)
def test_layout_and_table_say_the_same(wish: dict[str, object]) -> None:
    size = JobSize(devices=16, devices_per_node=4, seq_len=128, sequences=64)
    layout = complete_layout(LayoutConfig.model_validate(wish), size)
    assert complete_layout(layout.config(), size) == layout


def test_description_names_what_differs_from_the_plainest_layout() -> None:
    assert Layout().describe(micro_batch=False) == "none"
    text = Layout(shard="hybrid", shard_size=4, tensor=2, pipeline=2, schedule="zbv", micro_batch=8).describe()
    assert text == "hybrid 4, tensor 2, pipeline 2 zbv, micro_batch 8"
    assert Layout(pipeline=2, offload="optimizer").describe() == "none, pipeline 2, micro_batch 1, offload optimizer"


@pytest.mark.parametrize(
    ("params", "bucket_bytes", "buckets"),
    [
        ([10, 10, 10], None, [range(1), range(1, 2), range(2, 3)]),
        ([10, 10, 10], 0, [range(1), range(1, 2), range(2, 3)]),  # a layer is never split
        ([10, 10, 10], 80, [range(1), range(1, 3)]),  # 4 bytes a value, filled from the last layer
        ([10, 10, 10], 79, [range(1), range(1, 2), range(2, 3)]),
        ([10, 10, 10], 120, [range(3)]),
        ([5, 5, 40, 5, 5], 50, [range(2), range(2, 3), range(3, 5)]),
        ([], 100, []),
    ],
)
def test_gradient_buckets(params, bucket_bytes, buckets):
    assert gradient_buckets(params, bucket_bytes) == buckets
