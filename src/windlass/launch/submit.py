"""From a recipe to jobs in a queue: run folder, script, checks, submission. Every choice is kept with its reason."""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.clusters import Cluster, load_cluster
from windlass.clusters.probe import host_names, matches_hosts
from windlass.config import LayoutConfig, Loaded, Recipe
from windlass.config.ramp import run_length
from windlass.errors import LaunchError, PlanError, WindlassError
from windlass.files import append_line, write_atomic
from windlass.launch import checks
from windlass.launch.checks import Finding
from windlass.launch.cpu import CpuWork, active_venv, cpu_job
from windlass.launch.executor import Executor, LocalExecutor
from windlass.launch.job import BatchJob, expected_store_bytes, folder_mark, train_job
from windlass.launch.ledger import active_entries, adopt_jobs, committed_node_hours, entries, runs_below
from windlass.launch.script import render, render_local
from windlass.launch.slurm import SlurmScheduler, slurm_available
from windlass.launch.staging import COPY_BYTES_PER_SECOND, expand, folder_bytes, is_staged, link_checkpoints
from windlass.launch.start import resolve_recipe
from windlass.models.presets import model_spec
from windlass.planner.changes import adjust_batch, better_batch
from windlass.planner.search import Plan, plan
from windlass.runs import Run, create_run
from windlass.runs.events import Saved
from windlass.runs.folder import check_run_folder
from windlass.runs.lock import holder
from windlass.units import DAY, print_quota

# Bytes per parameter on disk by the precision of AdamW's moments: fp32 master weights and two moments.
CHECKPOINT_BYTES = {"fp32": 12, "bf16": 8}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's answer, as far as launching needs it; None where it had none."""

    layout: LayoutConfig | None
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    run_seconds: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_share: float | None = None
    kwh: float | None = None
    steps: int | None = None
    checkpoint_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """What the jobs may use at most, and what the whole run is expected to need. None: unknown."""

    # All jobs that are submitted, and one of them, each to its wall-time limit.
    node_hours: float
    units: float | None
    unit: str
    job_node_hours: float
    job_units: float | None
    # The whole run, and the jobs that it still needs.
    expected_node_hours: float | None
    expected_units: float | None
    expected_links: int | None
    expected_kwh: float | None


@dataclass(frozen=True, kw_only=True)
class PreparedLaunch:
    loaded: Loaded
    cluster: Cluster
    run_dir: Path
    job: BatchJob
    script: str
    plan: Planned
    cost: JobCost
    findings: tuple[Finding, ...]
    local: bool
    stage: BatchJob | None = None  # copies to the fast file system before the first training job

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe


def executors(run: Run) -> dict[str, Executor]:
    local: dict[str, Executor] = {"local": LocalExecutor(run.path)}
    return {**local, "slurm": SlurmScheduler()} if slurm_available() else local


def dry_run_executor(prepared: PreparedLaunch) -> Executor | None:
    """The scheduler that a dry run may ask about jobs; None if there is none."""
    if prepared.local:
        return LocalExecutor(prepared.run_dir)
    return SlurmScheduler() if slurm_available() else None


def prepare(
    loaded: Loaded,
    *,
    run_dir: Path,
    local: bool = False,
    devices: int | None = None,
    expect_store: bool = True,
    dry_run: bool = False,
    adjust: bool = False,
) -> PreparedLaunch:
    """Plan, render and check; changes nothing on disk."""
    cluster, run, adjusted = load_cluster(loaded.recipe.cluster), Run(run_dir), None
    if adjust:
        recipe, adjusted = adjust_batch(loaded.recipe, cluster)
        loaded = replace(loaded, recipe=recipe)
    recipe = loaded.recipe
    local = local or cluster.slurm is None
    expected = planned(recipe, cluster)
    store_bytes = folder_bytes(recipe.data.store)
    share_left = 1.0 - min(1.0, (run.last_metrics().tokens or 0) / (recipe.data.tokens or math.inf))
    ranks = f"{recipe.nodes} nodes x {cluster.node.devices} devices = {recipe.nodes * cluster.node.devices} ranks"
    job = train_job(
        recipe,
        cluster,
        run_dir.absolute(),
        workdir=Path.cwd(),
        active_venv=active_venv(),
        save_seconds=max((e.write_seconds for e in run.events(Saved) if e.write_seconds is not None), default=None),
        step_seconds=run.last_metrics().step_seconds,
        store_bytes=store_bytes,
        run_seconds=None if expected.run_seconds is None else share_left * expected.run_seconds,
        about=[
            *([f"layout: {expected.reason}"] if expected.reason else []),
            "on this machine, without a scheduler" if local else ranks,
        ],
    )
    if local:
        seconds, count = recipe.launch.time or math.inf, devices or cluster.node.devices
        job = replace(job, devices_per_node=count, nodes=1, seconds=seconds, energy_flags=())
        job = replace(job, staging=None, checkpoints_target=None)
    store_bytes = store_bytes or expected_store_bytes(recipe)
    findings = [Finding("batch", "ok", adjusted)] if adjusted else []
    findings += [*expected.findings, *([] if local else checks.check_request(job, cluster))]
    # Without patterns in the cluster file any machine with SLURM may be the cluster.
    trusted = not dry_run or not cluster.hostname_patterns
    on_site = slurm_available() and (trusted or matches_hosts(cluster, host_names()))
    if not local:
        sizes = (store_bytes, expected.checkpoint_bytes, expected.steps)
        findings += checks.check_quotas(job, recipe, cluster, *sizes, on_site=on_site)
    if local or on_site:
        site = checks.check_site(job, recipe, cluster, expected.checkpoint_bytes, expected.steps)
        findings += [finding for finding in site if expect_store or finding.rule != "store"]
    else:
        not_here = f"this machine is not {cluster.title}: disks, image, token store and queue were not checked"
        findings.append(Finding("site", "note", not_here))
    cost = forecast_cost(job, cluster, expected, share_left)
    if not local:
        budget, used = recipe.launch.budget_node_hours, 0.0
        if budget is not None:
            ledger = [e for other in runs_below(run.path.parent) for e in entries(other, executors(other))]
            used = committed_node_hours(ledger, cluster=recipe.cluster, account=job.account)
        needed = None if cost.expected_node_hours is None else share_left * cost.expected_node_hours
        findings += checks.check_chain(job, cost.expected_links)
        findings += checks.check_budget(cost.node_hours, used, budget, needed)
    return PreparedLaunch(
        loaded=loaded,
        cluster=cluster,
        run_dir=run_dir,
        job=job,
        script=render_local(job, cluster) if local else render(job, cluster),
        plan=expected,
        cost=cost,
        findings=tuple(findings),
        local=local,
        stage=None if local else stage_job(job, recipe, cluster, store_bytes),
    )


def stage_job(job: BatchJob, recipe: Recipe, cluster: Cluster, store_bytes: int | None) -> BatchJob | None:
    """The CPU job that copies what a training job wants on a faster file system; None when nothing is left to copy."""
    run, options, account = Run(Path(job.run_dir)), list[str](), recipe.launch.account
    staging = job.staging
    if staging is not None and not staging.per_node:
        target = expand(staging.target, cluster, account)
        if target is None or not is_staged(Path(os.path.expandvars(staging.source)), target):
            options += ["--store", staging.target]
    if job.checkpoints_target is not None and not run.checkpoints.is_symlink():
        target = expand(job.checkpoints_target, cluster, account)
        if options or target is None or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir())):
            options += ["--checkpoints", job.checkpoints_target]
    if not options:
        return None
    argv = ["windlass", "stage", job.run_dir, *options]
    seconds = (store_bytes or 0) / COPY_BYTES_PER_SECOND
    copy = cpu_job(
        cluster,
        run.path,
        "stage",
        argv,
        account=account,
        env=job.env,
        work=CpuWork(seconds=seconds),
        environment=job.environment,
    )
    size = "an unknown amount" if store_bytes is None else f"at most {print_quota(store_bytes)} of tokens"
    rate = f"{print_quota(COPY_BYTES_PER_SECOND)}/s assumed"
    return replace(copy, about=(*copy.about, f"{size}, {rate}; no node with devices waits for this"))


def planned(recipe: Recipe, cluster: Cluster) -> Planned:
    """Plan the recipe's own layout, or the best one. Never raises: what cannot be planned is a finding."""
    steps, data, size = recipe.train.steps, recipe.data, None
    with contextlib.suppress(WindlassError):  # a model whose config cannot be read here
        size = model_spec(recipe.model).params.stored * CHECKPOINT_BYTES[recipe.optim.moments]
    if length := run_length(recipe):
        steps = length[0]
    chosen: Plan | None = None
    try:
        plans = plan(recipe, cluster)
        chosen = plans.best if recipe.layout is None else next((p for p in plans.plans if p.from_recipe), None)
        reason = next((r.reason for r in plans.rejected if r.from_recipe), "it is not valid here")
        hint = f"the planner would choose {plans.plans[0].candidate.describe()}" if plans.plans else None
        finding = Finding("fit", "refuse", f"the recipe's layout does not fit: {reason}", hint, "windlass plan")
    except WindlassError as error:
        finding = Finding("fit", "note", f"not planned: {error.message}", error.hint)
        if isinstance(error, PlanError) or error.code.startswith("layout."):
            finding = Finding("fit", "refuse", error.message, error.hint, "windlass plan")
    if chosen is None:
        return Planned(layout=recipe.layout, findings=(finding,), steps=steps, checkpoint_bytes=size)
    reason = chosen.reason if recipe.layout is not None else f"{chosen.candidate.describe()} ({chosen.reason})"
    findings, better = [Finding("fit", "ok", reason)], better_batch(plans.task, chosen)
    if better is not None:
        message = f"a batch of {data.batch_tokens:,} tokens divides poorly over {plans.task.devices:,} devices"
        findings.append(Finding("batch", "warn", message, f"use --adjust, or {better.describe()}", "windlass plan"))
    return Planned(
        layout=chosen.layout.config(),
        reason=reason,
        findings=tuple(findings),
        run_seconds=chosen.days * DAY,
        step_seconds=chosen.step.seconds,
        tokens_per_second=chosen.batch_tokens / chosen.step.seconds,
        mfu=chosen.step.mfu,
        memory_share=chosen.memory_share,
        kwh=chosen.energy.kwh,
        steps=chosen.steps,
        checkpoint_bytes=size,
    )


def forecast_cost(job: BatchJob, cluster: Cluster, expected: Planned, share_left: float = 1.0) -> JobCost:
    """At most: all jobs to their limit. Expected: the planner's run time, when there is one. `share_left`: share of
    the run that is still to be trained."""
    unlimited, seconds, rate = math.isinf(job.seconds), expected.run_seconds, cluster.billing.per_node_hour
    job_hours = 0.0 if unlimited else job.nodes * job.seconds / 3600
    expected_hours = None if seconds is None else job.nodes * seconds / 3600
    links = None
    if seconds is not None:
        links = 1 if unlimited else max(1, math.ceil(share_left * seconds / max(60.0, job.seconds - job.lead_seconds)))
    return JobCost(
        node_hours=job_hours * job.links,
        units=None if rate is None else job_hours * job.links * rate,
        unit=cluster.billing.unit,
        job_node_hours=job_hours,
        job_units=None if rate is None else job_hours * rate,
        expected_node_hours=expected_hours,
        expected_units=None if rate is None or expected_hours is None else expected_hours * rate,
        expected_links=links,
        expected_kwh=expected.kwh,
    )


def submit(
    prepared: PreparedLaunch, executor: Executor | None = None, *, after: str | None = None, force: bool = False
) -> list[str]:
    """Write the run folder, submit every job of the chain and return their ids at once.

    Nothing is submitted when a check refuses, unless forced."""
    executor = executor or (LocalExecutor(prepared.run_dir) if prepared.local else SlurmScheduler())
    run, job = Run(prepared.run_dir), prepared.job
    if isinstance(executor, SlurmScheduler):
        adopt_jobs(run.jobs_file, executor)
    loaded, layout_from = refuse_launch(prepared, executor, after=after, force=force)
    run = create_run(prepared.run_dir, loaded, layout_from=layout_from)
    script = Path(job.job_file)
    write_atomic(script, prepared.script)
    if isinstance(executor, SlurmScheduler) and not force:
        executor.test(script)
    if prepared.stage is not None:
        after = submit_job(prepared.stage, prepared.cluster, executor, after=f"afterok:{after}" if after else None)
    elif job.checkpoints_target and (target := expand(job.checkpoints_target, prepared.cluster, job.account)):
        link_checkpoints(run, target)  # the folder is empty, or was linked by an earlier launch
    ids: list[str] = []
    for number in range(1, (1 if prepared.local else job.links) + 1):
        condition = f"afterany:{ids[-1]}" if ids else f"afterok:{after}" if after else None
        chain = {"link": number, "links": job.links, "chain": job.chain, "after": condition}
        try:
            ids.append(submit_recorded(job, prepared.cluster, executor, run.jobs_file, after=condition, values=chain))
        except LaunchError as error:
            if not ids:
                raise
            queued = f"jobs 1 to {len(ids)} of the chain are queued ({', '.join(ids)})"
            raise LaunchError(
                "launch.chain-incomplete", f"{queued}, job {number} was refused: {error.message}", hint=error.hint
            ) from None
    return ids


def refuse_launch(
    prepared: PreparedLaunch, executor: Executor | None, *, after: str | None = None, force: bool = False
) -> tuple[Loaded, str]:
    """Raise when `submit` would refuse; changes nothing. Else the recipe with its layout, and who chose the layout.

    `executor` is None in a dry run on a machine without the scheduler: its queue is then not asked."""
    run = Run(prepared.run_dir)
    # Two chains in one run folder would compete for its lock.
    queues = {} if executor is None else {executor.name: executor}
    if active := active_entries(run, queues, strict=True) if queues and run.jobs_file.exists() else []:
        raise LaunchError(
            "launch.run-active",
            f"{run.path} is already active: {', '.join(f'{e.job} {e.state.state.lower()}' for e in active)}",
            hint=f"`windlass jobs {run.name}` shows these jobs, `windlass cancel {run.name}` cancels them",
        )
    if (owner := holder(run.lock_file)) is not None:
        where = f"host {owner.get('host', 'unknown')}, pid {owner.get('pid', 'unknown')}"
        raise LaunchError(
            "launch.run-locked",
            f"another process is writing to {run.path} ({where})",
            hint="wait for it, or choose another folder with --run",
        )
    checks.refuse(prepared.findings, force=force)
    if after is not None and executor is not None:
        check_known(executor, after)
    loaded, layout_from, _ = resolve_recipe(prepared.loaded, run, prepared.cluster, prepared.recipe.nodes)
    check_run_folder(run, loaded.recipe)
    return loaded, layout_from


def submit_job(
    job: BatchJob, cluster: Cluster, executor: Executor, *, jobs_file: Path | None = None, after: str | None = None
) -> str:
    """Write the script of a job without a recipe, submit it and record it; its id."""
    folder, script = Path(job.run_dir), Path(job.job_file)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_atomic(script, render(job, cluster))
    values = {"array": job.array, "after": after}
    return submit_recorded(job, cluster, executor, jobs_file or folder / "jobs.jsonl", after=after, values=values)


def submit_recorded(
    job: BatchJob,
    cluster: Cluster,
    executor: Executor,
    jobs_file: Path,
    *,
    after: str | None,
    values: Mapping[str, Any],
) -> str:
    """Submit and record, before and after: a job whose id does not reach us is found in the queue by its mark."""
    mark = f"{folder_mark(jobs_file.parent)}:{secrets.token_hex(4)}"
    record = {"time": time.time(), **submission_values(job, cluster, executor.name), **values, "mark": mark}
    comment = f"{job.sbatch.get('comment') or ''} {mark}".strip()
    append_line(jobs_file, {"record": "submitting", **record})
    try:
        job_id = executor.submit(Path(job.job_file), run_dir=Path(job.run_dir), after=after, comment=comment)
    except LaunchError as error:
        if error.code != "launch.submission-unknown":
            append_line(jobs_file, {"record": "refused", "time": time.time(), "mark": mark, "reason": error.message})
        raise
    append_line(jobs_file, {"record": "submitted", "job": job_id, **record})
    return job_id


def submission_values(job: BatchJob, cluster: Cluster, executor: str) -> dict[str, Any]:
    return {
        "kind": job.kind,
        "name": job.name,
        "executor": executor,
        "cluster": cluster.name,
        "account": job.account,
        "partition": job.partition,
        "qos": job.qos,
        "nodes": job.nodes,
        "tasks_per_node": job.tasks_per_node,
        "devices_per_node": job.devices_per_node,
        "seconds": None if math.isinf(job.seconds) else job.seconds,
        "script": job.job_file,
        "unit": cluster.billing.unit,
        "units_per_node_hour": cluster.billing.per_node_hour,
        "user": os.environ.get("USER"),
    }


def check_known(executor: Executor, job: str) -> None:
    """Check that SLURM knows the job. It treats a dependency on an unknown job as satisfied, so the run would start
    before its data exist."""
    if job not in executor.states([job]):
        raise LaunchError(
            "launch.unknown-dependency",
            f"job {job} is unknown to the scheduler, which would treat the dependency as satisfied",
            hint="check the id with `squeue --me`; a job that ended long ago needs no dependency",
        )


def cancel(run: Run, by_name: Mapping[str, Executor], only: str | None = None) -> list[str]:
    """Cancel the waiting and running jobs of this run, the last first, so that none starts in the meantime."""
    ledger = entries(run, by_name, strict=True)
    if only is not None and only not in {e.job for e in ledger}:
        jobs = ", ".join(e.job for e in ledger) or "none"
        raise LaunchError(
            "launch.job-not-in-run",
            f"job {only} does not belong to this run ({jobs})",
            hint="use `scancel` to cancel jobs of other runs",
        )
    cancelled = []
    for entry in (e for e in reversed(ledger) if e.state.active and only in (None, e.job)):
        if entry.executor not in by_name:
            raise LaunchError(
                "launch.executor-not-here",
                f"job {entry.job} was submitted to {entry.executor}, which is not on this machine",
                hint="log in to the machine it was launched from",
            )
        by_name[entry.executor].cancel([entry.job])
        append_line(run.jobs_file, {"record": "cancelled", "time": time.time(), "job": entry.job})
        cancelled.append(entry.job)
    return cancelled
