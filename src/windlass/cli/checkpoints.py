"""`windlass checkpoints RUN`: the checkpoints of a run, which are complete, and which rule keeps each."""

import time
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import JsonOption
from windlass.cli.output import bar, show, table, text_of
from windlass.errors import CheckpointError
from windlass.units import print_bytes, print_tokens


def checkpoints(
    run: Annotated[Path, typer.Argument(help="Run folder, or its name in runs/.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List a run's checkpoints: complete or damaged, their metric, and the rule that keeps each.

    Changes nothing; the exit code is 7 if one is damaged.
    """
    from windlass.checkpoint import inventory, keep
    from windlass.runs import open_run

    folder = open_run(run)
    config = folder.recipe().save
    with bar("checking", quiet=not verify or as_json) as progress:
        entries = inventory.inventory(folder, config, verify=verify, progress=progress)
    sizes, step = [entry.bytes for entry in entries], inventory.resumes_from(entries)
    total_bytes = None if None in sizes else sum(size for size in sizes if size is not None)
    document = {
        "run": folder.path,
        "rules": config.model_dump(include={"every", "keep_last", "keep_best", "keep_every", "metric", "quota"}),
        "bytes": total_bytes,
        "resumes_from": step,
        "checkpoints": entries,
    }
    rows = [
        (
            "unknown" if e.step is None else f"{e.step:,}",
            "" if e.tokens is None else print_tokens(e.tokens),
            print_bytes(e.bytes),
            text_of(e.metric, ".4f", ""),
            "" if e.written_at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(e.written_at)),
            text_of(e.world_size, "", ""),
            e.state,
            e.problem or "; ".join(e.kept_by) or ("the next save removes it" if e.usable else ""),
        )
        for e in entries
    ]
    columns = ("step", "tokens", "size", config.metric, "saved", "devices", "state", "kept because / problem")
    resume = "No checkpoint can be resumed." if step is None else f"Resume starts at step {step:,}."
    total = f"Total {print_bytes(total_bytes)}. Retention: {keep.rules(config)}. {resume}"
    listed = (table(None, columns, rows, right=(0, 1, 2, 3, 5), drop=("devices", "tokens", "saved")), total)
    show(as_json, document, *(listed if entries else [f"{folder.path} has no checkpoints yet"]))
    if any(entry.state == "damaged" for entry in entries):
        raise typer.Exit(CheckpointError.exit_code)
