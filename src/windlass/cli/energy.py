"""`windlass energy RUN`: kWh by source, per billion tokens, CO2, and what was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from windlass.report.collect import RunSummary
    from windlass.runs.folder import Run


def register(app: typer.Typer) -> None:
    app.command("energy")(energy)


def energy(
    run: Annotated[Path, typer.Argument(help="Run folder, or its name in runs/.")],
    ear: Annotated[
        list[Path] | None,
        typer.Option("--ear", help="EAR's CSV (eacct -c, --ear-user-db) to take into the run's record."),
    ] = None,
    sacct: Annotated[
        Path | None, typer.Option("--sacct", help="Output of sacct to take into the record, from another machine.")
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Ask sacct here for the run's jobs and take the answer into the record.")
    ] = False,
    pue: Annotated[
        float | None,
        typer.Option(
            "--pue", min=1.0, help="Another PUE, for this table only; energy.pue of the recipe is for all views."
        ),
    ] = None,
    grid: Annotated[
        float | None,
        typer.Option("--grid", min=0.0, help="Another grid intensity, location-based, g per kWh, for this table only."),
    ] = None,
    market: Annotated[
        float | None,
        typer.Option(
            "--market", min=0.0, help="Another contract intensity, market-based, g per kWh, for this table only."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the run's energy table; EAR and SLURM records become part of the run's own record, so that every view shows them."""
    from windlass.report.collect import collect
    from windlass.runs.folder import open_run

    folder = open_run(run)
    notes = _take_records(folder, ear or [], sacct, slurm)
    given = {"pue": pue, "grid_g_per_kwh": grid, "market_g_per_kwh": market}
    summary = collect(folder, factors={name: value for name, value in given.items() if value is not None})
    _print_json(summary, notes) if as_json else _print_table(summary, notes)


def _take_records(run: Run, ear: list[Path], sacct: Path | None, slurm: bool) -> list[str]:
    from windlass.energy.ear import read_ear
    from windlass.energy.ledger import record_ear, record_slurm
    from windlass.energy.slurm import read_sacct
    from windlass.energy.slurm import sacct as ask
    from windlass.errors import RunError
    from windlass.files import read_json_lines

    notes = []
    for path in ear:
        rows = read_ear(path)
        taken = record_ear(run, rows, str(path))
        notes.append(
            f"{_count(taken, 'row')} of {path} taken into {run.energy_file}{_left_out(len(rows) - taken, 'row')}"
        )
    texts = [(str(sacct), _text(sacct))] if sacct is not None else []
    if slurm:
        jobs = [
            str(line.get("job_id") or line.get("job"))
            for line in read_json_lines(run.jobs_file)
            if line.get("job_id") or line.get("job")
        ]
        if not jobs:
            raise RunError(
                "cli.names-job", f"{run.jobs_file} names no job", hint="pass sacct's output with --sacct FILE"
            )
        texts.append(("sacct's answer", ask(list(dict.fromkeys(jobs)))))
    for where, text in texts:
        found = read_sacct(text, where)
        taken = record_slurm(run, found, where)
        without = [f"{j.job}: {j.note}" for j in found if j.joules is None]
        others = _left_out(len(found) - len(without) - taken, "job")
        notes.append("; ".join([f"{_count(taken, 'job')} of {where} taken{others}", *without]))
    return notes


def _left_out(count: int, what: str) -> str:
    return f" ({_count(count, what)} left out: of other jobs, or without a figure)" if count else ""


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _text(path: Path) -> str:
    from windlass.errors import RunError

    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunError(
            "cli.cannot-read",
            f"{path} cannot be read: {error.strerror}",
            hint="name the file that sacct's output was written to",
        ) from None


def _print_json(summary: RunSummary, notes: list[str]) -> None:
    from dataclasses import asdict

    from windlass.cli.output import print_json

    e = summary.energy
    print_json({
        "run": summary.name, "path": summary.path, "basis": e.basis, "joules": e.joules, "measured_joules": e.ledger.joules,
        "modelled_joules": e.ledger.modelled_joules, "joules_per_token": e.joules_per_token, "joules_per_step": e.joules_per_step,
        "kwh_per_billion_tokens": e.kwh_per_billion_tokens, "mean_watts": e.mean_watts, "forecast_kwh": e.forecast_kwh,
        "resolution_joules": e.ledger.resolution_joules, "startup_joules": e.ledger.startup_joules, "coverage": e.ledger.coverage, "nodes_expected": e.ledger.nodes_expected,
        "nodes_measured": e.ledger.nodes_measured, "missing": e.ledger.missing, "sources": [asdict(s) for s in e.ledger.sources],
        "carbon": None if e.carbon is None else asdict(e.carbon), "tokens": summary.tokens, "step": summary.step, "notes": notes,
    })  # fmt: skip


def _print_table(summary: RunSummary, notes: list[str]) -> None:
    from windlass.cli.output import console, table
    from windlass.report.tables import SOURCE_COLUMNS, energy_rows, source_rows

    out = console()
    for note in notes:
        out.print(note, markup=False)
    rows = source_rows(summary.energy)
    if rows:
        out.print(table(f"{summary.name}: energy by source", SOURCE_COLUMNS, rows, right=(3, 4)))
    out.print(
        table(None if rows else f"{summary.name}: energy", ("", "", "how we know"), energy_rows(summary), right=(1,))
    )
    missing = sorted(summary.energy.ledger.missing.items())
    if missing:
        out.print(table("not read on at least one node", ("source", "why"), missing))
