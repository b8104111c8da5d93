"""`windlass finetune`: train and test a text classifier on top of a model."""

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import DeviceOption, JsonOption, ModelArgument, ProcessesOption, SaveOption, StepOption
from windlass.cli.output import show
from windlass.files import write_json


def finetune(
    run: ModelArgument,
    train: Annotated[Path, typer.Option("--train", help="TSV with the columns text and label (or target).")],
    test: Annotated[
        Path | None, typer.Option("--test", help="TSV to test on (default: a fifth of the training file).")
    ] = None,
    frozen: Annotated[bool, typer.Option("--frozen/--full", help="Train only a head, or every weight.")] = False,
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts per step over all processes.")] = 16,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate (default: 1e-3 frozen, 5e-5 full).")] = None,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a text that are read.")] = 256,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds to run (0, 1, 2, ...).")] = 1,
    devices: ProcessesOption = None,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the result as JSON to this file.")] = None,
    step: StepOption = None,
    device: DeviceOption = None,
    save: SaveOption = True,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a classifier on texts and labels; accuracy and macro-F1 over several seeds."""
    from windlass.cli.evaluate import score_table
    from windlass.clusters.scheduler import place
    from windlass.evaluate.finetune import TuneOptions, start_workers
    from windlass.evaluate.finetune import finetune as run_finetune

    rank_place = place()
    if devices is not None and devices > 1 and rank_place.source == "single":
        raise typer.Exit(start_workers(devices))
    options = TuneOptions(frozen=frozen, epochs=epochs, batch=batch, lr=lr, length=length, seeds=tuple(range(seeds)))
    result = run_finetune(run, train, test, options, place=rank_place, step=step, device=device, save=save)
    if rank_place.rank:
        return
    rate = result.scores[0].detail["texts_per_second"]
    answer = {
        **{score.metric: score.value for score in result.scores},  # flat, so that a sweep finds them
        "texts_per_second": rate,
        "train": result.train,
        "labels": result.labels,
        "processes": result.processes,
        "scores": [score.line() for score in result.scores],
    }
    if output is not None:
        write_json(output, answer)
    summary = f"{len(result.labels)} labels, {result.processes} process(es), {rate:,.1f} texts/s in training"
    show(as_json, answer, score_table(result.scores), summary)
