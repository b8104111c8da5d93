"""Points of one shape packed into few jobs of one array, each below the wall-time limit."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.scheduler import array_task, job_id
from windlass.errors import ConfigError, LaunchError
from windlass.files import read_json, read_json_lines, write_json
from windlass.launch.cpu import active_venv
from windlass.launch.executor import Executor
from windlass.launch.job import BatchJob, choose_queue, cpus_per_device, find_partition, plain_environment, train_job
from windlass.launch.script import srun_argv
from windlass.launch.slurm import SlurmScheduler
from windlass.launch.submit import submit_job
from windlass.launch.sweep.execute import StepLauncher, run_point
from windlass.launch.sweep.folder import SweepRun
from windlass.launch.sweep.outcome import classify
from windlass.launch.sweep.points import SweepPoint

MAX_SECONDS = 4 * 3600.0  # wall time of a packed job when the sweep has none: short jobs start soon
MARGIN = 1.5  # a point may take this much longer than expected before the other points of its pack are in danger
UNKNOWN_SECONDS = 1800.0  # for a point without a prediction and without a time_limit


@dataclass(frozen=True)
class SweepPack:
    """Points that share one allocation, one after another."""

    points: tuple[str, ...]
    nodes: int
    devices: int  # per node
    seconds: float


def make_packs(
    sweep_run: SweepRun, points: Sequence[SweepPoint], limit_seconds: float, per_node: int
) -> list[SweepPack]:
    """Greedy, in the sweep's order: a new allocation begins where the next point would not fit in the time."""
    packs: list[SweepPack] = []
    for group in _by_shape(points, per_node):
        pack = None
        for point in group:
            seconds = min(reserved_seconds(sweep_run, point), limit_seconds)
            if pack is not None and pack.seconds + seconds <= limit_seconds:
                pack = replace(packs.pop(), points=(*pack.points, point.name), seconds=pack.seconds + seconds)
            else:
                pack = SweepPack((point.name,), *_shape(point, per_node), seconds)
            packs.append(pack)
    return packs


def _shape(point: SweepPoint, per_node: int) -> tuple[int, int]:
    nodes = point.recipe.nodes if point.recipe is not None else int(point.settings.get("nodes", 1))
    return nodes, point.devices or per_node


def _by_shape(points: Sequence[SweepPoint], per_node: int) -> list[list[SweepPoint]]:
    shapes: dict[tuple[int, int], list[SweepPoint]] = {}
    for point in points:
        shapes.setdefault(_shape(point, per_node), []).append(point)
    return list(shapes.values())


def reserved_seconds(sweep_run: SweepRun, point: SweepPoint) -> float:
    """The point's time limit, or the expected time with a margin."""
    expected = sweep_run.expectations[point.name].seconds
    if expected is None:
        return UNKNOWN_SECONDS if point.time_limit is None else point.time_limit
    return min(max(60.0, expected * MARGIN), math.inf if point.time_limit is None else point.time_limit)


def submit_packs(
    sweep_run: SweepRun,
    points: Sequence[SweepPoint],
    *,
    cluster: str | None,
    everything: bool = False,
    stage: str | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Write the packs and submit one array per shape; returns at once. Points without a job get their outcome now."""
    if not points:
        raise LaunchError(
            "sweep.no-points",
            "there is no point to submit",
            hint="--only oom,fail repeats some; --report writes the page",
        )
    name = cluster or next((p.recipe.cluster for p in points if p.recipe is not None), None)
    if name is None:
        raise ConfigError(
            "sweep.cluster-missing", "a sweep of a command does not name a cluster", hint="add --cluster NAME"
        )
    machine = load_cluster(name)
    if machine.slurm is None:
        raise LaunchError(
            "launch.cluster-without-slurm",
            f"{machine.name} has no SLURM",
            hint="leave out --slurm: the points run here one after another",
        )
    with_job = []
    for point in points:
        expected = sweep_run.expectations[point.name]
        if expected.verdict != "illegal" and (everything or not expected.skip):
            with_job.append(point)
        else:
            run_point(sweep_run, point, everything=everything)
    # What runs in the allocation must see the same points and expectations.
    options = [
        *(["--cluster", cluster] if cluster else []),
        *(["--stage", stage] if stage else []),
        *(["--all"] if everything else []),
    ]
    arrays = []
    for number, group in enumerate(_by_shape(with_job, machine.node.devices)):
        recipe = group[0].recipe
        queue = find_partition(machine, *choose_queue(recipe, machine)) if recipe is not None else None
        limit = min(
            sweep_run.sweep.allocation or MAX_SECONDS, queue.max_time if queue and queue.max_time else MAX_SECONDS
        )
        packs = make_packs(sweep_run, group, limit, machine.node.devices)
        folder = f"{packs[0].nodes}x{packs[0].devices}-{time.time_ns()}-{number}"
        arrays.append((packs, _pack_job(sweep_run, group[0], packs, machine, folder, options)))
    submitted, tries = [], sweep_run.folder.tries()
    for packs, job in arrays:  # every shape was checked before the first is submitted
        listed = {name: tries[name] for pack in packs for name in pack.points}
        value = {"packs": [asdict(p) for p in packs], "tries": listed, "step": srun_argv(job, machine)}
        write_json(Path(job.run_dir) / "packs.json", value)
        array_id = submit_job(job, machine, executor or SlurmScheduler(), jobs_file=sweep_run.folder.jobs_file)
        submitted += [{**asdict(pack), "job": f"{array_id}_{index}"} for index, pack in enumerate(packs)]
    return {"sweep": sweep_run.sweep.name, "folder": str(sweep_run.folder.path), "packs": submitted}


def _pack_job(
    sweep_run: SweepRun,
    point: SweepPoint,
    packs: Sequence[SweepPack],
    machine: Cluster,
    name: str,
    options: Sequence[str],
) -> BatchJob:
    """A training job of this shape that runs the sweep instead; for a command, with the cluster file's settings."""
    first, slurm, sweep_dir = packs[0], machine.slurm, sweep_run.folder.path.absolute()
    folder = sweep_dir / "packs" / name
    if point.recipe is not None:
        job = train_job(point.recipe, machine, folder, workdir=Path.cwd(), active_venv=active_venv())
    else:
        job = BatchJob(
            name="",
            run_dir=str(folder),
            workdir=str(Path.cwd()),
            command=(),
            partition=slurm.partition if slurm else None,
            qos=slurm.qos if slurm else None,
            mem=None if slurm is None or slurm.mem_forbidden else slurm.mem,
            environment=plain_environment(machine, active_venv()),
        )
    if first.nodes > 1 and job.environment.kind == "container":
        raise LaunchError(
            "sweep.container-several-nodes",
            f"points over {first.nodes} nodes cannot run from inside a container: srun is not available there",
            hint='launch.environment = "venv" or "module" for the sweep, or --point for those on one node',
        )
    arguments = ["--run", str(sweep_dir), "--inside", str(folder / "packs.json"), *options]
    count = sum(len(pack.points) for pack in packs)
    return replace(
        job,
        name=sweep_run.sweep.name,
        kind="sweep",
        command=("windlass", "sweep", str(sweep_run.loaded.path.absolute()), *arguments),
        nodes=first.nodes,
        tasks_per_node=first.devices,
        devices_per_node=first.devices,
        cpus_per_task=cpus_per_device(machine),
        seconds=max(pack.seconds for pack in packs) + 60.0,
        requeue=False,
        torchrun=False,
        chain="none",
        links=1,
        array=len(packs),
        staging=None,
        account=job.account or os.environ.get("SBATCH_ACCOUNT"),
        # Points are runs of their own: the tracker folder of one run must not hold them all.
        tracker_env={name: value for name, value in job.tracker_env.items() if name != "WANDB_DIR"},
        about=(f"{count} points of sweep {sweep_run.sweep.name} in {len(packs)} allocations",),
    )


def settle(sweep_run: SweepRun, executor: Executor) -> list[str]:
    """Points that ran when their allocation ended (time limit, node failure, pre-emption) get the scheduler's outcome.

    Points of the same pack that had not begun stay without an outcome: submitting again runs them."""
    settled, folder = [], sweep_run.folder
    for line in (r for r in read_json_lines(folder.jobs_file) if r.get("record") == "submitted"):
        value = read_json(Path(str(line.get("script"))).parent / "packs.json") or {}
        packs, tries, now = value.get("packs", []), value.get("tries", {}), folder.tries()
        tasks = [f"{line.get('job')}_{index}" for index in range(len(packs))]
        states = executor.states(tasks)
        for task, name in ((task, name) for task, pack in zip(tasks, packs, strict=True) for name in pack["points"]):
            state = states.get(task)
            ran_here = now[name] == tries.get(name, 0) and folder.begun(name).get("job") == task
            if state is not None and state.over and ran_here:
                outcome = classify(folder.point(name), state.exit_code, log=folder.log(name), state=state)
                folder.add_outcome({"point": name, "seconds": None, "job": task, **asdict(outcome)})
                settled.append(name)
    return settled


# -- inside the allocation --------------------------------------------------------------------------------------------


def pack_of_this_task(sweep_run: SweepRun, file: Path) -> tuple[list[SweepPoint], StepLauncher | None]:
    """The points that this array task runs, and what starts their ranks.

    Points with an outcome since the submission are left out: a requeued job continues where it was. On several nodes
    srun starts one task per device; one node starts its own processes.
    """
    value, task = read_json(file), (array_task() or (0, 1))[0]
    if value is None or task >= len(value.get("packs", ())):
        raise ConfigError("sweep.packs-damaged", f"{file} is missing or damaged", hint="submit the sweep again")
    pack, before, now = value["packs"][task], value.get("tries", {}), sweep_run.folder.tries()
    points = [p for p in sweep_run.points if p.name in pack["points"] and now[p.name] == before.get(p.name, 0)]
    if pack["nodes"] == 1 or job_id() is None:
        return points, None
    shape = [f"--nodes={pack['nodes']}", f"--ntasks-per-node={pack['devices']}", "--kill-on-bad-exit=1"]
    return points, StepLauncher((*(value.get("step") or ["srun"]), *shape), pack["nodes"], pack["devices"])
