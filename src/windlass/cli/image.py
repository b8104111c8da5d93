"""`windlass image`: build a container image with windlass as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import AccountOption, JsonOption
from windlass.cli.output import show


def image(
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Cluster name (default: the one this host belongs to).")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="Image file to start from, or the tag of NVIDIA's image, depending on the definition."
        ),
    ] = None,
    definition: Annotated[
        str | None, typer.Option("--definition", help="Definition file (default: the cluster file's).")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Image to build.")] = Path("windlass.sif"),
    account: AccountOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script; submit nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a container image with windlass on top of the site's or NVIDIA's PyTorch image, as a CPU job."""
    from windlass.launch import image as images
    from windlass.launch.array import find_cluster
    from windlass.launch.script import render
    from windlass.launch.slurm import SlurmScheduler
    from windlass.launch.submit import submit_job

    machine = find_cluster(cluster)
    job = images.image_job(machine, base=base, output=output, definition=definition, account=account)
    chosen = images.read_definition(definition or machine.container.definition)
    problems = images.check_image(machine, chosen, workdir=Path.cwd())
    value = {"cluster": machine.name, "definition": str(chosen.path), "output": str(output.absolute())}
    if dry_run:
        notes = [{"code": p.code, "message": p.message, "hint": p.hint} for p in problems]
        texts = [f"{p.code}: {p.message}\n  -> {p.hint}" for p in problems]
        if not as_json:
            print(render(job, machine))
        show(as_json, {**value, "script": render(job, machine), "problems": notes}, *texts)
        return
    for problem in problems:
        raise problem
    submitted = submit_job(job, machine, SlurmScheduler())
    show(as_json, {**value, "job": submitted}, f"submitted: {submitted}; log {job.run_dir}/logs/{submitted}.out")
