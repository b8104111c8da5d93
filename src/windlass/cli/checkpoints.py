"""`windlass checkpoints RUN`: the checkpoints of a run, which are complete, and which rule keeps each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.output import bar, show, table
from windlass.errors import CheckpointError
from windlass.units import print_bytes, print_tokens

if TYPE_CHECKING:
    from windlass.checkpoint.inventory import CheckpointEntry


def checkpoints(
    run: Annotated[Path, typer.Argument(help="Run folder, or its name under runs/.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List a run's checkpoints: complete or damaged, their metric, and the rule that keeps each.

    Changes nothing; exit code 7 when one is damaged.
    """
    from windlass.checkpoint.inventory import inventory, resumes_from
    from windlass.checkpoint.keep import rules
    from windlass.runs import open_run

    folder = open_run(run)
    config = folder.recipe().save
    with bar("checking", quiet=not verify or as_json) as progress:
        entries = inventory(folder, config, verify=verify, progress=progress)
    sizes, step = [entry.bytes for entry in entries], resumes_from(entries)
    total_bytes = None if None in sizes else sum(size for size in sizes if size is not None)
    document = {
        "run": folder.path,
        "rules": config.model_dump(include={"every", "keep_last", "keep_best", "keep_every", "metric", "quota"}),
        "bytes": total_bytes,
        "resumes_from": step,
        "checkpoints": entries,
    }
    if entries:
        columns = ("step", "tokens", "size", config.metric, "saved", "devices", "state", "kept because / problem")
        resume = "No checkpoint can be resumed." if step is None else f"Resume starts at step {step:,}."
        total = f"Total {print_bytes(total_bytes)}. Retention: {rules(config)}. {resume}"
        show(as_json, document, table(None, columns, [_row(e) for e in entries], right=(0, 1, 2, 3, 5)), total)
    else:
        show(as_json, document, f"{folder.path} has no checkpoints yet")
    if any(entry.state == "damaged" for entry in entries):
        raise typer.Exit(CheckpointError.exit_code)


def _row(entry: CheckpointEntry) -> tuple[str, ...]:
    saved_at = None if entry.written_at is None else time.localtime(entry.written_at)
    return (
        "unknown" if entry.step is None else f"{entry.step:,}",
        "" if entry.tokens is None else print_tokens(entry.tokens),
        print_bytes(entry.bytes),
        "" if entry.metric is None else f"{entry.metric:.4f}",
        time.strftime("%Y-%m-%d %H:%M", saved_at) if saved_at else "",
        "" if entry.world_size is None else str(entry.world_size),
        entry.state,
        entry.problem or "; ".join(entry.kept_by) or ("the next save removes it" if entry.usable else ""),
    )
