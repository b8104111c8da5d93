import pytest

from windlass.cost.flops import attention_per_token, days, hardware_per_token, hfu, mfu, per_token, training_flops
from windlass.cost.params import count
from windlass.cost.shapes import make_shape
from windlass.errors import ConfigError


def test_the_three_conventions_by_hand(llama_8b):
    active = 8_030_261_248 - 128256 * 4096
    attention = 12 * 32 * 8192 * 4096
    assert per_token(llama_8b, 8192, "6N") == 6 * active
    assert per_token(llama_8b, 8192, "6N+attention") == 6 * active + attention
    assert per_token(llama_8b, 8192, "6N+causal attention") == 6 * active + attention / 2


def test_an_unknown_convention_lists_the_known(llama_8b):
    with pytest.raises(ConfigError, match="7N") as caught:
        per_token(llama_8b, 8192, "7N")
    assert "6N+causal attention" in (caught.value.hint or "")


def test_full_recompute_is_the_8n_of_the_slides():
    shape = make_shape(arch="gpt", layers=96, width=12288, heads=96, vocab=51200)
    body = count(shape).body
    assert hardware_per_token(shape, 1, "full", "6N") == pytest.approx(6 * count(shape).active + 2 * body)
    assert hardware_per_token(shape, 1, "full", "6N") / count(shape).active == pytest.approx(8, rel=0.01)
    assert hardware_per_token(shape, 2048, "none") == per_token(shape, 2048)
    assert (
        per_token(shape, 2048) < hardware_per_token(shape, 2048, "selective") < hardware_per_token(shape, 2048, "full")
    )


def test_a_tied_head_still_multiplies():
    tied, untied = (make_shape(layers=4, width=256, heads=4, vocab=32000, tied=t) for t in (True, False))
    assert per_token(tied, 128) == per_token(untied, 128)


def test_retention_in_chunks_costs_less_than_the_square():
    common = {
        "arch": "retnet",
        "layers": 16,
        "width": 1024,
        "ffn": 1728,
        "heads": 4,
        "vocab": 50000,
        "value_width": 1728,
    }
    parallel, chunked = make_shape(**common), make_shape(**common, chunk=512)
    assert attention_per_token(parallel, 8192) == 16 * 6 * 8192 * (1024 + 1728)
    assert attention_per_token(chunked, 8192) == 16 * (6 * 512 * 2752 + 3 * 4 * 1024 * 1728 / 4)
    assert attention_per_token(chunked, 512) == attention_per_token(parallel, 512)


def test_mfu_names_what_it_is_a_share_of(llama_8b):
    found = mfu(llama_8b, 8192, 6815, 989, matmul_tflops=794.5)
    assert found.value == pytest.approx(0.40, abs=0.005)  # torchtitan on an H200: 39.9 %
    assert found.of_achievable == pytest.approx(found.value * 989 / 794.5)
    assert "6N+attention" in str(found) and "989 TFLOP/s dense bf16 peak" in str(found) and "achievable" in str(found)


def test_an_unknown_peak_gives_no_number(llama_8b):
    assert mfu(llama_8b, 8192, 6815, None).value is None
    assert "unknown" in str(mfu(llama_8b, 8192, 6815, None))
    assert hfu(llama_8b, 8192, 6815, None, recompute="full").value is None


def test_hfu_counts_the_recomputed_forward(llama_8b):
    plain, hard = mfu(llama_8b, 8192, 6815, 989), hfu(llama_8b, 8192, 6815, 989, recompute="full")
    assert 1.25 < hard.value / plain.value < 1.34
    assert "full recompute" in hard.convention


def test_gptnl_30b_in_34_days_means_an_mfu_of_a_third():
    # 22 nodes x 4 H100; 30e9 parameters, 450e9 tokens, 6N: the slide's 34 days need about 32 %.
    flops = 6 * 30e9 * 450e9
    assert days(flops, 88, 989, 0.32) == pytest.approx(34, rel=0.03)


def test_training_flops_is_tokens_times_one(llama_8b):
    assert training_flops(llama_8b, 4096, 1e9, "6N") == 1e9 * per_token(llama_8b, 4096, "6N")


def test_selective_recompute_counts_the_products_it_does_again() -> None:
    """Keys, attention's output and the up-projection of a Llama: 2048 x (256 + 2048 + 5632) weights of a layer's."""
    shape = make_shape(layers=22, width=2048, heads=32, kv_heads=4, ffn=5632, vocab=32_000)
    again = 22 * 2 * 2048 * (256 + 2048 + 5632)
    found = hardware_per_token(shape, 4096, "selective") - per_token(shape, 4096)
    assert found == pytest.approx(again, rel=1e-3)
