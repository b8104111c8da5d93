"""Rows of a table of runs as measured runs, for the planner's calibration."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published.cells import number
from benchmarks.published.rows import Refusal, read_run
from benchmarks.published.score import read_rows

from windlass.planner.calibrate import MeasuredRun


def measured_runs(path: Path, device: str) -> tuple[list[MeasuredRun], list[str]]:
    """Rows measured on `device` with their step times, and the reasons why other rows were skipped."""
    runs: list[MeasuredRun] = []
    skipped: list[str] = []
    for row in read_rows(path):
        name, tokens_per_second = row.get("id") or path.stem, number(row, "tokens_per_s_per_gpu")
        run = read_run(row)
        if isinstance(run, Refusal) or not tokens_per_second or run.machine is None:
            reason = (
                run.reason if isinstance(run, Refusal) else "unknown device" if tokens_per_second else "no tokens/s"
            )
            skipped.append(f"{name}: {reason}")
            continue
        if run.machine.device.name != device:
            skipped.append(f"{name}: measured on {run.machine.device.name}, not on {device}")
            continue
        tokens = run.layout.sequences_per_step * run.step.seq_len
        memory_gib = number(row, "peak_mem_gib") if (row.get("mem_kind") or "") == "allocated" else None
        runs.append(
            MeasuredRun(
                name=name,
                model=run.model,
                step=run.step,
                layout=run.layout,
                machine=run.machine,
                step_seconds=tokens / (tokens_per_second * run.layout.devices),
                memory_bytes=memory_gib * 2**30 if memory_gib else None,
            )
        )
    return runs, skipped
