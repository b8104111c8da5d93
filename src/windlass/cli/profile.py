"""`windlass profile` and `windlass compare`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import typer
from rich.table import Table

from windlass.cli.options import JsonOption
from windlass.cli.output import bar, show, table, working
from windlass.errors import ConfigError, ProfileError

if TYPE_CHECKING:
    from windlass.figures import DataTable, Section
    from windlass.profile.event_names import Mode
    from windlass.profile.job_profile import ReadProgress

MODE_HELP = (
    "`fixed`: communication by kernel name, adding up to 100 %. `tb`: the same numbers as the discontinued "
    "torch-tb-profiler."
)


def profile(
    targets: Annotated[
        list[Path],
        typer.Argument(
            help="A run folder, or trace files of one job (.json or .json.gz, one per rank).", metavar="RUN|TRACE"
        ),
    ],
    mode: Annotated[str, typer.Option(help=MODE_HELP)] = "fixed",
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with stacked step-time bars.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of rows in the operator and kernel tables.")] = 15,
    step: Annotated[int | None, typer.Option(help="First step of the window to show (default: the newest).")] = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Also group operators by input shapes; with --now: record the shapes.")
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Ask a running run to trace its next steps.")] = False,
    steps: Annotated[int, typer.Option(help="With --now: number of steps.")] = 3,
    ranks: Annotated[str, typer.Option(help="With --now: ranks that write a trace, such as 0,8,16, or all.")] = "0",
    stacks: Annotated[bool, typer.Option("--stacks", help="With --now: record Python stacks.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="With --now: also write a memory snapshot.")] = False,
    wait: Annotated[float, typer.Option(help="With --now: seconds to wait for the trace.")] = 120.0,
) -> None:
    """Show where an average step's time goes: execution summary, communication, device use, operators and kernels."""
    from windlass.profile import captures, job_profile, view
    from windlass.runs import open_run

    counting = _mode(mode)
    if now:
        try:
            chosen = [] if ranks.strip() == "all" else [int(part) for part in ranks.split(",")]  # empty: all ranks
        except ValueError:
            raise ConfigError(
                "profile.ranks-invalid", f"--ranks {ranks} is not a list of ranks", hint="write it like 0,8,16, or all"
            ) from None
        request = captures.TraceRequest(
            id=uuid4().hex[:12], steps=steps, ranks=chosen, shapes=shapes, stacks=stacks, memory=memory
        )
        if len(targets) != 1:
            raise ProfileError(
                "profile.now-needs-one-run",
                "--now takes one running run",
                hint="give one run folder: windlass profile RUN --now",
            )
        run = open_run(targets[0])
        captures.submit_request(run, request)
        if not as_json:
            show(False, None, f"requested a trace of {steps} steps from {run.name}; waiting up to {wait:g} s")
        if not captures.wait_for_trace(run, request, wait):
            raise ProfileError(
                "profile.request-unanswered",
                f"{run.name} has written no trace within {wait:g} s",
                hint=f"the request stays in {run.requests}; steps may take long, so look again later with "
                f"`windlass profile {run.name}`",
            )
    resolved = [captures.find_target(target, step=step) for target in targets]
    if len(resolved) == 1:
        captures.require_traces(resolved[0])
    elif any(target.run is not None for target in resolved):
        raise ProfileError(
            "profile.several-runs",
            "`profile` takes one run, or the trace files of one job",
            hint="use `windlass compare RUN RUN` to compare runs",
        )
    traces = [path for target in resolved for path in target.traces]  # several files are the ranks of one job
    with _reading(traces, quiet=as_json) as progress:
        job = job_profile.profile_traces(traces, counting, label=resolved[0].label, by_shape=shapes, progress=progress)
    lines = [f"advice: {a.text}" for a in job.advice] + [f"note: {note}" for note in view.profile_notes(job)]
    _write_page(html, f"Profile of {job.label}", view.profile_sections(job, top=top), quiet=as_json)
    show(as_json, job.to_json(), *_parts(view.profile_tables(job, top)), *lines)


def compare(
    targets: Annotated[
        list[Path],
        typer.Argument(help="Two or more run folders or traces; the first is the baseline.", metavar="RUN|TRACE"),
    ],
    mode: Annotated[str, typer.Option(help=MODE_HELP)] = "fixed",
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with stacked step-time bars.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of rows in the operator and kernel diffs.")] = 15,
    sort: Annotated[
        str,
        typer.Option(
            help="Sort order of the operator diff: impact (change of self time), calls, host, self_host, device, "
            "self_device or name."
        ),
    ] = "impact",
    per_step: Annotated[
        bool,
        typer.Option("--per-step", help="Show operator and kernel diffs per step, for windows of different lengths."),
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference between loss curves that counts as equal, in nats per token."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if the loss curves differ by more than the tolerance.")
    ] = False,
) -> None:
    """Compare runs or traces: summaries side by side, operator diff, scaling, configs, throughput, energy and loss."""
    from windlass.profile import captures, job_profile, view
    from windlass.profile.compare import LOSS_TOLERANCE, SORT_KEYS, compare_jobs, compare_runs

    order = "impact" if sort == "matters" else sort
    if len(targets) < 2:
        raise ProfileError(
            "profile.compare-needs-two",
            "compare needs at least two runs or traces",
            hint="give both: windlass compare BASELINE EXPERIMENT",
        )
    if order not in SORT_KEYS:
        raise ConfigError(
            "profile.sort-unknown", f"--sort {sort} is unknown", hint=f"choose one of {', '.join(SORT_KEYS)}"
        )
    counting = _mode(mode)
    resolved = [captures.find_target(target) for target in targets]
    labels = [target.label for target in resolved]
    if len(set(labels)) < len(labels):  # equal names get the folder's name, or their place, in front
        labels = [
            f"{t.traces[0].resolve().parent.name}/{t.label}" if t.traces and t.run is None else f"{i + 1}:{t.label}"
            for i, t in enumerate(resolved)
        ]
    runs = [target.run for target in resolved if target.run is not None]
    all_runs, untraced = len(runs) == len(resolved), [target.label for target in resolved if not target.traces]
    if untraced and not all_runs:
        raise ProfileError(
            "profile.compare-mixed",
            f"a run without traces can only be compared with other run folders ({', '.join(untraced)} has none)",
            hint="give run folders on both sides, or traces on both",
        )
    with _reading([path for target in resolved for path in target.traces], quiet=as_json) as progress:
        jobs = [
            job_profile.profile_traces(target.traces, counting, label=label, progress=progress)
            for target, label in zip(resolved, labels, strict=True)
            if not untraced
        ]
    with working("comparing", quiet=as_json):
        comparison = compare_jobs(
            labels,
            jobs,
            compare_runs(runs, tolerance=LOSS_TOLERANCE if tolerance is None else tolerance) if all_runs else None,
            manifests=[run.manifest() for run in runs] if all_runs else (),
            sort=order,
            per_step=per_step,
        )
    _write_page(
        html,
        "Comparison of " + " and ".join(comparison.labels),
        view.comparison_sections(comparison, top),
        quiet=as_json,
    )
    lines = [*view.loss_verdicts(comparison), *(f"note: {note}" for note in view.comparison_notes(comparison))]
    show(as_json, comparison.to_json(), *_parts(view.comparison_tables(comparison, top)), *lines)
    if check and comparison.runs is not None and any(loss.same is False for loss in comparison.runs.loss):
        raise typer.Exit(1)


def _mode(text: str) -> Mode:
    from windlass.profile.event_names import Mode

    if text not in list(Mode):
        raise ConfigError("profile.mode-unknown", f"--mode {text} is unknown", hint="choose fixed (the default) or tb")
    return Mode(text)


@contextmanager
def _reading(paths: Sequence[Path], *, quiet: bool) -> Iterator[ReadProgress]:
    """A progress bar over the bytes of all files."""
    total_bytes = sum(p.stat().st_size for p in paths if p.exists())
    done: dict[Path, int] = {}
    with bar("reading traces", quiet=quiet) as show_progress:

        def report(path: Path, count: int) -> None:
            done[path] = count
            show_progress(sum(done.values()), total_bytes)

        yield report


def _write_page(path: Path | None, title: str, sections: list[Section], *, quiet: bool) -> None:
    from windlass.figures import page, save_page

    if path is not None:
        save_page(path, page(title, sections))
        if not quiet:
            show(False, None, f"page: {path}")


def _parts(tables: Sequence[tuple[str, DataTable]]) -> Iterator[Table | str]:
    for title, content in tables:
        if content.rows:
            drop = ("share", *reversed(content.columns[2:]))
            yield table(title, content.columns, content.rows, right=content.right, drop=drop)
        if content.caption:
            yield f"  {content.caption}" if content.rows else f"{title}: {content.caption}"
            yield ""
