"""Fine-tuning on examples: equal to transformers' Trainer, to itself after a stop, and by the field's scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.helpers import build, new_run, run_here, steps
from tests.train.tuning_files import reviews, save_encoder, tune_table, write_tsv

from windlass.checkpoint.load import read_weight_files
from windlass.config import ModelConfig, Recipe
from windlass.config.tune import SCORES, TuneConfig
from windlass.data.complete_tune import complete_tune
from windlass.data.example_batches import ExampleOrder, micro_batches
from windlass.data.examples import read_example_sets
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.evaluate.open_model import open_model
from windlass.files import read_json_lines
from windlass.models.task_head import TaskHead, build_task_model
from windlass.report.collect import collect
from windlass.runs.events import Evaluated, Finished
from windlass.train.checkpointing import load_model_weights
from windlass.train.label_metrics import label_scores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuning")
    for name, count, seed in (("train", 160, 0), ("valid", 40, 1), ("test", 40, 2)):
        write_tsv(folder / f"{name}.tsv", count, seed)
    save_encoder(folder / "model")
    return folder


def recipe(folder: Path, **changes: Any) -> Recipe:
    return complete_tune(Recipe.model_validate(tune_table(folder, **changes)))


@pytest.mark.integration
def test_losses_of_the_trainer(folder: Path, tmp_path: Path) -> None:
    """20 steps with dropout 0 and the same batches: transformers' Trainer has the same losses."""
    import transformers

    training = build(recipe(folder, tune={"dropout": 0.0}))
    load_model_weights(folder / "model", training.parts.modules[0])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    own = training.parts.modules[0].state_dict()
    model.load_state_dict({name: own[f"net.{name}"].clone() for name in model.state_dict()})
    stream, order = training.stream, training.plan.order
    rows = [
        {"input_ids": stream.train.texts[i].tokens, "token_type_ids": stream.train.texts[i].segments,
         "labels": int(stream.train.targets[i])}
        for step in range(20) for i in order.step(step).tolist()
    ]  # fmt: skip

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=20, learning_rate=1e-3, lr_scheduler_type="constant",
        weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    trainer = InOrder(
        model=model, args=arguments, train_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(tokenizer, return_tensors="pt"),
    )  # fmt: skip
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ours = [loss for loss, _ in steps(training, 20)]
    assert len(theirs) == 20 and max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4


@pytest.mark.integration
def test_a_run_learns_tests_its_best_weights_and_resumes(folder: Path, tmp_path: Path) -> None:
    """Five epochs at once, and the same cut in the third: every loss and score is equal."""
    table = recipe(folder, tune={"epochs": 5, "test": str(folder / "test.tsv")}, optim={"lr": 3e-3})
    assert table.train.steps == 100 and table.train.eval_every == 20 and table.tune is not None
    assert table.tune.labels == ["minus", "plus"]
    one, two = new_run(tmp_path / "one"), new_run(tmp_path / "two")
    assert run_here(table, one) == 0
    short = table.model_copy(update={"train": table.train.model_copy(update={"steps": 45})})
    assert run_here(short, two) == 0 and run_here(table, two) == 0
    lines = [list(read_json_lines(run.eval_file)) for run in (one, two)]
    accuracy = {line["metric"]: line["value"] for line in lines[0]}["accuracy"]
    assert accuracy > 0.8
    assert [(line["metric"], line["value"]) for line in lines[0]] == [
        (line["metric"], line["value"]) for line in lines[1][-len(lines[0]) :]
    ]
    first, second = ([line.loss for line in run.metrics_lines()] for run in (one, two))
    assert first == second
    scores = [event.scores["macro_f1"] for event in one.events(Evaluated)]
    assert len(scores) == 5 and max(scores) > 0.8


def test_patience_ends_a_run(folder: Path, tmp_path: Path) -> None:
    """A learning rate of 0 never gets better: the run ends after the second validation."""
    run = new_run(tmp_path / "run")
    table = recipe(folder, tune={"epochs": 50, "patience": 1}, optim={"lr": 0.0}, train={"eval_every": 3})
    assert run_here(table, run) == 0
    (finished,) = run.events(Finished)
    assert finished.step == 6 and len(list(run.events(Evaluated))) == 2
    assert run_here(table, run) == 0  # and stays finished
    assert [event.step for event in run.events(Finished)] == [6, 6]


@pytest.mark.parametrize("kind", ["roberta", "deberta", "t5", "gpt2", "llama"])
def test_other_models(kind: str, folder: Path, tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", kind)
    table = tune_table(tmp_path)
    table["tune"] |= {"train": str(folder / "train.tsv"), "validation": str(folder / "valid.tsv")}
    training = build(complete_tune(Recipe.model_validate(table)))
    load_model_weights(tmp_path / "model", training.parts.modules[0])
    losses = [loss for loss, _ in steps(training, 12)]
    assert all(np.isfinite(losses)) and losses[0] < 10


TASKS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "multi_label": ([{"text": text, "label": [label, "text"]} for text, label in reviews(64)], "macro_f1"),
    "regress": (
        [
            {"text": "dobry" if label == "plus" else "zły", "label": 1.0 if label == "plus" else -1.0}
            for _, label in reviews(64)
        ],
        "pearson",
    ),
    "tag": (
        [
            {"words": (words := text.split()), "tags": ["B-GOOD" if w in "dobry świetny" else "O" for w in words]}
            for text, _ in reviews(64)
        ],
        "span_f1",
    ),
    "pair": (
        [
            {"text": "hotel", "second": text.split()[-1] + (" dobry" if label == "plus" else " zły"), "label": label}
            for text, label in reviews(64)
        ],
        "macro_f1",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_other_tasks(name: str, folder: Path, tmp_path: Path) -> None:
    rows, metric = TASKS[name]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    task = {"task": "classify", "pair": "second"} if name == "pair" else {"task": name}
    training = build(recipe(folder, tune={**task, "train": str(file), "validation": None}))
    load_model_weights(folder / "model", training.parts.modules[0])
    losses = [loss for loss, _ in steps(training, 40, lr=5e-3)]
    validation = training.validator.run()
    assert np.mean(losses[-8:]) < 0.9 * np.mean(losses[:8]) and metric in validation.scores
    if name == "pair":
        assert max(training.stream.train.texts[0].segments) == 1


def test_frozen_weights_stay(folder: Path) -> None:
    training = build(recipe(folder, tune={"frozen": True}))
    load_model_weights(folder / "model", training.parts.modules[0])
    before = {name: p.clone() for name, p in training.parts.modules[0].named_parameters()}
    steps(training, 3)
    changed = {n for n, p in training.parts.modules[0].named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("classifier" in name or "pooler" in name for name in changed)


def test_class_weights_as_torch(folder: Path, tmp_path: Path) -> None:
    """The weighted mean of a batch is that of torch's loss; the weights are those of scikit-learn."""
    from sklearn.utils.class_weight import compute_class_weight

    pairs = [pair for pair in reviews(60) if pair[1] == "plus" or pair[0] < "h"]
    (tmp_path / "t.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in pairs))
    table = recipe(folder, tune={"train": str(tmp_path / "t.tsv"), "class_weights": "balanced", "dropout": 0.0})
    training = build(table)
    targets = np.array([int(t) for t in training.stream.train.targets])
    assert training.stream.weights == pytest.approx(
        compute_class_weight("balanced", classes=np.array([0, 1]), y=targets)
    )
    batch = next(iter_batches(training))
    loss = training.stepper.step(batch, 0.0).values[0].item()
    logits, goals = [], []
    with torch.no_grad():
        for tokens, goal, segments in batch.micro_batches:
            logits.append(training.parts.modules[0](tokens, None, segments))
            goals.append(goal)
    weight = torch.tensor(training.stream.weights, dtype=torch.float32)
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(goals), weight=weight)
    assert loss == pytest.approx(float(expected), rel=1e-5)


def iter_batches(training: Any) -> Any:
    from windlass.train import loop

    reader = loop.open_batches(training)
    return iter(lambda: next(reader), None)


def test_order_and_parts() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, size=103)
    order = ExampleOrder(lengths, 8, seed=1, group_by_length=True)
    chosen = np.concatenate([order.step(i) for i in range(order.steps_per_epoch)])
    assert sorted(chosen.tolist()) == list(range(103))
    assert order.step(0).tolist() != order.step(order.steps_per_epoch).tolist()
    grouped = [int(lengths[order.step(i)].max() - lengths[order.step(i)].min()) for i in range(13)]
    assert np.median(grouped) < 15  # of 57
    parts = [micro_batches(order.step(0), 2, 2, 2, rank) for rank in range(2)]
    assert sorted(i for rank in parts for part in rank for i in part) == sorted(order.step(0).tolist())
    short = [micro_batches(np.arange(3), 2, 2, 2, rank) for rank in range(2)]
    assert short == [[[0, 1], []], [[2], []]]


def test_scores_by_hand() -> None:
    scores = label_scores("classify", [0, 0, 1, 1, 1], [0, 1, 1, 1, 0])
    assert scores["macro_f1"] == pytest.approx((0.5 + 2 / 3) / 2) and scores["accuracy"] == pytest.approx(0.6)
    rows = {"multi_label": ([[1, 0]], [[1, 1]]), "regress": ([1.0, 2.0], [2.0, 1.0]), "tag": ([["O"]], [["O"]])}
    assert {task: tuple(label_scores(task, *pair)) for task, pair in rows.items()} | {
        "classify": tuple(scores)
    } == SCORES
    spans = label_scores("tag", [["B-X", "I-X", "O"]], [["B-X", "I-X", "B-Y"]])
    assert spans["span_precision"] == 1.0 and spans["span_recall"] == 0.5
    assert label_scores("regress", [1.0, 1.0], [1.0, 2.0])["pearson"] is None


def test_refusals(folder: Path, tmp_path: Path) -> None:
    def sets(content: str, **tune: Any) -> Any:
        (tmp_path / "bad.tsv").write_text(content)
        keys = {"train": str(tmp_path / "bad.tsv"), **tune}
        config = Recipe.model_validate(tune_table(folder, tune=keys)).tune
        assert config is not None
        return read_example_sets(config)

    cases: list[tuple[Any, str, str]] = [
        (lambda: sets(""), "tune.no-examples", "bad.tsv"),
        (lambda: sets("text\tlabel\na\tx\nb\n"), "tune.bad-examples", "line 3"),
        (lambda: sets("a\tx\n\ty\n"), "tune.bad-examples", "line 2"),
        (lambda: sets("a\tx\nb\tx\n"), "tune.one-label-only", "2"),
        (lambda: sets("a\t1\n", task="regress", validation=None), "tune.no-examples", "1 example"),
        (lambda: sets("a\tx\nb\ty\n"), "tune.labels-unknown", "40"),
        (lambda: sets("a\tx\nb\t1\n", task="regress"), "tune.bad-examples", "1 of 2"),
        (lambda: sets("a", train=str(tmp_path / "none.tsv")), "files.missing", "none.tsv"),
    ]
    for action, code, text in cases:
        with pytest.raises(DataError) as error:
            action()
        assert error.value.code == code and text in error.value.message
    with pytest.raises(ConfigError) as divided:
        recipe(folder, layout={"tensor": 2})
    assert divided.value.code == "tune.axis-unsupported" and "tensor (2)" in divided.value.message
    own = {"family": "llama", "layers": 2, "width": 32, "heads": 4, "ffn": 48, "vocab": 300}
    with pytest.raises(ConfigError) as staged:  # our own decoders: tensor, but no pipeline
        recipe(folder, model=own, layout={"tensor": 2, "pipeline": 2})
    assert staged.value.code == "tune.axis-unsupported" and "pipeline (2)" in staged.value.message
    with pytest.raises(ConfigError) as wrong:  # before the first step
        recipe(folder, tune={"metric": "bleu"})
    assert wrong.value.code == "tune.metric-unknown"


def test_changed_examples_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", 40)
    table = recipe(folder, tune={"train": str(tmp_path / "train.tsv")})
    write_tsv(tmp_path / "train.tsv", 41)
    with pytest.raises(DataError) as error:
        build(table)
    assert error.value.code == "data.changed" and "train.tsv" in error.value.message


def test_best_checkpoint_of_equal_ones_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of retention keep the last one too: a rank that chose the other waited for a folder that was gone."""
    from windlass.checkpoint import files
    from windlass.checkpoint.load import find_best

    saved = [files.SavedCheckpoint(tmp_path, {"step": step, "metric": metric}) for step, metric in METRICS]
    monkeypatch.setattr(files, "list_saved", lambda run: saved)
    best = find_best(new_run(tmp_path / "run"))
    assert best is not None and best.step == 36


METRICS = [(12, -0.5), (24, -0.4), (36, -0.5), (48, None)]


def test_export_has_the_head_and_the_names_of_labels(folder: Path, tmp_path: Path) -> None:
    """The exported folder has the best weights and the model's own tokenizer: transformers repeats the test score."""
    import transformers

    from windlass.convert.export import export

    table = recipe(folder, tune={"test": str(folder / "test.tsv"), "epochs": 2, "metric": "loss"}, optim={"lr": 3e-2})
    run = new_run(tmp_path / "run")
    (run.path / "config.json").write_text(table.model_dump_json())
    assert run_here(table, run) == 0
    exported = export(run.path, tmp_path / "exported")
    assert exported.check is not None and exported.check.ok
    recorded = {line["metric"]: line for line in read_json_lines(run.eval_file)}
    assert exported.step == recorded["loss"]["step"]
    with pytest.raises(ConfigError) as asked:
        open_model(run.path, device="cpu")
    assert asked.value.code == "evaluate.no-next-token"
    summary = collect(run)
    assert summary.tokens == summary.target_tokens, "texts are not filled to seq_len: the run is complete"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert model.config.id2label == {0: "minus", 1: "plus"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    texts, labels = zip(*reviews(40, seed=2), strict=True)
    with torch.no_grad():
        logits = model(**tokenizer(list(texts), return_tensors="pt", padding=True)).logits
    numbers = torch.tensor([model.config.label2id[label] for label in labels])
    assert float(torch.nn.functional.cross_entropy(logits, numbers)) == pytest.approx(
        recorded["loss"]["value"], abs=1e-5
    )


@pytest.mark.parametrize(("task", "kind"), [("regress", "bert"), ("multi_label", "gpt2"), ("tag", "deberta")])
def test_export_of_other_tasks(task: str, kind: str, tmp_path: Path) -> None:
    import transformers

    from windlass.convert.export import export

    save_encoder(tmp_path / "model", kind)
    rows, _ = TASKS[task]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tune = {"task": task, "train": str(tmp_path / "rows.jsonl"), "validation": None}
    table = recipe(tmp_path, tune=tune, train={"steps": 1})
    run = new_run(tmp_path / "run")
    (run.path / "config.json").write_text(table.model_dump_json())
    assert run_here(table, run) == 0
    exported = export(run.path, tmp_path / "exported")
    assert exported.check is not None and exported.check.ok
    config = transformers.AutoConfig.from_pretrained(tmp_path / "exported")
    assert config.num_labels == (1 if task == "regress" else len(table.tune.labels if table.tune else ()))
    assert config.pad_token_id == 0, "without it transformers takes no batch of a GPT-2"


def test_positions_of_roberta(tmp_path: Path) -> None:
    """66 rows, of which those up to the padding token (0) are not positions of texts."""
    save_encoder(tmp_path / "model", "roberta")
    model = ModelConfig(family="hf", config=str(tmp_path / "model"))
    with torch.device("meta"):
        build_task_model(model, 65, TaskHead("classify", 2))
        with pytest.raises(ConfigError) as error:
            build_task_model(model, 66, TaskHead("classify", 2))
    assert error.value.code == "model.sequence-too-long" and "65" in error.value.message


def test_pickled_weights_with_names_of_tensorflow(folder: Path, tmp_path: Path) -> None:
    """HerBERT is published as pytorch_model.bin alone, bert-base-cased with LayerNorm.gamma and beta."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model" / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
           for name, tensor in weights.items()}  # fmt: skip
    assert old.keys() != weights.keys()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((folder / "model" / "config.json").read_text())
    for zipped in (True, False):
        torch.save(old, tmp_path / "model" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        state = read_weight_files(tmp_path / "model")
        assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(CheckpointError) as error:
        load_model_weights(tmp_path / "model", build(recipe(folder)).parts.modules[0])
    assert error.value.code == "checkpoint.weights-damaged"


def test_files_of_examples(tmp_path: Path) -> None:
    """A line ends at a line feed alone; a list in JSON; long texts in CSV; labels of the tenth that validates."""

    def sets(name: str, content: str, **tune: Any) -> Any:
        (tmp_path / name).write_text(content)
        return read_example_sets(TuneConfig(**{"task": "classify", "train": str(tmp_path / name), **tune}))

    rows = [{"text": f"a\u2028b\x85c {n}", "label": "x" if n else "rare"} for n in range(20)]
    for name, content in (
        ("a.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)),
        ("a.json", json.dumps(rows, indent=1)),
        ("a.tsv", "".join(f"{row['text']}\t{row['label']}\n" for row in rows)),
    ):
        read = sets(name, content)
        assert len(read.train) + len(read.validation) == 20 and read.labels == ["rare", "x"]
        assert all("\u2028b" in example.text for example in read.train)
    assert len(sets("a.csv", "text,label\n" + "long,x\n" + f'"{"z" * 200_000}",y\n' * 9).train) == 9
    conll = "Nowy\u00a0Jork\tB-LOC\nleży\tO\n\n" * 10
    assert sets("a.conll", conll, task="tag").train[0].text == ("Nowy\u00a0Jork", "leży")
    numbers = json.dumps({"words": ["a", "b"], "tags": [0, 1]}) + "\n"
    with pytest.raises(DataError) as error:
        sets("b.jsonl", numbers * 3, task="tag")
    assert error.value.code == "tune.bad-examples" and "3 of 3" in error.value.message
    # Lone surrogates, which JSON can write and UTF-8 cannot: of the label, the text and the second text.
    lines = [
        '{"text": "a", "pair": "b", "label": "x"}',
        *('{"text": "a", "pair": "b", "label": "x"}'.replace(f'"{c}"', f'"{c}\\ud800"') for c in "xab"),
    ]
    with pytest.raises(DataError) as error:
        sets("c.jsonl", "\n".join(lines), pair="pair")
    assert error.value.code == "tune.bad-examples" and "3 of 4" in error.value.message


def test_plan_and_launch_read_the_examples(folder: Path, tmp_path: Path) -> None:
    """Steps follow from the examples: 160 of them in batches of 8, three times, on two devices."""
    from windlass.clusters.load import load_cluster
    from windlass.config.load import load_recipe
    from windlass.config.toml_text import to_toml
    from windlass.launch.start import resolve_recipe
    from windlass.planner.search import on_devices, plan
    from windlass.runs.folder import Run

    table = tune_table(folder, cluster="snellius-h100")
    del table["layout"]
    (tmp_path / "r.toml").write_text(to_toml(table))
    loaded, cluster = load_recipe(tmp_path / "r.toml"), on_devices(load_cluster("snellius-h100"), 2)
    best = plan(loaded.recipe, cluster, nodes=1).best
    assert (best.layout.data, best.layout.micro_batch, best.layout.accumulation) == (2, 4, 1)
    resolved, chosen_by, _ = resolve_recipe(loaded, Run(tmp_path / "run"), cluster, 1)
    assert resolved.recipe.train.steps == 60 and resolved.recipe.tune is not None and chosen_by == "recipe"
    assert resolved.recipe.tune.labels == ["minus", "plus"]
