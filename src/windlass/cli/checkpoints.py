"""`windlass checkpoints RUN`: what is on the disk, what is whole, and why each stays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.checkpoint.inventory import Entry
    from windlass.config import SaveConfig


def register(app: typer.Typer) -> None:
    app.command("checkpoints")(checkpoints)


def checkpoints(
    run: Annotated[Path, typer.Argument(help="Run folder, or its name under runs/.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List a run's checkpoints: whole or damaged, their metric, and the rule that keeps each. Nothing is changed; exit code 7 when one is damaged."""
    from windlass.checkpoint.inventory import inventory
    from windlass.cli.output import bar, print_json
    from windlass.errors import CheckpointError
    from windlass.runs import open_run

    folder = open_run(run)
    config = folder.recipe().save
    with bar("checking", quiet=not verify or as_json) as told:
        found = inventory(folder, config, verify=verify, told=told)
    print_json(_document(folder.path, config, found)) if as_json else _print(folder.path, config, found)
    if any(entry.state == "damaged" for entry in found):
        raise typer.Exit(CheckpointError.exit_code)


def _document(path: Path, config: SaveConfig, found: list[Entry]) -> dict[str, Any]:
    from windlass.checkpoint.inventory import resumes_from

    return {
        "run": path,
        "rules": config.model_dump(include={"every", "keep_last", "keep_best", "keep_every", "metric", "quota"}),
        "bytes": _total(found),
        "resumes_from": resumes_from(found),
        "checkpoints": found,
    }


def _total(found: list[Entry]) -> int | None:
    sizes = [entry.bytes for entry in found]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _print(path: Path, config: SaveConfig, found: list[Entry]) -> None:
    from windlass.checkpoint.inventory import resumes_from
    from windlass.checkpoint.keep import rules
    from windlass.cli.output import console, table
    from windlass.units import print_bytes

    out = console()
    if not found:
        out.print(f"{path} has no checkpoints yet", markup=False)
        return
    columns = ("step", "tokens", "size", config.metric, "saved", "devices", "state", "why it stays, or what is wrong")
    out.print(table(None, columns, [_row(entry) for entry in found], right=(0, 1, 2, 3, 5)))
    step = resumes_from(found)
    goes_on = "nothing here can be resumed from" if step is None else f"a resume goes on from step {step:,}"
    out.print(f"{print_bytes(_total(found))} in all; kept are {rules(config)}; {goes_on}", markup=False, soft_wrap=True)


def _row(entry: Entry) -> tuple[str, ...]:
    from windlass.units import print_bytes, print_tokens

    step = "unknown" if entry.step is None else f"{entry.step:,}"
    metric = "" if entry.metric is None else f"{entry.metric:.4f}"
    why = entry.problem or "; ".join(entry.kept_by) or ("the next save removes it" if entry.usable else "")
    devices = "" if entry.world_size is None else str(entry.world_size)
    tokens = "" if entry.tokens is None else print_tokens(entry.tokens)
    return step, tokens, print_bytes(entry.bytes), metric, _when(entry.written_at), devices, entry.state, why


def _when(moment: float | None) -> str:
    import time

    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
