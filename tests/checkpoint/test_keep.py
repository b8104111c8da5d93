"""Which checkpoints stay, worked by hand, and whether they will fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.checkpoint.files import MANIFEST, SavedCheckpoint, describe, sealed
from windlass.checkpoint.keep import check_quota, forecast, keep_reasons, superseded, tidy
from windlass.config.save import SaveConfig
from windlass.errors import ConfigError
from windlass.files import write_json


def saved(step: int, metric: float | None = None, tokens: int | None = None) -> SavedCheckpoint:
    return SavedCheckpoint(
        Path(f"step-{step:09d}"), {"step": step, "metric": metric, "tokens": tokens, "files": {"a": {"bytes": 100}}}
    )


def gone(all_of: list[SavedCheckpoint], **rules) -> list[int]:
    return [s.step for s in superseded(all_of, SaveConfig(**rules))]


def test_last_n() -> None:
    assert gone([saved(s) for s in (10, 20, 30, 40)], keep_last=2) == [10, 20]


def test_best_by_metric_stays_and_one_without_a_metric_takes_no_part() -> None:
    several = [saved(10, 3.0), saved(20, 1.5), saved(30), saved(40, 2.0), saved(50, 2.5)]
    assert gone(several, keep_last=1, keep_best=2) == [10, 30]


def test_every_k_steps_for_ever_takes_the_first_at_or_after_each_multiple() -> None:
    # With k = 100: 100 belongs to the first multiple, 210 to the second; 50 comes before any, 150 and 260 are not first.
    assert gone([saved(s) for s in (50, 100, 150, 210, 260, 290)], keep_last=1, keep_every=100) == [50, 150, 260]


def test_every_k_tokens() -> None:
    several = [saved(s, tokens=s * 10) for s in (90, 100, 190, 200, 300)]
    assert gone(several, keep_last=1, keep_every="1k tokens") == [90, 190]


def test_the_newest_is_never_deleted_even_alone() -> None:
    assert gone([saved(7)], keep_last=1) == []


def test_each_says_why_it_stays() -> None:
    reasons = keep_reasons([saved(10, 1.0), saved(20, 2.0), saved(30)], SaveConfig(keep_last=1, keep_best=1))
    assert reasons == {10: ("number 1 by val_loss (1.0000)",), 20: (), 30: ("one of the last 1",)}


def test_one_judged_by_another_metric_takes_no_part() -> None:
    by_loss = SavedCheckpoint(Path("step-1"), {**saved(10, 0.1).manifest, "metric_name": "loss"})
    scored = keep_reasons(
        [saved(10, -0.9), saved(20, -0.8)], SaveConfig(keep_last=1, keep_best=1, metric="val_macro_f1")
    )
    assert scored[10] == ("number 1 by val_macro_f1 (0.9000)",), "kept with a minus sign, shown as it is"
    by_val = SavedCheckpoint(Path("step-2"), {**saved(20, 2.0).manifest, "metric_name": "val_loss"})
    assert gone([by_loss, by_val, saved(30)], keep_last=1, keep_best=1) == [10]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
@pytest.mark.parametrize("keep_best", [0, 1, 4])
@pytest.mark.parametrize("keep_every", [None, 1, 7, "300 tokens"])
def test_rules_that_combine_keep_what_each_alone_would(keep_last, keep_best, keep_every) -> None:
    """Also applied after every save, as a run does it: nothing that a rule wants at the end was deleted on the way."""
    every = [saved(s, metric=(s * 7) % 11 if s % 2 else None, tokens=s * 50) for s in range(1, 30)]
    rules = SaveConfig(keep_last=keep_last, keep_best=keep_best, keep_every=keep_every)
    there: list[SavedCheckpoint] = []
    for one in every:
        there.append(one)
        doomed = superseded(there, rules)
        assert one not in doomed and [s.step for s in doomed] == sorted(s.step for s in doomed)
        there = [s for s in there if s not in doomed]
    steps = {s.step for s in there}
    assert set(range(30 - keep_last, 30)) <= steps
    metrics = sorted(s.metric for s in every if s.metric is not None)[:keep_best]
    assert metrics == sorted(s.metric for s in there if s.metric is not None)[:keep_best]
    if keep_every == 7:
        assert {7, 14, 21, 28} <= steps
    if keep_every == "300 tokens":
        assert {6, 12, 18, 24} <= steps


def put(run, step: int, *, lose: bool = False) -> None:
    run.checkpoint(step).mkdir()
    (run.checkpoint(step) / "a").write_bytes(b"12345")
    manifest = {"format": 1, "step": step, "files": describe(run.checkpoint(step), ["a"])}
    write_json(run.checkpoint(step) / MANIFEST, sealed(manifest))
    if lose:
        (run.checkpoint(step) / "a").write_bytes(b"123")


def test_a_newest_one_that_has_lost_a_file_does_not_push_out_the_last_good_one(run) -> None:
    put(run, 1)
    put(run, 2, lose=True)
    put(run, 3, lose=True)
    assert tidy(run, SaveConfig(keep_last=1)) == [] and run.checkpoint(1).is_dir()
    put(run, 4)
    assert (
        tidy(run, SaveConfig(keep_last=1)) == [1] and run.checkpoint(2).is_dir()
    )  # damaged: for the next start to name


def test_tidy_leaves_incomplete_folders_alone(run) -> None:
    (run.checkpoints / "step-000000001").mkdir()  # no manifest: not complete, so not ours to delete
    assert tidy(run, SaveConfig(keep_last=1)) == [] and (run.checkpoints / "step-000000001").is_dir()


def test_forecast_by_hand() -> None:
    # 3 last + 2 best + 1000 steps / 100 = 15 kept, one more while saving: 16 x 1000 bytes.
    config = SaveConfig(keep_last=3, keep_best=2, keep_every=100, quota=20_000)
    need = forecast(1000, config, steps=1000, batch_tokens=50)
    assert (need.kept, need.peak_bytes, need.fits) == (15, 16_000, True)
    assert forecast(1000, SaveConfig(keep_every="5k tokens"), steps=1000, batch_tokens=50).kept == 3 + 10


def test_a_run_of_few_saves_needs_no_room_for_more() -> None:
    # 10 steps, one every 5: two, and the last step is one of them at most once more: 3; keep_last = 9 changes nothing.
    need = forecast(1000, SaveConfig(every=5, keep_last=9, quota=3000), steps=10, batch_tokens=1)
    assert (need.kept, need.peak_bytes, need.fits) == (3, 3000, True)


def test_a_forecast_over_quota_says_how_many_would_fit() -> None:
    with pytest.raises(ConfigError) as error:
        check_quota(forecast(1000, SaveConfig(quota=3000), steps=10, batch_tokens=1))
    assert error.value.code == "checkpoint.quota-too-small" and "at most 2" in error.value.hint
    assert all(number in error.value.message for number in ("3.9 KiB", "2.9 KiB", "3 ", "1000 B"))
    with pytest.raises(ConfigError) as error:
        check_quota(forecast(1000, SaveConfig(quota=1500), steps=10, batch_tokens=1))
    assert error.value.code == "checkpoint.quota-too-small" and "at most" not in error.value.hint


def test_free_space_that_is_short_warns() -> None:
    need = forecast(1000, SaveConfig(), steps=10, batch_tokens=1, free_bytes=1500)
    assert need.fits is False and "free space 1.5 KiB: " in need.text
    check_quota(need)


def test_without_a_limit_the_answer_is_unknown() -> None:
    need = forecast(1000, SaveConfig(), steps=10, batch_tokens=1)
    assert need.fits is None and "quota unknown" in need.text
    check_quota(need)
