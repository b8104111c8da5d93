"""Rows of a table of runs as measured runs, for the planner's calibration."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published.cells import gibibytes, lower_text
from benchmarks.published.rows import Refusal, read_run
from benchmarks.published.score import memory_kind, rate_measured, read_rows

from windlass.planner.calibrate import MeasuredRun


def measured_runs(path: Path, device: str) -> tuple[list[MeasuredRun], list[str]]:
    """Rows measured on `device` with their step times, and the reasons why other rows were skipped."""
    runs: list[MeasuredRun] = []
    skipped: list[str] = []
    for row in read_rows(path):
        name, tokens_per_second = row.get("id") or path.stem, rate_measured(row)
        run = read_run(row)
        if lower_text(row, "quality") == "flagged":
            skipped.append(f"{name}: flagged")
            continue
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
        modules = run.layout.devices / run.parts  # what the row counts as one device
        memory_gib = gibibytes(row, "peak_mem_gib") if memory_kind(row) == "allocated" else None
        runs.append(
            MeasuredRun(
                name=name,
                model=run.model,
                step=run.step,
                layout=run.layout,
                machine=run.machine,
                step_seconds=tokens / (tokens_per_second * modules),
                memory_bytes=memory_gib * 2**30 if memory_gib else None,
            )
        )
    return runs, skipped
