"""How does a recipe become jobs in a queue? Recipe -> run folder -> script -> checks -> links; every choice is kept with its reason."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from windlass.clusters import Cluster, load_cluster
from windlass.config import Loaded, Recipe
from windlass.errors import LaunchError
from windlass.files import append_line, write_atomic
from windlass.launch import checks
from windlass.launch.checks import Finding
from windlass.launch.executor import Executor
from windlass.launch.job import Job, train_job
from windlass.launch.ledger import committed_node_hours, entries, runs_below
from windlass.launch.local import Local, render_local
from windlass.launch.planned import Planned, planned
from windlass.launch.script import render
from windlass.launch.slurm import Slurm, available
from windlass.runs import Run, create_run
from windlass.runs.events import Saved
from windlass.runs.lock import holder


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the jobs may use at most, and what the run is expected to need."""

    node_hours: float
    units: float | None
    unit: str
    expected_node_hours: float | None
    expected_links: int | None
    expected_kwh: float | None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that submission needs, before anything is written or submitted."""

    loaded: Loaded
    recipe: Recipe
    cluster: Cluster
    run_dir: Path
    job: Job
    text: str
    plan: Planned
    cost: Cost
    findings: tuple[Finding, ...]
    local: bool


def executors(run: Run | None = None) -> dict[str, Executor]:
    """Those that can be asked on this machine."""
    found: dict[str, Executor] = {"local": Local(run.path if run else None)}
    if available():
        found["slurm"] = Slurm()
    return found


def prepare(
    loaded: Loaded, *, run_dir: Path, overrides: Sequence[str] = (), local: bool = False, devices: int | None = None, workdir: Path | None = None,
    expect_store: bool = True, dry_run: bool = False,
) -> Prepared:  # fmt: skip
    """Plan, render and check; changes nothing on disk."""
    recipe, cluster = loaded.recipe, load_cluster(loaded.recipe.cluster)
    local = local or cluster.slurm is None
    plan = planned(recipe, cluster)
    run = Run(run_dir)
    job = train_job(
        recipe, cluster, run_dir.absolute(), workdir=workdir or Path.cwd(), overrides=[w for w in overrides if not w.startswith("launch.")],
        layout_words=plan.words, active_venv=active_venv(), saved_seconds=longest_save(run), about=[*plan.about, _where(recipe, cluster, local)],
    )  # fmt: skip
    if local:
        job = replace(
            job,
            devices_per_node=devices or cluster.node.devices,
            nodes=1,
            seconds=recipe.launch.time or math.inf,
            staging=None,
            energy_flags=(),
        )
    text = render_local(job, cluster) if local else render(job, cluster)
    findings = [*plan.findings, *([] if local else checks.check_request(job, cluster))]
    if local or (available() and (at_site(cluster) or not dry_run)):
        findings += site_findings(job, recipe, cluster, plan, expect_store=expect_store)
    else:
        findings.append(
            Finding(
                "site",
                "note",
                f"this machine is not {cluster.title}: disks, image, token store and queue were not looked at",
            )
        )
    cost = forecast_cost(job, cluster, plan)
    findings += _budget(run, recipe, cost) if not local else []
    return Prepared(
        loaded=loaded,
        recipe=recipe,
        cluster=cluster,
        run_dir=run_dir,
        job=job,
        text=text,
        plan=plan,
        cost=cost,
        findings=tuple(findings),
        local=local,
    )


def at_site(cluster: Cluster) -> bool:
    """Does this machine look like one of the cluster's? Without patterns in its file, any machine with SLURM does."""
    name = socket.getfqdn()
    short = socket.gethostname()
    return not cluster.hostname_patterns or any(
        fnmatch(host, p) for p in cluster.hostname_patterns for host in (name, short)
    )


def _where(recipe: Recipe, cluster: Cluster, local: bool) -> str:
    if local:
        return "on this machine, without a scheduler"
    return f"{recipe.nodes} nodes x {cluster.node.devices} devices = {recipe.nodes * cluster.node.devices} ranks"


def active_venv() -> str | None:
    """The virtual environment launch itself runs in."""
    return sys.prefix if sys.prefix != sys.base_prefix else None


def longest_save(run: Run) -> float | None:
    """Seconds the longest save of this run took, from its events; None before the first."""
    times = [e.write_seconds for e in run.events(Saved)]
    known = [float(t) for t in times if isinstance(t, (int, float))]
    return max(known, default=None)


def site_findings(
    job: Job, recipe: Recipe, cluster: Cluster, plan: Planned, *, expect_store: bool = True
) -> list[Finding]:
    found = checks.check_site(job, recipe, cluster, checkpoint_bytes=plan.checkpoint_bytes, steps=plan.steps)
    return [f for f in found if expect_store or f.rule != "store"]


def forecast_cost(job: Job, cluster: Cluster, plan: Planned) -> Cost:
    """At most: all links to their limit. Expected: the planner's run time, when there is one."""
    hours = 0.0 if math.isinf(job.seconds) else job.nodes * job.links * job.seconds / 3600
    rate = cluster.billing.per_node_hour
    expected = None if plan.run_seconds is None else job.nodes * plan.run_seconds / 3600
    usable = job.seconds - job.lead_seconds
    links = (
        None
        if plan.run_seconds is None
        else 1
        if math.isinf(job.seconds)
        else math.ceil(plan.run_seconds / max(60.0, usable))
    )
    return Cost(
        node_hours=hours, units=None if rate is None else hours * rate, unit=cluster.billing.unit, expected_node_hours=expected,
        expected_links=links, expected_kwh=plan.kwh,
    )  # fmt: skip


def _budget(run: Run, recipe: Recipe, cost: Cost) -> list[Finding]:
    budget = recipe.launch.budget_node_hours
    used = 0.0
    if budget is not None:
        known = [e for other in runs_below(run.path.parent) for e in entries(other, executors(other))]
        used = committed_node_hours(known, cluster=recipe.cluster, account=recipe.launch.account)
    return checks.check_budget(cost.node_hours, used, budget)


# -- submitting ---------------------------------------------------------------------------------------------------------------


def submit(
    prepared: Prepared, executor: Executor | None = None, *, after: str | None = None, force: bool = False
) -> list[str]:
    """Write the run folder, submit every link and return their ids at once. Nothing is submitted when a check refuses."""
    executor = executor or (Local(prepared.run_dir) if prepared.local else Slurm())
    refuse_active(Run(prepared.run_dir), executor)
    checks.refuse(prepared.findings, force=force)
    if after is not None:
        check_known(executor, after)
    run = create_run(prepared.run_dir, prepared.loaded)
    script = Path(prepared.job.job_file)
    write_atomic(script, prepared.text)
    if isinstance(executor, Slurm) and not force:
        executor.test(script)
    return _links(prepared, run, script, executor, after)


def _links(prepared: Prepared, run: Run, script: Path, executor: Executor, after: str | None) -> list[str]:
    jobs: list[str] = []
    count = 1 if prepared.local else prepared.job.links
    for number in range(1, count + 1):
        condition = f"afterok:{after}" if after and number == 1 else f"afterany:{jobs[-1]}" if jobs else None
        try:
            job = executor.submit(script, run_dir=run.path, after=condition)
        except LaunchError as error:
            if not jobs:
                raise
            message = (
                f"links 1 to {len(jobs)} are queued ({', '.join(jobs)}), link {number} was refused: {error.message}"
            )
            raise LaunchError("launch.failed", message, hint=error.hint) from None
        jobs.append(job)
        record(run, prepared, executor, job, number, condition)
    return jobs


def record(run: Run, prepared: Prepared, executor: Executor, job: str, link: int, after: str | None) -> None:
    line = submission_record(prepared.job, prepared.cluster, executor.name, job)
    append_line(
        run.jobs_file, {**line, "link": link, "links": prepared.job.links, "chain": prepared.job.chain, "after": after}
    )


def submission_record(job: Job, cluster: Cluster, executor: str, job_id: str) -> dict[str, Any]:
    """The `submitted` line of jobs.jsonl."""
    return {
        "record": "submitted", "time": time.time(), "job": job_id, "kind": job.kind, "name": job.name, "executor": executor,
        "cluster": cluster.name, "account": job.account, "partition": job.partition, "qos": job.qos, "nodes": job.nodes,
        "tasks_per_node": job.tasks_per_node, "devices_per_node": job.devices_per_node, "seconds": None if math.isinf(job.seconds) else job.seconds,
        "script": job.job_file, "unit": cluster.billing.unit, "units_per_node_hour": cluster.billing.per_node_hour, "user": os.environ.get("USER"),
    }  # fmt: skip


def refuse_active(run: Run, executor: Executor) -> None:
    """Two chains in one run folder would fight for its lock."""
    if not run.jobs_file.exists():
        return _refuse_locked(run)
    live = [
        e
        for e in entries(run, {executor.name: executor}, strict=True)
        if (e.state.waiting or e.state.live) and not e.state.never
    ]
    if live:
        words = ", ".join(f"{e.job} {e.state.state.lower()}" for e in live)
        raise LaunchError(
            "launch.already-active",
            f"{run.path} is already active: {words}",
            hint=f"`windlass jobs {run.name}` shows them, `windlass cancel {run.name}` ends them",
        )
    return _refuse_locked(run)


def _refuse_locked(run: Run) -> None:
    who = holder(run.lock_file)
    if who is not None:
        raise LaunchError(
            "launch.being-written-another-process",
            f"{run.path} is being written by another process (host {who.get('host', 'unknown')}, pid {who.get('pid', 'unknown')})",
            hint="wait for it, or choose another folder with --run",
        )


def check_known(executor: Executor, job: str) -> None:
    """SLURM takes a condition on a job it does not know as met: the run would start before its data are there."""
    if job not in executor.states([job]):
        raise LaunchError(
            "launch.job-unknown-scheduler-condition",
            f"job {job} is unknown to the scheduler, and a condition on it would count as met",
            hint="check the id with `squeue --me`; a job that has ended long ago needs no condition",
        )


def cancel(run: Run, by_name: Mapping[str, Executor], only: str | None = None) -> list[str]:
    """Cancel what waits or runs of this run, later links first so that none starts meanwhile."""
    found = entries(run, by_name, strict=True)
    if only is not None and only not in {e.job for e in found}:
        known = ", ".join(e.job for e in found) or "none"
        raise LaunchError(
            "launch.job-one-run",
            f"job {only} is not one of this run ({known})",
            hint="`scancel` ends jobs of other runs",
        )
    todo = [e for e in reversed(found) if (e.state.waiting or e.state.live) and only in (None, e.job)]
    for entry in todo:
        if entry.executor not in by_name:
            raise LaunchError(
                "launch.job-submitted-machine",
                f"job {entry.job} was submitted to {entry.executor}, which is not on this machine",
                hint="log in to the machine it was launched from",
            )
        by_name[entry.executor].cancel([entry.job])
        append_line(run.jobs_file, {"record": "cancelled", "time": time.time(), "job": entry.job})
    return [entry.job for entry in todo]
