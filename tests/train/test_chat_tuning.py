"""Instruction tuning: the loss of packed conversations is that of TRL and transformers, on any layout; LoRA."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.chat_store import conversation, make_store, pair, recipe_table
from tests.train.helpers import build, new_run, run_here, steps
from tests.untrusted import Canary
from torch import nn

from windlass.blocks.head.loss import chunked_loss, next_token_loss
from windlass.checkpoint.names import TRANSFORMS
from windlass.config import ModelConfig, OptimConfig, Recipe
from windlass.config.tune import LoraConfig
from windlass.convert.config_json import config_json, format_of
from windlass.convert.source import find_source, load_model
from windlass.convert.weights import open_weights
from windlass.data.complete_tune import complete_tune
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.files import read_json_lines
from windlass.layout.types import IGNORED
from windlass.models.build import build_model
from windlass.runs.folder import Run
from windlass.train.adapters import add_adapters, check_targets
from windlass.train.loop import open_batches
from windlass.train.optimizers.sgd.spec import SPEC
from windlass.train.optimizers.sgd.update import SGD
from windlass.train.preference import attach_references, read_reference, write_reference


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("chat"), texts=20)


def chat(store: Path, lora: dict[str, Any] | None = None, **tables: Any) -> Recipe:
    tune = {"task": "chat", **({"lora": lora} if lora is not None else {})}
    tables["data"] = {"mix": {"chat": 1.0}} | tables.get("data", {})
    return Recipe.model_validate(recipe_table(store, tune, **tables))


def in_transformers(recipe: Recipe, model: nn.Module, folder: Path) -> Any:
    """The same model as transformers builds it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config_json(recipe, "float32", 1024)))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
    names, vocab = format_of(recipe.model), recipe.model.vocab or 0
    state = {}
    for name, tensor in model.state_dict().items():
        kind = names.transforms.get(name)
        state[names.hf_name(name)] = TRANSFORMS[kind][1](tensor, vocab) if kind else tensor
    theirs.load_state_dict(state)
    return theirs.eval()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_ignored_targets_do_not_count_in_any_loss(z_loss: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(11, 8)
    targets = torch.randint(0, 10, (2, 9))
    targets[:, ::2] = IGNORED
    results = []
    for loss in (next_token_loss, chunked_loss):
        hidden = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        sums = loss(hidden, weight, targets, vocab=10, z_loss=z_loss)
        sums[0].backward()
        results.append((sums.detach(), hidden.grad))
        assert not hidden.grad[:, ::2].any()
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-6)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def batch_of_trl(trainer: Any) -> Any:
    """The trainer's batch of everything, and its loss on it."""
    (batch,) = trainer.get_train_dataloader()
    items = (batch["labels"] != -100).sum() if "labels" in batch else None
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model.eval(), dict(batch), num_items_in_batch=items))


def trl_options(folder: Path, **options: Any) -> dict[str, Any]:
    common = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "report_to": "none",
        "bf16": False,
        "disable_tqdm": True,
    }
    return {**common, "per_device_train_batch_size": 1000, "dataloader_pin_memory": False, **options}


def all_at_once(store: Path, task: dict[str, Any], **tables: Any) -> Recipe:
    """A recipe whose step holds every sequence of the source `chat`."""
    table = recipe_table(store, task, data={"mix": {"chat": 1.0}}, **tables)
    count = int(build(Recipe.model_validate(table)).stream.mixture.windows[0])
    table["data"]["batch_tokens"], table["layout"]["micro_batch"] = count * 96, count
    return Recipe.model_validate(table)


@pytest.mark.slow  # importing TRL takes half a minute
def test_the_loss_of_packed_conversations_is_that_of_trl(store: Path, tmp_path: Path) -> None:
    """All conversations in one step: packed by us; padded, one per row, by TRL."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    recipe = all_at_once(store, {"task": "chat"})
    training = build(recipe)
    theirs = in_transformers(recipe, training.parts.modules[0], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(store.parent / "tokenizer")
    talks = [conversation(i) for i in range(60)]
    short = [
        t for t in talks if len(tokenizer.apply_chat_template(t["messages"], tokenize=True, return_dict=False)) <= 97
    ]
    options = trl.SFTConfig(**trl_options(tmp_path, assistant_only_loss=True, max_length=None))
    trainer = trl.SFTTrainer(
        theirs, options, train_dataset=datasets.Dataset.from_list(short), processing_class=tokenizer
    )
    assert steps(training, 1)[0][0] == pytest.approx(batch_of_trl(trainer), rel=1e-5)
    assert f"{60 - len(short):,} longer than data.seq_len left out" in training.stream.packing_line()


def test_a_mix_with_texts_counts_every_token_of_them(store: Path) -> None:
    training = build(chat(store, data={"mix": {"chat": 0.5, "web": 0.5}}))
    batches = open_batches(training)
    batch = next(batches)
    batches.close()
    assert batch.documents is not None and batch.ignored.shape == (8, 96)  # type: ignore[union-attr]
    source, _ = training.stream.identity(range(8))
    shares = (~batch.ignored).float().mean(1)  # type: ignore[union-attr]
    names = training.stream.sources
    assert min(shares[source == names.index("web")]) > 0.8 > max(shares[source == names.index("chat")])


def test_validation_counts_answers_only(tmp_path: Path) -> None:
    store = make_store(tmp_path, validation=0.4)
    training = build(chat(store, data={"mix": {}}))
    batch = training.stream.__class__(training.stream.store, training.recipe.data, seed=0, split="validation")
    count = int(batch.mixture.windows.sum())
    numbers = np.resize(np.arange(count), 2 * -(-count // 2))
    tokens, documents = (torch.from_numpy(a).long() for a in (batch.sequences(numbers), batch.document_ids(numbers)))
    hidden = torch.from_numpy(batch.ignored(numbers))
    with torch.no_grad():
        targets = tokens[:, 1:].masked_fill(hidden, IGNORED)
        sums = training.parts.modules[0](tokens[:, :-1], targets, documents[:, :-1])
    validation = training.validator.run()
    assert validation is not None and validation.overall.bits_per_byte is None
    assert validation.overall.loss == pytest.approx(float(sums[1] / (~hidden).sum()), rel=1e-5)


def test_a_resumed_run_is_the_same_bit_for_bit(store: Path, tmp_path: Path) -> None:
    optim, lora = {"schedule": "constant"}, {"rank": 4, "dropout": 0.1}
    for name, count in (("once", 6), ("twice", 3)):
        run_here(chat(store, lora, optim=optim, train={"steps": count}), new_run(tmp_path / name))
    run_here(chat(store, lora, optim=optim), Run(tmp_path / "twice"))
    weights = [open_weights(tmp_path / name / "checkpoints" / "step-000000006") for name in ("once", "twice")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# -- LoRA ----------------------------------------------------------------------------------------------------------


def test_only_adapters_are_trained_and_the_export_is_merged(store: Path, tmp_path: Path) -> None:
    base = new_run(tmp_path / "base")
    run_here(chat(store, train={"steps": 2}), base)
    recipe = chat(store, {"rank": 4, "alpha": 8.0, "targets": ["wq", "w2"]}, save={"load": str(base.path)})
    training = build(recipe)
    assert {slot.name.rpartition(".")[0].rpartition(".")[2] for slot in training.optimizer.slots} == {"adapter"}
    assert len(training.optimizer.slots) == 2 * 2 * 2  # A and B of two products in two layers
    run = new_run(tmp_path / "tuned")
    run_here(recipe, run)
    (run.path / "config.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    folder = run.path / "checkpoints" / "step-000000006"
    before, after = open_weights(base.path / "checkpoints" / "step-000000002"), open_weights(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"layers.{i}.{name}.weight" for i in range(2) for name in ("attention.wq", "feed_forward.w2")}
    # The model with adapters computes what the merged one does.
    torch.manual_seed(0)
    tokens = torch.randint(0, 300, (2, 40))
    resumed = build(recipe)
    from windlass.checkpoint.load import read_tensors
    from windlass.checkpoint.reader import CheckpointReader

    state = {slot.name: slot.weights.detach() for slot in resumed.optimizer.slots} | resumed.parts.frozen()
    read_tensors(CheckpointReader(folder), {"model": state})
    merged = load_model(recipe, folder, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        unmerged_logits, merged_logits = resumed.parts.modules[0](tokens), merged(tokens)
    assert torch.allclose(unmerged_logits, merged_logits, atol=1e-5)
    assert find_source(run.path).folder == folder


def test_unknown_targets_are_refused_with_those_that_exist(store: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build(chat(store, {"targets": ["q_proj", "wo"]}))
    assert error.value.code == "tune.lora-target-unknown"
    assert "q_proj" in error.value.message and "w1, w2, w3, wk, wo, wq, wv" in (error.value.hint or "")


def test_a_pipeline_stage_may_have_no_adapters() -> None:
    """As where the attention layers of a hybrid model are all in another stage."""
    mamba = {"heads": 4, "head_dim": 8, "state": 8, "groups": 2, "chunk": 8}
    config = ModelConfig.model_validate(
        {
            "family": "nemotron_h",
            "layers": 4,
            "width": 32,
            "ffn": 48,
            "heads": 4,
            "vocab": 99,
            "pattern": "MM*M",
            "mamba": mamba,
        }
    )
    lora = LoraConfig(targets=["wq"])
    with torch.device("meta"):
        model = build_model(config, seq_len=16)
    check_targets(model, lora)
    model.keep_stage(range(2), first=True, last=False)
    assert add_adapters(model, lora).startswith("LoRA: 0 adapters") and not any(
        p.requires_grad for p in model.parameters()
    )
    optimizer = SGD((), OptimConfig(name="sgd"), SPEC)
    optimizer.step(0.1)
    assert int(optimizer.count) == 1


@pytest.mark.integration
def test_adapters_of_a_transformers_model_compute_what_peft_does(store: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.Qwen2Config(
        **shape, num_key_value_heads=2, vocab_size=320, max_position_embeddings=128
    ).save_pretrained(tmp_path)
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    table = recipe_table(store, {"task": "chat", "lora": lora}, data={"pack": "stream", "mix": {"chat": 1.0}})
    training = build(Recipe.model_validate(table | {"model": {"family": "hf", "config": str(tmp_path)}}))
    steps(training, 2)
    model = training.parts.modules[0]
    base = transformers.AutoModelForCausalLM.from_config(model.net.config)
    weights = dict(model.net.state_dict())
    base.load_state_dict({name: tensor for name, tensor in weights.items() if ".adapter." not in name})
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=lora["targets"]))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            part = "a" if "lora_A" in name else "b"
            ours = name.removeprefix("base_model.model.").split(".lora_")[0]
            parameter.data.copy_(weights[f"{ours}.adapter.{part}"])
    tokens = torch.randint(0, 300, (2, 20))
    with torch.no_grad():
        assert torch.allclose(model.eval()(tokens), theirs.eval()(tokens).logits, atol=1e-5)


# -- preference pairs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("pairs"), 24, pairs=True)


@pytest.mark.slow
def test_the_loss_of_pairs_is_that_of_trl(pair_store: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    recipe = all_at_once(pair_store, {"task": "prefer", "beta": 0.3})
    training = replace(build(recipe), run=new_run(tmp_path / "run"))
    reference = in_transformers(recipe, training.parts.modules[0], tmp_path)
    attach_references(training)
    assert steps(training, 1)[0][0] == pytest.approx(math.log(2), rel=1e-6)  # the policy is the reference
    steps(training, 2)
    policy = in_transformers(recipe, training.parts.modules[0], tmp_path)
    rows = [pair(i) for i in range(24)]
    rows = [{**row, **{k: [{"role": "assistant", "content": row[k]}] for k in ("chosen", "rejected")}} for row in rows]
    left_out = training.stream.packings[0].left_out  # type: ignore[index]
    assert left_out == 0
    options = trl.DPOConfig(**trl_options(tmp_path, beta=0.3, max_length=None, disable_dropout=True))
    tokenizer = AutoTokenizer.from_pretrained(pair_store.parent / "tokenizer")
    data = datasets.Dataset.from_list(rows)
    trainer = trl.DPOTrainer(policy, ref_model=reference, args=options, train_dataset=data, processing_class=tokenizer)
    expected = batch_of_trl(trainer)
    batches = open_batches(training)
    result = training.stepper.step(next(batches), lr=0.0)
    batches.close()
    loss, _, _, _, margin, accuracy = result.values.tolist()
    assert loss == pytest.approx(expected, rel=1e-5) and loss < 0.69
    logged = {key: sum(values) / len(values) for key, values in trainer._metrics["eval"].items()}
    assert margin == pytest.approx(logged["rewards/margins"], rel=1e-4)
    assert accuracy == pytest.approx(logged["rewards/accuracies"])


@pytest.mark.integration
def test_a_resumed_preference_run_keeps_its_reference(pair_store: Path, tmp_path: Path) -> None:
    def recipe(count: int) -> Recipe:
        table = recipe_table(pair_store, {"task": "prefer"}, optim={"schedule": "constant"}, train={"steps": count})
        return Recipe.model_validate(table)

    run_here(recipe(6), new_run(tmp_path / "once"))
    run_here(recipe(3), new_run(tmp_path / "twice"))
    run_here(recipe(6), Run(tmp_path / "twice"))
    weights = [open_weights(tmp_path / name / "checkpoints" / "step-000000006") for name in ("once", "twice")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    lines = list(read_json_lines(tmp_path / "twice" / "metrics.jsonl"))
    assert lines[-1]["reward_accuracy"] > 0.5 and lines[-1]["reward_margin"] > 0
    (tmp_path / "twice" / "reference.npy").unlink()
    with pytest.raises(CheckpointError) as error:
        run_here(recipe(9), Run(tmp_path / "twice"))
    assert error.value.code == "tune.reference-missing"


def test_a_damaged_reference_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    path, margins = tmp_path / "reference.npy", np.arange(5, dtype=np.float32)
    write_reference(path, margins)
    good = path.read_bytes()
    assert np.array_equal(read_reference(path), margins) and np.array_equal(np.load(path), margins)
    path.write_bytes(good[:-4])  # of version 0.7: no checksum
    assert np.array_equal(read_reference(path), margins)

    def saved(array: Any) -> bytes:
        np.save(path, array, allow_pickle=True)
        return path.read_bytes()

    code = saved(np.array([Canary(tmp_path / "canary")], dtype=object))
    flipped = good[:-7] + bytes([good[-7] ^ 1]) + good[-6:]
    huge = good.replace(b"(5,), }             ", b"(5000000000000000,),}")[: len(good)]
    others = (
        saved(margins.astype(np.float64)),
        saved(margins[:, None]),
        saved(margins + np.float32(np.inf)),
        b"",
        b"PK\x03\x04",
        huge,
    )
    for content in (code, flipped, good[:-9], good[:20], good + b"x", *others):
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            read_reference(path)
        assert error.value.code == "tune.reference-damaged"
    assert not (tmp_path / "canary").exists()


def test_pairs_need_a_store_of_pairs_and_packing(store: Path, pair_store: Path) -> None:
    """Found when the run is created, or at the start where the store was not written before."""
    for folder, data, code in (
        (store, {}, "tune.no-pairs"),
        (store, {"store": None}, "tune.no-pairs"),
        (pair_store, {"pack": "stream", "mask_documents": True}, "tune.pairs-not-packed"),
    ):
        recipe = Recipe.model_validate(recipe_table(folder, {"task": "prefer"}, data=data))
        for check in (complete_tune, build):
            with pytest.raises((ConfigError, DataError)) as error:
                check(recipe)
            assert error.value.code == code
    missing = Recipe.model_validate(recipe_table(store.parent / "later", {"task": "prefer"}))
    assert complete_tune(missing) == missing


def test_rejected_answers_are_not_learned(pair_store: Path) -> None:
    def recipe(mix: dict[str, float]) -> Recipe:
        return Recipe.model_validate(recipe_table(pair_store, {"task": "chat"}, data={"mix": mix}))

    for mix in ({}, {"chat": 1.0}):
        with pytest.raises(DataError) as error:
            complete_tune(recipe(mix))
        assert error.value.code == "tune.pairs-as-chat"
    complete_tune(recipe({"web": 1.0}))  # the pairs are not used
