"""`windlass finetune`: train and test a model on labelled texts, with several seeds."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.options import JsonOption, ModelArgument, ProcessesOption, SaveOption, StepOption, option_groups
from windlass.cli.output import show, working
from windlass.files import write_json
from windlass.units import counted

if TYPE_CHECKING:
    from windlass.config import Recipe
    from windlass.runs.folder import Run


@dataclass(frozen=True)
class FinetuneOptions:
    train: Annotated[
        Path | None, typer.Option("--train", help="TSV, CSV or JSONL with the columns text and label.")
    ] = None
    validation: Annotated[
        Path | None,
        typer.Option("--validation", help="Examples used to choose the best weights (default: a tenth of --train)."),
    ] = None
    test: Annotated[
        Path | None, typer.Option("--test", help="Examples to test on (default: report the validation scores).")
    ] = None
    task_file: Annotated[
        Path | None, typer.Option("--tune", help="TOML file of a task with [tune] keys; options override its keys.")
    ] = None
    task: Annotated[
        str | None, typer.Option("--task", help="classify, multi_label, regress or tag (default: classify).")
    ] = None
    columns: Annotated[
        str | None, typer.Option("--columns", help="Names of the columns: text,label or text,second text,label.")
    ] = None
    frozen: Annotated[
        bool | None, typer.Option("--frozen/--full", help="Train only a head, or every weight (default).")
    ] = None
    epochs: Annotated[
        float | None, typer.Option("--epochs", min=0.01, help="Passes over the training examples (default: 3).")
    ] = None
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Texts per step over all processes (default: 16).")
    ] = None
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate (default: 1e-3 frozen, 5e-5 full).")] = None
    length: Annotated[int | None, typer.Option("--length", min=1, help="Maximum tokens per text (default: 256).")] = (
        None
    )
    patience: Annotated[
        int | None,
        typer.Option("--patience", min=0, help="Stop after this many epochs without a better score; 0: never."),
    ] = None

    def keys(self) -> dict[str, Any]:
        """Of the `[tune]` table; None where the option was not given."""
        names = self.columns.split(",") if self.columns is not None else []
        if len(names) not in (0, 2, 3):
            raise typer.BadParameter("--columns takes two or three names")
        columns = {"text": names[0], "label": names[-1]} if names else {}
        columns |= {"pair": names[1]} if len(names) == 3 else {}
        paths = {"train": self.train, "validation": self.validation, "test": self.test}
        files = {name: path and str(path) for name, path in paths.items()}
        return (
            {name: getattr(self, name) for name in ("task", "frozen", "epochs", "batch", "patience")} | files | columns
        )


@option_groups
def finetune(
    run: ModelArgument,
    options: FinetuneOptions,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds to run (0, 1, 2, ...).")] = 1,
    devices: ProcessesOption = None,
    folder: Annotated[Path, typer.Option("--runs", help="Folder for the run of each seed.")] = Path("runs"),
    output: Annotated[Path | None, typer.Option("--output", help="Also write the result as JSON to this file.")] = None,
    step: StepOption = None,
    save: SaveOption = True,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune any local model on labelled texts; prints the mean and spread of the scores over several seeds.

    Each seed is a run like any other: it resumes where it stopped, and `watch`, `report` and `dash` show it. A
    finished run is not trained again; it is an error if its settings differ.
    """
    with working("importing torch", quiet=as_json):
        from windlass.cli.evaluate import score_table
        from windlass.clusters.scheduler import place
        from windlass.convert.config_json import is_hf_folder
        from windlass.evaluate.finetune import LENGTH, mean_scores, read_task, seed_result, summary, tune_recipe
        from windlass.runs.folder import open_run
        from windlass.runs.scores import append_scores
        from windlass.runs.starts import last_start

    tune, seq_len = read_task(options.task_file, options.keys())
    # A file of a task has the task's name; else a run is named after its training file, a score after its test file.
    name = (options.task_file or Path(tune.train or "")).stem
    data_set = (options.task_file or Path(tune.test or tune.train or "")).stem
    position = place()
    processes = (devices or 1) if position.source == "single" else position.world_size
    length = options.length or seq_len or LENGTH
    recipes = [tune_recipe(run, name, tune, length=length, lr=options.lr, seed=n, step=step) for n in range(seeds)]
    finished = [train_seed(recipe, folder / recipe.name, processes, quiet=as_json) for recipe in recipes]
    if position.rank:
        return
    results = [seed_result(seed_run) for seed_run in finished]
    if (used := last_start(finished[0])) is not None:  # which may have finished earlier
        processes = used.devices
    rates = [result.texts_per_second for result in results if result.texts_per_second is not None]
    rate = sum(rates) / len(rates) if rates else None
    about = {"kind": tune.task, "frozen": tune.frozen, "epochs": tune.epochs, "processes": processes}
    detail = {**about, "texts_per_second": rate, "seeds": [asdict(result) for result in results]}
    scores = mean_scores(data_set, results, detail)
    if save and not is_hf_folder(run):
        append_scores(open_run(run), scores, step=step, tokens=None)
    labels = finished[0].recipe().tune.labels  # type: ignore[union-attr]
    answer = {
        **{score.metric: score.value for score in scores},  # flat, so that a sweep finds them
        **summary(tune.selected_metric, results),
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
    show(as_json, answer, score_table(scores), f"{len(labels)} labels, {counted(processes, 'worker')}, {speed}")


def train_seed(recipe: "Recipe", path: Path, processes: int, *, quiet: bool) -> "Run":
    """The finished run of a seed; the command ends where it did not finish. One of other settings is refused: its
    scores are not those that were asked for."""
    from windlass.cli.train import train_start
    from windlass.clusters.scheduler import place
    from windlass.config import Loaded
    from windlass.config.toml_text import to_toml
    from windlass.errors import EXIT_DONE, RunError
    from windlass.launch.start import create_planned_run, local_cluster, resolve_recipe
    from windlass.runs.events import Finished
    from windlass.runs.folder import Run, check_run_folder

    run = Run(path)
    text = to_toml(recipe.model_dump(mode="json", exclude_defaults=True), "Written by `windlass finetune`.")
    loaded = Loaded(recipe, text, None, {})
    nodes = place().nodes
    try:
        check_run_folder(run, resolve_recipe(loaded, run, local_cluster(recipe, processes // nodes), nodes)[0].recipe)
    except RunError as error:
        raise RunError(error.code, error.message, hint=f"use another folder (--runs), or remove {path}") from None
    if any(run.events(Finished)):
        return run
    create = partial(create_planned_run, path, loaded)
    code = train_start(
        run, lambda per_node, nodes: create(local_cluster(recipe, per_node), nodes)[1], devices=processes, quiet=quiet
    )
    if code != EXIT_DONE:
        raise typer.Exit(code)
    return run
