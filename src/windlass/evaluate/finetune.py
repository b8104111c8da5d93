"""`windlass finetune`: a recipe per seed, each a run of the training loop, and the mean of their scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windlass.config import Recipe
from windlass.config.load import validate
from windlass.convert.config_json import is_hf_folder, recipe_name
from windlass.convert.source import find_source, find_tokenizer
from windlass.errors import ConfigError, RunError
from windlass.evaluate.scores import EvalScore, wilson_interval
from windlass.files import read_json_lines
from windlass.runs.events import Evaluated
from windlass.runs.folder import Run

# Texts of a forward pass: sorted by length, so that few tokens are padding.
MICRO_BATCH = 8
# Student's t for the 95 % interval of a mean, by number of seeds; from 11 on 2.2 or less.
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    task: str = "classify"
    frozen: bool = False
    epochs: float = 3
    batch: int = 16  # texts of one step over all processes
    lr: float | None = None  # None: 1e-3 for a head alone, 5e-5 for every weight
    length: int = 256  # the first so many tokens of a text are read
    patience: int = 0
    columns: tuple[str, str | None, str] = ("text", None, "label")


def tune_recipe(
    model: Path, train: Path, test: Path | None, options: TuneOptions, *, seed: int, devices: int, step: int | None
) -> Recipe:
    """The recipe of one seed: any local Hugging Face folder through transformers, or a run of ours."""
    per_device, rest = divmod(options.batch, devices)
    if rest:
        raise ConfigError(
            "tune.batch-not-divisible",
            f"a batch of {options.batch} does not divide over {devices} processes",
            hint=f"choose --batch {math.ceil(options.batch / devices) * devices}",
        )
    if is_hf_folder(model):
        table: dict[str, Any] = {"family": "hf", "config": str(model)}
        weights, tokenizer = model, None
    else:
        source = find_source(model, step)
        table = source.recipe.model.model_dump(mode="json")
        weights, tokenizer = source.folder, str(find_tokenizer(source).path)
    text, pair, label = options.columns
    tune = {"task": options.task, "train": str(train), "test": None if test is None else str(test),
            "text": text, "pair": pair, "label": label, "epochs": options.epochs, "batch": options.batch,
            "frozen": options.frozen, "patience": options.patience}  # fmt: skip
    lr = options.lr if options.lr is not None else 1e-3 if options.frozen else 5e-5
    raw = {
        "name": f"{recipe_name(model)}-{recipe_name(train.with_suffix(''))}-seed{seed}",
        "seed": seed,
        "model": table,
        "tune": tune,
        "data": {"seq_len": options.length, "tokenizer": tokenizer},
        "optim": {"lr": lr, "schedule": "linear", "min_lr_ratio": 0.0, "weight_decay": 0.01, "beta2": 0.999},
        "train": {"precision": "fp32"},
        "layout": {"micro_batch": math.gcd(per_device, MICRO_BATCH)},
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


def seed_result(run: Run) -> SeedResult:
    """Scores of a finished run: of its test examples, or of its best validation where it has none."""
    recipe = run.recipe()
    assert recipe.tune is not None
    lines = [line for line in read_json_lines(run.eval_file) if line.get("value") is not None]
    scores = {line["metric"]: float(line["value"]) for line in lines}
    step, count = (int(lines[-1]["step"]), int(lines[-1]["count"])) if lines else (0, 0)
    if not scores:
        passes = [event for event in run.events(Evaluated) if event.scores]
        if not passes:
            raise RunError("tune.no-scores", f"{run.path} has no scores", hint=f"finish it: windlass resume {run.path}")
        scores = {name: value for name, value in passes[-1].scores.items() if value is not None}
        step = passes[-1].step or 0
    seconds = [line.step_seconds for line in run.metrics_lines() if line.step_seconds]
    # The median step: the first ones allocate memory.
    rate = recipe.tune.batch / float(np.median(seconds)) if seconds else None
    return SeedResult(str(run.path), recipe.seed, scores, step, count, rate)


def mean_scores(task: str, results: Sequence[SeedResult], detail: dict[str, Any]) -> list[EvalScore]:
    """Means over seeds; the interval is that of the spread over seeds, or of the test texts of a single seed."""
    count, scores = results[0].count, []
    for metric in results[0].scores:
        values = np.array([result.scores[metric] for result in results if metric in result.scores])
        mean, low, high = float(values.mean()), None, None
        if len(values) > 1:
            half = STUDENT_T.get(len(values), 2.2) * float(values.std(ddof=1)) / len(values) ** 0.5
            low, high = mean - half, mean + half
        elif metric == "accuracy" and count:
            low, high = wilson_interval(round(mean * count), count)
        scores.append(
            EvalScore(task=task, group="all", metric=metric, value=mean, low=low, high=high, count=count, detail=detail)
        )
    return scores
