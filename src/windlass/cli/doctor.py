"""`windlass doctor`: checks devices, links, disks, clocks and environment, here or as a short job on N nodes."""

import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from windlass.cli.options import JsonOption
from windlass.cli.output import show, table, working
from windlass.errors import ConfigError


def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="Also check this recipe's token store and tokenizer.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Run as a short job on this cluster (with --nodes).")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="With --cluster: number of nodes (default: 1).")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Worker processes on this machine (default: one per device).")
    ] = None,
    paths: Annotated[
        list[Path] | None,
        typer.Option("--path", help="A file system to measure (repeatable; default: the current folder)."),
    ] = None,
    megabytes: Annotated[
        int, typer.Option("--megabytes", min=1, help="Size of the file for the disk test, in MB.")
    ] = 64,
    store: Annotated[str | None, typer.Option("--store", help="Token store to check.")] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="Tokenizer file to check.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Use larger matrix products and messages: slower, but more stable numbers.")
    ] = False,
    no_devices: Annotated[bool, typer.Option("--no-devices", help="Skip checks that require torch.")] = False,
    account: Annotated[str | None, typer.Option("--account", help="With --cluster: SLURM account to charge.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="With --cluster: SLURM partition.")] = None,
    wait: Annotated[float, typer.Option("--wait", help="With --cluster: seconds to wait for the job.")] = 1800.0,
    as_json: JsonOption = False,
) -> None:
    """Check devices, links, disks, clocks and environment. Exit code 6 means not fit for training."""
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.launch import doctor as checks

    if recipe is not None:
        data = load_recipe(recipe).recipe.data
        store, tokenizer = store or data.store, tokenizer or data.tokenizer
    # The cluster's file systems that exist here; all nodes measure them.
    shared = [os.path.expandvars(s.path) for s in load_cluster(cluster).storage.values()] if cluster else []
    writable = [Path(p) for p in shared if p.startswith("/") and "$" not in p and os.access(p, os.W_OK)]
    places = paths or [Path.cwd(), *writable]
    if cluster is not None:
        with working(f"running the checks as a job on {cluster}", quiet=as_json):
            rows = checks.run_doctor_job(
                cluster, nodes or 1, places, full=full, account=account, partition=partition, wait_seconds=wait
            )
    elif nodes is not None:
        raise ConfigError(
            "launch.cluster-missing",
            f"--nodes {nodes} needs a cluster",
            hint="name it: windlass doctor --cluster lumi-g --nodes 2",
        )
    else:
        with working("checking disks, clock and environment", quiet=as_json):
            rows = checks.host_checks(places, megabytes=megabytes)
        if not no_devices and find_spec("torch") is None:
            advice = "pip install 'windlass[train]', or the site's own torch"
            missing = "torch is not installed in this environment"
            rows.append(checks.DoctorCheck("torch", "here", "fail", missing, advice))
        elif not no_devices:
            with (
                working("checking devices and links (one worker per device)", quiet=as_json),
                TemporaryDirectory(prefix="windlass-doctor-") as folder,
            ):
                count = devices or checks.count_devices()
                rows += checks.examine(checks.run_workers(Path(folder), count, full=full), count, Path(folder))
    diagnosis = checks.Diagnosis((*rows, *checks.data_checks(store, tokenizer)))
    lines = [(c.level, c.topic, c.where, c.text + (f" -> {c.hint}" if c.hint else "")) for c in diagnosis.checks]
    show(
        as_json,
        diagnosis.as_dict(),
        table("windlass doctor", ("", "check", "where", "result"), lines),
        f"verdict: {diagnosis.verdict}",
    )
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)
