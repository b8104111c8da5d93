"""`windlass export`, `import`: from a checkpoint to a folder that others load, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.words import AsJson, AtStep, Which


def register(app: typer.Typer) -> None:
    app.command("export")(export)
    app.command("import")(import_)


def export(
    run: Which,
    to: Annotated[Path, typer.Option("--to", help="New folder; an existing one is refused.")],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="fp32, bf16 or fp16; bf16 unless the run computed in fp32, an import as it came."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare logits with transformers before it is done.")
    ] = True,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text file to compare on; Python's library when left out.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Tokenizer; the run's when left out.")] = None,
    shard: Annotated[str, typer.Option("--shard", help="Largest file; also about the memory that is needed.")] = "4 GB",
    step: AtStep = None,
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face folder: weights, config, tokenizer and model card, checked by its logits."""
    from windlass.cli.output import bar, console, print_json
    from windlass.evaluate.export import export as write
    from windlass.evaluate.record import read_utf8
    from windlass.units import parse_bytes, print_bytes

    said = read_utf8(text, "text to compare on") if text is not None else None
    with bar("exporting", quiet=as_json) as tell:
        made = write(
            run, to, step=step, dtype=dtype, tokenizer=tokenizer, card=_card(run), verify=verify, text=said, shard_bytes=parse_bytes(shard), tell=tell,
        )  # fmt: skip
    if as_json:
        print_json(made)
        return
    out = console()
    step_taken = "" if made.step is None else f"step {made.step:,}, "
    lines = [
        f"{made.folder}: {step_taken}{made.tensors} tensors, {print_bytes(made.bytes)} of {made.dtype} in {made.files} file(s); "
        f"tokenizer: {made.tokenizer}",
        *([made.note] if made.note is not None else []),
        "not verified (--no-verify)" if made.check is None else _checked(made.check),
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


def _checked(check: Any) -> str:
    return (
        f"logits verified ({check.how}) on {check.positions:,} positions of {check.text}: largest difference {check.difference:.2g}, "
        f"same first choice at {check.agreement:.2%}"
    )


def _card(run: Path) -> str | None:
    """README.md from the ledger, the energy and the report; None where there is no run folder."""
    from windlass.errors import WindlassError
    from windlass.report.collect import collect
    from windlass.report.evaluations import evaluation
    from windlass.report.markdown import markdown
    from windlass.report.model_card import content_summary, data_section, model_card
    from windlass.runs import open_run

    try:
        summary = collect(open_run(run))
    except WindlassError:
        return None
    library = "windlass" if summary.recipe.get("model", {}).get("family") == "retnet" else "transformers"
    front = f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [windlass]\n---\n\n"
    return front + markdown(
        summary.name, [model_card(summary), data_section(summary), evaluation(summary), content_summary(summary)]
    )


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Hugging Face folder, or a run whose vocabulary is to grow.")
    ],
    run: Annotated[Path | None, typer.Option("--run", help="New run folder; runs/<name of DIR> when left out.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="New tokenizer: embeddings are made for it from the old tokenizer's pieces."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="Sequence length to note; at most what the model allows.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare logits with transformers.")] = True,
    as_json: AsJson = False,
) -> None:
    """Read a Hugging Face model into a run folder: `save.load = "RUN"` starts from it at any layout."""
    from windlass.cli.output import bar, console, print_json
    from windlass.evaluate.imports import import_model

    target = run or Path("runs") / folder.resolve().name
    with bar("importing", quiet=as_json):
        made = import_model(folder, target, tokenizer=tokenizer, seq_len=seq_len, verify=verify)
    if as_json:
        print_json(made)
        return
    out = console()
    out.print(
        f"{made.run}: {made.family}, {made.parameters:,} parameters, {made.dtype}, vocabulary {made.vocab:,}",
        markup=False,
    )
    for line in made.notes:
        out.print(line, markup=False, soft_wrap=True)
    if made.check is not None:
        out.print(_checked(made.check), markup=False)
    out.print(f'to go on training from it: [save] load = "{made.run}"', markup=False)
