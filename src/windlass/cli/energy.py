"""`windlass energy RUN`: energy by source, per billion tokens, CO2, and what was not measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.output import show, table
from windlass.errors import RunError
from windlass.files import read_json_lines

if TYPE_CHECKING:
    from windlass.report.collect import RunSummary
    from windlass.runs.folder import Run


def energy(
    run: Annotated[Path, typer.Argument(help="Run folder, or its name in runs/.")],
    ear: Annotated[
        list[Path] | None, typer.Option("--ear", help="EAR's CSV (eacct -c, --ear-user-db) to add to the run's record.")
    ] = None,
    sacct: Annotated[
        Path | None, typer.Option("--sacct", help="Output of sacct on another machine to add to the record.")
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Ask sacct for the run's jobs and add the answer to the record.")
    ] = False,
    pue: Annotated[
        float | None,
        typer.Option("--pue", min=1.0, help="PUE for this table only (energy.pue in the recipe sets it everywhere)."),
    ] = None,
    grid: Annotated[
        float | None,
        typer.Option("--grid", min=0.0, help="Location-based grid intensity for this table only, g per kWh."),
    ] = None,
    market: Annotated[
        float | None,
        typer.Option(
            "--market", min=0.0, help="Market-based intensity of the contract for this table only, g per kWh."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the run's energy table. EAR and SLURM figures become part of the run's record, so every view has them."""
    from windlass.report.collect import collect
    from windlass.report.tables import energy_rows, source_table
    from windlass.runs.folder import open_run

    folder = open_run(run)
    notes = _add_site_records(folder, ear or [], sacct, slurm)
    factors = {"pue": pue, "grid_g_per_kwh": grid, "market_g_per_kwh": market}
    summary = collect(folder, factors={name: value for name, value in factors.items() if value is not None})
    sources, missing = source_table(summary.energy), sorted(summary.energy.ledger.missing.items())
    title = None if sources.rows else f"{summary.name}: energy"
    show(
        as_json,
        _document(summary, notes),
        *notes,
        table(f"{summary.name}: energy by source", sources.columns, sources.rows, right=(3, 4))
        if sources.rows
        else None,
        table(title, ("", "", "source or method"), energy_rows(summary), right=(1,)),
        table("not read on at least one node", ("source", "reason"), missing) if missing else None,
    )


def _add_site_records(run: Run, ear: list[Path], sacct_file: Path | None, slurm: bool) -> list[str]:
    from windlass.energy.site_records import read_ear, read_sacct, record_ear, record_slurm, sacct

    def counted(taken: int, total: int, unit: str, origin: str) -> str:
        left_out = f" ({total - taken} left out: of other jobs, or without a figure)" if total > taken else ""
        return f"{taken} {unit}{'' if taken == 1 else 's'} of {origin} added to {run.energy_file}{left_out}"

    notes = []
    for path in ear:
        rows = read_ear(path)
        notes.append(counted(record_ear(run, rows, str(path)), len(rows), "row", str(path)))
    texts = []
    if sacct_file is not None:
        try:
            texts.append((str(sacct_file), sacct_file.read_text(encoding="utf-8", errors="replace")))
        except OSError as error:
            raise RunError(
                "energy.file-unreadable",
                f"{sacct_file} cannot be read: {error.strerror}",
                hint="name the file that sacct's output was written to",
            ) from None
    if slurm:
        jobs = [str(line.get("job_id") or line.get("job") or "") for line in read_json_lines(run.jobs_file)]
        if not any(jobs):
            raise RunError(
                "energy.no-jobs-recorded", f"{run.jobs_file} names no job", hint="pass sacct's output with --sacct FILE"
            )
        texts.append(("sacct's answer", sacct(list(dict.fromkeys(filter(None, jobs))))))
    for origin, text in texts:
        energies = read_sacct(text, origin)
        unknown = [f"{job.job}: {job.note}" for job in energies if job.joules is None]
        taken = record_slurm(run, energies, origin)
        notes.append("; ".join([counted(taken, len(energies) - len(unknown), "job", origin), *unknown]))
    return notes


def _document(summary: RunSummary, notes: list[str]) -> dict[str, Any]:
    energy, ledger = summary.energy, summary.energy.ledger
    keys = ("basis", "joules", "joules_per_token", "joules_per_step", "kwh_per_billion_tokens", "mean_watts",
            "forecast_kwh")  # fmt: skip
    ledger_keys = ("resolution_joules", "startup_joules", "coverage", "nodes_expected", "nodes_measured", "missing")
    return {
        "run": summary.name,
        "path": summary.path,
        **{key: getattr(energy, key) for key in keys},
        "measured_joules": ledger.joules,
        "modelled_joules": ledger.modelled_joules,
        **{key: getattr(ledger, key) for key in ledger_keys},
        "sources": [asdict(source) for source in ledger.sources],
        "carbon": None if energy.carbon is None else asdict(energy.carbon),
        "tokens": summary.tokens,
        "step": summary.step,
        "notes": notes,
    }
