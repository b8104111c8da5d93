"""Rules that say what to look at first. Each names its threshold, so that readers can judge it."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.profile.rank_profile import RankProfile, mean_of_measured

THRESHOLDS = {
    "data loading": 5.0,  # % of the step
    "communication": 10.0,  # % of the step that is exposed; the overlap matters above the same share in total
    "overlap": 50.0,  # % of the communication
    "utilisation": 0.5,  # share of the time
    "host wait": 10.0,  # % of the step
    "tensor cores": 0.0,  # share of the kernel time
    "memory": 0.9,  # share of the device's memory
    "DataParallel": 0,  # ranks
    "backend": 0,  # ranks
    "straggler": 5.0,  # % longer than the median rank
}
SHORT_KERNEL_US = 10.0


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """Differences between the ranks. In synchronous training steps last equally long on all ranks, so the slow rank is
    the one that waits least: the one with the longest step outside communication."""

    step_us_min: float
    step_us_max: float
    busy_us_min: float
    busy_us_max: float
    straggler: int
    excess_pct: float  # how much longer the straggler is busy than the median rank


@dataclass(frozen=True)
class Advice:
    rule: str
    value: float
    threshold: float
    text: str  # the value, the threshold and what to try


def advise(ranks: list[RankProfile], spread: RankSpread | None) -> list[Advice]:
    """The rules that apply to the mean over ranks."""
    advice: list[Advice] = []

    def check(rule: str, value: float | None, finding: str, cure: str, *, below: bool = False) -> None:
        """Add the advice if the value is on the bad side of the rule's threshold; `finding` may show both."""
        limit = THRESHOLDS[rule]
        if value is not None and (value < limit if below else value > limit):
            text = finding.format(value=value, percent=value * 100, limit=limit, limit_percent=limit * 100)
            advice.append(Advice(rule, value, limit, f"{text}: {cure}"))

    check(
        "data loading",
        sum(r.categories_pct["DataLoader"] for r in ranks) / len(ranks),
        "{value:.1f} % of the step waits for data (more than {limit:g} %)",
        "give the loader more workers, or read a token store",
    )
    check(
        "communication",
        sum(r.categories_pct["Communication"] for r in ranks) / len(ranks),
        "{value:.1f} % of the step is exposed communication (more than {limit:g} %)",
        "accumulate more micro-batches per step, shard over fewer devices, or keep sharding inside a node",
    )
    total_us, step_us = sum(r.communication.total_us for r in ranks), sum(r.step_us for r in ranks)
    matters = step_us > 0 and total_us / step_us * 100 > THRESHOLDS["communication"]
    check(
        "overlap",
        sum(r.communication.overlap_us for r in ranks) / total_us * 100 if matters else None,
        "only {value:.0f} % of the communication runs behind computation (less than {limit:g} %)",
        "check prefetching and bucket sizes",
        below=True,
    )
    check(
        "utilisation",
        mean_of_measured([r.gpu_utilization for r in ranks]),
        "the device runs kernels {percent:.1f} % of the time (less than {limit_percent:g} %)",
        "raise the micro-batch, or compile the model",
        below=True,
    )
    _check_host_wait(ranks, advice)
    used = mean_of_measured([r.tensor_cores.used_share for r in ranks])
    check(
        "tensor cores",
        mean_of_measured([r.tensor_cores.eligible_share for r in ranks]) if used == 0.0 else None,
        "{percent:.0f} % of the kernel time comes from operators that could use tensor cores, and no kernel does",
        "train in bf16",
    )
    check(
        "memory",
        max((r.memory_peak_share for r in ranks if r.memory_peak_share is not None), default=None),
        "memory peaks at {percent:.1f} % of the device (more than {limit_percent:g} %)",
        "recompute activations or shard more before growing the batch",
    )
    check(
        "DataParallel",
        sum(len(r.devices) > 1 for r in ranks if r.uses_data_parallel),
        "DataParallel drives several devices from one process",
        "use one process per device",
    )
    check(
        "backend",
        sum(bool(r.devices) and r.backend == "gloo" for r in ranks),
        "{value} rank(s) with a device talk over gloo",
        "NCCL (RCCL on AMD) is the fast backend",
    )
    if spread is not None:
        check(
            "straggler",
            spread.excess_pct,
            f"rank {spread.straggler} is busy {{value:.1f}} % longer than the median rank (more than {{limit:g}} %), "
            "and the others wait for it in their collectives",
            "look at its host, clocks and data",
        )
    return advice


def _check_host_wait(ranks: list[RankProfile], advice: list[Advice]) -> None:
    """The cure depends on the mean kernel: short ones can be fused."""
    limit = THRESHOLDS["host wait"]
    value = mean_of_measured(
        [r.idle.host_wait_us / r.step_us * 100 if r.idle and r.step_us > 0 else None for r in ranks]
    )
    if value is None or value <= limit:
        return
    text = f"the device waits {value:.1f} % of the step for the host to launch work (more than {limit:g} %)"
    calls = sum(k.calls for r in ranks for k in r.kernels)
    mean_kernel_us = sum(k.total_us for r in ranks for k in r.kernels) / calls if calls else 0.0
    if mean_kernel_us:
        cure = "short: fuse them (compile)" if mean_kernel_us < SHORT_KERNEL_US else "so look at the host side"
        text += f"; the mean kernel takes {mean_kernel_us:.1f} us, {cure}"
    advice.append(Advice("host wait", value, limit, text))
