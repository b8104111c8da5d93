"""The lines of metrics.jsonl: one dataclass; `Run.record_metrics` writes them and `Run.metrics_lines` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from windlass.runs.events import read_fields


def _key(meaning: str, *, optional: bool = False) -> Any:
    """A key of the line. An optional one is left out of the file when it is None, the others are written as null."""
    return field(default=None, metadata={"meaning": meaning, "optional": optional})


@dataclass(kw_only=True)
class MetricsLine:
    """What is known about one logged step; None: unknown."""

    step: int | None = _key("optimizer steps done")
    tokens: int | None = _key("tokens trained on since the run began, over all restarts")
    loss: float | None = _key("mean cross-entropy of the step over all ranks, nats per token")
    grad_norm: float | None = _key("global gradient norm before clipping")
    lr: float | None = _key("learning rate of the step")
    step_seconds: float | None = _key(
        "wall time of the step without validation passes, mean over the steps since the last line"
    )
    tokens_per_second: float | None = _key("tokens per second of the whole job")
    mfu: float | None = _key("model FLOP utilisation, 0 to 1; null when the device's peak is unknown")
    memory_bytes: int | None = _key("highest allocator peak of any rank so far")
    energy_joules: float | None = _key(
        "energy of the whole job since the run began, carried over restarts; null when not measured"
    )
    time: float | None = _key("seconds since 1970")
    tokens_per_second_per_device: float | None = _key("tokens_per_second / devices")
    hfu: float | None = _key("hardware FLOP utilisation: recomputation counted as work", optional=True)
    watts: float | None = _key("mean power of the job since the last line")
    joules_per_token: float | None = _key(
        "energy per token over at least the last ten seconds of training, without validation; "
        "unknown in the first two seconds"
    )
    energy_nodes: int | None = _key("nodes whose energy is in energy_joules")
    nodes: int | None = _key("nodes of the job")
    utilization: float | None = _key("GPU utilisation that the driver reports, 0 to 1")
    data_seconds: float | None = _key("time the step waited for data")
    spread_seconds: float | None = _key("slowest rank's compute time minus the fastest's", optional=True)
    slowest_rank: int | None = _key("the slowest rank", optional=True)
    val_loss: float | None = _key(
        "mean cross-entropy on the validation split, on lines that follow a validation pass; "
        "`val_loss/NAME` is that of a source",
        optional=True,
    )
    val_bits_per_byte: float | None = _key(
        "validation loss in bits per byte of text, comparable between tokenizers; "
        "`val_bits_per_byte/NAME` is that of a source",
        optional=True,
    )
    skipped: int | None = _key("1 when the step changed no weights (non-finite or spike)")
    z_loss: float | None = _key("auxiliary loss", optional=True)
    expert_imbalance: float | None = _key(
        "tokens of the most used expert relative to the mean of its layer, in the layer where it is highest",
        optional=True,
    )
    router_entropy: float | None = _key(
        "entropy of the routers' scores in nats, mean over tokens and layers; ln(experts) when all are equal",
        optional=True,
    )
    router_loss: float | None = _key("balance and z-losses of all routers, per token", optional=True)
    dropped_tokens: int | None = _key("tokens that no expert computed: always 0", optional=True)
    # Further keys of the line, such as `val_loss/NAME`.
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in _KEYS}
        return {k: v for k, v in values.items() if v is not None or k not in _OPTIONAL} | self.extra

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> MetricsLine:
        """A line of the file; a value that is not a number is None."""
        return cls(**read_fields(cls, line), extra={k: v for k, v in line.items() if k not in METRICS})


_KEYS = tuple(f for f in fields(MetricsLine) if f.name != "extra")
_OPTIONAL = {f.name for f in _KEYS if f.metadata["optional"]}
# Key -> meaning, for the reference page and the dashboard.
METRICS: dict[str, str] = {f.name: f.metadata["meaning"] for f in _KEYS}


def last_of_each_step(lines: Iterable[MetricsLine]) -> list[MetricsLine]:
    """The lines that the final weights contain: where a run goes back to an earlier step, what followed is dropped."""
    kept: list[MetricsLine] = []
    for line in (line for line in lines if line.step is not None):
        while kept and (kept[-1].step or 0) >= (line.step or 0):
            kept.pop()
        kept.append(line)
    return kept
