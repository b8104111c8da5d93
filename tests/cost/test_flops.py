from typing import Any

import pytest
from tests.cost.helpers import classic, own, retnet

from windlass.cost.flops import flops_per_token, hardware_flops_per_token, hfu, mfu, training_days
from windlass.errors import ConfigError
from windlass.models.spec import ModelSpec


def test_the_three_conventions_by_hand(llama_8b: ModelSpec) -> None:
    active = 8_030_261_248 - 128256 * 4096
    attention = 12 * 32 * 8192 * 4096
    assert flops_per_token(llama_8b, 8192, "6N") == 6 * active
    assert flops_per_token(llama_8b, 8192, "6N+attention") == 6 * active + attention
    assert flops_per_token(llama_8b, 8192, "6N+causal attention") == 6 * active + attention / 2


def test_an_unknown_convention_lists_the_valid_ones(llama_8b: ModelSpec) -> None:
    with pytest.raises(ConfigError) as error:
        flops_per_token(llama_8b, 8192, "7N")  # type: ignore[arg-type]
    assert error.value.code == "cost.unknown-flops-convention" and "7N" in error.value.message
    assert "6N+causal attention" in (error.value.hint or "")


def test_full_recompute_is_the_8n_of_the_slides() -> None:
    model = classic("gpt", layers=96, width=12288, heads=96, vocab=51200)
    assert hardware_flops_per_token(model, 1, "full", "6N") == pytest.approx(
        6 * model.params.active + 2 * model.params.body
    )
    assert hardware_flops_per_token(model, 1, "full", "6N") / model.params.active == pytest.approx(8, rel=0.01)
    none, selective, full = (hardware_flops_per_token(model, 2048, kind) for kind in ("none", "selective", "full"))
    assert flops_per_token(model, 2048) == none < selective < full


def test_a_tied_head_still_multiplies() -> None:
    tied, untied = (own(layers=4, width=256, heads=4, vocab=32000, tied=value) for value in (True, False))
    assert flops_per_token(tied, 128) == flops_per_token(untied, 128)


def test_retention_in_chunks_costs_less_than_the_square() -> None:
    parallel, chunked = retnet(), retnet(retention="chunkwise", chunk=512)
    # Forward and backward, 16 layers: 6 FLOPs for each pair of positions and value; a chunk's state is read and written.
    assert 3 * parallel.mixing_flops(8192) == 16 * 6 * 8192 * (1024 + 1728)
    assert 3 * chunked.mixing_flops(8192) == 16 * (6 * 512 * 2752 + 3 * 4 * 1024 * 1728 / 4)
    assert chunked.mixing_flops(512) == parallel.mixing_flops(512)


def test_mfu_says_what_it_is_a_share_of(llama_8b: ModelSpec) -> None:
    result = mfu(llama_8b, 8192, 6815, 989, matmul_tflops=794.5)
    assert result.value == pytest.approx(0.40, abs=0.005)  # torchtitan on an H200: 39.9 %
    assert result.of_achievable == pytest.approx(0.40 * 989 / 794.5, rel=0.01)
    assert result.convention == "6N+attention" and "989" in result.denominator
    assert "40." in str(result) or "39." in str(result)


def test_an_unknown_peak_gives_no_number(llama_8b: ModelSpec) -> None:
    assert mfu(llama_8b, 8192, 6815, None).value is None
    assert "not measured" in str(mfu(llama_8b, 8192, 6815, None))
    assert hfu(llama_8b, 8192, 6815, None, recompute="full").value is None


def test_hfu_counts_the_recomputed_forward_pass(llama_8b: ModelSpec) -> None:
    model, hardware = mfu(llama_8b, 8192, 6815, 989), hfu(llama_8b, 8192, 6815, 989, recompute="full")
    assert model.value and hardware.value
    assert 1.25 < hardware.value / model.value < 1.34
    assert "full" in hardware.convention


def test_gptnl_30b_in_34_days_means_an_mfu_of_a_third() -> None:
    # 22 nodes x 4 H100; 30e9 parameters, 450e9 tokens, 6N: the slide's 34 days need about 32 %.
    assert training_days(6 * 30e9 * 450e9, 88, 989, 0.32) == pytest.approx(34, rel=0.03)


def test_selective_recompute_counts_the_products_it_does_again() -> None:
    """Keys, attention's output and the up-projection of a Llama: 2048 x (256 + 2048 + 5632) weights of a layer's."""
    model = own(layers=22, width=2048, heads=32, kv_heads=4, ffn=5632, vocab=32_000)
    again = hardware_flops_per_token(model, 4096, "selective") - flops_per_token(model, 4096)
    assert again == pytest.approx(22 * 2 * 2048 * (256 + 2048 + 5632), rel=1e-3)


@pytest.mark.parametrize(
    ("total", "active", "keys"),
    [
        (46.7e9, 12.9e9, {"family": "mixtral", "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000}),
        (30.5e9, 3.35e9, {"family": "qwen3_moe", "layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144,
                          "vocab": 151936, "experts": {"ffn": 768}}),
        (6.92e9, 1.28e9, {"family": "olmoe", "layers": 16, "width": 2048, "heads": 16, "ffn": 1024, "vocab": 50304}),
    ],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B", "OLMoE-1B-7B"],
)  # fmt: skip
def test_experts_count_in_memory_and_only_some_of_them_in_flops(total: float, active: float, keys: Any) -> None:
    """Published counts; the published active ones contain the input embedding, which multiplies nothing."""
    model = own(**keys)
    assert model.params.total == pytest.approx(total, rel=2e-3)
    table = keys["vocab"] * keys["width"]
    assert model.params.active + table == pytest.approx(active, rel=5e-3)
    assert flops_per_token(model, 4096, "6N") == 6 * model.params.active
    assert hardware_flops_per_token(model, 4096, "full", "6N") == 6 * model.params.active + 2 * (
        model.params.active - table
    )
