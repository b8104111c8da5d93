"""`windlass energy RUN`: energy by source, per billion tokens, CO2, and what was not measured. `windlass energy --mwh
X`: tonnes of CO2e of a known energy."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.options import JsonOption
from windlass.cli.output import show, table, working
from windlass.errors import ConfigError, RunError
from windlass.files import read_json_lines

if TYPE_CHECKING:
    from windlass.runs.folder import Run

ENERGY_KEYS = (
    "basis", "joules", "joules_per_token", "joules_per_step", "kwh_per_billion_tokens", "mean_watts", "forecast_kwh",
)  # fmt: skip
LEDGER_KEYS = ("resolution_joules", "startup_joules", "coverage", "nodes_expected", "nodes_measured", "missing")
SCOPES = {
    "gpu": "devices only, without hosts, network and facility overhead",
    "node": "complete nodes, without network and facility overhead",
    "facility": "at the facility's meter, PUE included",
}


def energy(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run folder, or its name in runs/; omit it with --mwh.")
    ] = None,
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
    mwh: Annotated[
        float | None, typer.Option("--mwh", min=0.0, help="Without a run: compute the CO2e of this energy, in MWh.")
    ] = None,
    scope: Annotated[
        str, typer.Option("--scope", help="What --mwh was measured at: gpu, node or facility (with PUE).")
    ] = "node",
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="With --mwh: take PUE and intensities from this cluster file.")
    ] = None,
    days: Annotated[float | None, typer.Option("--days", min=0.0, help="With --mwh: duration in days.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="With --mwh: number of nodes.")] = None,
    node_hours: Annotated[
        float | None,
        typer.Option("--node-hours", min=0.0, help="With --mwh: node-hours, instead of --days or --nodes."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the run's energy table. Figures from EAR and SLURM are added to the run's record, so that every view shows
    them."""
    overrides = {"pue": pue, "grid_g_per_kwh": grid, "market_g_per_kwh": market}
    factors = {name: value for name, value in overrides.items() if value is not None}
    if mwh is not None and run is None:
        show_known_energy(mwh, scope, cluster, factors, days, nodes, node_hours, as_json)
        return
    if run is None or mwh is not None:
        raise ConfigError(
            "energy.run-or-mwh",
            "neither a run nor --mwh is given" if run is None else f"both a run ({run}) and --mwh are given",
            hint="windlass energy RUN for a run's record, windlass energy --mwh 52.3 --grid 267.6 without one",
        )
    from windlass.report import collect, tables
    from windlass.runs.folder import open_run

    folder = open_run(run)
    notes = add_site_records(folder, ear or [], sacct, slurm)
    with working(f"reading {folder.path}", quiet=as_json):
        summary = collect.collect(folder, factors=factors)
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
    by_source = table(
        f"{summary.name}: energy by source",
        sources.columns,
        sources.rows,
        right=(3, 4),
        drop=("nodes", "method", "note"),
    )
    title = None if sources.rows else f"{summary.name}: energy"
    show(
        as_json,
        document,
        *notes,
        by_source if sources.rows else None,
        table(title, ("", "", "source or method"), tables.energy_rows(summary), right=(1,)),
        table("not read on at least one node", ("source", "reason"), missing) if missing else None,
    )


def add_site_records(folder: "Run", ear: list[Path], sacct: Path | None, slurm: bool) -> list[str]:
    """Add EAR's and SLURM's figures to the run's record; says what was taken of each."""
    from windlass.energy import site_records

    def counted(taken: int, total: int, unit: str, origin: str) -> str:
        left_out = f" ({total - taken} skipped: from other jobs, or without a value)" if total > taken else ""
        return f"{taken} {unit}{'' if taken == 1 else 's'} of {origin} added to {folder.energy_file}{left_out}"

    notes: list[str] = []
    for path in ear:
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
    return notes


def show_known_energy(
    mwh: float,
    scope: str,
    cluster: str | None,
    factors: dict[str, float],
    days: float | None,
    nodes: int | None,
    node_hours: float | None,
    as_json: bool,
) -> None:
    """CO2e of an energy that was measured or published elsewhere, with its scope and the source of each factor."""
    from windlass.clusters import load_cluster
    from windlass.energy.carbon import JOULES_PER_KWH, carbon, print_carbon

    numbers = {"--mwh": mwh, "--days": days, "--node-hours": node_hours, **factors}
    if bad := [f"{name} {value}" for name, value in numbers.items() if value is not None and not math.isfinite(value)]:
        raise ConfigError("energy.not-a-number", f"{bad[0]} is not a valid amount", hint="give a number of 0 or more")
    if mwh and 0 in (days, node_hours):
        raise ConfigError(
            "energy.no-time",
            f"{mwh:g} MWh cannot be used in 0 hours",
            hint="give --days or --node-hours above 0, or omit it",
        )
    counted = None if days is None or nodes is None else days * 24 * nodes
    if counted and node_hours and not math.isclose(counted, node_hours, rel_tol=0.01):
        raise ConfigError(
            "energy.hours-contradict",
            f"--node-hours {node_hours:,g} contradicts {days:g} days on {nodes} nodes, which is {counted:,g}",
            hint="give only two of --days, --nodes and --node-hours",
        )
    if scope not in SCOPES:
        raise ConfigError(
            "energy.scope-unknown", f"--scope {scope} is not a scope", hint=f"use one of {', '.join(SCOPES)}"
        )
    if scope == "facility":
        if "pue" in factors:
            raise ConfigError(
                "energy.pue-counted-twice",
                f"--pue {factors['pue']:g} on energy of the facility would count its overhead twice",
                hint="omit --pue, or give --scope gpu or node",
            )
        factors = factors | {"pue": 1.0}
    result = carbon(mwh * 1e3 * JOULES_PER_KWH, load_cluster(cluster) if cluster else None, None, factors)
    if node_hours is None:
        node_hours = counted
    elif nodes is not None and days is None:
        days = node_hours / nodes / 24
    watts = mwh * 1e6 / node_hours if node_hours else None
    tonnes = {"tco2e": result.location_kg, "tco2e_without_pue": result.location_it_only_kg}
    tonnes |= {"tco2e_market": result.market_kg}
    document = {
        "mwh": mwh,
        "scope": scope,
        "scope_note": SCOPES[scope],
        "pue": None if scope == "facility" else result.pue.value,
        "mwh_with_pue": None if result.kwh is None else result.kwh / 1e3,
        "grid_g_per_kwh": result.grid.value,
        "market_g_per_kwh": result.market.value,
        **{name: None if kg is None else kg / 1e3 for name, kg in tonnes.items()},
        "days": days,
        "nodes": nodes,
        "node_hours": node_hours,
        "watts_per_node": watts,
        "equivalent": result.equivalent,
        "co2_equivalent": result.co2_equivalent,
        "sources": {
            name: None if factor.value is None else factor.source
            for name, factor in (("pue", result.pue), ("grid", result.grid), ("market", result.market))
        },
    }
    in_it = "energy x PUE" if result.kwh is not None else "PUE unknown: facility overhead is not included"
    rows = [(f"energy, scope {scope}", f"{mwh:,.6g} MWh", SCOPES[scope])]
    if scope != "facility":
        rows += [
            ("PUE", "unknown", "give --pue or --cluster")
            if result.pue.value is None
            else ("PUE", f"{result.pue.value:g}", result.pue.source),
            ("with PUE", "unknown" if result.kwh is None else f"{result.kwh / 1e3:,.6g} MWh", in_it),
        ]
    for basis, option, kg, factor in (
        ("location", "--grid", result.location_kg, result.grid),
        ("market", "--market", result.market_kg, result.market),
    ):
        text = f"give {option} or --cluster" if factor.value is None else f"{factor.value:g} g/kWh, {factor.source}"
        rows.append((f"CO2e, {basis}-based", print_carbon(kg), text))
    if scope != "facility":
        note = "for comparison with reports that leave the PUE out"
        rows.append(("CO2e, location-based, without PUE", print_carbon(result.location_it_only_kg), note))
    if node_hours is not None:
        length = "" if days is None else f"{days:g} days" + (f" on {nodes} nodes" if nodes else "")
        rows.append(("node-hours", f"{node_hours:,.6g}", length))
        rows.append((f"mean power per node, scope {scope}", "unknown" if watts is None else f"{watts:,.0f} W", ""))
    rows += [("equivalent to", "", text) for text in (result.equivalent, result.co2_equivalent) if text]
    show(as_json, document, table(None, ("", "", "source or method"), rows, right=(1,)))
