"""Every source gets its exact share, in an order that depends on seed and number only."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.helpers import refused

from windlass.config import DataConfig, DataStage
from windlass.data.mix import Mixture, plan_phases, refuse_repeats, shares, source_passes


def test_shares_by_hand() -> None:
    # Webster's method with weights 1/2, 1/3, 1/6: after six turns exactly 3, 2 and 1.
    weights = np.array([3, 2, 1]) / 6
    assert shares(6, weights).tolist() == [3, 2, 1]
    assert shares(12, weights).tolist() == [6, 4, 2]
    assert shares(0, weights).tolist() == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8), st.integers(1, 10**9))
def test_shares_are_exact_and_never_go_back(weights: list[float], count: int) -> None:
    normal = np.array(weights) / sum(weights)
    now, later = shares(count, normal), shares(count + 1, normal)
    assert now.sum() == count
    assert np.all(np.abs(now - normal * count) <= len(weights))
    assert np.all(later >= now)
    assert (later - now).sum() == 1


def make(seed: int = 0, phases: list[tuple[int, list[float]]] | None = None) -> Mixture:
    return Mixture(["a", "b", "c"], [1000, 50_000, 7], phases or [(0, [0.5, 0.3, 0.2])], seed)


def test_proportions_are_exact_at_any_length() -> None:
    source, _, _ = make().identity(np.arange(30_000))
    for length in (1280, 4096, 28_672):
        share = np.bincount(source[:length], minlength=3) / length
        assert np.all(np.abs(share - [0.5, 0.3, 0.2]) <= 3 / length)


def test_no_window_comes_twice_in_one_pass() -> None:
    source, window, turn = make().identity(np.arange(30_000))
    assert len(set(zip(source.tolist(), window.tolist(), turn.tolist(), strict=True))) == 30_000
    first = (source == 0) & (turn == 0)
    assert np.array_equal(np.sort(window[first]), np.arange(1000))


def test_each_pass_has_its_own_order() -> None:
    source, window, turn = make().identity(np.arange(30_000))
    order = [window[(source == 0) & (turn == number)].tolist() for number in (0, 1)]
    assert sorted(order[0]) == sorted(order[1])
    assert order[0] != order[1]


def test_random_access_equals_reading_in_order() -> None:
    mixture = make(seed=5, phases=[(0, [0.5, 0.3, 0.2]), (5000, [0.1, 0.9, 0.0])])
    complete = mixture.identity(np.arange(12_000))
    picked = np.array([11_999, 0, 4999, 5000, 5001, 4096, 7, 7])
    again = make(seed=5, phases=[(0, [0.5, 0.3, 0.2]), (5000, [0.1, 0.9, 0.0])]).identity(picked)
    assert all(np.array_equal(a[picked], b) for a, b in zip(complete, again, strict=True))


def test_seeds_differ() -> None:
    assert not np.array_equal(make(1).identity(np.arange(100))[1], make(2).identity(np.arange(100))[1])


def test_stages_take_over_exactly_and_repeat_nothing() -> None:
    mixture = make(phases=[(0, [0.5, 0.3, 0.2]), (5000, [0.0, 1.0, 0.0])])
    source, window, turn = mixture.identity(np.arange(10_000))
    assert np.all(source[5000:] == 1)
    assert np.bincount(source[:5000]).tolist() == [2500, 1500, 1000]
    assert len(set(zip(source.tolist(), window.tolist(), turn.tolist(), strict=True))) == 10_000
    assert mixture.drawn(10_000).tolist() == [2500, 6500, 1000]


def test_ten_trillion_tokens_open_at_once_in_constant_memory() -> None:
    rng = np.random.default_rng(0)
    windows = (rng.dirichlet(np.ones(200)) * 10e12 / 4096).astype(np.int64) + 1
    tracemalloc.start()
    mixture = Mixture([f"s{i}" for i in range(200)], windows.tolist(), [(0, windows.astype(float).tolist())], 1)
    step, ranks = 1_000_000, 10_000
    for rank in (0, 4999, 9999):  # the sequences of one rank in one step of 10,000 ranks
        source, window, _ = mixture.identity(step * ranks + rank + np.arange(1))
        assert 0 <= window[0] < windows[source[0]]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_natural_mix_is_by_size_and_epochs() -> None:
    config = DataConfig(epochs={"b": 2.0}, seq_len=10)
    assert plan_phases(config, ["a", "b"], [100, 50], 10) == [(0, [100.0, 100.0])]


def test_stage_at_zero_replaces_the_mix() -> None:
    config = DataConfig(stages=[DataStage(start=0, mix={"a": 1.0}), DataStage(start=1000, mix={"b": 1.0})], seq_len=10)
    assert plan_phases(config, ["a", "b"], [100, 50], 10) == [(0, [1.0, 0.0]), (100, [0.0, 1.0])]


def test_every_problem_of_a_mix_comes_at_once() -> None:
    config = DataConfig(mix={"a": 1.0, "x": 0.5, "b": -1.0, "tiny": 0.1}, seq_len=10)
    with refused("data.mix-invalid", "'x'", "'b' is -1.0", "'tiny' has fewer than 11 tokens"):
        plan_phases(config, ["a", "b", "tiny"], [100, 50, 0], 10)


def test_a_mix_of_zeros_is_refused() -> None:
    with refused("data.mix-invalid"):
        plan_phases(DataConfig(mix={"a": 0.0}), ["a"], [5], 2048)


def test_epochs_are_reported_and_limited() -> None:
    mixture = Mixture(["a", "b"], [100, 1000], [(0, [0.5, 0.5])], 0)
    config = DataConfig(epochs={"a": 4.0}, seq_len=10)
    report = source_passes(mixture, config, 7680, 10, [1001, 10_001])  # 768 sequences are six blocks of 128
    assert [(p.source, p.epochs, p.trained) for p in report] == [("a", 3.84, 3840), ("b", 0.384, 3840)]
    refuse_repeats(report)
    with refused("data.source-repeated", "a: 5.12 passes over 1,001 tokens, at most 4"):
        refuse_repeats(source_passes(mixture, config, 10_240, 10, [1001, 10_001]))


def test_a_run_of_exactly_the_allowed_passes_is_not_refused() -> None:
    # 100 + 2 x 50 windows by epochs: the natural mix reads a once and b twice, whatever the shuffle at its end.
    config = DataConfig(epochs={"a": 1.0, "b": 2.0}, seq_len=10)
    for seed in range(20):
        mixture = Mixture(["a", "b"], [100, 50], plan_phases(config, ["a", "b"], [100, 50], 10), seed)
        refuse_repeats(source_passes(mixture, config, 2000, 10, [1001, 501]))
