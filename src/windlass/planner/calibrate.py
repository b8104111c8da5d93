"""How fast is *this* machine? Fit its few efficiency constants to measured runs, say what that gains, and keep them beside the cluster file."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from windlass.clusters import Cluster, device_by_driver_name, load_cluster
from windlass.clusters.load import user_folder
from windlass.clusters.model import Device, Efficiency, Links
from windlass.cost.memory import memory
from windlass.cost.shapes import Shape
from windlass.cost.step import DEFAULTS, Constants, estimate, sustained_tflops, with_efficiency
from windlass.cost.work import Degrees, Work
from windlass.errors import PlanError, RunError, WindlassError
from windlass.files import write_atomic
from windlass.planner.cells import number
from windlass.planner.rows import Refusal, understand
from windlass.planner.score import read_rows
from windlass.runs.events import ProcessStart, Started
from windlass.runs.folder import Run, open_run

LIMITS = {"matmul": (0.1, 1.0), "memory": (0.2, 1.0), "network": (0.1, 1.0), "overlap": (0.0, 1.0)}
WARM_UP = 0.2
"""Share of a run's lines that is left out at the start: compilation, caches and clocks settle there."""
LEAST_LINES = 3
HOLD = 0.02
"""How strongly a constant is held to where it starts: one odd run must not move what it says little about."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: what it was asked to do and how long its steps took."""

    name: str
    shape: Shape
    work: Work
    layout: Degrees
    device: Device
    links: Links
    devices_per_node: int
    step_seconds: float
    memory_bytes: float | None = None

    def predicted(self, constants: Constants) -> float:
        return estimate(
            self.shape, self.work, self.layout, self.device, self.links, self.devices_per_node, constants=constants
        ).seconds

    def error(self, constants: Constants) -> float:
        return self.predicted(constants) / self.step_seconds - 1.0

    def memory_error(self) -> float | None:
        if not self.memory_bytes:
            return None
        return memory(self.shape, self.work, self.layout, self.devices_per_node).allocated / self.memory_bytes - 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    cluster: str
    efficiency: Efficiency
    runs: list[dict[str, Any]]
    before_pct: float
    """Median absolute error of the step time with the planner's own constants."""
    after_pct: float
    """With the fitted ones, on the runs they were fitted to."""
    left_out_pct: float | None
    """Each run predicted from the others; None with fewer than two runs."""
    memory_pct: float | None
    skipped: list[str]
    file: Path | None

    def json(self) -> dict[str, Any]:
        fitted = {k: v for k, v in self.efficiency.model_dump().items() if v is not None}
        return {
            "cluster": self.cluster,
            "efficiency": fitted,
            "before_median_pct": self.before_pct,
            "after_median_pct": self.after_pct,
            "left_out_median_pct": self.left_out_pct,
            "memory_median_pct": self.memory_pct,
            "runs": self.runs,
            "skipped": self.skipped,
            "file": None if self.file is None else str(self.file),
        }

    def text(self) -> str:
        """What a person wants to know, in lines."""
        left = "not measured (needs two runs)" if self.left_out_pct is None else f"{self.left_out_pct:.1f} %"
        held = "not measured" if self.memory_pct is None else f"{self.memory_pct:.1f} %"
        fitted = ", ".join(
            f"{k} {getattr(self.efficiency, k):.3f}" for k in LIMITS if getattr(self.efficiency, k) is not None
        )
        lines = [
            f"{self.cluster}: {len(self.runs)} measured runs",
            f"step time, median error: before {self.before_pct:.1f} %, after {self.after_pct:.1f} %, each run from the others {left}",
            f"peak memory, median error (nothing is fitted): {held}",
            f"constants: {fitted}",
        ]
        lines += [
            f"  {r['name']}: measured {r['step_seconds']:.3f} s, before {r['before_pct']:+.1f} %, after {r['after_pct']:+.1f} %"
            for r in self.runs
        ]
        lines += [f"left out: {reason}" for reason in self.skipped]
        worse = " (the planner's own constants are as good)" if self.after_pct > self.before_pct else ""
        return "\n".join([*lines, f"kept in {self.file}" if self.file else f"not stored{worse}"])


def calibrate(paths: Sequence[Path | str], cluster: str | None = None, *, store: bool = True) -> Calibration:
    """Fit a machine's constants to run folders, sweep folders or tables of runs, and store them for the next plan."""
    runs, skipped, named = gather([Path(p) for p in paths], cluster)
    if not runs:
        raise PlanError(
            "planner.measured-run-calibrate",
            "no measured run to calibrate from" + (": " + "; ".join(skipped[:5]) if skipped else ""),
            hint=f"a run needs a layout in its config and at least {LEAST_LINES} lines with step_seconds in metrics.jsonl",
        )
    start = _start(runs)
    free = _identifiable(runs, start)
    best = fit(runs, start, free)
    efficiency = Efficiency.model_validate(
        {
            **{k: round(getattr(best, k), 4) for k in free},
            "fitted_on": time.strftime("%Y-%m-%d", time.gmtime()),
            "fitted_from": f"{len(runs)} runs: {', '.join(r.name for r in runs[:4])}{' ...' if len(runs) > 4 else ''}",
        }
    )
    before, after = (_median_pct([r.error(c) for r in runs]) for c in (DEFAULTS, best))
    return Calibration(
        cluster=named,
        efficiency=efficiency,
        runs=[_line(r, best) for r in runs],
        before_pct=before,
        after_pct=after,
        left_out_pct=_left_out(runs, start, free),
        memory_pct=_maybe_median([r.memory_error() for r in runs]),
        skipped=skipped,
        # A fit that is no better than the planner's own constants would only make the next plan worse.
        file=keep(named, efficiency) if store and after <= before else None,
    )


def _line(run: Measured, best: Constants) -> dict[str, Any]:
    held = run.memory_error()
    return {
        "name": run.name,
        "step_seconds": run.step_seconds,
        "before_pct": run.error(DEFAULTS) * 100,
        "after_pct": run.error(best) * 100,
        "memory_pct": None if held is None else held * 100,
    }


def _median_pct(errors: list[float]) -> float:
    return median(abs(e) for e in errors) * 100


def _maybe_median(errors: list[float | None]) -> float | None:
    known = [e for e in errors if e is not None]
    return _median_pct(known) if known else None


# -- the fit -----------------------------------------------------------------------------------------------------------------------


def _start(runs: Sequence[Measured]) -> Constants:
    """Where the fit begins: the shipped constants, with the matrix rate that they mean on this device."""
    device = runs[0].device
    share = sustained_tflops(device) / device.peak_tflops if device.peak_tflops else DEFAULTS.matmul
    return with_efficiency(DEFAULTS, Efficiency(matmul=min(1.0, share)))


def _identifiable(runs: Sequence[Measured], start: Constants) -> tuple[str, ...]:
    """Constants that these runs can decide: network and overlap need runs that wait for the network."""
    names = ["matmul", "memory"]
    if any(_moves(run, start, "network") for run in runs):
        names.append("network")
    if any(_moves(run, start, "overlap") for run in runs):
        names.append("overlap")
    return tuple(names)


def _moves(run: Measured, constants: Constants, name: str) -> bool:
    """Does half of a constant change the prediction by more than one per cent?"""
    halved = replace(constants, **{name: getattr(constants, name) / 2})
    return abs(run.predicted(halved) / run.predicted(constants) - 1) > 0.01


def fit(runs: Sequence[Measured], start: Constants, free: tuple[str, ...]) -> Constants:
    """Coordinate descent on the mean squared log error, held to the start."""

    def loss(c: Constants) -> float:
        errors = [math.log(run.predicted(c) / run.step_seconds) ** 2 for run in runs]
        held = sum(math.log(max(getattr(c, n), 1e-3) / getattr(start, n)) ** 2 for n in free)
        return sum(errors) / len(errors) + HOLD / len(errors) * held

    best, value, step = start, loss(start), 0.2
    while step > 0.002:
        before = value
        for name in free:
            best, value = _along(best, value, name, step, loss)
        if before - value < 1e-9:
            step /= 2
    return best


def _along(
    best: Constants, value: float, name: str, step: float, loss: Callable[[Constants], float]
) -> tuple[Constants, float]:
    low, high = LIMITS[name]
    for factor in (1 + step, 1 / (1 + step)):
        trial = replace(best, **{name: min(high, max(low, getattr(best, name) * factor))})
        found = loss(trial)
        if found < value:
            return trial, found
    return best, value


def _left_out(runs: Sequence[Measured], start: Constants, free: tuple[str, ...]) -> float | None:
    if len(runs) < 2:
        return None
    errors = []
    for i, run in enumerate(runs):
        errors.append(run.error(fit([*runs[:i], *runs[i + 1 :]], start, free)))
    return _median_pct(errors)


# -- measured runs -----------------------------------------------------------------------------------------------------------------


def gather(paths: Sequence[Path], cluster: str | None) -> tuple[list[Measured], list[str], str]:
    """Every usable run under the paths, why others were left out, and the cluster they speak for."""
    runs: list[Measured] = []
    skipped: list[str] = []
    named = cluster
    for path in paths:
        if path.suffix.lower() == ".csv":
            found, reasons = _of_table(path, None if cluster is None else load_cluster(cluster).device)
            runs, skipped = runs + found, skipped + reasons
            continue
        for folder in _run_folders(path):
            try:
                run = open_run(folder)
                named = named or run.recipe().cluster
                runs.append(of_run(run, load_cluster(named)))
            except WindlassError as error:
                skipped.append(f"{folder.name}: {error.message}")
    if runs and named is None:
        raise PlanError(
            "planner.table-runs-does-say",
            "a table of runs does not say which cluster it is from",
            hint="add --cluster NAME",
        )
    return runs, skipped, named or ""


def _run_folders(path: Path) -> list[Path]:
    """The folder itself, or the runs of a sweep inside it."""
    if (path / "metrics.jsonl").is_file():
        return [path]
    if not path.is_dir():
        raise RunError(
            "planner.run-sweep-folder",
            f"{path} is not a run or sweep folder",
            hint="give a folder with metrics.jsonl, a sweep's folder, or a CSV table",
        )
    return sorted(p.parent for pattern in ("*/metrics.jsonl", "*/*/metrics.jsonl") for p in path.glob(pattern))


def of_run(run: Run, cluster: Cluster) -> Measured:
    """One run folder: the layout it trained with, and the median of its steps after the warm-up."""
    from windlass.planner.layouts import from_config, work_of
    from windlass.planner.search import on_devices
    from windlass.planner.task import make_task

    recipe = run.recipe()
    if recipe.layout is None:
        raise RunError(
            "planner.layout-config",
            f"{run.name} has no layout in its config",
            hint="runs started by windlass keep the layout they chose",
        )
    last = [Started(), *run.events(ProcessStart)][-1]
    devices = last.world_size or cluster.node.devices * recipe.nodes
    per_node = last.devices_per_node or min(devices, cluster.node.devices)
    machine = (
        cluster
        if devices % cluster.node.devices == 0 and per_node == cluster.node.devices
        else on_devices(cluster, per_node)
    )
    task = make_task(recipe, machine, max(1, devices // per_node), keep_recompute=True)
    choice = from_config(recipe.layout, recipe.train.recompute, task)
    device = device_by_driver_name(last.device or "") or task.device
    seconds, held = _steps(run)
    return Measured(
        name=run.name,
        shape=task.shape,
        work=work_of(task, choice),
        layout=choice.degrees(),
        device=device,
        links=cluster.links,
        devices_per_node=per_node,
        step_seconds=seconds,
        memory_bytes=held,
    )


def _steps(run: Run) -> tuple[float, float | None]:
    lines = [m for m in run.metrics_lines() if m.step_seconds is not None and m.step_seconds > 0]
    kept = lines[max(1, int(len(lines) * WARM_UP)) :]
    if len(kept) < LEAST_LINES:
        raise RunError(
            "planner.steps-after-warm-up",
            f"{run.name} has {len(kept)} steps after its warm-up, {LEAST_LINES} are needed",
            hint="let it run for a few more steps",
        )
    held = [m.memory_bytes for m in kept if m.memory_bytes is not None]
    return median(m.step_seconds or 0.0 for m in kept), max(held) if held else None


def _of_table(path: Path, device: str | None) -> tuple[list[Measured], list[str]]:
    """Rows of a table in the format of `--score`, those of the cluster's device: tokens/s become step times."""
    runs: list[Measured] = []
    skipped: list[str] = []
    for row in read_rows(path):
        name, tps = row.get("id") or path.stem, number(row, "tokens_per_s_per_gpu")
        case = understand(row)
        if isinstance(case, Refusal) or not tps or case.device is None:
            why = case.reason if isinstance(case, Refusal) else "unknown device" if tps else "no tokens/s"
            skipped.append(f"{name}: {why}")
            continue
        if device is not None and case.device.name != device:
            skipped.append(f"{name}: measured on {case.device.name}, not on {device}")
            continue
        tokens = case.work.micro_batch * case.work.seq_len * case.work.accumulation * case.layout.data
        held = number(row, "peak_mem_gib")
        runs.append(
            Measured(
                name=name,
                shape=case.shape,
                work=case.work,
                layout=case.layout,
                device=case.device,
                links=case.links,
                devices_per_node=case.devices_per_node,
                step_seconds=tokens / (tps * case.layout.devices),
                memory_bytes=held * 2**30 if held and (row.get("mem_kind") or "") == "allocated" else None,
            )
        )
    return runs, skipped


# -- keeping -----------------------------------------------------------------------------------------------------------------------


def keep(cluster: str, efficiency: Efficiency) -> Path:
    """Write the `[efficiency]` table into the user's file of this cluster, leaving the rest of that file as it is."""
    path = user_folder() / f"{cluster}.toml"
    old = path.read_text() if path.is_file() else ""
    rest = re.sub(r"(?ms)^\[efficiency\][^\[]*", "", old).rstrip()
    lines = [
        "# Fitted by `windlass plan --calibrate`; delete this table to return to the planner's own constants.",
        "[efficiency]",
    ]
    for key, value in efficiency.model_dump().items():
        if value is not None:
            lines.append(f"{key} = {_toml(value)}")
    rest = "\n".join(
        line for line in rest.splitlines() if not line.startswith("# Fitted by `windlass plan --calibrate`")
    ).rstrip()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (rest + "\n\n" if rest else "") + "\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
