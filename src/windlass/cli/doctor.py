"""`windlass doctor`: devices, links, disks, clocks and environment before the real job; here, or as a short job on N nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from windlass.launch.doctor import Check


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="Also check this recipe's token store and tokenizer.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Run as a short job on this cluster (with --nodes).")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="As a job: on so many nodes.")] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Here: worker processes; one per device when left out.")
    ] = None,
    paths: Annotated[
        list[Path] | None,
        typer.Option("--path", help="A file system to measure (repeat); the current folder when left out."),
    ] = None,
    megabytes: Annotated[
        int, typer.Option("--megabytes", min=1, help="Size of the file that disks are measured with.")
    ] = 64,
    store: Annotated[str | None, typer.Option("--store", help="Token store to open.")] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="Tokenizer file to look for.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Larger products and messages: steadier numbers, more time.")
    ] = False,
    no_devices: Annotated[bool, typer.Option("--no-devices", help="Leave out what needs torch.")] = False,
    account: Annotated[str | None, typer.Option("--account", help="As a job: account.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="As a job: partition.")] = None,
    wait: Annotated[float, typer.Option("--wait", help="As a job: seconds to wait for it.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check devices, links, disks, clocks and environment; a verdict and an exit code (6: unfit)."""
    from windlass.cli.output import console, print_json, table
    from windlass.launch.doctor import Diagnosis, data_checks, host_checks

    if recipe is not None:
        from windlass.config import load_recipe

        data = load_recipe(recipe).recipe.data
        store, tokenizer = store or data.store, tokenizer or data.tokenizer
    places = tuple(paths or [Path.cwd(), *_file_systems(cluster)])
    if cluster is not None or nodes is not None:
        found = _as_job(cluster, nodes or 1, places, full, account, partition, wait)
    else:
        found = host_checks(places, megabytes=megabytes)
        found += [] if no_devices else _here(devices, full)
    diagnosis = Diagnosis((*found, *data_checks(store, tokenizer)))
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        rows = [(c.level, c.topic, c.where, c.text + (f" -> {c.hint}" if c.hint else "")) for c in diagnosis.checks]
        console().print(table("windlass doctor", ("", "what", "where", "found"), rows))
        console().print(f"verdict: {diagnosis.verdict}", markup=False)
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)


def _file_systems(cluster: str | None) -> list[Path]:
    """The cluster's file systems that exist here; all nodes are asked to measure them."""
    import os

    from windlass.clusters import load_cluster

    named = [os.path.expandvars(s.path) for s in load_cluster(cluster).storage.values()] if cluster else []
    return [Path(p) for p in named if p.startswith("/") and "$" not in p and os.access(p, os.W_OK)]


def _here(devices: int | None, full: bool) -> list[Check]:
    import importlib.util
    import tempfile

    from windlass.launch.doctor import Check, examine, run_workers
    from windlass.launch.doctor_job import count_devices

    if importlib.util.find_spec("torch") is None:
        return [
            Check(
                "torch",
                "here",
                "fail",
                "torch is not installed in this environment",
                "pip install 'windlass[train]', or the site's own torch",
            )
        ]
    count = devices or count_devices()
    with tempfile.TemporaryDirectory(prefix="windlass-doctor-") as folder:
        return examine(run_workers(Path(folder), count, full=full), count, Path(folder))


def _as_job(
    cluster: str | None,
    nodes: int,
    paths: tuple[Path, ...],
    full: bool,
    account: str | None,
    partition: str | None,
    wait: float,
) -> list[Check]:
    from windlass.errors import ConfigError
    from windlass.launch.doctor_job import run_job

    if cluster is None:
        raise ConfigError(
            "cli.nodes-cluster",
            f"on {nodes} nodes of which cluster?",
            hint="windlass doctor --cluster lumi-g --nodes 2",
        )
    return run_job(cluster, nodes, paths, full=full, account=account, partition=partition, wait_seconds=wait)
