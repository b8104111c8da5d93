"""`windlass launch`, `jobs`, `logs`, `cancel`: from a recipe to jobs in a queue, and what becomes of them; `link` is for job scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.launch.ledger import Entry
    from windlass.launch.submit import Prepared
    from windlass.runs import Run

JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RUN = Annotated[str, typer.Argument(help="Run folder, or its name in runs/.", metavar="RUN")]


def register(app: typer.Typer) -> None:
    app.command("launch")(launch)
    app.command("jobs")(jobs)
    app.command("logs")(logs)
    app.command("cancel")(cancel)
    app.command("submit", context_settings={"ignore_unknown_options": True})(submit_any)
    app.command("link", hidden=True)(link)


def launch(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change: layout.micro_batch=4.", metavar="KEY=VALUE"),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes of the job, instead of the recipe's.")] = None,
    chain: Annotated[
        str | None,
        typer.Option("--chain", help="K: submit K links, each after the one before. self: each link submits the next."),
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Run folder; runs/<name> when left out.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print script, plan, cost and checks; submit nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Submit although a check refuses.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, without a scheduler.")] = False,
    devices: Annotated[int | None, typer.Option("--devices", help="With --local: how many devices.")] = None,
    after: Annotated[str | None, typer.Option("--after", help="Start only after this job has ended well.")] = None,
    pretokenize: Annotated[
        Path | None, typer.Option("--pretokenize", help="DATA.toml: tokenise first, as a CPU job; train after it.")
    ] = None,
    array: Annotated[int, typer.Option("--array", help="With --pretokenize: tasks of the array.")] = 8,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", help="Any further sbatch option: --sbatch exclude=nid001 (repeat).")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Plan, check and submit a training run, or print what would be submitted."""
    from windlass.cli.output import console, print_json
    from windlass.config import load_recipe
    from windlass.launch.submit import prepare, submit

    words = [*(overrides or ()), *([f"nodes={nodes}"] if nodes is not None else [])]
    extra = [*([f"launch.chain={chain}"] if chain is not None else []), *_sbatch_words(sbatch or [])]
    loaded = load_recipe(recipe, [*words, *extra])
    folder = run or Path("runs") / loaded.recipe.name
    prepared = prepare(
        loaded,
        run_dir=folder,
        overrides=words,
        local=local,
        devices=devices,
        expect_store=pretokenize is None,
        dry_run=dry_run,
    )
    if dry_run:
        _show_dry(prepared, as_json, _tokenizing(prepared, pretokenize, array))
        return
    if pretokenize is not None:
        from windlass.launch.array import tokenize_array

        first = tokenize_array(
            pretokenize, array, cluster=prepared.cluster, account=prepared.job.account, env=prepared.job.env
        )
        after = first.merge_job
    ids = submit(prepared, after=after, force=force)
    if as_json:
        print_json({**_prepared_json(prepared), "jobs": ids})
        return
    out = console()
    _findings(prepared)
    out.print(
        f"submitted: {', '.join(ids)} ({len(ids)} link{'s' if len(ids) > 1 else ''}), run folder {folder}", markup=False
    )
    out.print(f"next: windlass jobs {folder}   windlass logs {folder} -f   windlass watch {folder}", markup=False)


def _sbatch_words(words: list[str]) -> list[str]:
    from windlass.errors import ConfigError

    made = []
    for word in words:
        key, equals, value = word.lstrip("-").partition("=")
        if not key:
            raise ConfigError(
                "cli.sbatch-names-option",
                f"--sbatch {word!r} names no option",
                hint="write --sbatch exclude=nid001234 or --sbatch hold",
            )
        made.append(f'launch.sbatch.{key}="{value}"' if equals else f"launch.sbatch.{key}=true")
    return made


def _prepared_json(prepared: Prepared) -> dict[str, Any]:
    from windlass.launch.checks import refusals

    plan = prepared.plan
    return {
        "run": str(prepared.run_dir),
        "cluster": prepared.cluster.name,
        "executor": "local" if prepared.local else "slurm",
        "nodes": prepared.job.nodes,
        "tasks_per_node": prepared.job.tasks_per_node,
        "links": prepared.job.links,
        "chain": prepared.job.chain,
        "partition": prepared.job.partition,
        "qos": prepared.job.qos,
        "account": prepared.job.account,
        "seconds": prepared.job.seconds,
        "layout": plan.layout,
        "plan": {
            "reason": plan.reason or None,
            "run_seconds": plan.run_seconds,
            "step_seconds": plan.step_seconds,
            "tokens_per_second": plan.tokens_per_second,
            "mfu": plan.mfu,
            "memory_share": plan.memory_share,
            "checkpoint_bytes": plan.checkpoint_bytes,
        },
        "cost": prepared.cost,
        "checks": list(prepared.findings),
        "would_submit": not refusals(prepared.findings),
        "script": prepared.text,
    }


def _tokenizing(prepared: Prepared, data: Path | None, tasks: int) -> dict[str, str] | None:
    """The scripts that would run before the training, where data are tokenised first."""
    if data is None:
        return None
    from windlass.launch.array import tokenize_scripts

    job = prepared.job
    return tokenize_scripts(data, tasks, cluster=prepared.cluster, account=job.account, env=job.env)


def _show_dry(prepared: Prepared, as_json: bool, before: dict[str, str] | None) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.launch.checks import refusals
    from windlass.units import print_bytes, print_seconds

    if as_json:
        print_json({**_prepared_json(prepared), **({} if before is None else {"pretokenize": before})})
        return
    out = console()
    for kind, text in (before or {}).items():
        out.print(f"[bold]{'first, tokenising' if kind == 'array' else 'then, its end'}[/bold]")
        print(text)
    if before:
        out.print("[bold]after it, training[/bold]")
    print(prepared.text)
    plan, cost, job = prepared.plan, prepared.cost, prepared.job
    rows = [
        ("layout", plan.reason or "not planned"),
        ("expected", f"{print_seconds(plan.run_seconds)} of training" + (f", {plan.tokens_per_second:,.0f} tokens/s" if plan.tokens_per_second else "")),
        ("links", f"{job.links} of {_limit(job.seconds)}" + (f"; about {cost.expected_links} needed" if cost.expected_links else "")),
        ("cost at most", _money(cost.node_hours, cost.units, cost.unit)),
        ("cost expected", _money(cost.expected_node_hours, None if cost.expected_node_hours is None or prepared.cluster.billing.per_node_hour is None else cost.expected_node_hours * prepared.cluster.billing.per_node_hour, cost.unit)),
        ("energy expected", "unknown" if cost.expected_kwh is None else f"{cost.expected_kwh:,.0f} kWh"),
        ("one checkpoint", print_bytes(plan.checkpoint_bytes) if plan.checkpoint_bytes is not None else "unknown"),
    ]  # fmt: skip
    out.print(table(f"Dry run of {prepared.recipe.name} on {prepared.cluster.title}", ("", ""), rows))
    _findings(prepared)
    bad = len(refusals(prepared.findings))
    out.print(
        f"would be refused: {bad} check{'s' if bad > 1 else ''} (--force overrides)"
        if bad
        else "would be submitted; nothing was written or submitted"
    )


def _limit(seconds: float) -> str:
    from windlass.units import print_seconds

    return "no limit" if seconds == float("inf") else print_seconds(seconds)


def _money(hours: float | None, units: float | None, unit: str) -> str:
    if hours is None:
        return "unknown"
    return f"{hours:,.1f} node-hours" + (f" = {units:,.0f} {unit}" if units is not None else f" ({unit}: rate unknown)")


def _findings(prepared: Prepared) -> None:
    from windlass.cli.output import console, table

    rows = [
        (f.level, f.rule, f.message + (f" -> {f.hint}" if f.hint and f.level != "ok" else ""), f.source or "")
        for f in prepared.findings
    ]
    if rows:
        console().print(table("Checks", ("", "rule", "what", "source"), rows))


# -- afterwards ---------------------------------------------------------------------------------------------------------------


def jobs(
    run: Annotated[str | None, typer.Argument(help="Run folder, or its name in runs/.", metavar="RUN")] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Node-hours, units and kWh per run and project, over all runs in a folder.")
    ] = False,
    folder: Annotated[Path, typer.Option("--folder", help="With --ledger: where the runs are.")] = Path("runs"),
    as_json: JSON = False,
) -> None:
    """The chain of a run: states, node-hours used and left, and when it may be done. With --ledger: the books."""
    from windlass.errors import RunError
    from windlass.runs import open_run

    if ledger:
        _ledger(run, folder, as_json)
    elif run is None:
        _all_jobs(folder, as_json)
    else:
        found = open_run(run)
        if not found.jobs_file.exists():
            raise RunError(
                "cli.jobs-launched",
                f"{found.path} has no jobs: it was not launched",
                hint="`windlass launch RECIPE` submits one; `windlass watch` shows a run that trains here",
            )
        _jobs(found, as_json)


def _jobs(run: Run, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.launch.ledger import entries
    from windlass.launch.outlook import outlook
    from windlass.launch.submit import executors

    found = entries(run, executors(run))
    view = outlook(run, found)
    if as_json:
        print_json({"run": str(run.path), "jobs": [e.as_dict() for e in found], **view.as_dict()})
        return
    out = console()
    columns = ("link", "job", "state", "why", "nodes", "ran", "of", "node-hours", "from step", "to step", "says")
    out.print(table(f"Jobs of {run.name}", columns, [_job_row(e) for e in found], right=(4, 7, 8, 9)))
    for line in view.lines():
        out.print(line, markup=False)


def _job_row(e: Entry) -> tuple[Any, ...]:
    from windlass.launch.executor import NEVER
    from windlass.units import print_seconds

    link = "" if e.link is None else f"{e.link}/{e.links}" if (e.links or 1) > 1 else str(e.link)
    why = e.state.reason or (f"code {e.state.exit_code}" if e.state.exit_code else "")
    if e.state.never:
        why = f"{why}: never starts, {NEVER[e.state.reason or '']}"
    ran = print_seconds(e.state.elapsed_seconds) if not e.state.waiting else ""
    hours = "unknown" if e.node_hours is None else f"{e.node_hours:.2f}"
    limit = "" if e.limit_seconds is None else print_seconds(e.limit_seconds)
    return (
        link if e.kind == "train" else e.kind,
        e.job,
        e.state.state,
        why,
        e.nodes,
        ran,
        limit,
        hours,
        e.began_step,
        e.step,
        e.state.evidence,
    )


def _all_jobs(folder: Path, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.launch.ledger import entries, runs_below
    from windlass.launch.submit import executors

    found = [e for run in runs_below(folder) for e in entries(run, executors(run))]
    if as_json:
        print_json({"jobs": [e.as_dict() for e in found]})
        return
    if not found:
        console().print(f"no jobs in {folder}; `windlass launch RECIPE` submits one", markup=False)
        return
    rows = [(Path(e.run).name, *_job_row(e)) for e in found]
    columns = ("run", "link", "job", "state", "why", "nodes", "ran", "of", "node-hours", "from step", "to step", "says")
    console().print(table(f"Jobs in {folder}", columns, rows, right=(5, 8, 9, 10)))


def _ledger(run: str | None, folder: Path, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.launch.ledger import entries, runs_below, sums
    from windlass.launch.submit import executors
    from windlass.runs import open_run
    from windlass.units import print_joules

    chosen = [open_run(run)] if run else runs_below(folder)
    found = [e for item in chosen for e in entries(item, executors(item))]
    by_run, by_project = sums(found, "run"), sums(found, "project")
    if as_json:
        print_json({"jobs": [e.as_dict() for e in found], "runs": by_run, "projects": by_project})
        return
    out = console()
    for title, group in (("Per run", by_run), ("Per project", by_project)):
        rows = []
        for s in group:
            notes = [f"length of {s.unknown_hours} jobs unknown"] if s.unknown_hours else []
            notes += [f"energy not measured in {s.unmeasured} of {s.jobs} jobs"] if s.unmeasured else []
            units = "unknown" if s.units is None else f"{s.units:,.1f} {s.unit}"
            rows.append(
                (s.name, s.jobs, f"{s.node_hours:,.2f}", units, print_joules(s.energy_joules), "; ".join(notes))
            )
        out.print(table(title, ("", "jobs", "node-hours", "units", "energy", "notes"), rows, right=(1, 2, 3, 4)))


def logs(
    run: RUN,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on printing until the run's jobs have ended.")
    ] = False,
    job: Annotated[str | None, typer.Option("--job", help="This job; the newest that has a log when left out.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines to begin with.")] = 40,
) -> None:
    """Print the log of a run's newest job, or follow it from link to link."""
    import sys

    from windlass.launch.logs import follow_logs, last_lines
    from windlass.launch.submit import executors
    from windlass.runs import open_run

    found = open_run(run)
    chunks = (
        follow_logs(found, executors(found), job=job, lines=lines)
        if follow
        else iter([last_lines(found, job=job, lines=lines)])
    )
    for chunk in chunks:
        sys.stdout.write(chunk)
        sys.stdout.flush()


def cancel(
    run: RUN,
    job: Annotated[str | None, typer.Option("--job", help="Only this job; all of the run when left out.")] = None,
    as_json: JSON = False,
) -> None:
    """Cancel the waiting and running jobs of a run. What was saved stays; `windlass launch` goes on from there."""
    from windlass.cli.output import console, print_json
    from windlass.launch.submit import cancel as cancel_jobs
    from windlass.launch.submit import executors
    from windlass.runs import open_run

    found = open_run(run)
    ended = cancel_jobs(found, executors(found), only=job)
    if as_json:
        print_json({"run": str(found.path), "cancelled": ended})
        return
    console().print(
        f"cancelled: {', '.join(ended)}" if ended else "nothing to cancel: no job of this run waits or runs",
        markup=False,
    )


def submit_any(
    command: Annotated[
        list[str], typer.Argument(help="A windlass command and its words: eval RUN --json", metavar="COMMAND")
    ],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Cluster file; the one this host belongs to when left out.")
    ] = None,
    after: Annotated[str | None, typer.Option("--after", help="Start only after this job has ended well.")] = None,
    account: Annotated[str | None, typer.Option("--account")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where script and log go.")] = None,
) -> None:
    """Run any windlass command as a CPU job: windlass submit -- eval RUN."""
    import time

    from windlass.cli.output import console
    from windlass.launch.array import submit_command

    place = folder or Path("runs") / f"{command[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = submit_command(["windlass", *command], cluster=cluster, folder=place, account=account, after=after)
    console().print(f"submitted: {job}; log {place}/logs/{job}.out", markup=False)


def link(
    action: Annotated[str, typer.Argument(help="before, after or next.")],
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    code: Annotated[int, typer.Option("--code", help="How the ranks ended.")] = 0,
    by: Annotated[str, typer.Option("--by", help="A signal that the batch shell saw.")] = "none",
    job: Annotated[str | None, typer.Option("--job", help="next: the job that was submitted.")] = None,
) -> None:
    """Asked by job scripts: is there anything left to do (before), how did it end (after)? Answers by its exit code."""
    import socket

    from windlass.clusters.scheduler import job_id, restart_count
    from windlass.errors import ConfigError
    from windlass.launch import chain
    from windlass.launch.script import LINK_AGAIN, LINK_GO, LINK_STOP
    from windlass.runs import open_run

    found, me, restart = open_run(run), job_id(), restart_count()
    if action == "before":
        verdict = chain.before(found, me, restart, socket.gethostname())
        print(
            f"windlass: link {me} {'goes on' if verdict.answer == 'go' else 'ends at once'}: {verdict.reason}",
            flush=True,
        )
        raise typer.Exit(LINK_GO if verdict.answer == "go" else LINK_STOP)
    if action == "after":
        verdict = chain.after(found, me, restart, code, None if by == "none" else by)
        word = {
            "go": "another link is wanted",
            "finished": "no further link is needed",
            "hopeless": "no further link is tried",
        }[verdict.answer]
        print(f"windlass: link {me} ended with code {code}; {word}: {verdict.reason}", flush=True)
        raise typer.Exit(LINK_AGAIN if verdict.answer == "go" else LINK_STOP)
    if action == "next":
        chain.follow(found, me, job)
        return
    raise ConfigError(
        "cli.before-after-next", f"{action!r} is not before, after or next", hint="this command is for job scripts"
    )
