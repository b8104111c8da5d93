"""How do short points share allocations? Points of one shape are packed into as few jobs as the wall-time limit allows, as one array."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.scheduler import array_task, job_id
from windlass.config import Recipe
from windlass.errors import ConfigError, LaunchError
from windlass.launch.executor import Executor
from windlass.launch.job import Job, choose_environment, choose_queue, find_partition
from windlass.launch.script import render
from windlass.launch.slurm import Slurm
from windlass.launch.submit import active_venv, submission_record
from windlass.launch.sweep.outcome import classify
from windlass.launch.sweep.points import Point
from windlass.runs.files import append_line, read_json, read_lines, write_json, write_whole

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
    shapes: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        shapes.setdefault(_shape(work, point, per_node), []).append(point)
    for (nodes, devices), group in shapes.items():
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


def _shape(work: Work, point: Point, per_node: int) -> tuple[int, int]:
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
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Write the packs and submit one array per shape; returns at once. Points that need no job get their outcome now."""
    from windlass.launch.sweep.local import run_point

    if not points:
        raise LaunchError("there is no point to submit", hint="--only oom,fail repeats some; --report writes the page")
    base = next((p.recipe for p in points if p.recipe is not None), None)
    name = cluster or (base.cluster if base else None)
    if name is None:
        raise ConfigError("on which machine? A command does not say", hint="add --cluster NAME")
    machine = load_cluster(name)
    if machine.slurm is None:
        raise LaunchError(
            f"{machine.name} has no SLURM", hint="leave out --slurm: the points run here one after another"
        )
    runs = []
    for point in points:
        expected = work.expectation(point)
        if expected.verdict == "illegal" or (expected.skip and not everything):
            run_point(work, point, everything=everything)
        else:
            runs.append(point)
    packs = make_packs(work, runs, _limit(work, base, machine), machine.node.devices)
    executor = executor or Slurm()
    return {"sweep": work.sweep.name, "folder": str(work.folder.path), "packs": _submit(work, packs, base, machine, executor, everything)}  # fmt: skip


def _limit(work: Work, base: Recipe | None, machine: Cluster) -> float:
    partition = find_partition(machine, *choose_queue(base, machine)) if base is not None else None
    most = partition.max_time if partition and partition.max_time else MOST_SECONDS
    return min(work.sweep.allocation or MOST_SECONDS, most)


def _submit(
    work: Work, packs: Sequence[Pack], base: Recipe | None, machine: Cluster, executor: Executor, everything: bool
) -> list[dict[str, Any]]:
    submitted = []
    shapes = list(dict.fromkeys((p.nodes, p.devices) for p in packs))
    for nodes, devices in shapes:
        group = [p for p in packs if (p.nodes, p.devices) == (nodes, devices)]
        folder = work.folder.path.absolute() / "packs" / f"{nodes}x{devices}-{time.time_ns()}"
        write_json(folder / "packs.json", {"packs": [asdict(p) for p in group]})
        job = _job(work, group, base, machine, folder, everything)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        write_whole(Path(job.job_file), render(job, machine))
        job_id = executor.submit(Path(job.job_file), run_dir=folder)
        append_line(work.folder.path / "jobs.jsonl", {**submission_record(job, machine, executor.name, job_id), "array": job.array})  # fmt: skip
        submitted += [{**asdict(p), "job": f"{job_id}_{i}"} for i, p in enumerate(group)]
    return submitted


def _job(
    work: Work, group: Sequence[Pack], base: Recipe | None, machine: Cluster, folder: Path, everything: bool
) -> Job:
    slurm, first = machine.slurm, group[0]
    partition, qos = choose_queue(base, machine) if base is not None else (slurm.partition if slurm else None, None)
    cores = (machine.node.cores_usable or machine.node.cores) // machine.node.devices
    command = ["windlass", "sweep", str(work.loaded.path.absolute()), "--run", str(work.folder.path.absolute()), "--inside", str(folder / "packs.json")]  # fmt: skip
    launch = base.launch if base is not None else None
    return Job(
        name=work.sweep.name, kind="sweep", run_dir=str(folder), workdir=str(Path.cwd()), command=(*command, *(["--all"] if everything else [])),
        nodes=first.nodes, tasks_per_node=first.devices, devices_per_node=first.devices if machine.slurm and machine.slurm.gpu_option != "none" else 0,
        cpus_per_task=(slurm.cpus_per_task if slurm else None) or max(1, cores), seconds=max(p.seconds for p in group) + 60.0, partition=partition, qos=qos,
        account=(launch.account if launch else None) or os.environ.get("SBATCH_ACCOUNT"), array=len(group),
        environment=choose_environment(base, machine, active_venv()) if base is not None else _plain_environment(machine),
        env=launch.env if launch else {}, sbatch=launch.sbatch if launch else {},
        about=(f"{sum(len(p.points) for p in group)} points of sweep {work.sweep.name} in {len(group)} allocations",),
    )  # fmt: skip


def _plain_environment(machine: Cluster) -> Any:
    from windlass.launch.job import Environment

    venv = active_venv()
    return Environment(kind="venv" if venv else "module", modules=tuple(machine.modules), venv=venv)


def settle(work: Work, executor: Executor) -> list[str]:
    """Points that were running when their allocation ended (time limit, node failure, pre-emption) get the scheduler's word.

    Points of the same pack that had not begun stay without an outcome: submitting again takes them up."""
    done, settled = work.folder.outcomes(), []
    for line in read_lines(work.folder.path / "jobs.jsonl"):
        folder = Path(str(line.get("script"))).parent
        packs = (read_json(folder / "packs.json") or {}).get("packs", [])
        tasks = [f"{line.get('job')}_{i}" for i in range(len(packs))]
        states = executor.states(tasks)
        for task, pack in zip(tasks, packs, strict=True):
            state = states.get(task)
            for name in pack["points"] if state is not None and state.over else ():
                if name not in done and work.folder.point(name).path.exists():
                    outcome = classify(work.folder.point(name), None if state is None else state.exit_code, log=work.folder.log(name), state=state)  # fmt: skip
                    work.folder.add_outcome({"point": name, "seconds": None, "job": task, **outcome.as_dict()})
                    settled.append(name)
    return settled


# -- inside the allocation ------------------------------------------------------------------------------------------------------


def pack_here(file: Path) -> Pack:
    """The pack of this array task."""
    value = read_json(file)
    task = array_task()
    if value is None or (task or (0, 1))[0] >= len(value.get("packs", ())):
        raise ConfigError(f"{file} is missing or damaged", hint="submit the sweep again")
    found = value["packs"][(task or (0, 1))[0]]
    return Pack(tuple(found["points"]), found["nodes"], found["devices"], found["seconds"])


def step_words(pack: Pack) -> tuple[str, ...]:
    """What comes before a point's command inside an allocation: one task per device. One node starts its own processes."""
    if pack.nodes == 1 or job_id() is None:
        return ()
    return ("srun", f"--nodes={pack.nodes}", f"--ntasks-per-node={pack.devices}", "--kill-on-bad-exit=1")
