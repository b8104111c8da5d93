"""`windlass finetune`: how well does the model learn to sort texts?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.words import AsJson, AtStep, Device, Save, Which


def register(app: typer.Typer) -> None:
    app.command("finetune")(finetune)


def finetune(
    run: Which,
    train: Annotated[Path, typer.Option("--train", help="TSV with the columns text and label (or target).")],
    test: Annotated[
        Path | None, typer.Option("--test", help="TSV to test on; a fifth of the training file when left out.")
    ] = None,
    frozen: Annotated[bool, typer.Option("--frozen/--full", help="Only a head learns, or every weight.")] = False,
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts of one step over all processes.")] = 16,
    lr: Annotated[float | None, typer.Option("--lr", help="1e-3 frozen, 5e-5 full, when left out.")] = None,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a text that are read.")] = 256,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="So many seeds: 0, 1, 2, ...")] = 1,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Processes on this machine, one per device.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the result as JSON here.")] = None,
    step: AtStep = None,
    device: Device = None,
    save: Save = True,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a classifier on texts and labels; accuracy and macro-F1 over several seeds."""
    from windlass.clusters.scheduler import place
    from windlass.evaluate.classify import HowToTune
    from windlass.evaluate.tune import start_workers, work

    where = place()
    if devices is not None and devices > 1 and where.source == "single":
        raise typer.Exit(start_workers(devices))
    how = HowToTune(frozen=frozen, epochs=epochs, batch=batch, lr=lr, length=length, seeds=tuple(range(seeds)))
    made = work(run, train, test, how, where=where, step=step, device=device, save=save)
    if where.rank:
        return
    _tell_tuned(made, output, as_json)


def _tell_tuned(made: Any, output: Path | None, as_json: bool) -> None:
    from windlass.cli.evaluate import score_table
    from windlass.cli.output import console, print_json
    from windlass.files import write_json

    rate = made.scores[0].detail["texts_per_second"]
    numbers = {score.metric: score.value for score in made.scores}  # flat, so that a sweep finds them
    answer = {
        **numbers,
        "texts_per_second": rate,
        "train": made.train,
        "labels": made.labels,
        "processes": made.processes,
    }
    answer["scores"] = [score.line() for score in made.scores]
    if output is not None:
        write_json(output, answer)
    if as_json:
        print_json(answer)
        return
    console().print(score_table(made.scores))
    console().print(
        f"{len(made.labels)} labels, {made.processes} process(es), {rate:,.1f} texts/s in training", markup=False
    )
