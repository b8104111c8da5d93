"""Errors of the power model on a table of runs with published energy, scope for scope.

Mean watts per device are compared: energy divided by device-hours. A row with devices and nodes measured apart gives two comparisons.
Only rows whose method begins with "measured" are scored. Rows that publish hours times a stated power are shown, never scored or fitted to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published.cells import Row, lower_text, number, positive, text_of
from benchmarks.published.rows import Refusal, find_device_cached, read_run, stated_billions
from benchmarks.published.score import quantile, read_rows

from windlass.clusters.model import Device, Node
from windlass.cost.power import POWER, POWER_SOURCES, USUAL_COMPUTE_MFU, PowerConstants, compute_mfu, node_power
from windlass.models.presets import model_spec
from windlass.planner.budget import model_near

WAITING = 0.07
"""`PowerConstants.waiting` of an H200 that holds its context and runs no kernel: 120.7 W (benchmarks/results/energy_check.json, window
"idle") between 75 W without a context and the limit of 700 W. Kernels that wait for others draw at least this."""
FACILITY = 1.74
"""Energy of the facility over that of the devices where no PUE is stated: Ai2's factor for host, network and building (Olmo 3)."""
ENERGY_COLUMNS = {"gpu": "energy_gpu_mwh", "node": "energy_node_mwh", "facility": "energy_total_mwh"}
LIMITS = {
    "params_b": (1e-3, 1e5),
    "active_params_b": (1e-3, 1e5),
    "seq_len": (1, 1e9),
    "node_gpus": (1, 1024),
    "mfu_pct": (1e-3, 100),
    "gpu_hours": (1e-6, 1e12),
    "pue": (1, 3),
    "watts_per_gpu": (1, 1e4),
    **dict.fromkeys(ENERGY_COLUMNS.values(), (1e-12, 1e9)),
}
"""What a run can have. A cell outside, or without a number, is a mistake: a default in its place would not be noticed."""
POSSIBLE_WATTS = {"gpu": 1.15, "node": 4.0, "facility": 5.0}
"""Highest mean power per device, as a multiple of its limit; the lowest is half of an idle device's."""
NEEDED_COLUMNS = ("id", "source", "gpu", "scope", "method")


@dataclass(frozen=True, slots=True)
class EnergyRun:
    """One published energy in one scope, and what the power model needs to predict it."""

    id: str
    source: str
    scope: str
    measured: bool
    pretraining: bool
    published_watts: float | None
    """Per device."""
    device_hours: float | None
    device: Device | None
    node_devices: int
    pue: float | None
    host_watts: float | None
    """Per device: the rest of the node, where devices and nodes were measured apart."""
    busy: float | None
    """Share of the time in which the devices computed."""
    refused: str | None
    """Why it is not predicted."""


def read_energy_rows(path: Path) -> list[dict[str, str]]:
    return read_rows(path, NEEDED_COLUMNS, "docs/concepts/predictions-energy.md")


def read_runs(row: Row) -> list[EnergyRun]:
    """One per scope of the row."""
    hours, scopes = number(row, "gpu_hours"), lower_text(row, "scope") or "not stated"
    text = f"{text_of(row, 'model')} {text_of(row, 'notes')} {text_of(row, 'precision')}".lower()
    device = find_device_cached(text_of(row, "gpu"))
    busy, unknown = _busy(row, device, "fp8" if "fp8" in text else "bf16")
    mwh = {scope: number(row, column) for scope, column in ENERGY_COLUMNS.items()}
    both = mwh["node"], mwh["gpu"]
    runs = []
    for scope in scopes.split("+"):
        energy = mwh.get(scope)
        published = energy * 1e6 / hours if energy and hours else number(row, "watts_per_gpu")
        reason = unknown if scope in ENERGY_COLUMNS else f"unknown scope {scope!r}"
        reason = reason or _impossible_power(scope, published, device)
        runs.append(
            EnergyRun(
                id=text_of(row, "id"),
                source=text_of(row, "source"),
                scope=scope,
                measured=lower_text(row, "method").startswith("measured"),
                pretraining=not re.search(r"lora|fine-tun|micro-benchmark", text),
                published_watts=published,
                device_hours=hours,
                device=device,
                node_devices=positive(row, "node_gpus") or 8,
                pue=number(row, "pue"),
                host_watts=(both[0] - both[1]) * 1e6 / hours if both[0] and both[1] and hours else None,
                busy=busy,
                refused=reason or (None if published else "no energy published for known device-hours"),
            )
        )
    return runs


def _busy(row: Row, device: Device | None, precision: str) -> tuple[float | None, str | None]:
    """Share of the time in which the devices computed, from the published MFU; or the reason why it is unknown."""
    for key, (least, most) in LIMITS.items():
        value = stated_billions(row) if key == "params_b" else number(row, key)
        if text_of(row, key) and (value is None or not least <= value <= most):
            return None, f"{key} {text_of(row, key)!r} is not a number from {least:g} to {most:g}"
    mfu, billions, seq_len = number(row, "mfu_pct"), stated_billions(row), positive(row, "seq_len") or 4096
    if device is None or device.tdp_watts is None:
        return None, f"unknown device {text_of(row, 'gpu')!r}"
    if number(row, "active_params_b"):
        return None, "a mixture of experts: its speed without waiting is not known"
    if mfu is None:
        return None, "MFU not stated, so the time spent waiting is unknown"
    run = read_run({**row, "gpus": "1", "arch": "llama", "tp": "1", "pp": "1", "seq_len": str(seq_len)})
    if not isinstance(run, Refusal):
        best = compute_mfu(run.model, device, seq_len, precision)
    elif text_of(row, "layers") and text_of(row, "hidden"):
        return None, run.reason
    elif billions:
        best = compute_mfu(model_spec(model_near(billions * 1e9)), device, seq_len, precision)
    else:
        best = USUAL_COMPUTE_MFU
    return min(1.0, mfu / 100 / best), None


def _impossible_power(scope: str, watts: float | None, device: Device | None) -> str | None:
    if watts is None or device is None or device.tdp_watts is None:
        return None
    least, most = (device.idle_watts or 0.0) / 2, POSSIBLE_WATTS[scope] * device.tdp_watts
    return None if least <= watts <= most else f"{watts:,.4g} W per device are not between {least:g} and {most:g}"


def predict_watts(run: EnergyRun, constants: PowerConstants = POWER) -> float | None:
    """Per device, in the run's scope."""
    if run.refused or run.device is None or run.busy is None:
        return None
    power = node_power(run.device, Node(devices=run.node_devices, cores=1), run.busy, constants)
    if run.scope == "gpu" or power.device_watts is None or power.node_watts is None:
        return power.device_watts
    node = power.node_watts / run.node_devices
    if run.scope == "facility":
        return node * run.pue if run.pue else power.device_watts * FACILITY
    return node


def error_of(run: EnergyRun, constants: PowerConstants = POWER) -> float | None:
    predicted = predict_watts(run, constants)
    return predicted / run.published_watts - 1.0 if predicted and run.published_watts else None


def fit_constants(runs: Sequence[EnergyRun]) -> PowerConstants:
    """The constants that are fitted, from the measured runs alone; the share while waiting is our own measurement,
    because few published runs wait much (without Luciole a fit gives 0.3). Host power that none of them shows is taken from
    data sheets: 115 W per device (Snellius: half of two EPYC 9334, memory, cards), 190 W in a server of eight. It is at
    most 210 W: MLPerf's servers draw 896 W per device with all devices at their limit."""
    measured = [run for run in runs if run.measured and run.published_watts]
    small = sorted(run.host_watts for run in measured if run.host_watts is not None and run.node_devices <= 4)
    large = any(run.scope == "node" and run.node_devices > 4 for run in measured)
    grid = [
        replace(POWER, waiting=WAITING, host_small=quantile(small, 0.5) or 115.0, host_large=host)
        for host in (range(150, 211, 5) if large else [190])
    ]
    return min(grid, key=lambda constants: _mean_error(measured, constants))


def _mean_error(runs: Sequence[EnergyRun], constants: PowerConstants) -> float:
    """Mean over sources, so that one with many rows does not decide."""
    sources: dict[str, list[float]] = {}
    for run in runs:
        if (error := error_of(run, constants)) is not None:
            sources.setdefault(run.source, []).append(abs(math.log1p(error)))
    return sum(sum(errors) / len(errors) for errors in sources.values()) / max(1, len(sources))


def score_energy(rows: Iterable[Row]) -> dict[str, Any]:
    """The JSON contract of `planner_accuracy.py --energy FILE.csv --json`. *Left out* means that every source is predicted
    with constants fitted to the others."""
    runs = [run for row in rows for run in read_runs(row)]
    sources = dict.fromkeys(run.source for run in runs if run.measured and not run.refused)
    fits = {source: fit_constants([run for run in runs if run.source != source]) for source in sources}
    shipped = [(run, error_of(run)) for run in runs]
    left_out = [(run, error_of(run, fits.get(run.source, POWER))) for run in runs]
    return {
        "constants": {name: {"value": getattr(POWER, name), "source": text} for name, text in POWER_SOURCES.items()},
        "fitted_to_these_rows": asdict(fit_constants(runs)),
        "groups": _groups(shipped),
        "left_out": _groups(left_out),
        "rows": [_line(run, error, apart) for (run, error), (_, apart) in zip(shipped, left_out, strict=True)],
    }


Errors = Sequence[tuple[EnergyRun, float | None]]


def _groups(errors: Errors) -> dict[str, Any]:
    measured = [pair for pair in errors if pair[0].measured]
    groups = {"measured": measured, "measured pre-training": [pair for pair in measured if pair[0].pretraining]}
    for scope in sorted({run.scope for run, _ in measured}):
        groups[f"measured, scope {scope}"] = [pair for pair in measured if pair[0].scope == scope]
    groups["modelled by their authors, not scored"] = [pair for pair in errors if not pair[0].measured]
    return {name: _summary(members) for name, members in groups.items()}


def _summary(pairs: Errors) -> dict[str, Any]:
    errors = [error * 100 for _, error in pairs if error is not None]
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(pairs),
        "covered": len(errors),
        "median_pct": quantile(sizes, 0.5),
        "p90_pct": quantile(sizes, 0.9),
        "worst_pct": max(errors, key=abs, default=None),
    }


def _line(run: EnergyRun, error: float | None, apart: float | None) -> dict[str, Any]:
    watts, hours = predict_watts(run), run.device_hours

    def mwh(value: float | None) -> float | None:
        return None if value is None or hours is None else value * hours / 1e6

    return {
        "id": run.id,
        "source": run.source,
        "scope": run.scope,
        "measured": run.measured,
        "pretraining": run.pretraining,
        "busy_share": run.busy,
        "predicted_watts": watts,
        "published_watts": run.published_watts,
        "predicted_mwh": mwh(watts),
        "published_mwh": mwh(run.published_watts),
        "error_pct": None if error is None else error * 100,
        "left_out_error_pct": None if apart is None else apart * 100,
        "refused": run.refused,
    }


def print_energy(result: dict[str, Any], path: Path) -> None:
    print(f"{path.name}: mean watts per device, predicted / published")
    for row in result["rows"]:
        if row["error_pct"] is None:
            continue
        kind = "measured" if row["measured"] else "modelled"
        errors = f"{row['error_pct']:+6.1f} %, left out {row['left_out_error_pct']:+6.1f} %"
        print(
            f"  {row['id']:22} {row['scope']:9} {kind} {row['predicted_watts']:7.0f} / {row['published_watts']:5.0f} W  {errors}"
        )
    for row in result["rows"]:
        if row["error_pct"] is None and row["measured"]:
            print(f"  {row['id']:22} {row['scope']:9} not predicted: {row['refused']}")
    for name, group in result["groups"].items():
        apart = result["left_out"][name]
        if group["covered"]:
            figures = (
                f"median {group['median_pct']:.1f} %, p90 {group['p90_pct']:.1f} %, worst {group['worst_pct']:+.1f} %"
            )
            print(f"{name}: {group['covered']} of {group['rows']} predicted, {figures}; "
                  f"left out {apart['median_pct']:.1f} % and {apart['p90_pct']:.1f} %")  # fmt: skip
