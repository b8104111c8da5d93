"""Masked language modelling: BERT's shares, transformers' loss, the same after a stop, on any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.helpers import build, new_run, run_here
from tests.train.tuning_files import make_masked_store, masked_table, save_encoder

from windlass.config import Recipe
from windlass.data.complete_tune import complete_tune
from windlass.errors import ConfigError
from windlass.layout.types import IGNORED
from windlass.train.loop import open_batches
from windlass.train.masking import Masking

MASK, SPECIAL = 4, (0, 1, 2, 3, 4)


def test_shares_of_bert() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(5, 1000, (200, 100))
    tokens[:, ::10] = 3  # a special token
    masking = Masking(0.15, MASK, SPECIAL, 1000)
    inputs, targets = masking.hide(tokens, 7)
    hidden = targets != IGNORED
    assert (hidden.sum(1) == 15).all() and not hidden[:, ::10].any()
    assert torch.equal(targets[hidden], tokens[hidden]) and torch.equal(inputs[~hidden], tokens[~hidden])
    is_mask, is_same = inputs[hidden] == MASK, inputs[hidden] == tokens[hidden]
    assert float(is_mask.float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float(is_same.float().mean()) == pytest.approx(0.1, abs=0.03)
    # Each position equally often, others at the next step, and the same for a sequence alone.
    assert hidden.float().mean(0)[1:10].min() > 0.08
    assert not torch.equal(masking.hide(tokens, 8)[1], targets)
    assert torch.equal(masking.hide(tokens[5:6], torch.tensor(7))[0], inputs[5:6])


def test_few_ordinary_tokens() -> None:
    """A sequence of special tokens but two hides at most those."""
    tokens = torch.zeros(1, 100, dtype=torch.long)
    tokens[0, :2] = torch.tensor([7, 8])
    assert int((Masking(0.15, MASK, SPECIAL, 10).hide(tokens, 0)[1] != IGNORED).sum()) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without weights, and a store of reviews."""
    folder = tmp_path_factory.mktemp("masked")
    save_encoder(folder / "model")
    make_masked_store(folder)
    return folder


def recipe(folder: Path, **changes: Any) -> Recipe:
    return complete_tune(Recipe.model_validate(masked_table(folder, **changes)))


def test_loss_of_transformers(folder: Path) -> None:
    import transformers

    table = recipe(folder)
    assert table.tune is not None and table.tune.mask_token == MASK and table.tune.special_tokens == list(SPECIAL)
    training = build(table)
    model = training.parts.modules[0]
    model.init_weights(0)
    theirs = transformers.BertForMaskedLM(transformers.BertConfig.from_pretrained(folder / "model")).eval()
    state = model.state_dict()
    theirs.load_state_dict({name: state[f"net.{name}"].clone() for name in theirs.state_dict()})
    reader = open_batches(training)
    batch = next(reader)
    reader.close()
    assert training.stepper.targets.masking is not None
    inputs, targets = training.stepper.targets.masking.hide(batch.tokens[:, :-1], 0)
    labels = targets.masked_fill(targets == IGNORED, -100)
    with torch.no_grad():
        expected = float(theirs(input_ids=inputs, labels=labels).loss)
    assert float(training.stepper.step(batch, 0.0).values[0]) == pytest.approx(expected, rel=2e-6)
    assert training.validator is not None and training.validator.run().overall.bits_per_byte is None


def test_export_is_loaded_by_transformers(folder: Path, tmp_path: Path) -> None:
    """The class of the export is that of masked language models, verified by logits, and a fine-tuning starts from it."""
    import transformers

    from windlass.convert.export import export

    table = recipe(folder, train={"steps": 1, "eval_every": 0})
    run = new_run(tmp_path / "run")
    run.path.joinpath("config.json").write_text(table.model_dump_json())
    assert run_here(table, run) == 0
    exported = export(run.path, tmp_path / "exported")
    assert exported.check is not None and exported.check.difference < 1e-5
    assert type(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "exported")).__name__ == "BertForMaskedLM"
    body = transformers.AutoModel.from_pretrained(tmp_path / "exported")
    assert body.config.num_hidden_layers == 2


@pytest.mark.integration
def test_learns_and_resumes(folder: Path, tmp_path: Path) -> None:
    """30 steps at once, and the same cut after 13."""
    table = recipe(folder)
    one, two = new_run(tmp_path / "one"), new_run(tmp_path / "two")
    assert run_here(table, one) == 0
    short = table.model_copy(update={"train": table.train.model_copy(update={"steps": 13})})
    assert run_here(short, two) == 0 and run_here(table, two) == 0
    losses = [[line.loss for line in run.metrics_lines()] for run in (one, two)]
    assert losses[0] == losses[1] and losses[0][-1] < 0.8 * losses[0][0]


def test_refusals(folder: Path, tmp_path: Path) -> None:
    from windlass.config.load import check

    llama = {"family": "llama", "layers": 1, "width": 32, "ffn": 64, "heads": 2, "vocab": 64}
    cases = [
        (lambda: build(recipe(folder, model=llama)), "tune.needs-encoder"),
        (lambda: recipe(folder, data={"store": None}), "tune.no-mask-token"),
        (lambda: check(recipe(folder, train={"goldfish_k": 4})), "config.invalid"),
    ]
    for action, code in cases:
        with pytest.raises(ConfigError) as error:
            action()
        assert error.value.code == code
