"""A sweep's folder as `windlass sweep` leaves it: real points, folder, outcomes and tables; only the training is invented."""

from __future__ import annotations

from pathlib import Path

from tests.small_recipe import recipe_tables

from windlass.config import load_recipe
from windlass.config.sweep import load_sweep
from windlass.files import append_line
from windlass.launch.sweep.expect import Expectation, expect_all
from windlass.launch.sweep.folder import SweepRun, open_sweep_folder
from windlass.launch.sweep.points import SweepPoint, make_points
from windlass.launch.sweep.results import collect_rows, write_tables
from windlass.runs.events import Finished, Started
from windlass.runs.folder import create_run

SWEEP = (
    """name = "grid"
title = "Sharding on one and two devices"
heat = ["layout.shard", "layout.micro_batch"]
scaling = "strong"
"""
    + recipe_tables(cluster="snellius-h100", batch_tokens=2048, steps=12)
    + """[matrix]
"layout.shard" = ["none", "full"]
"layout.micro_batch" = [2, 4]
devices = [1, 2]
[[include]]
name = "beside"
"layout.shard" = "none"
"layout.micro_batch" = 8
devices = 1
"""
)
OUT_OF_MEMORY = {"layout.shard": "none", "layout.micro_batch": 4}
BEGIN = 1_790_100_000.0


def make_sweep(path: Path, *, unfinished: int = 0) -> SweepRun:
    """The last `unfinished` points have not run yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.parent / ".grid.toml"
    file.write_text(SWEEP)
    loaded = load_sweep(file)
    points = make_points(loaded)
    expected = _planned_once(file)
    work = SweepRun(loaded=loaded, folder=open_sweep_folder(path, loaded, points), points=points, expected=expected)
    for point in points[: len(points) - unfinished]:
        end_point(work, point)
    write_tables(work, collect_rows(work))
    return work


_PLANNED: list[Expectation] = []


def _planned_once(file: Path) -> list[Expectation]:
    """The planner takes a second for each of these; what it expects is the same in every test."""
    if not _PLANNED:
        loaded = load_sweep(file)
        _PLANNED.extend(expect_all(loaded.sweep, make_points(loaded))[0])
    return _PLANNED


def end_point(work: SweepRun, point: SweepPoint) -> None:
    if all(point.values.get(k) == v for k, v in OUT_OF_MEMORY.items()):
        work.folder.add_outcome({"point": point.name, "seconds": 4.0, "outcome": "oom", "evidence": "log", "detail": "CUDA out of memory"})  # fmt: skip
        return
    _train(work, point)
    work.folder.add_outcome({"point": point.name, "seconds": 9.0, "outcome": "ok", "evidence": "exit", "detail": ""})


def _train(work: SweepRun, point: SweepPoint) -> None:
    run = create_run(work.folder.point(point.name).path, load_recipe(work.folder.recipe(point.name)))
    devices, micro = int(point.values["devices"]), int(point.values["layout.micro_batch"])
    speed = 1000.0 * devices**0.9 * (1 + micro / 10) * (0.8 if point.values["layout.shard"] == "full" else 1.0)
    run.record(Started(nodes=1, world_size=devices, device="NVIDIA H100"))
    for step in range(1, 13):
        seconds = 2048 / speed * (3.0 if step < 3 else 1.0)
        append_line(run.metrics_file, {
            "step": step, "tokens": 2048 * step, "loss": 6.0 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "step_seconds": seconds, "tokens_per_second": 2048 / seconds,
            "tokens_per_second_per_device": 2048 / seconds / devices, "mfu": speed / devices / 4000, "memory_bytes": (1 + micro) * 2**30,
            "energy_joules": step * 2048 / speed * devices * 400.0, "time": BEGIN + step * seconds,
        })  # fmt: skip
    run.record(Finished(step=12, tokens=2048 * 12, loss=4.8))
