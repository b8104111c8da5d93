"""Perplexity and bits per byte: equal to the training loss, worked by hand, and by group."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from windlass.convert.source import load_model
from windlass.data.store import Store
from windlass.data.tokenizer import Tokenizer, train_bpe
from windlass.errors import CheckpointError, ConfigError, DataError
from windlass.evaluate.likelihood import token_losses
from windlass.evaluate.open_model import find_store, open_model
from windlass.evaluate.perplexity import (
    HeldOutDocument,
    byte_count,
    choose_documents,
    evaluate_text,
    group_scores,
    summarize,
)
from windlass.evaluate.scores import ratio_interval
from windlass.files import read_json_lines
from windlass.runs.folder import Run
from windlass.runs.scores import append_scores, wilson_interval


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_the_mean_is_the_training_code_s_loss(which: str, request: Any, store: Store, tokenizer: Tokenizer) -> None:
    opened = open_model(request.getfixturevalue(which).path)
    result = evaluate_text(opened, store, tokenizer)
    total = 0.0
    for name in store.sources:  # the same windows through the model's own summed loss
        flat = torch.tensor([store.eos, *store.tokens(name, "validation")[:].tolist()])
        for start in range(0, len(flat) - 1, 32):
            part = flat[start : start + 33]
            total += float(opened.model(part[None, :-1], part[None, 1:])[1])
    everything = result.scores[0].detail
    assert everything["tokens"] == sum(len(store.tokens(n, "validation")) for n in store.sources) == result.tokens
    assert everything["nats"] == pytest.approx(total, rel=1e-5)


def test_bits_per_byte_by_hand() -> None:
    """Two documents: 8 nats over 4 bytes, 2 nats over 6 bytes -> 10 / ln 2 / 10 bits per byte."""
    documents = [HeldOutDocument("a", "nl", 4, 4, 8.0), HeldOutDocument("a", "nl", 1, 6, 2.0)]
    bits, perplexity = group_scores("all", documents)
    assert bits.value == pytest.approx(1 / math.log(2))
    assert perplexity.value == pytest.approx(math.exp(2.0))
    assert bits.low is not None and bits.low <= bits.value <= (bits.high or 0)


def test_one_document_has_no_interval() -> None:
    assert group_scores("all", [HeldOutDocument("a", None, 4, 4, 8.0)])[0].low is None


def test_groups_cover_sources_languages_and_lengths() -> None:
    documents = [HeldOutDocument("a", "nl", 9, 100, 8.0), HeldOutDocument("b", None, 9, 9000, 8.0)]
    groups = {score.group for score in summarize(documents)}
    assert groups == {
        "all",
        "source a",
        "source b",
        "language nl",
        "language unknown",
        "length under 2 KiB",
        "length 8 to 32 KiB",
    }


def test_bytes_are_those_of_the_text(store: Store, tokenizer: Tokenizer, corpus: dict[str, Path]) -> None:
    total = sum(
        byte_count(array[start:stop], tokenizer, store.eos)
        for name in store.sources
        for split in store.splits
        for array in [store.tokens(name, split)]
        for start, stop in array.documents()
    )
    assert total == sum(info.bytes or 0 for info in store.sources.values())


def test_a_limit_takes_whole_documents_of_every_source(store: Store) -> None:
    chosen = dict(choose_documents(store, "validation", 300))
    assert set(chosen) == {"dutch", "english"}
    longest = max(stop - start for spans in chosen.values() for start, stop in spans)
    assert 300 <= sum(stop - start for spans in chosen.values() for start, stop in spans) <= 300 + 2 * longest
    every = dict(choose_documents(store, "validation", None))
    assert all(0 < len(chosen[name]) < len(every[name]) and set(chosen[name]) <= set(every[name]) for name in chosen)


def test_masked_documents_do_not_see_each_other(
    make_run: Any, tmp_path: Path, store: Store, tokenizer: Tokenizer
) -> None:
    run = make_run(tmp_path / "run", seq_len=64)
    opened = open_model(run.path)
    plain = evaluate_text(opened, store, tokenizer).documents
    data = opened.recipe.data.model_copy(update={"mask_documents": True})
    source = replace(opened.source, recipe=opened.recipe.model_copy(update={"data": data}))
    masked = evaluate_text(replace(opened, source=source), store, tokenizer).documents
    assert masked[0].nats == pytest.approx(plain[0].nats, rel=0.05)
    assert sum(d.nats for d in masked) != pytest.approx(sum(d.nats for d in plain), rel=1e-6)


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_one_shape_for_the_compiler_changes_nothing(
    which: str, request: Any, store: Store, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(request.getfixturevalue(which).path)
    plain = evaluate_text(opened, store, tokenizer, batch=3)
    shapes, compiled = set(), []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append(self))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    real = token_losses

    def noted(model: Any, inputs: torch.Tensor, *more: Any) -> torch.Tensor:
        shapes.add(tuple(inputs.shape))
        return real(model, inputs, *more)

    monkeypatch.setattr("windlass.evaluate.perplexity.token_losses", noted)
    fixed = evaluate_text(opened, store, tokenizer, batch=3, compiles=True)
    assert shapes == {(3, 32)} and len(compiled) == 2
    assert [d.nats for d in fixed.documents] == pytest.approx([d.nats for d in plain.documents], rel=1e-5)


def test_token_losses_ignore_padded_rows(llama_run: Run) -> None:
    model = open_model(llama_run.path).model
    assert model.embed.weight.shape[0] > model.vocab
    tokens = torch.randint(0, model.vocab, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = token_losses(model, tokens[:, :-1], tokens[:, 1:])
    logits = model(tokens[:, :-1])[..., : model.vocab]
    expected = -torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).squeeze(2)
    assert torch.allclose(losses, expected, atol=1e-5)


def test_results_land_in_the_run(llama_run: Run, store: Store, tokenizer: Tokenizer) -> None:
    opened = open_model(llama_run.path)
    result = evaluate_text(opened, store, tokenizer, max_tokens=500)
    append_scores(llama_run, result.scores, step=opened.step, tokens=opened.tokens)
    lines = list(read_json_lines(llama_run.eval_file))
    assert [line["value"] for line in lines[-len(result.scores) :]] == [score.value for score in result.scores]
    assert {"task", "group", "metric", "low", "high", "count"} <= set(lines[-1]) and lines[-1]["step"] == 7


def test_intervals() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for seed in range(60):  # a 95 % interval holds the truth about 57 times of 60
        sample = random.exponential(1.0, 80)
        low, high = ratio_interval(sample, np.ones(80), seed=seed)
        hits += (low or 0) <= 1.0 <= (high or 0)
    assert 50 <= hits <= 60
    low, high = wilson_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))


def test_refusals(
    llama_run: Run, retnet_run: Run, store: Store, tokenizer: Tokenizer, make_store: Any, tmp_path: Path
) -> None:
    other = make_store(tmp_path / "other", train_bpe(["abc " * 50, "water zee"], 262, tmp_path / "tokenizer"))
    opened, cpu = open_model(llama_run.path), torch.device("cpu")
    cases: list[tuple[Any, type[Exception], str, str]] = [
        (lambda: find_store(opened, other.path), DataError, "evaluate.other-tokenizer", "other"),
        (lambda: evaluate_text(opened, store, tokenizer, split="test"), DataError, "evaluate.split-missing", "'test'"),
        (lambda: open_model(llama_run.path, step=9), CheckpointError, "convert.step-missing", "9"),
        (
            lambda: load_model(retnet_run.recipe(), opened.source.folder, cpu, torch.float32),
            CheckpointError,
            "checkpoint.model-mismatch",
            "step-000000007",
        ),
        (lambda: open_model(llama_run.path, dtype="fp4"), ConfigError, "convert.dtype-unknown", "fp4"),
        (lambda: open_model(llama_run.path, device="gpu0"), ConfigError, "evaluate.device-unknown", "gpu0"),
        (lambda: open_model(llama_run.path, device="cuda:99"), ConfigError, "evaluate.device-missing", "cuda:99"),
    ]
    for action, kind, code, text in cases:
        with pytest.raises(kind) as error:
            action()
        assert error.value.code == code and text in error.value.message


def test_a_token_that_nothing_stands_before_is_not_counted(llama_run: Run, store: Store, tokenizer: Tokenizer) -> None:
    """Without an end token the very first token cannot be predicted: it must not lower the mean."""
    opened, bare = open_model(llama_run.path), replace(store, eos=None)
    with_end, without = (evaluate_text(opened, held, tokenizer, max_tokens=500) for held in (store, bare))
    first, second = with_end.scores[0].detail, without.scores[0].detail
    assert second["tokens"] == first["tokens"] - 1 and second["nats"] < first["nats"]
    assert [d.tokens for d in without.documents][1:] == [d.tokens for d in with_end.documents][1:]
