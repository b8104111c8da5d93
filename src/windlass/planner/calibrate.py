"""Efficiency constants of a cluster, fitted to measured runs and stored in the user's cluster file."""

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from windlass.clusters import Cluster, device_by_driver_name, load_cluster
from windlass.clusters.load import user_folder
from windlass.clusters.model import Efficiency
from windlass.cost.memory import memory
from windlass.cost.step import DEFAULTS, Constants, Machine, estimate_step, sustained_tflops, with_efficiency
from windlass.errors import PlanError, RunError, WindlassError
from windlass.files import write_atomic
from windlass.layout.types import Layout, StepSpec
from windlass.models.spec import ModelSpec
from windlass.planner.candidates import candidate_of
from windlass.planner.search import on_devices
from windlass.planner.task import make_task
from windlass.runs.events import ProcessStart, Started
from windlass.runs.folder import Run, open_run

# The fitted constants and the values that they may take.
BOUNDS = {"matmul": (0.1, 1.0), "memory": (0.2, 1.0), "network": (0.1, 1.0), "overlap": (0.0, 1.0)}
# Share of a run's steps that is skipped at the start: compilation, caches and clocks settle.
WARM_UP = 0.2
MIN_STEPS = 3
# Weight of the distance to the start values: one odd run must not move a constant that it hardly depends on.
PRIOR_WEIGHT = 0.02
EFFICIENCY_HEADER = (
    "# Fitted by `windlass plan --calibrate`; delete this table to return to the planner's own constants."
)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run: the step that it executed and how long the step took."""

    name: str
    model: ModelSpec
    step: StepSpec
    layout: Layout
    machine: Machine
    step_seconds: float
    # Peak of the allocator; None: not measured.
    memory_bytes: float | None = None

    def predicted_seconds(self, constants: Constants) -> float:
        return estimate_step(self.model, self.step, self.layout, self.machine, constants=constants).seconds

    def error(self, constants: Constants) -> float:
        """Relative error of the predicted step time."""
        return self.predicted_seconds(constants) / self.step_seconds - 1.0

    def memory_error_pct(self) -> float | None:
        allocated = memory(self.model, self.step, self.layout).allocated
        return (allocated / self.memory_bytes - 1.0) * 100 if self.memory_bytes else None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted constants and the median absolute error of the step time in per cent."""

    cluster: str
    efficiency: Efficiency
    runs: list[dict[str, Any]]
    # With the planner's own constants.
    before_pct: float
    # With the fitted constants, on the runs that they were fitted to.
    after_pct: float
    # Each run predicted from a fit to the others; None with fewer than two runs.
    left_out_pct: float | None
    # Median error of the peak memory, for which nothing is fitted; None: not measured.
    memory_pct: float | None
    skipped: list[str]
    # Where the constants were stored; None: not stored.
    file: Path | None

    def json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "efficiency": self.efficiency.model_dump(exclude_none=True),
            "before_median_pct": self.before_pct,
            "after_median_pct": self.after_pct,
            "left_out_median_pct": self.left_out_pct,
            "memory_median_pct": self.memory_pct,
            "runs": self.runs,
            "skipped": self.skipped,
            "file": None if self.file is None else str(self.file),
        }

    def text(self) -> str:
        left_out = "not measured (needs two runs)" if self.left_out_pct is None else f"{self.left_out_pct:.1f} %"
        memory_error = "not measured" if self.memory_pct is None else f"{self.memory_pct:.1f} %"
        constants = {name: getattr(self.efficiency, name) for name in BOUNDS}
        lines = [
            f"{self.cluster}: {len(self.runs)} measured runs",
            f"step time, median error: before {self.before_pct:.1f} %, after {self.after_pct:.1f} %, "
            f"each run predicted from the others {left_out}",
            f"peak memory, median error (not fitted): {memory_error}",
            "constants: " + ", ".join(f"{name} {value:.3f}" for name, value in constants.items() if value is not None),
        ]
        lines += [
            f"  {run['name']}: measured {run['step_seconds']:.3f} s, "
            f"before {run['before_pct']:+.1f} %, after {run['after_pct']:+.1f} %"
            for run in self.runs
        ]
        lines += [f"skipped: {reason}" for reason in self.skipped]
        worse = " (the planner's own constants predict these runs better)" if self.after_pct > self.before_pct else ""
        return "\n".join([*lines, f"stored in {self.file}" if self.file else f"not stored{worse}"])


def calibrate(paths: Sequence[Path | str], cluster: str | None = None, *, store: bool = True) -> Calibration:
    """Fit a cluster's constants to run or sweep folders, and store them for the next plan."""
    runs, skipped, name = collect_runs([Path(p) for p in paths], cluster)
    return calibrate_runs(runs, name, skipped, store=store)


def calibrate_runs(
    runs: Sequence[MeasuredRun], cluster: str, skipped: Sequence[str] = (), *, store: bool = True
) -> Calibration:
    if not runs:
        raise PlanError(
            "planner.no-measured-run",
            "no measured run to calibrate from" + (": " + "; ".join(skipped[:5]) if skipped else ""),
            hint=f"a run needs a layout in its config and {MIN_STEPS} lines with step_seconds in metrics.jsonl",
        )
    # The fit starts at the shipped constants, with the matrix rate that they imply on this device.
    device = runs[0].machine.device
    share = sustained_tflops(device) / device.peak_tflops if device.peak_tflops else DEFAULTS.matmul
    start = with_efficiency(DEFAULTS, Efficiency(matmul=min(1.0, share)))
    names = identifiable(runs, start)
    best = fit(runs, start, names)
    efficiency = Efficiency.model_validate(
        {
            **{name: round(getattr(best, name), 4) for name in names},
            "fitted_on": time.strftime("%Y-%m-%d", time.gmtime()),
            "fitted_from": f"{len(runs)} runs: {', '.join(r.name for r in runs[:4])}{' ...' if len(runs) > 4 else ''}",
        }
    )
    lines: list[dict[str, Any]] = [
        {
            "name": run.name,
            "step_seconds": run.step_seconds,
            "before_pct": run.error(DEFAULTS) * 100,
            "after_pct": run.error(best) * 100,
            "memory_pct": run.memory_error_pct(),
        }
        for run in runs
    ]
    others = [[*runs[:i], *runs[i + 1 :]] for i in range(len(runs))]
    left_out = [run.error(fit(group, start, names)) * 100 for run, group in zip(runs, others, strict=True) if group]
    before, after = (median(abs(line[key]) for line in lines) for key in ("before_pct", "after_pct"))
    return Calibration(
        cluster=cluster,
        efficiency=efficiency,
        runs=lines,
        before_pct=before,
        after_pct=after,
        left_out_pct=_median(left_out),
        memory_pct=_median([line["memory_pct"] for line in lines]),
        skipped=list(skipped),
        # Constants that predict worse than the planner's own would only spoil the next plan.
        file=store_efficiency(cluster, efficiency) if store and after <= before else None,
    )


def _median(errors: Sequence[float | None]) -> float | None:
    """Median of the absolute values; None if nothing was measured."""
    return median([abs(e) for e in errors if e is not None]) if any(e is not None for e in errors) else None


def identifiable(runs: Sequence[MeasuredRun], start: Constants) -> tuple[str, ...]:
    """Constants that these runs can decide: network and overlap only if halving them changes a prediction by more
    than 1 %."""
    halved = {name: replace(start, **{name: getattr(start, name) / 2}) for name in ("network", "overlap")}
    changes = {
        name: [abs(run.predicted_seconds(constants) / run.predicted_seconds(start) - 1) for run in runs]
        for name, constants in halved.items()
    }
    return ("matmul", "memory", *(name for name, shares in changes.items() if max(shares) > 0.01))


def fit(runs: Sequence[MeasuredRun], start: Constants, names: tuple[str, ...]) -> Constants:
    """Coordinate descent on the mean squared log error, with a weak pull towards the start values."""

    def loss(constants: Constants) -> float:
        errors = [math.log(run.predicted_seconds(constants) / run.step_seconds) ** 2 for run in runs]
        distance = sum(math.log(max(getattr(constants, n), 1e-3) / getattr(start, n)) ** 2 for n in names)
        return sum(errors) / len(errors) + PRIOR_WEIGHT / len(errors) * distance

    best, best_loss, step = start, loss(start), 0.2
    while step > 0.002:
        loss_before = best_loss
        for name in names:
            low, high = BOUNDS[name]
            for factor in (1 + step, 1 / (1 + step)):
                trial = replace(best, **{name: min(high, max(low, getattr(best, name) * factor))})
                trial_loss = loss(trial)
                if trial_loss < best_loss:
                    best, best_loss = trial, trial_loss
                    break
        if loss_before - best_loss < 1e-9:
            step /= 2
    return best


def collect_runs(paths: Sequence[Path], cluster: str | None) -> tuple[list[MeasuredRun], list[str], str]:
    """Every usable run under the paths, the reasons why others were skipped, and the cluster that they ran on."""
    runs: list[MeasuredRun] = []
    skipped: list[str] = []
    for path in paths:
        if not path.is_dir():
            table = "; for a table of runs: python benchmarks/planner_accuracy.py --rows FILE.csv --calibrate CLUSTER"
            raise RunError(
                "planner.not-a-run",
                f"{path} is not a run or sweep folder",
                hint="give a folder with metrics.jsonl or a sweep folder" + table * (path.suffix.lower() == ".csv"),
            )
        # The points of a sweep are one or two levels below.
        points = [p.parent for pattern in ("*/metrics.jsonl", "*/*/metrics.jsonl") for p in path.glob(pattern)]
        folders = [path] if (path / "metrics.jsonl").is_file() else sorted(points)
        for folder in folders:
            try:
                run = open_run(folder)
                cluster = cluster or run.recipe().cluster
                runs.append(measured_run(run, load_cluster(cluster)))
            except WindlassError as error:
                skipped.append(f"{folder.name}: {error.message}")
    return runs, skipped, cluster or ""


def measured_run(run: Run, cluster: Cluster) -> MeasuredRun:
    """A run folder's layout and the median of its step times after the warm-up."""
    recipe = run.recipe()
    if recipe.layout is None:
        raise RunError(
            "planner.run-without-layout",
            f"{run.name} has no layout in its config",
            hint="use a run that windlass started: it records its layout",
        )
    last_start = [Started(), *run.events(ProcessStart)][-1]
    devices = last_start.world_size or cluster.node.devices * recipe.nodes
    per_node = last_start.devices_per_node or min(devices, cluster.node.devices)
    full_nodes = devices % cluster.node.devices == 0 and per_node == cluster.node.devices
    used_cluster = cluster if full_nodes else on_devices(cluster, per_node)
    task = make_task(recipe, used_cluster, max(1, devices // per_node), keep_recompute=True)
    candidate = candidate_of(recipe.layout, recipe.train.recompute, task)

    timed = [m for m in run.metrics_lines() if m.step_seconds is not None and m.step_seconds > 0]
    steps = timed[max(1, int(len(timed) * WARM_UP)) :]
    if len(steps) < MIN_STEPS:
        raise RunError(
            "planner.run-too-short",
            f"{run.name} has {len(steps)} steps after its warm-up, but {MIN_STEPS} are needed",
            hint="let it run for a few more steps",
        )
    device = device_by_driver_name(last_start.device or "") or task.device
    return MeasuredRun(
        name=run.name,
        model=task.model,
        step=candidate.step(task),
        layout=candidate.layout,
        machine=Machine(device, cluster.links, per_node),
        step_seconds=median(m.step_seconds or 0.0 for m in steps),
        memory_bytes=max((m.memory_bytes for m in steps if m.memory_bytes is not None), default=None),
    )


def store_efficiency(cluster: str, efficiency: Efficiency) -> Path:
    """Write the `[efficiency]` table into the user's file of this cluster and keep the other tables of that file."""
    path = user_folder() / f"{cluster}.toml"
    text = path.read_text() if path.is_file() else ""
    text = re.sub(r"(?ms)^\[efficiency\][^\[]*", "", text).replace(EFFICIENCY_HEADER, "").rstrip()
    values = efficiency.model_dump(exclude_none=True).items()
    # Strings and numbers are written alike in JSON and TOML.
    lines = [EFFICIENCY_HEADER, "[efficiency]", *(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in values)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (text + "\n\n" if text else "") + "\n".join(lines) + "\n")
    return path
