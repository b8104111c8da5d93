"""What should be looked at first? Rules with their thresholds, so that anyone can judge whether they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.profile.summary import RankProfile

if TYPE_CHECKING:
    from windlass.profile.job import Spread

DATA_LOADING_PCT = 5.0
COMMUNICATION_PCT = 10.0
UTILIZATION = 0.5
MEMORY_SHARE = 0.9
HOST_WAIT_PCT = 10.0
SHORT_KERNEL_US = 10.0
STRAGGLER_PCT = 5.0
OVERLAP_PCT = 50.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    rule: str
    value: float
    threshold: float
    text: str
    """What was found, against which threshold, and what to try."""


def advise(ranks: list[RankProfile], spread: Spread | None) -> list[Advice]:
    """The rules that fire on the mean over ranks."""
    rules = (
        _data_loading,
        _communication,
        _overlap,
        _utilization,
        _host_wait,
        _tensor_cores,
        _memory,
        _data_parallel,
        _backend,
    )
    found = [advice for rule in rules if (advice := rule(ranks)) is not None]
    return [*found, *([late] if spread and (late := _straggler(spread)) else [])]


def _percent(ranks: list[RankProfile], category: str) -> float:
    return sum(r.categories_pct[category] for r in ranks) / len(ranks)


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _data_loading(ranks: list[RankProfile]) -> Advice | None:
    value = _percent(ranks, "DataLoader")
    if value <= DATA_LOADING_PCT:
        return None
    text = f"{value:.1f} % of the step waits for data (more than {DATA_LOADING_PCT:g} %): give the loader more workers, or read a token store"
    return Advice(rule="data loading", value=value, threshold=DATA_LOADING_PCT, text=text)


def _communication(ranks: list[RankProfile]) -> Advice | None:
    value = _percent(ranks, "Communication")
    if value <= COMMUNICATION_PCT:
        return None
    text = (
        f"{value:.1f} % of the step is exposed communication (more than {COMMUNICATION_PCT:g} %): accumulate more micro-batches per step, "
        "shard over fewer devices, or keep sharding inside a node"
    )
    return Advice(rule="communication", value=value, threshold=COMMUNICATION_PCT, text=text)


def _overlap(ranks: list[RankProfile]) -> Advice | None:
    total = sum(r.communication.total_us for r in ranks)
    whole = sum(r.step_us for r in ranks)
    share = total / whole * 100 if whole > 0 else 0.0
    value = sum(r.communication.overlap_us for r in ranks) / total * 100 if total > 0 else 100.0
    if share <= COMMUNICATION_PCT or value >= OVERLAP_PCT:
        return None
    text = f"only {value:.0f} % of the communication runs behind computation (less than {OVERLAP_PCT:g} %): check prefetching and bucket sizes"
    return Advice(rule="overlap", value=value, threshold=OVERLAP_PCT, text=text)


def _utilization(ranks: list[RankProfile]) -> Advice | None:
    value = _mean([r.gpu_utilization for r in ranks])
    if value is None or value >= UTILIZATION:
        return None
    text = f"the device runs kernels {value * 100:.1f} % of the time (less than {UTILIZATION * 100:g} %): raise the micro-batch, or compile the model"
    return Advice(rule="utilisation", value=value, threshold=UTILIZATION, text=text)


def _host_wait(ranks: list[RankProfile]) -> Advice | None:
    value = _mean([r.idle.host_wait_us / r.step_us * 100 if r.idle and r.step_us > 0 else None for r in ranks])
    if value is None or value <= HOST_WAIT_PCT:
        return None
    kernel = _mean_kernel(ranks)
    size = f"; the mean kernel takes {kernel:.1f} us, {'short: fuse them (compile)' if kernel < SHORT_KERNEL_US else 'so look at the host side'}"
    text = f"the device waits {value:.1f} % of the step for the host to launch work (more than {HOST_WAIT_PCT:g} %){size if kernel else ''}"
    return Advice(rule="host wait", value=value, threshold=HOST_WAIT_PCT, text=text)


def _mean_kernel(ranks: list[RankProfile]) -> float:
    calls = sum(k.calls for r in ranks for k in r.kernels)
    return sum(k.total_us for r in ranks for k in r.kernels) / calls if calls else 0.0


def _tensor_cores(ranks: list[RankProfile]) -> Advice | None:
    used, eligible = (
        _mean([r.tensor_cores.used_share for r in ranks]),
        _mean([r.tensor_cores.eligible_share for r in ranks]),
    )
    if used is None or eligible is None or used > 0.0 or eligible <= 0.0:
        return None
    text = f"{eligible * 100:.0f} % of the kernel time comes from operators that could use tensor cores, and no kernel does: train in bf16"
    return Advice(rule="tensor cores", value=eligible, threshold=0.0, text=text)


def _memory(ranks: list[RankProfile]) -> Advice | None:
    value = max((r.memory_peak_share for r in ranks if r.memory_peak_share is not None), default=0.0)
    if value <= MEMORY_SHARE:
        return None
    text = f"memory peaks at {value * 100:.1f} % of the device (more than {MEMORY_SHARE * 100:g} %): recompute activations or shard more before growing the batch"
    return Advice(rule="memory", value=value, threshold=MEMORY_SHARE, text=text)


def _data_parallel(ranks: list[RankProfile]) -> Advice | None:
    count = sum(len(r.devices) > 1 for r in ranks if r.data_parallel)
    if not count:
        return None
    return Advice(
        rule="DataParallel",
        value=count,
        threshold=0,
        text="DataParallel drives several devices from one process: use one process per device",
    )


def _backend(ranks: list[RankProfile]) -> Advice | None:
    wrong = [r for r in ranks if r.devices and r.backend == "gloo"]
    if not wrong:
        return None
    text = f"{len(wrong)} rank(s) with a device talk over gloo: NCCL (RCCL on AMD) is the fast backend"
    return Advice(rule="backend", value=len(wrong), threshold=0, text=text)


def _straggler(spread: Spread) -> Advice | None:
    if spread.excess_pct <= STRAGGLER_PCT:
        return None
    text = (
        f"rank {spread.straggler} is busy {spread.excess_pct:.1f} % longer than the median rank (more than {STRAGGLER_PCT:g} %), and the others wait "
        "for it in their collectives: look at its host, clocks and data"
    )
    return Advice(rule="straggler", value=spread.excess_pct, threshold=STRAGGLER_PCT, text=text)
