"""`windlass export` and `windlass import`: write and read Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.options import JsonOption, ModelArgument, StepOption
from windlass.cli.output import bar, show, working
from windlass.errors import WindlassError
from windlass.units import parse_bytes, print_bytes, print_share

if TYPE_CHECKING:
    from windlass.convert.verify import LogitComparison


def export(
    run: ModelArgument,
    to: Annotated[Path, typer.Option("--to", help="New folder; it must not exist yet.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="fp32, bf16 or fp16 (default: bf16; fp32 for an fp32 run; an imported model keeps its dtype).",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare logits with transformers before finishing.")
    ] = True,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text file to compare logits on (default: Python's standard library).")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Tokenizer to use (default: the run's).")
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard", help="Maximum size of a weight file; the export needs about as much memory.")
    ] = "4 GB",
    step: StepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a Hugging Face folder (weights, config, tokenizer, model card) and verify its logits."""
    with working("importing torch", quiet=as_json):
        from windlass.convert.export import export as write_folder
        from windlass.files import read_text_file
        from windlass.registry import PRESETS
        from windlass.report import collect, write
        from windlass.runs import open_run

    sample = read_text_file(text, "text to compare on") if text is not None else None
    try:  # README.md from the ledger, the energy and the report
        summary = collect.collect(open_run(run))
    except WindlassError:  # there is no run folder
        readme = None
    else:
        family = summary.recipe.get("model", {}).get("family")
        library = PRESETS.load(family).hf.library if family else "transformers"
        readme = write.hub_readme(summary, library)
    with bar("exporting", quiet=as_json) as progress:
        exported = write_folder(
            run,
            to,
            step=step,
            dtype=dtype,
            tokenizer=tokenizer,
            card=readme,
            verify=verify,
            text=sample,
            shard_bytes=parse_bytes(shard),
            progress=progress,
        )
    at_step = "" if exported.step is None else f"step {exported.step:,}, "
    show(
        as_json,
        exported,
        f"{exported.folder}: {at_step}{exported.tensors} tensors, {print_bytes(exported.bytes)} of {exported.dtype} "
        f"in {exported.files} file(s); tokenizer: {exported.tokenizer}",
        exported.note,
        "not verified (--no-verify)" if exported.check is None else _check_text(exported.check),
    )


def _check_text(check: LogitComparison) -> str:
    return (
        f"logits verified ({check.how}) on {check.positions:,} positions of {check.text}: "
        f"largest difference {check.difference:.2g}, top-1 token agrees at {print_share(check.agreement, digits=2)}"
    )


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Hugging Face folder, or a run whose vocabulary should grow.")
    ],
    run: Annotated[Path | None, typer.Option("--run", help="New run folder (default: runs/<name of DIR>).")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="New tokenizer; its embeddings are computed from those of the old tokenizer's pieces."
        ),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="Sequence length to record (up to the model's maximum).")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare logits with transformers.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Import a Hugging Face model into a run folder; `save.load = "RUN"` trains from it with any layout."""
    with working("importing torch", quiet=as_json):
        from windlass.convert.imports import import_model
    with working(f"reading {folder}", quiet=as_json):
        imported = import_model(
            folder, run or Path("runs") / folder.resolve().name, tokenizer=tokenizer, seq_len=seq_len, verify=verify
        )
    show(
        as_json,
        imported,
        f"{imported.run}: {imported.family}, {imported.parameters:,} parameters, {imported.dtype}, "
        f"vocabulary {imported.vocab:,}",
        *imported.notes,
        None if imported.check is None else _check_text(imported.check),
        f'to continue training from it: [save] load = "{imported.run}"',
    )
