"""On a GPU: a recorded token is the same token, and the compiled evaluation finds the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from windlass.evaluate.generate import Sampling, generate, generate_batch, make_decoder
from windlass.evaluate.open_model import open_model
from windlass.evaluate.perplexity import evaluate_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_a_replayed_token_is_the_same_token(which: str, dtype: str, request: Any) -> None:
    model = open_model(request.getfixturevalue(which).path, dtype=dtype).model
    tokens = torch.randint(0, model.vocab, (1, 60), generator=torch.Generator().manual_seed(1)).cuda()
    plain, replayed = (make_decoder(model, limit=60, replays=replays) for replays in (False, True))
    plain.feed(tokens[:, :20])
    replayed.feed(tokens[:, :20])
    scale = 1.0
    for place in range(20, 60):
        expected, actual = (state.feed(tokens[:, place : place + 1]) for state in (plain, replayed))
        scale = max(scale, float(expected.abs().max()))
        assert float((expected - actual).abs().max()) < (1e-3 if dtype == "fp32" else 0.06) * scale, place


def test_greedy_text_is_the_same(retnet_run: Any) -> None:
    model = open_model(retnet_run.path, dtype="fp32").model
    sampling = Sampling(tokens=40, temperature=0.0)
    assert generate(model, [5, 6, 7], sampling, replays=False).ids == generate(model, [5, 6, 7], sampling).ids


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_a_replayed_batch_gives_each_prompt_its_own_text(which: str, request: Any) -> None:
    model = open_model(request.getfixturevalue(which).path, dtype="fp32").model
    prompts, sampling = [[5, 6, 7], [8], [9, 10, 11, 12]], Sampling(tokens=20, temperature=0.0)
    alone = [generate(model, prompt, sampling, replays=False).ids for prompt in prompts]
    assert [row.ids for row in generate_batch(model, prompts, [sampling] * 3)] == alone


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
def test_compiled_evaluation_finds_the_same(which: str, request: Any, store: Any, tokenizer: Any) -> None:
    opened = open_model(request.getfixturevalue(which).path, dtype="fp32")
    plain = evaluate_text(opened, store, tokenizer, batch=4, compiles=False)
    fast = evaluate_text(opened, store, tokenizer, batch=4, compiles=True)
    assert [d.nats for d in fast.documents] == pytest.approx([d.nats for d in plain.documents], rel=2e-3)
