"""`windlass launch`, `jobs`, `logs`, `cancel`, `submit`: jobs of a run in a queue; `link` is for job scripts."""

from __future__ import annotations

import json
import shlex
import time
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from windlass.cli.options import (
    AccountOption,
    AdjustOption,
    JsonOption,
    NewDataOption,
    NewRunOption,
    OverridesArgument,
    RecipeArgument,
    RunArgument,
    ScratchOption,
)
from windlass.cli.output import bar, console, print_json, show, table, working
from windlass.errors import ConfigError, RunError, WindlassError
from windlass.units import (
    print_bytes,
    print_figure,
    print_joules,
    print_kwh,
    print_node_hours,
    print_rate,
    print_seconds,
)

if TYPE_CHECKING:
    from windlass.launch.ledger import LedgerEntry
    from windlass.launch.submit import PreparedLaunch

# How often `windlass stage` writes its progress into the log of a job.
LOG_SECONDS = 30.0
AfterOption = Annotated[str | None, typer.Option("--after", help="Start only after this job succeeds (afterok).")]
JOB_COLUMNS = (
    "link", "job", "state", "reason", "nodes", "ran", "limit", "node-hours", "from step", "to step", "source",
)  # fmt: skip

DRY_RUN_OK = "Dry run OK: this job would be submitted. Nothing was written or submitted."
JOB_DROP = ("source", "from step", "limit", "nodes", "node-hours", "reason")


def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes instead of the recipe's.")] = None,
    chain: Annotated[
        str | None,
        typer.Option("--chain", help="K: submit K jobs that run one after another. self: each job submits the next."),
    ] = None,
    run: NewRunOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job script, plan, cost and checks; submit nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Submit even if a check fails.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, without a scheduler.")] = False,
    devices: Annotated[int | None, typer.Option("--devices", help="With --local: number of devices.")] = None,
    after: AfterOption = None,
    pretokenize: Annotated[
        Path | None, typer.Option("--pretokenize", help="Data file to tokenize in a CPU job before training.")
    ] = None,
    array: Annotated[int, typer.Option("--array", help="With --pretokenize: number of array tasks.")] = 8,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", help="Additional sbatch option (repeatable): --sbatch exclude=nid001."),
    ] = None,
    adjust: AdjustOption = False,
    new_data: NewDataOption = False,
    from_scratch: ScratchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan, check and submit a training run, or print what would be submitted."""
    from windlass.checkpoint.missing import restart_from_scratch
    from windlass.config import load_recipe
    from windlass.config.sources import load_data_file
    from windlass.launch import array as arrays
    from windlass.launch import submit
    from windlass.launch.script import render
    from windlass.runs.folder import Run

    changes = [*(overrides or ()), *([f"nodes={nodes}"] if nodes is not None else [])]
    changes += [f"launch.chain={chain}"] if chain is not None else []
    for option in sbatch or []:
        key, equals, value = option.lstrip("-").partition("=")
        if not key:
            raise ConfigError(
                "launch.sbatch-option",
                f"--sbatch {option!r} names no option",
                hint="write --sbatch exclude=nid001234 or --sbatch hold",
            )
        changes.append(f"launch.sbatch.{key}={json.dumps(value)}" if equals else f"launch.sbatch.{key}=true")
    loaded = load_recipe(recipe, changes)
    folder = run or Path("runs") / loaded.recipe.name
    with working("planning and checking the job", quiet=as_json):
        prepared = submit.prepare(
            loaded,
            run_dir=folder,
            local=local,
            devices=devices,
            expect_store=pretokenize is None,
            dry_run=dry_run,
            adjust=adjust,
        )
    loaded = prepared.loaded
    place: Any = {"cluster": prepared.cluster, "account": prepared.job.account, "env": prepared.job.env}
    if pretokenize is not None:
        place["size"] = arrays.input_bytes(load_data_file(pretokenize), loaded.recipe.data.tokens)
    if dry_run:
        scripts = {} if pretokenize is None else arrays.tokenize_scripts(pretokenize, array, **place)
        stage = {} if prepared.stage is None else {"stage": render(prepared.stage, prepared.cluster)}
        refusal = None
        try:
            submit.refuse_launch(prepared, submit.dry_run_executor(prepared), after=after, force=force)
        except WindlassError as error:
            refusal = error
        if as_json:
            document = {**_prepared_json(prepared), **({"pretokenize": scripts} if scripts else {}), **stage}
            print_json({**document, "would_submit": refusal is None, "refused_by": refusal and refusal.code})
        else:
            _print_scripts(prepared, scripts | stage)
            show(False, None, _plan_table(prepared), _findings_table(prepared), None if refusal else DRY_RUN_OK)
        if refusal is not None:
            raise refusal
        return
    if from_scratch:
        restart_from_scratch(Run(folder))
    if new_data:
        from windlass.data.run_check import accept_data  # numpy: not for every start

        accept_data(loaded.recipe, Run(folder), lambda text: None)
    if pretokenize is not None:
        after = arrays.tokenize_array(pretokenize, array, **place).merge_job
    with working("submitting", quiet=as_json):
        ids = submit.submit(prepared, after=after, force=force)
    show(
        as_json,
        {**_prepared_json(prepared), "jobs": ids},
        _plan_table(prepared),
        _findings_table(prepared),
        f"submitted: {', '.join(ids)} ({len(ids)} job{'s' if len(ids) > 1 else ''}), run folder {folder}",
        "next: " + "   ".join(f"windlass {name} {shlex.quote(str(folder))}" for name in ("jobs", "logs -f", "watch")),
    )


def _prepared_json(prepared: PreparedLaunch) -> dict[str, Any]:
    from windlass.launch.checks import refusals

    plan, job = prepared.plan, prepared.job
    plan_keys = ("run_seconds", "step_seconds", "tokens_per_second", "mfu", "memory_share", "checkpoint_bytes")
    job_keys = ("nodes", "tasks_per_node", "links", "chain", "partition", "qos", "account", "seconds")
    return {
        "run": str(prepared.run_dir),
        "cluster": prepared.cluster.name,
        "executor": "local" if prepared.local else "slurm",
        **{key: getattr(job, key) for key in job_keys},
        "layout": plan.layout,
        "plan": {"reason": plan.reason or None, **{key: getattr(plan, key) for key in plan_keys}},
        "cost": prepared.cost,
        "checks": list(prepared.findings),
        "would_submit": not refusals(prepared.findings),
        "script": prepared.script,
    }


def _print_scripts(prepared: PreparedLaunch, before: dict[str, str]) -> None:
    """In the order in which they would run."""
    out = console()
    titles = {"array": "tokenize", "merge": "merge the token store", "stage": "copy to the fast file system"}
    for number, (kind, text) in enumerate(before.items(), 1):
        out.print(f"[bold]Job {number}: {titles[kind]}[/bold]")
        print(text)
    if before:
        out.print("[bold]Then: train[/bold]")
    print(prepared.script)


def _plan_table(prepared: PreparedLaunch) -> Table:
    """Time and cost, of one job and of the whole run."""
    plan, cost, job = prepared.plan, prepared.cost, prepared.job
    is_limited = job.seconds != float("inf")
    limit = f"of {print_seconds(job.seconds)}" if is_limited else "without a time limit"
    speed = f", {print_rate(plan.tokens_per_second)} on all devices" if plan.tokens_per_second else ""
    jobs = f"{job.links} job{'s' if job.links > 1 else ''}"
    needed = f"; about {cost.expected_links} needed for the whole run" if cost.expected_links else ""

    def amount(hours: float | None, units: float | None) -> str:
        if hours is None:
            return "unknown"
        return print_node_hours(hours) + ("" if units in (None, hours) else f" = {print_figure(units)} {cost.unit}s")

    whole_run = amount(cost.expected_node_hours, cost.expected_units)
    rows = [
        ("layout", plan.reason or "not planned"),
        (
            "expected",
            "unknown" if plan.run_seconds is None else f"{print_seconds(plan.run_seconds)} of training{speed}",
        ),
        ("jobs", f"{jobs} {limit}{needed}"),
        *([("cost of one job", f"at most {amount(cost.job_node_hours, cost.job_units)}")] if is_limited else []),
        *(
            [(f"cost of {jobs}", f"at most {amount(cost.node_hours, cost.units)}")]
            if is_limited and job.links > 1
            else []
        ),
        ("cost of the whole run", f"{whole_run}, expected" if cost.expected_node_hours is not None else whole_run),
        (
            "energy of the whole run",
            "unknown" if cost.expected_kwh is None else f"{print_kwh(cost.expected_kwh)}, expected",
        ),
        ("one checkpoint", "unknown" if plan.checkpoint_bytes is None else print_bytes(plan.checkpoint_bytes)),
    ]
    return table(f"{prepared.recipe.name} on {prepared.cluster.title}", ("", ""), rows)


def _findings_table(prepared: PreparedLaunch) -> Table | None:
    rows = [
        (
            "FAIL" if f.level == "refuse" else f.level,
            f.rule,
            f.message + (f" -> {f.hint}" if f.hint and f.level != "ok" else ""),
            f.source or "",
        )
        for f in prepared.findings
    ]
    return table("Checks", ("", "rule", "finding", "source"), rows, drop=("source",)) if rows else None


def jobs(
    run: Annotated[str | None, typer.Argument(help="Run folder, or its name in runs/.", metavar="RUN")] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Node-hours, units and kWh per run and project, over all runs in a folder.")
    ] = False,
    folder: Annotated[Path, typer.Option("--folder", help="With --ledger: folder that holds the runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the jobs of a run: states, node-hours, estimated end. With --ledger: usage across all runs and projects."""
    from windlass.launch import ledger as usage
    from windlass.launch.submit import executors
    from windlass.runs import open_run

    runs = [open_run(run)] if run else usage.runs_below(folder)
    if run and not ledger and not runs[0].jobs_file.exists():
        raise RunError(
            "launch.no-jobs",
            f"{runs[0].path} has no jobs: the run was not launched",
            hint="`windlass launch RECIPE` submits one; to follow a local run, use `windlass watch`",
        )
    with working("asking the scheduler", quiet=as_json):
        rows = [entry for item in runs for entry in usage.entries(item, executors(item))]
    listed = {"jobs": [entry.as_dict() for entry in rows]}
    if ledger:
        groups = {"runs": usage.totals(rows, "run"), "projects": usage.totals(rows, "project")}
        columns, tables = ("", "jobs", "node-hours", "units", "energy", "notes"), []
        for title, group in zip(("Per run", "Per project"), groups.values(), strict=True):
            lines = []
            for t in group:
                units = "unknown" if t.units is None else f"{print_figure(t.units)} {t.unit}s"
                notes = [f"duration of {t.unknown_hours} jobs unknown"] if t.unknown_hours else []
                notes += [f"energy not measured in {t.unmeasured} of {t.jobs} jobs"] if t.unmeasured else []
                lines.append(
                    (
                        t.name,
                        t.jobs,
                        print_node_hours(t.node_hours, unit=""),
                        units,
                        print_joules(t.energy_joules),
                        "; ".join(notes),
                    )
                )
            tables.append(table(title, columns, lines, right=(1, 2, 3, 4), drop=("jobs", "units")))
        show(as_json, {**listed, **groups}, *tables)
    elif run:
        forecast = usage.forecast_chain(runs[0], rows)
        shown = table(f"Jobs of {runs[0].name}", JOB_COLUMNS, map(_job_row, rows), right=(4, 7, 8, 9), drop=JOB_DROP)
        show(as_json, {"run": str(runs[0].path), **listed, **vars(forecast)}, shown, *forecast.lines())
    elif rows:
        named = [(Path(entry.run).name, *_job_row(entry)) for entry in rows]
        show(
            as_json,
            listed,
            table(f"Jobs in {folder}", ("run", *JOB_COLUMNS), named, right=(5, 8, 9, 10), drop=JOB_DROP),
        )
    else:
        show(as_json, listed, f"no jobs in {folder}; `windlass launch RECIPE` submits one")


def _job_row(entry: LedgerEntry) -> tuple[Any, ...]:
    from windlass.launch.executor import NEVER_STARTS

    state = entry.state
    link = "" if entry.link is None else f"{entry.link}/{entry.links}" if (entry.links or 1) > 1 else str(entry.link)
    reason = state.reason or (f"code {state.exit_code}" if state.exit_code else "")
    if state.never_starts:
        reason = f"{reason}: will never start, {NEVER_STARTS[state.reason or '']}"
    return (
        link if entry.kind == "train" else entry.kind,
        entry.job,
        state.state,
        reason,
        entry.nodes,
        "" if state.waiting else print_seconds(state.elapsed_seconds),
        "" if entry.limit_seconds is None else print_seconds(entry.limit_seconds),
        print_node_hours(entry.node_hours, unit=""),
        entry.began_step,
        entry.step,
        state.evidence,
    )


def logs(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the run's jobs have ended.")
    ] = False,
    job: Annotated[str | None, typer.Option("--job", help="Job id (default: the newest job with a log).")] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Number of lines from the end of the log to print first.")
    ] = 40,
) -> None:
    """Print the log of a run's newest job, or follow it from job to job."""
    from windlass.launch import ledger, submit
    from windlass.launch import logs as job_logs
    from windlass.runs import open_run

    folder = open_run(run)

    def is_active() -> bool:
        return any(job in (None, entry.job) for entry in ledger.active_entries(folder, submit.executors(folder)))

    if not follow:
        print(job_logs.last_lines(folder, job=job, lines=lines), end="")
        return
    for text in job_logs.follow_logs(folder, is_active, job=job, lines=lines):
        print(text, end="", flush=True)


def cancel(
    run: RunArgument,
    job: Annotated[
        str | None, typer.Option("--job", help="Cancel only this job (default: all jobs of the run).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel the waiting and running jobs of a run. Checkpoints stay; `windlass launch` resumes from them."""
    from windlass.launch import submit
    from windlass.runs import open_run

    folder = open_run(run)
    ended = submit.cancel(folder, submit.executors(folder), only=job)
    text = f"cancelled: {', '.join(ended)}" if ended else "nothing to cancel: no job of this run is pending or running"
    show(as_json, {"run": str(folder.path), "cancelled": ended}, text)


def submit_any(
    command: Annotated[
        list[str], typer.Argument(help="windlass command and its arguments: eval RUN --json", metavar="COMMAND")
    ],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Cluster name (default: the one this host belongs to).")
    ] = None,
    after: AfterOption = None,
    account: AccountOption = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Folder for the job script and log.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script; submit nothing.")] = False,
) -> None:
    """Run any windlass command as a CPU job: windlass submit -- eval RUN."""
    from windlass.cli import GROUPS
    from windlass.launch.array import command_job, submit_command
    from windlass.launch.script import render

    if command[0] not in (commands := {name.split()[0] for name in GROUPS}):
        near = get_close_matches(command[0], commands, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            "cli.unknown-command",
            f"{command[0]!r} is not a windlass command",
            hint=f"{hint}write the command without `windlass`: windlass submit -- eval RUN",
        )
    place = folder or Path("runs") / f"{command[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    machine, job = command_job(["windlass", *command], cluster=cluster, folder=place, account=account)
    if dry_run:
        print(render(job, machine))
        show(False, None, DRY_RUN_OK)
        return
    job_id = submit_command(machine, job, after=after)
    show(False, None, f"submitted: {job_id}; log {place}/logs/{job_id}.out")


def stage(
    run: RunArgument,
    store: Annotated[Path | None, typer.Option("--store", help="Folder for the copy of the token store.")] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option("--checkpoints", help="Folder to move the checkpoints to; the run folder links to it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a run's token store and checkpoints to another file system, in parallel; an interrupted copy is resumed.
    `windlass launch` runs this as a CPU job."""
    from windlass.launch.staging import stage as copy
    from windlass.runs import open_run

    began, last = time.monotonic(), 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        rate = (
            f"{print_bytes(done)} of {print_bytes(total)}, {print_bytes(done / max(1e-3, time.monotonic() - began))}/s"
        )
        update(done, total, f"copying: {rate}")
        if not as_json and time.monotonic() - last > LOG_SECONDS:  # the log of a job shows no bar
            last = time.monotonic()
            print(f"windlass: copied {rate}", flush=True)

    with bar("copying", quiet=as_json) as update:
        copies = copy(open_run(run), store, checkpoints, progress)
    lines = (
        f"{c.source} -> {c.target}: {c.files} files copied, {print_bytes(c.bytes)} in {print_seconds(c.seconds)}; "
        f"{c.kept_files} already there"
        for c in copies
    )
    show(as_json, {"copies": copies}, *lines)


def link(
    action: Annotated[str, typer.Argument(help="before, after or next.")],
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    code: Annotated[int, typer.Option("--code", help="Exit code of the ranks.")] = 0,
    by: Annotated[str, typer.Option("--by", help="Signal that the batch shell received.")] = "none",
    job: Annotated[str | None, typer.Option("--job", help="With next: id of the submitted job.")] = None,
) -> None:
    """Used by job scripts: decide whether work is left (before) and record how the job ended (after). The exit code is
    the answer."""
    import socket

    from windlass.clusters.scheduler import job_id, restart_count
    from windlass.launch import chain, script
    from windlass.runs import open_run

    folder, me, restart = open_run(run), job_id(), restart_count()
    if action == "next":
        chain.record_next(folder, me, job)
    elif action == "before":
        verdict = chain.before(folder, me, restart, socket.gethostname())
        text = "continues" if verdict.answer == "go" else "ends now"
        print(f"windlass: job {me} {text}: {verdict.reason}", flush=True)
        raise typer.Exit(script.LINK_GO if verdict.answer == "go" else script.LINK_STOP)
    elif action == "after":
        verdict = chain.after(folder, me, restart, code, None if by == "none" else by)
        texts = {"go": "another job is needed", "finished": "no further job is needed"}
        text = texts.get(verdict.answer, "no further job is submitted")
        print(f"windlass: job {me} ended with code {code}; {text}: {verdict.reason}", flush=True)
        raise typer.Exit(script.LINK_AGAIN if verdict.answer == "go" else script.LINK_STOP)
    else:
        raise ConfigError(
            "launch.link-action",
            f"unknown action {action!r}",
            hint="use before, after or next; only job scripts need this command",
        )
