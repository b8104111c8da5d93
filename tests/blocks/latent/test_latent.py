"""What the new blocks keep for the backward pass, counted tensor by tensor: latent attention, biased and clamped experts."""

from __future__ import annotations

import pytest
import torch

from windlass.blocks.attention.rope import Rope
from windlass.blocks.base import Block, BlockContext
from windlass.blocks.experts.module import Experts
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.blocks.latent.module import LatentAttention
from windlass.blocks.latent.spec import LatentSpec
from windlass.layout.types import Layout, StepSpec

POSITIONS = 128
LATENT = {"width": 64, "heads": 4, "kv_heads": 4, "head_dim": 24, "value_dim": 24, "kv_rank": 32, "rope": Rope(1e4, 8)}
EXPERTS = ExpertsSpec(width=64, hidden=96, count=8, top_k=4, bias=True, activation="clamped_swiglu")


def kept_per_token(block: Block, compiled: bool) -> float:
    """Bytes beside the input, parameters and tables; numbers of an expert or of the batch are left out."""
    x = torch.randn(2, POSITIONS, 64, requires_grad=True)
    key = block.table_key
    tables = {} if key is None else {key: block.make_table(0, POSITIONS, torch.device("cpu"))}
    held = [x, *block.parameters(), *(part for table in tables.values() for part in table)]
    own, sizes = {tensor.untyped_storage().data_ptr() for tensor in held}, dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel() > 2 * POSITIONS:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch._dynamo.reset()
    run = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False) if compiled else block
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run(x, BlockContext(tables))
    return sum(sizes.values()) / (2 * POSITIONS)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "spec", [LatentSpec(**LATENT), LatentSpec(**LATENT, q_rank=40), EXPERTS], ids=["kv", "q", "experts"]
)
def test_the_spec_counts_what_the_block_keeps(spec: LatentSpec | ExpertsSpec, compiled: bool) -> None:
    block = LatentAttention(spec) if isinstance(spec, LatentSpec) else Experts(spec)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    step = StepSpec(seq_len=POSITIONS, precision="fp32", compile=compiled)
    assert spec.kept_bytes(step, Layout()) == pytest.approx(kept_per_token(block, compiled), rel=0.01)
