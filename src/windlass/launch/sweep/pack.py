"""How do short points share allocations? Points of one shape are packed into as few jobs as the wall-time limit allows, as one array."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.scheduler import array_task, job_id
from windlass.errors import ConfigError, LaunchError
from windlass.files import append_line, read_json, read_json_lines, write_atomic, write_json
from windlass.launch.executor import Executor, State
from windlass.launch.job import Environment, Job, choose_queue, find_partition, train_job
from windlass.launch.script import render, srun_words
from windlass.launch.slurm import Slurm
from windlass.launch.submit import active_venv, submission_record
from windlass.launch.sweep.outcome import classify
from windlass.launch.sweep.points import Point

if TYPE_CHECKING:
    from windlass.launch.sweep.local import Work

MOST_SECONDS = 4 * 3600.0
"""Wall time of a packed job when the sweep says none: short jobs start soon."""
MARGIN = 1.5
"""A point may take this much longer than expected before its neighbours in the pack are in danger."""
UNKNOWN_SECONDS = 1800.0
"""For a point that nobody can predict and that has no time_limit."""


@dataclass(frozen=True)
class Pack:
    """Points that share one allocation, one after another."""

    points: tuple[str, ...]
    nodes: int
    devices: int
    """Per node."""
    seconds: float


def make_packs(work: Work, points: Sequence[Point], limit: float, per_node: int) -> list[Pack]:
    """Greedy, in the sweep's order: a new allocation begins where the next point would not fit in the time."""
    packs: list[Pack] = []
    for group in _shapes(points, per_node):
        nodes, devices = _shape(group[0], per_node)
        names: list[str] = []
        total = 0.0
        for point in group:
            need = min(seconds_of(work, point), limit)
            if names and total + need > limit:
                packs.append(Pack(tuple(names), nodes, devices, total))
                names, total = [], 0.0
            names.append(point.name)
            total += need
        packs.append(Pack(tuple(names), nodes, devices, total))
    return packs


def _shape(point: Point, per_node: int) -> tuple[int, int]:
    nodes = point.recipe.nodes if point.recipe is not None else int(point.settings.get("nodes", 1))
    return nodes, point.devices or per_node


def seconds_of(work: Work, point: Point) -> float:
    """Time to reserve: the point's limit, or the expectation with a margin."""
    expected = work.expectation(point).seconds
    if point.time_limit is not None:
        return point.time_limit if expected is None else min(point.time_limit, max(60.0, expected * MARGIN))
    return UNKNOWN_SECONDS if expected is None else max(60.0, expected * MARGIN)


def submit_packs(
    work: Work,
    points: Sequence[Point],
    *,
    cluster: str | None,
    everything: bool = False,
    stage: str | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Write the packs and submit one array per shape; returns at once. Points that need no job get their outcome now."""
    from windlass.launch.sweep.local import run_point

    if not points:
        raise LaunchError(
            "launch.point-submit",
            "there is no point to submit",
            hint="--only oom,fail repeats some; --report writes the page",
        )
    machine = _machine(points, cluster)
    runs = []
    for point in points:
        expected = work.expectation(point)
        if expected.verdict == "illegal" or (expected.skip and not everything):
            run_point(work, point, everything=everything)
        else:
            runs.append(point)
    packs = [pack for group in _shapes(runs, machine.node.devices) for pack in make_packs(work, group, _limit(work, group, machine), machine.node.devices)]  # fmt: skip
    request = Request(machine, cluster, everything, stage)
    submitted = _submit(work, packs, request, executor or Slurm())
    return {"sweep": work.sweep.name, "folder": str(work.folder.path), "packs": submitted}


@dataclass(frozen=True)
class Request:
    """How the sweep was asked for: what runs in the allocation must see the same points and expectations."""

    machine: Cluster
    cluster: str | None
    everything: bool
    stage: str | None

    def words(self) -> list[str]:
        cluster = [] if self.cluster is None else ["--cluster", self.cluster]
        stage = [] if self.stage is None else ["--stage", self.stage]
        return [*cluster, *stage, *(["--all"] if self.everything else [])]


def _machine(points: Sequence[Point], cluster: str | None) -> Cluster:
    name = cluster or next((p.recipe.cluster for p in points if p.recipe is not None), None)
    if name is None:
        raise ConfigError(
            "launch.machine-command-does-say", "on which machine? A command does not say", hint="add --cluster NAME"
        )
    machine = load_cluster(name)
    if machine.slurm is None:
        raise LaunchError(
            "launch.slurm",
            f"{machine.name} has no SLURM",
            hint="leave out --slurm: the points run here one after another",
        )
    return machine


def _shapes(points: Sequence[Point], per_node: int) -> list[list[Point]]:
    """Points of the same nodes and devices, in the order of the sweep."""
    shapes: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        shapes.setdefault(_shape(point, per_node), []).append(point)
    return list(shapes.values())


def _limit(work: Work, group: Sequence[Point], machine: Cluster) -> float:
    recipe = group[0].recipe
    partition = find_partition(machine, *choose_queue(recipe, machine)) if recipe is not None else None
    most = partition.max_time if partition and partition.max_time else MOST_SECONDS
    return min(work.sweep.allocation or MOST_SECONDS, most)


def _submit(work: Work, packs: Sequence[Pack], request: Request, executor: Executor) -> list[dict[str, Any]]:
    submitted = []
    tries = work.folder.tries()
    jobs = []
    for number, shape in enumerate(dict.fromkeys((p.nodes, p.devices) for p in packs)):
        group = [p for p in packs if (p.nodes, p.devices) == shape]
        folder = work.folder.path.absolute() / "packs" / f"{shape[0]}x{shape[1]}-{time.time_ns()}-{number}"
        jobs.append(
            (group, _job(work, group, request, folder), folder)
        )  # every shape is checked before one is submitted
    for group, job, folder in jobs:
        listed = {name: tries[name] for pack in group for name in pack.points}
        step = srun_words(job, request.machine)
        write_json(folder / "packs.json", {"packs": [asdict(p) for p in group], "tries": listed, "step": step})
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        write_atomic(Path(job.job_file), render(job, request.machine))
        job_id = executor.submit(Path(job.job_file), run_dir=folder)
        append_line(work.folder.path / "jobs.jsonl", {**submission_record(job, request.machine, executor.name, job_id), "array": job.array})  # fmt: skip
        submitted += [{**asdict(p), "job": f"{job_id}_{i}"} for i, p in enumerate(group)]
    return submitted


def _job(work: Work, group: Sequence[Pack], request: Request, folder: Path) -> Job:
    """A training job of this shape that runs the sweep instead; for a command, what the cluster's file says."""
    first, machine = group[0], request.machine
    recipe = next(p for p in work.points if p.name == first.points[0]).recipe
    command = ["windlass", "sweep", str(work.loaded.path.absolute()), "--run", str(work.folder.path.absolute()), "--inside", str(folder / "packs.json")]  # fmt: skip
    job = train_job(recipe, machine, folder, workdir=Path.cwd(), active_venv=active_venv()) if recipe is not None else _command_job(folder, machine)  # fmt: skip
    if first.nodes > 1 and job.environment.kind == "container":
        raise LaunchError(
            "launch.points-over-nodes-cannot",
            f"points over {first.nodes} nodes cannot run from inside a container: srun is not there",
            hint='launch.environment = "venv" or "module" for the sweep, or --point for those on one node',
        )
    return replace(
        job, name=work.sweep.name, kind="sweep", command=(*command, *request.words()), nodes=first.nodes, tasks_per_node=first.devices,
        devices_per_node=first.devices, cpus_per_task=_cores(machine), seconds=max(p.seconds for p in group) + 60.0, requeue=False, torchrun=False,
        chain="none", links=1, array=len(group), staging=None, account=job.account or os.environ.get("SBATCH_ACCOUNT"),
        # Points are runs of their own: what names one tracked run must not name them all.
        tracker_env={k: v for k, v in job.tracker_env.items() if k == "WANDB_MODE" or not k.startswith("WANDB")},
        about=(f"{sum(len(p.points) for p in group)} points of sweep {work.sweep.name} in {len(group)} allocations",),
    )  # fmt: skip


def _cores(machine: Cluster) -> int:
    given = machine.slurm.cpus_per_task if machine.slurm else None
    return given or max(1, (machine.node.cores_usable or machine.node.cores) // machine.node.devices)


def _command_job(folder: Path, machine: Cluster) -> Job:
    slurm, venv = machine.slurm, active_venv()
    return Job(
        name="", run_dir=str(folder), workdir=str(Path.cwd()), command=(), partition=slurm.partition if slurm else None, qos=slurm.qos if slurm else None,
        mem=None if slurm is None or slurm.mem_forbidden else slurm.mem, environment=Environment(kind="venv" if venv else "module", modules=tuple(machine.modules), venv=venv),
    )  # fmt: skip


def settle(work: Work, executor: Executor) -> list[str]:
    """Points that were running when their allocation ended (time limit, node failure, pre-emption) get the scheduler's word.

    Points of the same pack that had not begun stay without an outcome: submitting again takes them up."""
    settled = []
    for line in read_json_lines(work.folder.path / "jobs.jsonl"):
        value = read_json(Path(str(line.get("script"))).parent / "packs.json") or {}
        packs, tries = value.get("packs", []), value.get("tries", {})
        tasks = [f"{line.get('job')}_{i}" for i in range(len(packs))]
        states = executor.states(tasks)
        now = work.folder.tries()
        for task, pack in zip(tasks, packs, strict=True):
            state = states.get(task)
            for name in pack["points"] if state is not None and state.over else ():
                if now[name] == tries.get(name, 0) and work.folder.begun(name).get("job") == task:
                    _take_word(work, name, task, state)
                    settled.append(name)
    return settled


def _take_word(work: Work, name: str, task: str, state: State | None) -> None:
    code = None if state is None else state.exit_code
    outcome = classify(work.folder.point(name), code, log=work.folder.log(name), state=state)
    work.folder.add_outcome({"point": name, "seconds": None, "job": task, **outcome.as_dict()})


# -- inside the allocation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Here:
    """What this array task is to do."""

    pack: Pack
    points: list[Point]
    """Those of the pack that have no outcome since the submission: a requeued job goes on where it was."""
    step: tuple[str, ...]
    """What comes before a point's command: one task per device. One node starts its own processes."""


def pack_here(work: Work, file: Path) -> Here:
    value, task = read_json(file), (array_task() or (0, 1))[0]
    if value is None or task >= len(value.get("packs", ())):
        raise ConfigError("launch.missing-damaged", f"{file} is missing or damaged", hint="submit the sweep again")
    found, before, now = value["packs"][task], value.get("tries", {}), work.folder.tries()
    pack = Pack(tuple(found["points"]), found["nodes"], found["devices"], found["seconds"])
    open_points = [p for p in work.points if p.name in pack.points and now[p.name] == before.get(p.name, 0)]
    return Here(pack, open_points, step_words(pack, value.get("step") or ("srun",)))


def step_words(pack: Pack, srun: Sequence[str] = ("srun",)) -> tuple[str, ...]:
    if pack.nodes == 1 or job_id() is None:
        return ()
    return (*srun, f"--nodes={pack.nodes}", f"--ntasks-per-node={pack.devices}", "--kill-on-bad-exit=1")
