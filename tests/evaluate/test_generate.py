"""Incremental decoding is the forward pass, and generation samples as asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.config import ModelConfig
from windlass.errors import ConfigError
from windlass.evaluate.generate import Sampling, generate, generate_batch, make_decoder, pick_token, stop_condition
from windlass.evaluate.open_model import open_model
from windlass.models.build import build_model


def whole(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens)[:, -1, : model.vocab].float()


@pytest.mark.parametrize("which", ["llama_run", "retnet_run", "hybrid_run"])
@pytest.mark.parametrize("parts", [(30,), (1,) * 30, (7, 1, 1, 12, 9)])
def test_decoding_is_the_forward_pass(which: str, parts: tuple[int, ...], request: Any) -> None:
    model = open_model(request.getfixturevalue(which).path).model
    tokens = torch.randint(0, model.vocab, (2, 30), generator=torch.Generator().manual_seed(1))
    state, done = make_decoder(model, batch=2, limit=30), 0
    for part in parts:
        logits = state.feed(tokens[:, done : done + part])
        done += part
        assert torch.allclose(logits, whole(model, tokens[:, :done]), atol=2e-4), done


@pytest.mark.parametrize("which", ["llama_run", "retnet_run", "hybrid_run"])
def test_a_token_with_its_place_as_a_tensor_is_the_same_token(which: str, request: Any) -> None:
    """What a GPU records and replays, computed here without a recording."""
    model = open_model(request.getfixturevalue(which).path).model
    tokens = torch.randint(0, model.vocab, (2, 30), generator=torch.Generator().manual_seed(1))
    plain, other = (make_decoder(model, batch=2, limit=40) for _ in range(2))
    plain.feed(tokens[:, :20])
    other.feed(tokens[:, :20])
    for place in range(20, 30):
        token = tokens[:, place : place + 1]
        assert torch.allclose(other.run(token, torch.tensor([place]), None), plain.feed(token), atol=1e-4), place


def test_a_long_prompt_goes_through_in_chunks(retnet_run: Any) -> None:
    model = open_model(retnet_run.path).model
    model.seq_len = 200
    model.prepare("cpu")
    tokens = torch.randint(0, model.vocab, (1, 190), generator=torch.Generator().manual_seed(1))
    state = make_decoder(model, limit=190)
    state.chunk = 16
    assert torch.allclose(state.feed(tokens), whole(model, tokens), atol=2e-4)


def test_memory_grows_for_llama_and_not_for_retnet(llama_run: Any, retnet_run: Any) -> None:
    llama, retnet = (make_decoder(open_model(run.path).model, limit=64) for run in (llama_run, retnet_run))
    sizes = []
    for state in (llama, retnet):
        state.feed(torch.zeros(1, 8, dtype=torch.long))
        first = state.state_bytes()
        state.feed(torch.zeros(1, 24, dtype=torch.long))
        sizes.append((first, state.state_bytes()))
    # 2 layers x keys and values x 2 heads x 12 numbers x 4 bytes = 384 bytes a token
    assert sizes[0] == (8 * 384, 32 * 384)
    assert sizes[1][0] == sizes[1][1]


def test_a_transformers_model_decodes_with_its_own_cache(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=120,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    model = build_model(ModelConfig(family="hf", config=str(tmp_path)), seq_len=32)
    model.init_weights(0)
    tokens = torch.randint(0, 120, (1, 12))
    state = make_decoder(model.eval(), limit=12)
    state.feed(tokens[:, :5])
    assert torch.allclose(state.feed(tokens[:, 5:]), whole(model, tokens), atol=1e-4)
    assert state.state_bytes() > 0


def test_a_seed_is_a_text(llama_run: Any) -> None:
    model = open_model(llama_run.path).model
    texts = [generate(model, [5, 6, 7], Sampling(tokens=12, seed=seed)).ids for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 12


def test_greedy_takes_the_best_and_ends_with_the_end(llama_run: Any) -> None:
    model = open_model(llama_run.path).model
    result = generate(model, [5, 6], Sampling(tokens=6, temperature=0))
    tokens = [5, 6]
    for _ in range(6):
        tokens.append(int(whole(model, torch.tensor([tokens])).argmax()))
    assert result.ids == tokens[2:] and result.prompt_tokens == 2 and result.tokens_per_second
    end = result.ids[3]
    cut = generate(model, [5, 6], Sampling(tokens=6, temperature=0), eos=end)
    assert cut.ended and cut.ids == result.ids[: result.ids.index(end)]
    on = generate(model, [5, 6], Sampling(tokens=6, temperature=0, ignore_eos=True), eos=end)
    assert not on.ended and len(on.ids) == 6 and end not in on.ids


def test_the_nucleus_is_kept_to() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    random = torch.Generator().manual_seed(0)
    tokens = [pick_token(logits, Sampling(temperature=1.0, top_p=0.7), random) for _ in range(300)]
    assert set(tokens) == {0, 1}
    assert tokens.count(0) / 300 == pytest.approx(0.625, abs=0.08)  # 0.5 / 0.8


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"tokens": 0}, {"top_k": 0}])
def test_invalid_sampling(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        Sampling(**wrong)
    assert error.value.code == "evaluate.sampling-invalid"


def test_empty_prompt(llama_run: Any) -> None:
    with pytest.raises(ConfigError) as error:
        generate(open_model(llama_run.path).model, [], Sampling())
    assert error.value.code == "evaluate.prompt-empty"


@pytest.mark.parametrize("which", ["llama_run", "retnet_run"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_each_prompt_its_own_text(which: str, temperature: float, request: Any) -> None:
    model = open_model(request.getfixturevalue(which).path).model
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6]]
    alone = [
        generate(model, prompt, Sampling(tokens=9, temperature=temperature, seed=seed), eos=77, stop=ends_early).ids
        for seed, prompt in enumerate(prompts)
    ]
    samplings = [Sampling(tokens=9, temperature=temperature, seed=seed) for seed in range(4)]
    together = generate_batch(model, prompts, samplings, ends=(77,), stop=ends_early)
    assert [row.ids for row in together] == alone
    assert [row.prompt_tokens for row in together] == [3, 1, 6, 2] and len({tuple(ids) for ids in alone}) > 1


def ends_early(ids: list[int]) -> bool:
    return len(ids) > 4 and ids[-1] % 3 == 0


def test_a_stop_string_is_looked_for_behind_white_space_at_the_beginning() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    for text, strip, expected in [
        ("\n\nabc", True, False),
        ("\n" * 30, True, False),
        ("\nabc\n", True, True),
        ("\nabc", False, True),
        ("x" * 50 + "EN", False, False),
        ("x" * 50 + "END", False, True),
    ]:
        stop = stop_condition(["\n", "END"], decode, strip=strip)
        assert stop([ord(c) for c in text]) == expected, (text, strip)
