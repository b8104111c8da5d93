"""Points of one shape packed into few jobs of one array, each below the wall-time limit."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.scheduler import array_task, default_account, job_id
from windlass.config.launch import LaunchConfig
from windlass.errors import ConfigError, LaunchError
from windlass.files import read_json, read_json_lines, write_json
from windlass.launch import checks
from windlass.launch.checks import Finding
from windlass.launch.cpu import active_venv
from windlass.launch.executor import Executor
from windlass.launch.job import (
    BatchJob,
    JobRequest,
    choose_environment,
    choose_queue,
    cpus_per_device,
    find_partition,
    plain_environment,
    train_job,
)
from windlass.launch.script import container_argv, srun_argv
from windlass.launch.slurm import SlurmScheduler
from windlass.launch.submit import submit_job
from windlass.launch.sweep.command import place_of, srun_request
from windlass.launch.sweep.execute import StepLauncher, run_point
from windlass.launch.sweep.folder import SweepRun
from windlass.launch.sweep.outcome import classify
from windlass.launch.sweep.points import SweepPoint

MAX_SECONDS = 4 * 3600.0  # wall time of a packed job when the sweep has none: short jobs start soon
MARGIN = 1.5  # a point may take this much longer than expected before the other points of its pack are in danger
SPARE_SECONDS = 60.0  # time of a job besides its points: windlass starts and writes tables
UNKNOWN_SECONDS = 1800.0  # for a point without a prediction and without a time_limit


@dataclass(frozen=True)
class SweepPack:
    """Points that share one allocation, one after another."""

    points: tuple[str, ...]
    nodes: int
    devices: int  # per node
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PackArray:
    """The packs of one shape, the array job that runs them, and the prefix of each point's command."""

    machine: Cluster
    packs: list[SweepPack]
    job: BatchJob
    step: list[str]  # srun and its options, on several nodes
    container: list[str]
    findings: list[Finding]


@dataclass(frozen=True)
class CommandRequest:
    """What a sweep of a command asks of the cluster: its `launch` table, and what its own srun call says."""

    launch: LaunchConfig
    nodes: int


def make_packs(
    sweep_run: SweepRun, points: Sequence[SweepPoint], limit_seconds: float, per_node: int
) -> list[SweepPack]:
    """Fill allocations in the sweep's order; start a new one when the next point would exceed the wall time."""
    packs: list[SweepPack] = []
    for group in _by_shape(points, per_node):
        pack, nodes = None, _shape(group[0], per_node)[0]
        devices = max(_shape(point, per_node)[1] for point in group)
        for point in group:
            seconds = min(reserved_seconds(sweep_run, point), limit_seconds)
            if pack is not None and pack.seconds + seconds <= limit_seconds:
                pack = replace(packs.pop(), points=(*pack.points, point.name), seconds=pack.seconds + seconds)
            else:
                pack = SweepPack((point.name,), nodes, devices, seconds)
            packs.append(pack)
    return packs


def _shape(point: SweepPoint, per_node: int) -> tuple[int, int]:
    nodes, devices = place_of(point)
    return nodes, devices or per_node


def _by_shape(points: Sequence[SweepPoint], per_node: int) -> list[list[SweepPoint]]:
    """Group points by nodes and devices; by nodes alone if the commands call srun, which requests the devices
    itself."""
    shapes: dict[tuple[int, int | None], list[SweepPoint]] = {}
    for point in points:
        nodes, devices = _shape(point, per_node)
        calls_srun = point.recipe is None and srun_request(point) is not None
        shapes.setdefault((nodes, None if calls_srun else devices), []).append(point)
    return list(shapes.values())


def reserved_seconds(sweep_run: SweepRun, point: SweepPoint) -> float:
    """The point's time limit, or the expected time with a margin; for a command, the time its own srun call asks
    for."""
    expected = sweep_run.expectations[point.name].seconds
    if expected is None:
        request = srun_request(point) if point.recipe is None else None
        asked = point.time_limit if point.time_limit is not None else request.seconds if request else None
        return UNKNOWN_SECONDS if asked is None else asked
    return min(max(60.0, expected * MARGIN), math.inf if point.time_limit is None else point.time_limit)


def prepare_packs(
    sweep_run: SweepRun, points: Sequence[SweepPoint], *, cluster: str | None, options: Sequence[str] = ()
) -> list[PackArray]:
    """One array per shape, with the findings of the checks; writes nothing. `options` go to the sweep in the job."""
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
            hint="omit --slurm to run the points here, one after another",
        )
    arrays = []
    # What runs in the allocation must see the same points and expectations.
    options = [*(["--cluster", cluster] if cluster else []), *options]
    for number, group in enumerate(_by_shape(points, machine.node.devices)):
        request = request_of(sweep_run, group[0])
        queue = find_partition(machine, *choose_queue(request, machine))
        queue_limit = (queue.max_time if queue else None) or math.inf
        own = srun_request(group[0]) if group[0].recipe is None else None
        asked = sweep_run.sweep.allocation or sweep_run.sweep.launch.time
        limit = min(asked or MAX_SECONDS, queue_limit)
        if asked is None and own is not None and own.seconds is not None:
            # A point that asks for more than the queue allows keeps its time: the check refuses it with the numbers.
            limit = max(own.seconds, MAX_SECONDS if math.isinf(queue_limit) else queue_limit)
        packs = make_packs(sweep_run, group, limit, machine.node.devices)
        folder = f"{packs[0].nodes}x{packs[0].devices}-{time.time_ns()}-{number}"
        job = _pack_job(sweep_run, group[0], packs, machine, folder, options)
        if job.seconds - SPARE_SECONDS <= queue_limit:
            job = replace(job, seconds=min(job.seconds, queue_limit))
        env = choose_environment(request, machine, active_venv())
        in_container = group[0].recipe is None and env.kind == "container"
        if in_container and own is not None:
            raise LaunchError(
                "sweep.container-around-srun",
                f"{group[0].name}: the command calls srun itself, which is not available inside {env.image}",
                hint="remove launch.container and start the container after srun, or remove srun from the command",
            )
        findings = checks.check_request(job, machine)
        findings += checks.check_environment(replace(job, environment=env))
        arrays.append(
            PackArray(
                machine=machine,
                packs=packs,
                job=job,
                step=[] if own is not None else srun_argv(job, machine),
                container=container_argv(job, machine, env) if in_container else [],
                findings=findings,
            )
        )
    return arrays


def request_of(sweep_run: SweepRun, point: SweepPoint) -> JobRequest:
    """The point's recipe; for a command the sweep's `launch`, completed by the options of its own srun call."""
    if point.recipe is not None:
        return point.recipe
    launch, own = sweep_run.sweep.launch, srun_request(point)
    keys = [key for key in ("account", "partition", "qos") if getattr(launch, key) is None]
    return CommandRequest(
        launch.model_copy(update={key: getattr(own, key) for key in keys} if own else {}), place_of(point)[0]
    )


def submit_packs(
    sweep_run: SweepRun,
    points: Sequence[SweepPoint],
    *,
    cluster: str | None,
    everything: bool = False,
    options: Sequence[str] = (),
    force: bool = False,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Write the packs and submit one array per shape; returns at once. Points without a job get their outcome now."""
    if not points:
        raise LaunchError(
            "sweep.no-points",
            "there is no point to submit",
            hint="use --only oom,fail to repeat some, or --report to write the page",
        )
    with_job = points_with_job(sweep_run, points, everything=everything)
    arrays = prepare_packs(sweep_run, with_job, cluster=cluster, options=[*options, *(["--all"] if everything else [])])
    # Every shape is checked before the first is submitted.
    findings = {(f.rule, f.message): f for array in arrays for f in array.findings}
    checks.refuse(list(findings.values()), force=force)
    for point in points:
        if point not in with_job:
            run_point(sweep_run, point, everything=everything)
    submitted, tries = [], sweep_run.folder.tries()
    for array in arrays:
        listed = {name: tries[name] for pack in array.packs for name in pack.points}
        value = {"packs": [asdict(p) for p in array.packs], "tries": listed}
        value |= {"step": array.step, "container": array.container}
        write_json(Path(array.job.run_dir) / "packs.json", value)
        array_id = submit_job(
            array.job, array.machine, executor or SlurmScheduler(), jobs_file=sweep_run.folder.jobs_file
        )
        submitted += [{**asdict(pack), "job": f"{array_id}_{index}"} for index, pack in enumerate(array.packs)]
    return {"sweep": sweep_run.sweep.name, "folder": str(sweep_run.folder.path), "packs": submitted}


def points_with_job(sweep_run: SweepRun, points: Sequence[SweepPoint], *, everything: bool) -> list[SweepPoint]:
    """The points that get a job: without those that are invalid or predicted not to fit."""
    expected = sweep_run.expectations
    return [p for p in points if expected[p.name].verdict != "illegal" and (everything or not expected[p.name].skip)]


def _pack_job(
    sweep_run: SweepRun,
    point: SweepPoint,
    packs: Sequence[SweepPack],
    machine: Cluster,
    name: str,
    options: Sequence[str],
) -> BatchJob:
    """A training job of this shape whose command is the sweep; for a command, with the sweep's own settings."""
    first, slurm, sweep_dir = packs[0], machine.slurm, sweep_run.folder.path.absolute()
    folder = sweep_dir / "packs" / name
    if point.recipe is not None:
        job = train_job(point.recipe, machine, folder, workdir=Path.cwd(), active_venv=active_venv())
    else:
        request = request_of(sweep_run, point)
        launch, (partition, qos) = request.launch, choose_queue(request, machine)
        env = choose_environment(request, machine, active_venv())
        if env.kind == "container":  # around each point's command, not around the sweep, which starts the steps
            env = plain_environment(machine, launch.venv or active_venv())
        job = BatchJob(
            name="",
            run_dir=str(folder),
            workdir=str(Path.cwd()),
            command=(),
            partition=partition,
            qos=qos,
            account=launch.account,
            mem=None if slurm is None or slurm.mem_forbidden else slurm.mem,
            environment=env,
            env=launch.env,
            sbatch=launch.sbatch,
        )
    if first.nodes > 1 and job.environment.kind == "container":
        raise LaunchError(
            "sweep.container-several-nodes",
            f"points over {first.nodes} nodes cannot run from inside a container: srun is not available there",
            hint='set launch.environment = "venv" or "module", or run only the points on one node with --point',
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
        seconds=max(pack.seconds for pack in packs) + SPARE_SECONDS,
        requeue=False,
        torchrun=False,
        chain="none",
        links=1,
        array=len(packs),
        staging=None,
        account=job.account or default_account(slurm.account if slurm else None),
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
    srun starts one task per device, unless the command calls srun itself; one node starts its own processes.
    """
    value, task = read_json(file), (array_task() or (0, 1))[0]
    if value is None or task >= len(value.get("packs", ())):
        raise ConfigError("sweep.packs-damaged", f"{file} is missing or damaged", hint="submit the sweep again")
    pack, before, now = value["packs"][task], value.get("tries", {}), sweep_run.folder.tries()
    points = [p for p in sweep_run.points if p.name in pack["points"] and now[p.name] == before.get(p.name, 0)]
    step = value.get("step", ["srun"]) if pack["nodes"] > 1 and job_id() is not None else []
    shape = [f"--nodes={pack['nodes']}", f"--ntasks-per-node={pack['devices']}", "--kill-on-bad-exit=1"]
    argv = (*step, *(shape if step else ()), *value.get("container", ()))
    return points, StepLauncher(argv, pack["nodes"], pack["devices"]) if argv else None
