"""Parameters, products and FLOPs of each block by one worked example; torch is not imported."""

import subprocess
import sys

import pytest

from windlass.blocks.attention.rope import Rope
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec
from windlass.blocks.head.spec import choose_loss, loss_bytes
from windlass.blocks.latent.spec import LatentSpec
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.blocks.retention.spec import RetentionSpec
from windlass.layout.types import Layout, StepSpec

STEP = StepSpec(seq_len=1024)
ATTENTION = AttentionSpec(width=512, heads=8, kv_heads=2, head_dim=64)
LATENT = LatentSpec(
    width=7168, heads=128, kv_heads=128, head_dim=192, rope=Rope(1e4, 64), value_dim=128, kv_rank=512, q_rank=1536
)
MLP = MlpSpec(width=512, hidden=1536)
RETENTION = RetentionSpec(width=512, value_width=1024, heads=4)


def test_attention() -> None:
    assert ATTENTION.params() == {"query": 512 * 512, "key and value": 2 * 512 * 128, "attention output": 512 * 512}
    products = ATTENTION.products()
    assert [(p.name, p.outputs, p.inputs, p.divided) for p in products] == [
        ("query", 512, 512, "outputs"),
        ("key", 128, 512, "outputs"),
        ("value", 128, 512, "outputs"),
        ("attention output", 512, 512, "inputs"),
    ]
    assert [p.reads for p in products] == ["input"] * 3 + ["mixed"]
    assert sum(p.weights for p in products) == ATTENTION.active_params() == sum(ATTENTION.params().values())
    assert ATTENTION.mixing_flops(1024) == 4 * 1024 * 512
    mixing = ATTENTION.mixing(STEP)
    assert (mixing.flops, mixing.scores, mixing.narrow_heads) == (2 * 1024 * 512, 0, True)
    square = ATTENTION.mixing(StepSpec(seq_len=1024, attention="math"))
    assert (square.flops, square.scores) == (4 * 1024 * 512, 8 * 1024)
    # Queries, output, keys and values in 16 bits; log-sums in fp32.
    assert ATTENTION.kept_bytes(STEP, Layout()) == 2 * (2 * 512 + 2 * 128) + 4 * 8
    assert ATTENTION.kept_bytes(STEP, Layout(tensor=2)) == ATTENTION.kept_bytes(STEP, Layout()) / 2
    assert ATTENTION.context_bytes(STEP, Layout()) == 2 * 128 * 2
    assert ATTENTION.divides("tensor") == (("model.heads", 8), ("model.kv_heads", 2))
    assert ATTENTION.divides("pipeline") == ATTENTION.divides("context") == ()
    biased = AttentionSpec(width=512, heads=8, kv_heads=2, head_dim=64, bias="all", sinks=True)
    assert biased.params()["biases"] == 512 + 2 * 128 + 512 and biased.params()["sinks"] == 8


def test_latent_attention() -> None:
    """DeepSeek-V3's block, by hand."""
    assert LATENT.params() == {
        "query down": 7168 * 1536, "query up": 1536 * 128 * 192, "key and value down": 7168 * 576, "key and value up": 512 * 128 * 256,
        "attention output": 128 * 128 * 7168, "latent norms": 1536 + 512,
    }  # fmt: skip
    assert [p.divided for p in LATENT.products()] == ["", "outputs", "", "outputs", "inputs"]
    assert sum(p.weights for p in LATENT.products()) == LATENT.active_params() - 1536 - 512
    assert LATENT.mixing_flops(1024) == 2 * 1024 * 128 * (192 + 128)
    assert LATENT.mixing(STEP).flops == LATENT.mixing_flops(1024) / 2
    # Both narrow vectors before and after their norms on every rank; queries, keys, values and output of its heads.
    narrow, heads = 2 * (2 * (512 + 1536) + 64), 2 * 2 * 128 * (192 + 128) + 4 * 128
    assert LATENT.kept_bytes(STEP, Layout()) == narrow + heads
    assert LATENT.kept_bytes(STEP, Layout(tensor=4)) == narrow + heads / 4
    assert LATENT.context_bytes(STEP, Layout(tensor=4)) == 2 * 576
    assert LATENT.divides("tensor") == (("model.heads", 128),)


def test_feed_forward() -> None:
    assert MLP.params() == {"feed-forward": 3 * 512 * 1536}
    assert [(p.name, p.outputs, p.inputs, p.divided) for p in MLP.products()] == [
        ("gate", 1536, 512, "outputs"),
        ("up", 1536, 512, "outputs"),
        ("down", 512, 1536, "inputs"),
    ]
    assert MLP.mixing_flops(1024) == 0 and MLP.mixing(STEP) is None
    assert MLP.kept_bytes(STEP, Layout()) == 2 * 3 * 1536
    assert MLP.kept_bytes(StepSpec(seq_len=1024, compile=False), Layout()) == 2 * 4 * 1536
    assert MLP.kept_bytes(StepSpec(seq_len=1024, precision="fp8"), Layout()) == 2 * 2 * 1536
    assert MLP.divides("tensor") == (("model.ffn", 1536),)
    plain = MlpSpec(width=512, hidden=2048, activation="gelu", bias=True)
    assert plain.params() == {"feed-forward": 2 * 512 * 2048, "biases": 2048 + 512}
    assert [p.name for p in plain.products()] == ["gate", "down"]
    assert plain.kept_bytes(STEP, Layout()) == 2 * 2 * 2048


def test_retention() -> None:
    # Queries and keys 512 x 512; values, gate and output 512 x 1024.
    assert sum(RETENTION.params().values()) == 2 * 512**2 + 3 * 512 * 1024 == RETENTION.active_params()
    assert sum(p.weights for p in RETENTION.products()) == RETENTION.active_params()
    assert RETENTION.products()[-1].divided == "inputs"
    assert RETENTION.mixing_flops(1024) == 2 * 1024 * (512 + 1024)
    chunked = RetentionSpec(width=512, value_width=1024, heads=4, chunk=256)
    assert chunked.mixing_flops(1024) == 2 * 256 * (512 + 1024) + 4 * 512 * 1024 / 4
    # The parallel form keeps one decay matrix in fp32 for all layers.
    assert RETENTION.constant_bytes(STEP, Layout()) == 4 * 4 * 1024**2
    assert RETENTION.constant_bytes(STEP, Layout(tensor=2)) == 4 * 2 * 1024**2
    assert chunked.constant_bytes(STEP, Layout()) == 0
    assert RETENTION.context_bytes(STEP, Layout()) is None
    assert not RETENTION.masks_documents and not RETENTION.kept_by_selective
    assert RETENTION.divides("tensor") == (("model.heads", 4),)


def test_norm_and_embedding() -> None:
    assert NormSpec(width=512).params() == 512
    assert NormSpec(width=512, bias=True).params() == 1024
    assert NormSpec(width=512).kept_bytes(STEP, Layout()) == 2 * 2 * 512
    assert EmbeddingSpec(vocab=1000, rows=1024, width=512).rows == 1024


@pytest.mark.parametrize(
    ("wish", "tokens", "tensor", "kind"),
    [
        ("auto", 512, 1, "plain"),
        ("auto", 513, 1, "chunked"),
        ("auto", 1, 2, "chunked"),
        ("plain", 10**6, 1, "plain"),
        ("fused", 1, 1, "chunked"),
    ],
)
def test_loss_by_the_size_of_its_logits(wish: str, tokens: int, tensor: int, kind: str) -> None:
    assert choose_loss(wish, 32768, tokens, tensor)[0] == kind  # 512 x 32,768 x 4 bytes = 64 MiB


def test_bytes_of_the_loss() -> None:
    layout = Layout()
    plain = StepSpec(seq_len=1024, loss="plain")
    assert loss_bytes(512, 32768, 1024, plain, layout, plain_bytes=12.0) == 1024 * 32768 * 12
    chunked = StepSpec(seq_len=1024, loss="chunked", loss_chunk=256)
    # Four chunks: the logits of one with both gradients, the weights' gradient, and the hidden states.
    expected = 256 * 32768 * 6 + 4 * 32768 * 512 + 1024 * 512 * 2
    sums = 256 * 32768 * 2 + 2 * 4 * 32768 * 512 + 1024 * 512 * 2
    assert loss_bytes(512, 32768, 1024, chunked, layout, plain_bytes=12.0) == max(expected, sums)


def test_specs_do_not_import_torch() -> None:
    code = "import sys, windlass.models.presets, windlass.layout.rules, windlass.cost.step, windlass.planner; " \
        "from windlass.registry import PRESETS; [PRESETS.load(name) for name in PRESETS.names()]; " \
        "sys.exit('torch' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
