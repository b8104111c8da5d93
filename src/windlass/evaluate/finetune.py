"""`windlass finetune`: a recipe per seed, each a run of the training loop, and the mean of their scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windlass.config import Recipe
from windlass.config.load import read_toml, validate
from windlass.config.tune import EXAMPLE_TASKS, TuneConfig, lower_is_better, score_range
from windlass.convert.config_json import is_hf_folder, recipe_name
from windlass.convert.source import find_source, find_tokenizer
from windlass.data.examples import read_example_sets
from windlass.errors import ConfigError, RunError
from windlass.files import read_json_lines
from windlass.runs.events import Evaluated
from windlass.runs.folder import Run
from windlass.runs.scores import EvalScore, wilson_interval

# Student's t for the 95 % interval of a mean, by number of seeds; from 11 on 2.2 or less.
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


# What the command does where neither its options nor a file of the task say otherwise.
DEFAULTS: dict[str, Any] = {"task": "classify", "epochs": 3, "batch": 16}
LENGTH = 256  # the first so many tokens of a text are read


def read_task(path: Path | None, options: dict[str, Any]) -> tuple[TuneConfig, int | None]:
    """A task as its file describes it ([tune], and [data] seq_len), overlaid by options that are not None; and the
    file's seq_len."""
    raw = read_toml(path)[0] if path is not None else {}
    where = str(path or "windlass finetune")
    if unknown := sorted(set(raw) - {"tune", "data"}):
        raise ConfigError(
            "tune.task-file",
            f"{where}: a task has [tune] and [data], not {', '.join(unknown)}",
            hint="see recipes/lepiszcze for examples",
        )
    table = {**DEFAULTS, **raw.get("tune", {}), **{key: value for key, value in options.items() if value is not None}}
    tune = validate(TuneConfig, table, where)
    if not tune.reads_examples:
        raise ConfigError(
            "tune.task-file",
            f"{where}: `windlass finetune` is for tasks on examples, not {tune.task}",
            hint=f"use one of {', '.join(EXAMPLE_TASKS)}; for other tasks, use `windlass train` with a [tune] table",
        )
    if tune.train is None:
        raise ConfigError("tune.no-examples", f"{where} names no training examples", hint="name them with --train FILE")
    return tune, raw.get("data", {}).get("seq_len")


def tune_recipe(
    model: Path,
    name: str,
    tune: TuneConfig,
    *,
    length: int,
    lr: float | None,
    seed: int,
    step: int | None,
) -> Recipe:
    """The recipe of one seed for the task `name`: any local Hugging Face folder through transformers, or a run of
    ours."""
    if is_hf_folder(model):
        table: dict[str, Any] = {"family": "hf", "config": str(model)}
        weights, tokenizer = model, None
    else:
        source = find_source(model, step)
        table = source.recipe.model.model_dump(mode="json")
        weights, tokenizer = source.folder, str(find_tokenizer(source).path)
    raw = {
        "name": f"{recipe_name(model)}-{recipe_name(Path(name))}-seed{seed}",
        "seed": seed,
        "model": table,
        "tune": tune.model_dump(mode="json", exclude_defaults=True),
        "data": {"seq_len": length, "tokenizer": tokenizer},
        "optim": {
            "lr": lr if lr is not None else 1e-3 if tune.frozen else 5e-5,
            "schedule": "linear",
            "min_lr_ratio": 0.0,
            "weight_decay": 0.01,
            "beta2": 0.999,
        },
        "train": {"precision": "fp32"},
        "save": {"load": str(weights), "keep_last": 1},
    }
    return validate(Recipe, raw, "windlass finetune")


@dataclass(frozen=True)
class SeedResult:
    run: str
    seed: int
    scores: dict[str, float]
    step: int  # of the weights that were scored
    count: int  # examples that were scored
    texts_per_second: float | None
    validation: float | None = None  # the best value of the selected score on the validation examples
    energy_joules: float | None = None
    train_seconds: float | None = None  # of its steps


def seed_result(run: Run) -> SeedResult:
    """Scores of a finished run: of its test examples, or of its best validation where it has none."""
    recipe = run.recipe()
    assert recipe.tune is not None
    lines = [line for line in read_json_lines(run.eval_file) if line.get("value") is not None]
    scores = {line["metric"]: float(line["value"]) for line in lines}
    step, count = (int(lines[-1]["step"]), int(lines[-1]["count"])) if lines else (0, 0)
    metric = recipe.tune.selected_metric
    passes = [({**event.scores, "loss": event.val_loss}, event.step) for event in run.events(Evaluated) if event.scores]
    judged = [(values, at) for values, at in passes if values.get(metric) is not None]
    sign = -1 if lower_is_better(metric) else 1
    best = max(judged, key=lambda one: sign * (one[0][metric] or 0.0), default=None)
    if not scores:
        if best is None:
            raise RunError(
                "tune.no-scores", f"{run.path} has no scores", hint=f"finish it: windlass resume {run.argument}"
            )
        scores = {name: value for name, value in best[0].items() if value is not None}
        step, count = best[1] or 0, len(read_example_sets(recipe.tune).validation)
    metrics = list(run.metrics_lines())
    seconds = [line.step_seconds for line in metrics if line.step_seconds]
    joules = [line.energy_joules for line in metrics if line.energy_joules is not None]
    # The median step: the first ones allocate memory.
    rate = recipe.tune.batch / float(np.median(seconds)) if seconds else None
    return SeedResult(
        str(run.path),
        recipe.seed,
        scores,
        step,
        count,
        rate,
        None if best is None else best[0][metric],
        max(joules, default=None),
        sum(seconds) or None,
    )


def summary(metric: str, results: Sequence[SeedResult]) -> dict[str, Any]:
    """What a leaderboard shows: the task's own score, mean and standard deviation over seeds, and what they cost."""

    def values(name: str) -> list[float]:
        return [value for result in results if (value := getattr(result, name)) is not None]

    def complete_sum(name: str) -> float | None:
        return sum(values(name)) if len(values(name)) == len(results) else None

    scores = [result.scores[metric] for result in results if metric in result.scores]
    validation = values("validation")
    return {
        "metric": metric,
        "score": float(np.mean(scores)) if scores else None,
        "spread": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "validation_score": float(np.mean(validation)) if validation else None,
        "seeds": len(results),
        "train_seconds": complete_sum("train_seconds"),
        "energy_joules": complete_sum("energy_joules"),
    }


def mean_scores(task: str, results: Sequence[SeedResult], detail: dict[str, Any]) -> list[EvalScore]:
    """Means over seeds; the interval is that of the spread over seeds, or of the test texts of a single seed."""
    count, scores = results[0].count, []
    for metric in results[0].scores:
        values = np.array([result.scores[metric] for result in results if metric in result.scores])
        mean, low, high = float(values.mean()), None, None
        if len(values) > 1:
            half = STUDENT_T.get(len(values), 2.2) * float(values.std(ddof=1)) / len(values) ** 0.5
            least, most = score_range(metric)
            low, high = max(least, mean - half), min(most, mean + half)
        elif metric == "accuracy" and count:
            low, high = wilson_interval(round(mean * count), count)
        scores.append(
            EvalScore(task=task, group="all", metric=metric, value=mean, low=low, high=high, count=count, detail=detail)
        )
    return scores
