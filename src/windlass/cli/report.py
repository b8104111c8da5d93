"""`windlass report RUN` (HTML, Markdown or JSON) and `windlass sync RUN` (sends what offline trackers wrote)."""

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import JsonOption
from windlass.cli.output import console, print_json, show, working
from windlass.units import print_text


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders; several give one joint report. A folder of runs stands for all runs in it."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output file (.html or .md). Default: report.html in the run folder."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of writing HTML.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of writing HTML.")] = False,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write every chart to this folder, for slides and papers.")
    ] = None,
    picture: Annotated[
        str, typer.Option("--format", "--picture", help="Image format for --figures: svg, png or pdf.")
    ] = "svg",
) -> None:
    """Write a report: model, data, speed, energy and the events of one or several runs."""
    from windlass.figures import save_page
    from windlass.report import collect, write
    from windlass.report.sweeps import read_sweep
    from windlass.runs.folder import open_run

    # A folder that is not a run itself counts as all runs in it; a sweep of commands has none.
    named = []
    for path in runs:
        inside = collect.find_runs(path) if path.is_dir() and not (path / "config.json").is_file() else []
        named += inside or ([] if (path / "sweep.json").is_file() else [open_run(path)])
    folders = list({run.path.resolve(): run for run in named}.values())
    sweeps = [read_sweep(path) for path in runs if (path / "sweep.json").is_file()]
    if figures is not None:
        with working("drawing the figures", quiet=as_json):
            count = len(write.write_figures(folders, figures, picture, sweeps))
        typer.echo(f"wrote {count} figures to {figures}", err=True)
    if as_json:
        print_json(write.json_report(folders, sweeps))
        return
    if markdown and out is None:
        with working("reading the runs"):
            text = write.markdown_report(folders, sweeps)
        typer.echo(text)
        return
    target = out or (folders[0].report_file if len(folders) == 1 else Path("report.html"))
    as_markdown = markdown or target.suffix.lower() in (".md", ".markdown")
    with working(f"writing {target}"):
        save_page(target, write.markdown_report(folders, sweeps) if as_markdown else write.html_report(folders, sweeps))
    size = f"{target.stat().st_size / 1e6:.1f} MB, opens from disk without a network"
    show(False, None, f"wrote {print_text(str(target))} ({size})")


def sync(
    run: Annotated[Path, typer.Argument(help="Run folder (or a copy of it on a machine with internet).")],
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Keep running, and upload whenever the running job requests it through a trigger file."
        ),
    ] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between checks with --watch.", min=0.2)] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be uploaded; upload nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload offline W&B files, the oldest first and each once; a running job is asked to close its files first."""
    from windlass.report import sync as uploads
    from windlass.runs.folder import open_run

    folder = open_run(run)
    if watch:
        try:
            uploads.sync_watch(folder, every, say=lambda text: console().print(text, markup=False))
        except KeyboardInterrupt:
            typer.echo("stopped; uploaded files are not uploaded again", err=True)
        return
    if not dry_run and uploads.parts(folder) and uploads.is_live(folder):
        typer.echo("asking the job to close its current file (a minute at most) ...", err=True)
        uploads.ask_for_part(folder)
    done = uploads.sync_once(folder, dry_run=dry_run)
    nothing = "nothing to upload: the run has no offline W&B files (trackers.wandb = true writes them)"
    lines = [f"{part['part']}: {part['state']}" for part in done] or [nothing]
    show(as_json, {"run": str(folder.path), "dry_run": dry_run, "parts": done}, *lines)
