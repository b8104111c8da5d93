"""`windlass profile` and `windlass compare`: where a step's time goes, and what changed between runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.figures import DataTable, Section
    from windlass.profile.compare import ScalingRow
    from windlass.profile.find import Target
    from windlass.profile.job import JobProfile, Report
    from windlass.profile.runs import RunComparison
    from windlass.runs import Run

MODE_HELP = (
    "`fixed`: communication by kernel name, adding up to 100 %. `tb`: the numbers of the removed torch-tb-profiler."
)


def register(app: typer.Typer) -> None:
    app.command("profile")(profile)
    app.command("compare")(compare)


def profile(
    targets: Annotated[
        list[Path],
        typer.Argument(
            help="A run folder, or trace files of one job (.json or .json.gz, one per rank).", metavar="RUN|TRACE"
        ),
    ],
    mode: Annotated[str, typer.Option(help=MODE_HELP)] = "fixed",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with stacked step-time bars.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the operator and kernel tables.")] = 15,
    step: Annotated[
        int | None, typer.Option(help="The window that begins at this step, instead of the newest.")
    ] = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Group operators by input shapes too; with --now: record them.")
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Ask the live run for a trace of the next steps.")] = False,
    steps: Annotated[int, typer.Option(help="With --now: how many steps.")] = 3,
    ranks: Annotated[str, typer.Option(help="With --now: ranks that write a trace, like 0,8,16, or all.")] = "0",
    stacks: Annotated[bool, typer.Option("--stacks", help="With --now: record Python stacks.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="With --now: also write a memory snapshot.")] = False,
    wait: Annotated[float, typer.Option(help="With --now: seconds to wait for the trace.")] = 120.0,
) -> None:
    """Show where an average step's time goes: execution summary, communication, device use, operators and kernels."""
    from windlass.cli.output import print_json
    from windlass.profile.job import profile_traces

    chosen = _mode(mode)
    if now:
        _ask_now(
            targets, steps=steps, ranks=ranks, shapes=shapes, stacks=stacks, memory=memory, wait=wait, quiet=as_json
        )
    target = _one_target(targets, step)
    with _progress(target.traces, quiet=as_json) as report:
        job = profile_traces(target.traces, chosen, label=target.label, by_shape=shapes, report=report)
    if html is not None:
        _write_page(html, f"Profile of {job.label}", _profile_sections(job, top), quiet=as_json)
    if as_json:
        print_json(job.to_json())
    else:
        _print_profile(job, top)


def compare(
    targets: Annotated[
        list[Path],
        typer.Argument(help="Two or more run folders or traces; the first is the baseline.", metavar="RUN|TRACE"),
    ],
    mode: Annotated[str, typer.Option(help=MODE_HELP)] = "fixed",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with stacked step-time bars.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the operator and kernel diffs.")] = 15,
    sort: Annotated[
        str, typer.Option(help="Operator diff by: matters, calls, host, self_host, device, self_device, name.")
    ] = "matters",
    per_step: Annotated[
        bool, typer.Option("--per-step", help="Operator diff per step, for windows of different length.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference of the loss curves that counts as the same, nats per token."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 when the loss curves differ by more than the tolerance.")
    ] = False,
) -> None:
    """Compare runs or traces: summaries side by side, operator diff, scaling, configs, throughput, energy and loss curves."""
    from windlass.cli.output import print_json

    found = _comparison(targets, mode, sort=sort, per_step=per_step, tolerance=tolerance, quiet=as_json)
    if html is not None:
        _write_page(html, "Comparison of " + " and ".join(found.labels), found.sections(top), quiet=as_json)
    if as_json:
        print_json(found.to_json())
    else:
        found.show(top)
    if check and found.runs is not None and any(test.same is False for test in found.runs.loss):
        raise typer.Exit(1)


# -- profile ------------------------------------------------------------------------------------------------------------


def _mode(text: str) -> Any:
    from windlass.errors import ConfigError
    from windlass.profile.roles import Mode

    try:
        return Mode(text)
    except ValueError:
        raise ConfigError(
            "cli.mode-unknown", f"--mode {text} is unknown", hint="choose fixed (the default) or tb"
        ) from None


def _one_target(targets: Sequence[Path], step: int | None) -> Target:
    """Several files are the ranks of one job."""
    from windlass.errors import ProfileError
    from windlass.profile.find import Target, find_target, need_traces

    found = [find_target(t, step=step) for t in targets]
    if len(found) == 1:
        return need_traces(found[0])
    if any(t.run is not None for t in found):
        raise ProfileError(
            "cli.profile-takes-one-run",
            "`profile` takes one run, or the trace files of one job",
            hint="windlass compare RUN RUN puts runs side by side",
        )
    return Target(found[0].label, None, [path for t in found for path in t.traces])


def _ask_now(
    targets: Sequence[Path],
    *,
    steps: int,
    ranks: str,
    shapes: bool,
    stacks: bool,
    memory: bool,
    wait: float,
    quiet: bool,
) -> None:
    from windlass.cli.output import console
    from windlass.errors import ProfileError
    from windlass.profile.request import ask, wait_for_trace
    from windlass.runs import open_run

    if len(targets) != 1:
        raise ProfileError("cli.now-asks-one-live", "--now asks one live run", hint="windlass profile RUN --now")
    run = open_run(targets[0])
    request = ask(run, steps=steps, ranks=_ranks(ranks), shapes=shapes, stacks=stacks, memory=memory)
    if not quiet:
        console().print(f"asked {run.name} for a trace of {steps} steps; waiting up to {wait:g} s")
    if not wait_for_trace(run, request, wait):
        raise ProfileError(
            "cli.written-trace-within-s",
            f"{run.name} has written no trace within {wait:g} s",
            hint=f"the request stays in {run.requests}; steps may be long: look again later with `windlass profile {run.name}`",
        )


def _ranks(text: str) -> list[int]:
    from windlass.errors import ConfigError

    if text.strip() == "all":
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            "cli.ranks-list-ranks", f"--ranks {text} is no list of ranks", hint="write it like 0,8,16, or all"
        ) from None


@contextmanager
def _progress(paths: Sequence[Path], *, quiet: bool) -> Iterator[Report | None]:
    """A bar over the bytes of all files, on standard error, and only for people."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    sizes = {p: p.stat().st_size for p in paths if p.exists()}
    with Progress(
        TextColumn("reading {task.fields[file]}"),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("read", total=sum(sizes.values()), file="")
        done: dict[Path, int] = {}

        def report(path: Path, count: int) -> None:
            done[path] = count
            bar.update(task, completed=sum(done.values()), file=path.name)

        yield report


def _print(title: str, made: DataTable) -> None:
    from windlass.cli.output import console, table

    out = console()
    if not made.rows:
        out.print(f"{title}: {made.caption}\n", markup=False)
        return
    out.print(table(title, made.columns, made.rows, right=made.right))
    if made.caption:
        out.print(f"  {made.caption}\n", markup=False)


def _print_profile(job: JobProfile, top: int) -> None:
    from windlass.cli.output import console
    from windlass.profile import view

    _print(f"Execution summary of {job.label}", view.summary_table(job))
    _print("Communication and device", view.device_table(job))
    if job.collectives:
        _print("Collectives", view.collectives_table(job))
    if len(job.ranks) > 1:
        _print("Ranks", view.ranks_table(job))
    first = job.ranks[0]
    _print(f"Operators (rank {first.rank})", view.operators_table(first.operators, top))
    if first.kernels:
        _print(f"Kernels (rank {first.rank})", view.kernels_table(first.kernels, top))
    out = console()
    for advice in job.advice:
        out.print(f"advice: {advice.text}", markup=False)
    for note in dict.fromkeys(n for r in job.ranks for n in r.notes):
        out.print(f"note: {note}", markup=False)


def _profile_sections(job: JobProfile, top: int) -> list[Section]:
    from windlass.profile.view import sections

    return sections(job, top=top)


def _write_page(path: Path, title: str, sections: list[Section], *, quiet: bool) -> None:
    from windlass.cli.output import console
    from windlass.figures import page, save_page

    save_page(path, page(title, sections))
    if not quiet:
        console().print(f"page: {path}", markup=False)


# -- compare ------------------------------------------------------------------------------------------------------------


def _comparison(
    targets: Sequence[Path], mode: str, *, sort: str, per_step: bool, tolerance: float | None, quiet: bool
) -> Comparison:
    from windlass.errors import ConfigError, ProfileError
    from windlass.profile.compare import SORTS
    from windlass.profile.find import find_target
    from windlass.profile.job import profile_traces
    from windlass.profile.runs import LOSS_TOLERANCE, compare_runs

    if len(targets) < 2:
        raise ProfileError(
            "cli.compare-needs-least-two",
            "compare needs at least two runs or traces",
            hint="windlass compare BASELINE EXPERIMENT",
        )
    if sort not in SORTS:
        raise ConfigError("cli.sort-unknown", f"--sort {sort} is unknown", hint=f"choose one of {', '.join(SORTS)}")
    found = [find_target(t) for t in targets]
    runs = [t.run for t in found if t.run is not None]
    chosen = _mode(mode)
    jobs: list[JobProfile] = []
    if all(t.traces for t in found):
        with _progress([p for t in found for p in t.traces], quiet=quiet) as report:
            jobs = [
                profile_traces(t.traces, chosen, label=label, report=report)
                for t, label in zip(found, _labels(found), strict=True)
            ]
    compared = (
        compare_runs(runs, tolerance=LOSS_TOLERANCE if tolerance is None else tolerance)
        if len(runs) == len(found)
        else None
    )
    if not jobs and compared is None:
        bare = ", ".join(t.label for t in found if not t.traces)
        raise ProfileError(
            "cli.without-traces-only-runs",
            f"without traces only runs can be compared with runs ({bare} has none)",
            hint="give run folders on both sides, or traces on both",
        )
    return Comparison(_labels(found), jobs, compared, runs if len(runs) == len(found) else [], sort, per_step)


def _labels(found: Sequence[Target]) -> list[str]:
    """Short names; equal ones get the folder's name in front."""
    names = [t.label for t in found]
    if len(set(names)) == len(names):
        return names
    return [
        f"{t.traces[0].resolve().parent.name}/{t.label}" if t.traces and t.run is None else f"{i + 1}:{t.label}"
        for i, t in enumerate(found)
    ]


class Comparison:
    """What was found, ready to be shown in any form."""

    def __init__(
        self,
        labels: list[str],
        jobs: list[JobProfile],
        runs: RunComparison | None,
        folders: list[Run],
        sort: str,
        per_step: bool,
    ) -> None:
        from windlass.profile.compare import diff_kernels, diff_operators
        from windlass.profile.compare import per_step as one_step

        self.labels, self.jobs, self.runs = labels, jobs, runs
        self.operators, self.kernels = [], []
        if len(jobs) == 2:
            a, b = jobs[0].ranks[0], jobs[1].ranks[0]
            left, right = (one_step(r.operators, r.steps) if per_step else r.operators for r in (a, b))
            self.operators = diff_operators(left, right, sort=sort)
            self.kernels = diff_kernels(a.kernels, b.kernels)
        self.scaling = _scaling(jobs, folders) if jobs else []

    def to_json(self) -> dict[str, Any]:
        from dataclasses import asdict

        return {
            "labels": self.labels,
            "mode": self.jobs[0].mode.value if self.jobs else None,
            "profiles": [j.to_json(tables=False) for j in self.jobs],
            "summary": self._summary_json(),
            "operators": [o.to_json() for o in self.operators],
            "kernels": [
                {"name": k.name, "calls": k.calls.to_json(), "total_us": k.total.to_json()} for k in self.kernels
            ],
            "scaling": [{**asdict(row), "main_loss": row.main_loss} for row in self.scaling],
            "runs": self.runs.to_json() if self.runs else None,
        }

    def _summary_json(self) -> list[dict[str, Any]]:
        from windlass.profile.compare import Change
        from windlass.profile.roles import CATEGORIES

        if not self.jobs:
            return []
        rows = [
            ("step", [j.step_us for j in self.jobs]),
            *((c, [j.categories_us[c] for j in self.jobs]) for c in CATEGORIES),
        ]
        changes = [(name, values, Change(values[0], values[-1])) for name, values in rows]
        return [{"category": n, "values_us": v, "delta_us": c.delta, "delta_pct": c.percent} for n, v, c in changes]

    def tables(self, top: int) -> list[tuple[str, DataTable]]:
        from windlass.profile import view

        made: list[tuple[str, DataTable]] = []
        if self.jobs:
            made.append(("Execution summary", view.side_by_side(self.jobs)))
            made.append(("Scaling", view.scaling_table(self.scaling)))
        if self.operators:
            device = any(o.device.baseline or o.device.experiment for o in self.operators)
            made.append(
                (
                    f"Operator diff: {self.labels[0]} -> {self.labels[1]} (lowest rank of each)",
                    view.operator_diff_table(self.operators, top, device=device),
                )
            )
        if self.kernels:
            made.append(("Kernel diff", view.kernel_diff_table(self.kernels, top)))
        if self.runs:
            made.append(("Throughput, memory and energy", view.performance_table(self.runs.performance)))
            for title, rows in (
                ("Config", self.runs.config),
                ("Packages", self.runs.packages),
                ("Machine", self.runs.machine),
            ):
                made.append((title, view.differences_table(rows, self.labels)))
        return made

    def verdicts(self) -> list[str]:
        if self.runs is None:
            return []
        return [
            f"loss of {self.labels[0]} and {label}: {test.reason}"
            for label, test in zip(self.labels[1:], self.runs.loss, strict=True)
        ]

    def show(self, top: int) -> None:
        from windlass.cli.output import console

        for title, made in self.tables(top):
            _print(title, made)
        for text in self.verdicts():
            console().print(text, markup=False)

    def sections(self, top: int) -> list[Section]:
        from windlass.figures import Note, Section
        from windlass.profile import view

        made = (
            [Section("Step time", (view.step_bars(self.jobs), view.scaling_chart(self.scaling)))] if self.jobs else []
        )
        made += [Section(title, (table,)) for title, table in self.tables(top)]
        if self.runs is not None:
            chart = view.loss_chart(self.runs.loss, self.labels)
            made.append(Section("Loss", (*((chart,) if chart else ()), *(Note(text) for text in self.verdicts()))))
        return made


def _scaling(jobs: list[JobProfile], folders: list[Run]) -> list[ScalingRow]:
    from windlass.profile.compare import point_of, scaling

    manifests = [run.manifest() for run in folders] or [{} for _ in jobs]
    points = []
    for job, manifest in zip(jobs, manifests, strict=True):
        devices, tokens = manifest.get("world_size"), manifest.get("tokens_per_step")
        points.append(point_of(job, devices=devices, work_per_device=tokens / devices if tokens and devices else None))
    return scaling(points)
