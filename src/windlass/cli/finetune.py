"""`windlass finetune`: train and test a model on labelled texts, with several seeds."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import JsonOption, ModelArgument, ProcessesOption, SaveOption, StepOption
from windlass.cli.output import show
from windlass.files import write_json


def finetune(
    run: ModelArgument,
    train: Annotated[
        Path | None, typer.Option("--train", help="TSV, CSV or JSONL with the columns text and label.")
    ] = None,
    test: Annotated[
        Path | None, typer.Option("--test", help="Examples to test on (default: a tenth of the training file).")
    ] = None,
    task_file: Annotated[
        Path | None, typer.Option("--tune", help="TOML file of a task with [tune] keys; options come before its keys.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="classify, multi_label, regress or tag (default: classify).")
    ] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", help="Names of the columns: text,label or text,second text,label.")
    ] = None,
    frozen: Annotated[
        bool | None, typer.Option("--frozen/--full", help="Train only a head, or every weight (default).")
    ] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", min=0.01, help="Default: 3.")] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Texts per step over all processes (default: 16).")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate (default: 1e-3 frozen, 5e-5 full).")] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Tokens of a text that are read (default: 256).")
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option("--patience", min=0, help="Stop after so many epochs without a better score; 0: never."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds to run (0, 1, 2, ...).")] = 1,
    devices: ProcessesOption = None,
    folder: Annotated[Path, typer.Option("--runs", help="Folder for the run of each seed.")] = Path("runs"),
    output: Annotated[Path | None, typer.Option("--output", help="Also write the result as JSON to this file.")] = None,
    step: StepOption = None,
    save: SaveOption = True,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune any local model on labelled texts; mean and spread of its scores over several seeds.

    Each seed is a run like any other: it resumes where it stopped, and `watch`, `report` and `dash` show it.
    """
    from windlass.cli.evaluate import score_table
    from windlass.cli.train import train_start
    from windlass.clusters.scheduler import place
    from windlass.config import Loaded
    from windlass.config.toml_text import to_toml
    from windlass.config.tune import selected_metric
    from windlass.convert.config_json import is_hf_folder
    from windlass.errors import EXIT_DONE
    from windlass.evaluate.finetune import LENGTH, mean_scores, read_task, seed_result, summary, tune_recipe
    from windlass.evaluate.scores import append_scores
    from windlass.launch.start import create_planned_run, local_cluster
    from windlass.runs.events import Finished
    from windlass.runs.folder import Run, open_run

    names = columns.split(",") if columns is not None else None
    if names is not None and len(names) not in (2, 3):
        raise typer.BadParameter("--columns takes two or three names")
    chosen = {} if names is None else {"text": names[0], "label": names[-1]}
    chosen |= {"pair": names[1]} if names is not None and len(names) == 3 else {}
    files = {"train": None if train is None else str(train), "test": None if test is None else str(test)}
    options = {
        "task": task,
        "frozen": frozen,
        "epochs": epochs,
        "batch": batch,
        "patience": patience,
        **files,
        **chosen,
    }
    tune, seq_len = read_task(task_file, options)
    data_set = task_file.stem if task_file is not None else Path(tune.test or tune.train or "").stem
    run_name = task_file.stem if task_file is not None else Path(tune.train or "").stem
    position = place()
    processes = (devices or 1) if position.source == "single" else position.world_size
    finished = []
    for seed in range(seeds):
        recipe = tune_recipe(
            run, run_name, tune, length=length or seq_len or LENGTH, lr=lr, seed=seed, devices=processes, step=step
        )
        seed_run = Run(folder / recipe.name)
        if not any(seed_run.events(Finished)):
            text = to_toml(recipe.model_dump(mode="json", exclude_defaults=True), "Written by `windlass finetune`.")

            def create(per_node: int, nodes: int) -> str:
                loaded = Loaded(recipe, text, None, {})  # noqa: B023 - called at once
                cluster = local_cluster(recipe, per_node)  # noqa: B023
                return create_planned_run(seed_run.path, loaded, cluster, nodes)[1]  # noqa: B023

            code = train_start(seed_run, create, devices=processes, quiet=as_json)
            if code != EXIT_DONE:
                raise typer.Exit(code)
        finished.append(seed_run)
    if position.rank:
        return
    results = [seed_result(seed_run) for seed_run in finished]
    rates = [result.texts_per_second for result in results if result.texts_per_second is not None]
    rate = sum(rates) / len(rates) if rates else None
    detail = {"kind": tune.task, "frozen": tune.frozen, "epochs": tune.epochs, "processes": processes, "texts_per_second": rate,
              "seeds": [asdict(result) for result in results]}  # fmt: skip
    scores = mean_scores(data_set, results, detail)
    if save and not is_hf_folder(run):
        append_scores(open_run(run), scores, step=step, tokens=None)
    labels = finished[0].recipe().tune.labels  # type: ignore[union-attr]
    answer = {
        **{score.metric: score.value for score in scores},  # flat, so that a sweep finds them
        **summary(selected_metric(tune), results),
        "texts_per_second": rate,
        "train": tune.train,
        "labels": labels,
        "processes": processes,
        "runs": [str(seed_run.path) for seed_run in finished],
        "scores": [score.line() for score in scores],
    }
    if output is not None:
        write_json(output, answer)
    speed = "speed not measured" if rate is None else f"{rate:,.1f} texts/s in training"
    show(as_json, answer, score_table(scores), f"{len(labels)} labels, {processes} process(es), {speed}")
