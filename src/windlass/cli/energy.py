"""`windlass energy RUN`: energy by source, per billion tokens, CO2, and what was not measured."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import JsonOption, RunArgument
from windlass.cli.output import show, table
from windlass.errors import RunError
from windlass.files import read_json_lines

ENERGY_KEYS = (
    "basis", "joules", "joules_per_token", "joules_per_step", "kwh_per_billion_tokens", "mean_watts", "forecast_kwh",
)  # fmt: skip
LEDGER_KEYS = ("resolution_joules", "startup_joules", "coverage", "nodes_expected", "nodes_measured", "missing")


def energy(
    run: RunArgument,
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
    as_json: JsonOption = False,
) -> None:
    """Print the run's energy table. EAR and SLURM figures become part of the run's record, so every view has them."""
    from windlass.energy import site_records
    from windlass.report import collect, tables
    from windlass.runs.folder import open_run

    folder = open_run(run)

    def counted(taken: int, total: int, unit: str, origin: str) -> str:
        left_out = f" ({total - taken} left out: of other jobs, or without a figure)" if total > taken else ""
        return f"{taken} {unit}{'' if taken == 1 else 's'} of {origin} added to {folder.energy_file}{left_out}"

    notes = []
    for path in ear or []:
        ear_rows = site_records.read_ear(path)
        notes.append(counted(site_records.record_ear(folder, ear_rows, str(path)), len(ear_rows), "row", str(path)))
    answers = []
    if sacct is not None:
        try:
            answers.append((str(sacct), sacct.read_text(encoding="utf-8", errors="replace")))
        except OSError as error:
            raise RunError(
                "energy.file-unreadable",
                f"{sacct} cannot be read: {error.strerror}",
                hint="name the file that sacct's output was written to",
            ) from None
    if slurm:
        jobs = [str(line.get("job_id") or line.get("job") or "") for line in read_json_lines(folder.jobs_file)]
        if not any(jobs):
            advice = "pass sacct's output with --sacct FILE"
            raise RunError("energy.no-jobs-recorded", f"{folder.jobs_file} names no job", hint=advice)
        answers.append(("sacct's answer", site_records.sacct(list(dict.fromkeys(filter(None, jobs))))))
    for origin, text in answers:
        energies = site_records.read_sacct(text, origin)
        unknown = [f"{job.job}: {job.note}" for job in energies if job.joules is None]
        taken = site_records.record_slurm(folder, energies, origin)
        notes.append("; ".join([counted(taken, len(energies) - len(unknown), "job", origin), *unknown]))
    factors = {"pue": pue, "grid_g_per_kwh": grid, "market_g_per_kwh": market}
    summary = collect.collect(folder, factors={name: value for name, value in factors.items() if value is not None})
    measured, ledger = summary.energy, summary.energy.ledger
    document = {
        "run": summary.name,
        "path": summary.path,
        **{key: getattr(measured, key) for key in ENERGY_KEYS},
        "measured_joules": ledger.joules,
        "modelled_joules": ledger.modelled_joules,
        **{key: getattr(ledger, key) for key in LEDGER_KEYS},
        "sources": [asdict(source) for source in ledger.sources],
        "carbon": None if measured.carbon is None else asdict(measured.carbon),
        "tokens": summary.tokens,
        "step": summary.step,
        "notes": notes,
    }
    sources, missing = tables.source_table(measured), sorted(ledger.missing.items())
    by_source = table(f"{summary.name}: energy by source", sources.columns, sources.rows, right=(3, 4))
    title = None if sources.rows else f"{summary.name}: energy"
    show(
        as_json,
        document,
        *notes,
        by_source if sources.rows else None,
        table(title, ("", "", "source or method"), tables.energy_rows(summary), right=(1,)),
        table("not read on at least one node", ("source", "reason"), missing) if missing else None,
    )
