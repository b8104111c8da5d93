"""`windlass finetune`: our own models and transformers' learn, several seeds have a spread, and processes agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.train.tuning_files import save_encoder, write_tsv
from typer.testing import CliRunner

from windlass.cli import build
from windlass.data.complete_tune import complete_tune
from windlass.errors import ConfigError, RunError
from windlass.evaluate.finetune import SeedResult, mean_scores, read_task, summary, tune_recipe
from windlass.runs.folder import Run

GOOD, BAD = ["ship", "water", "together", "great"], ["heavy", "wind", "rope", "load"]


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    rows = [
        f"the {w} {v}\t{label}\n" for words, label in ((GOOD, "plus"), (BAD, "minus")) for w in words for v in words
    ]
    path = tmp_path / "polemo.tsv"
    path.write_text("text\ttarget\n" + "".join(rows) * 2)
    return path


def finetune(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(build("finetune"), ["finetune", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{") :])
    return answer


@pytest.mark.parametrize(("which", "frozen"), [("llama_run", False), ("llama_run", True), ("retnet_run", False)])
def test_our_own_models_learn(which: str, frozen: bool, request: Any, tsv: Path, tmp_path: Path) -> None:
    run: Run = request.getfixturevalue(which)
    speed = ["--frozen", "--epochs", 40, "--lr", 2e-2] if frozen else ["--epochs", 8, "--lr", 3e-3]
    answer = finetune(run.path, "--train", tsv, "--test", tsv, "--length", 16, "--runs", tmp_path / "runs", *speed)
    assert answer["labels"] == ["minus", "plus"] and answer["accuracy"] > 0.8
    assert [line["metric"] for line in map(json.loads, run.eval_file.read_text().splitlines())][-6:] == [
        score["metric"] for score in answer["scores"]
    ]


def test_seeds_have_a_spread_and_finished_ones_are_kept(tsv: Path, tmp_path: Path) -> None:
    save_encoder(tmp_path / "model")
    write_tsv(tmp_path / "train.tsv", 40)
    options = ["--train", tmp_path / "train.tsv", "--epochs", 1, "--length", 32, "--runs", tmp_path / "runs"]
    first = finetune(tmp_path / "model", *options)
    both = finetune(tmp_path / "model", *options, "--seeds", 2)
    seeds = both["scores"][0]["detail"]["seeds"]
    assert [seed["seed"] for seed in seeds] == [0, 1]
    assert seeds[0]["scores"]["accuracy"] == first["accuracy"]
    assert len(both["runs"]) == 2 and both["scores"][0]["count"] == 4, "a tenth of 40 texts"
    arguments = ["finetune", str(tmp_path / "model"), *map(str, options), "--lr", "1e-2"]
    other = CliRunner().invoke(build("finetune"), arguments)
    assert isinstance(other.exception, RunError) and other.exception.code == "runs.recipe-changed"
    assert "optim.lr: 5e-05 -> 0.01" in other.exception.message, "scores of other settings are not shown as these"


def test_mean_and_interval_of_seeds() -> None:
    results = [SeedResult("r", seed, {"accuracy": value}, 1, 50, None) for seed, value in enumerate((0.8, 0.9))]
    (score,) = mean_scores("task", results, {})
    assert score.value == pytest.approx(0.85) and score.high is not None and score.low is not None
    # sd / sqrt(2) is 0.05; no accuracy is above 1
    assert (score.low, score.high) == (pytest.approx(0.85 - 12.706 * 0.05, rel=1e-3), 1.0)


@pytest.mark.multi
def test_two_processes_of_the_command(tsv: Path, tmp_path: Path) -> None:
    save_encoder(tmp_path / "model")
    options = [
        "--train",
        tsv,
        "--test",
        tsv,
        "--epochs",
        0.5,
        "--length",
        16,
        "--runs",
        tmp_path / "two",
        "--devices",
        2,
    ]
    answer = finetune(tmp_path / "model", *options)
    assert answer["processes"] == 2 and 0 < answer["loss"] < 2


def test_a_batch_that_does_not_divide(tsv: Path, tmp_path: Path) -> None:
    save_encoder(tmp_path / "model")
    tune, _ = read_task(None, {"train": str(tsv), "label": "target"})
    recipe = tune_recipe(tmp_path / "model", "polemo", tune, length=16, lr=None, seed=0, step=None)
    layout = complete_tune(recipe, 4).layout
    assert layout is not None and layout.micro_batch == 4
    with pytest.raises(ConfigError) as error:
        complete_tune(recipe, 3)
    assert error.value.code == "tune.batch-not-divisible" and "18" in (error.value.hint or "")


def test_a_task_of_a_file(tsv: Path, tmp_path: Path) -> None:
    """Options replace the file's keys; what is not a task is refused."""
    file = tmp_path / "task.toml"
    file.write_text(f'[tune]\ntask = "classify"\ntrain = "{tsv}"\nlabel = "target"\nbatch = 8\n[data]\nseq_len = 24\n')
    tune, length = read_task(file, {"batch": 4, "epochs": None})
    assert (tune.batch, tune.epochs, tune.label, length) == (4, 3, "target", 24)
    for text in ('[tune]\ntask = "chat"\n', '[tune]\ntask = "classify"\n[model]\n', '[tune]\ntask = "tag"\n'):
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            read_task(file, {})
        assert error.value.code in ("tune.task-file", "tune.no-examples")


def test_summary_of_seeds() -> None:
    """Mean and standard deviation by hand; a cost that one seed did not measure is not known for all."""
    results = [
        SeedResult("r", seed, {"macro_f1": value}, 1, 50, None, value, joules, 2.0)
        for seed, (value, joules) in enumerate([(0.8, 5.0), (0.9, None)])
    ]
    result = summary("macro_f1", results)
    assert result["score"] == pytest.approx(0.85) and result["spread"] == pytest.approx(0.0707, abs=1e-4)
    assert result["train_seconds"] == 4.0 and result["energy_joules"] is None and result["seeds"] == 2
