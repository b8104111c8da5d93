"""Mamba-2 in chunks against the recurrence, documents against each alone, decoding against a forward pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.blocks.base import BlockContext
from windlass.blocks.mamba import fused
from windlass.blocks.mamba.module import Mamba
from windlass.blocks.mamba.scan import chunked_scan
from windlass.blocks.mamba.spec import MambaSpec
from windlass.layout.types import Layout, StepSpec

SPEC = MambaSpec(width=24, heads=6, head_dim=4, state=5, groups=2, chunk=8)


def make_block(spec: MambaSpec = SPEC) -> Mamba:
    block = Mamba(spec)
    for number, (name, parameter) in enumerate(block.named_parameters()):
        block.filler(name, 0.2, 2)(parameter.data, torch.Generator().manual_seed(number))
    return block


def recurrence(values: Tensor, steps: Tensor, decay: Tensor, write: Tensor, read: Tensor, documents: Tensor) -> Tensor:
    """Position by position."""
    batch, time, heads, dim = values.shape
    per_group = heads // write.shape[2]
    write, read = (part.repeat_interleave(per_group, dim=2) for part in (write, read))
    state, out = values.new_zeros(batch, heads, dim, write.shape[-1]), []
    for t in range(time):
        same = documents[:, t + 1] == documents[:, t]
        state = state * (steps[:, t] * decay).exp()[..., None, None] * same[:, None, None, None]
        state = state + (steps[:, t, :, None] * values[:, t])[..., None] * write[:, t, :, None]
        out.append((state * read[:, t, :, None]).sum(-1))
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
@pytest.mark.parametrize("is_packed", [False, True])
def test_chunks_compute_the_recurrence(chunk: int, is_packed: bool) -> None:
    torch.manual_seed(0)
    shapes = ((2, 23, 6, 4), (2, 23, 6), (6,), (2, 23, 2, 5), (2, 23, 2, 5))
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    inputs[1], inputs[2] = inputs[1].abs(), -3 * inputs[2].abs()
    # Documents that end inside a chunk, at its end, after one position, and one that covers several chunks.
    numbers = torch.tensor([[0] * 3 + [1] + [2] * 4 + [3] * 15, [0] * 8 + [1] * 15])
    documents = torch.nn.functional.pad(numbers if is_packed else numbers * 0, (1, 0), value=-1)
    grads = []
    for function in (recurrence, lambda *a: chunked_scan(*a[:5], chunk, a[5] if is_packed else None)[0]):
        leaves = [part.clone().requires_grad_() for part in inputs]
        out = function(*leaves, documents)
        out.square().sum().backward()
        grads.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5)  # decays between chunks are in fp32


def test_a_long_sequence_keeps_its_digits() -> None:
    """The logarithm of the decay reaches -40,000, where fp32 has steps of 0.004."""
    torch.manual_seed(0)
    values, steps = torch.randn(1, 20_000, 1, 2), torch.full((1, 20_000, 1), 0.5)
    write, read = torch.randn(1, 20_000, 1, 3), torch.randn(1, 20_000, 1, 3)
    inputs = (values, steps, torch.tensor([-4.0]), write, read)
    whole = chunked_scan(*inputs, 16)[0]
    tail = [part[:, -512:] if part.ndim > 1 else part for part in inputs]
    torch.testing.assert_close(whole[:, -256:], chunked_scan(*tail, 16)[0][:, -256:], rtol=1e-5, atol=1e-5)


def test_packed_documents_are_computed_as_alone() -> None:
    block, x = make_block(), torch.randn(1, 37, 24, requires_grad=True)
    lengths, slope = [9, 1, 2, 16, 9], torch.randn(1, 37, 24)
    numbers = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None]
    packed = block(x, BlockContext({}, numbers))
    (packed * slope).sum().backward()
    together = [parameter.grad.clone() for parameter in (x, *block.parameters())]
    block.zero_grad()
    x.grad = None
    alone = torch.cat([block(part, BlockContext({})) for part in x.split(lengths, dim=1)], dim=1)
    (alone * slope).sum().backward()
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
    for gradient, parameter in zip(together, (x, *block.parameters()), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 2, 13])
def test_decoding_carries_the_state(prompt: int) -> None:
    block, x = make_block(), torch.randn(2, 20, 24)
    state, places = block.new_state(2, 20), torch.arange(20)
    parts = [block.decode(x[:, :prompt], state, places[:prompt], 0, None)]
    parts += [block.decode(x[:, t : t + 1], state, places[t : t + 1], None, None) for t in range(prompt, 20)]
    torch.testing.assert_close(torch.cat(parts, dim=1), block(x, BlockContext({})), rtol=1e-4, atol=1e-5)
    # However many tokens: 6 heads of 4 x 5 numbers, and 3 inputs of 24 + 2 x 10 channels, in fp32.
    assert block.state_bytes(state, 20) == 2 * 4 * (6 * 4 * 5 + 3 * 44)


def kept_numbers(block: Mamba, time: int) -> list[int]:
    """Sizes of the tensors that a forward pass keeps for the backward pass."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(torch.randn(1, time, 8), BlockContext({}, torch.zeros(1, time, dtype=torch.long)))
    return sizes


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    block = make_block(MambaSpec(width=8, heads=2, head_dim=4, state=4, groups=1, chunk=16))
    block.repeats = False  # shows what is computed again otherwise
    short, long = kept_numbers(block, 256), kept_numbers(block, 1024)
    assert sum(long) < 4.2 * sum(short) and max(long) == 1024 * 16 * 2
    block.repeats = True
    assert sum(kept_numbers(block, 1024)) < 0.2 * sum(long)


def test_kernels_of_a_package_are_called_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's two functions, played by the plain scan: outputs, gradients and documents arrive in their places."""
    shapes = ((2, 23, 6, 4), (2, 23, 6), (6,), (2, 23, 2, 5), (2, 23, 2, 5))
    inputs = [torch.rand(shape) for shape in shapes]
    inputs[2] = -inputs[2]
    numbers = torch.tensor([[0] * 9 + [1] * 14, [0] * 23])

    def forward(*args: Any, seq_idx: Tensor) -> tuple[Tensor, ...]:
        return (chunked_scan(*args, torch.nn.functional.pad(seq_idx, (1, 0), value=-1))[0],)

    def backward(grad: Tensor, *args: Any, seq_idx: Tensor) -> Any:
        *tensors, out, chunk = args
        assert out.shape == grad.shape

        def gradients() -> Any:
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            return torch.autograd.grad(forward(*leaves, chunk, seq_idx=seq_idx)[0], leaves, grad)

        with ThreadPoolExecutor(1) as pool:  # an operator's own thread computes no gradients
            return pool.submit(gradients).result()

    kernels = SimpleNamespace(_mamba_chunk_scan_combined_fwd=forward, _mamba_chunk_scan_combined_bwd=backward)
    monkeypatch.setattr(fused, "_kernels", lambda: kernels)
    results = []
    for function in (
        lambda *leaves: chunked_scan(*leaves, 8, torch.nn.functional.pad(numbers, (1, 0), value=-1))[0],
        lambda *leaves: fused.fused_scan(*leaves, 8, numbers.to(torch.int32)),
    ):
        leaves = [part.clone().requires_grad_() for part in inputs]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_sizes_and_costs() -> None:
    spec = MambaSpec(width=512, heads=16, head_dim=64, state=32, groups=4, chunk=128)
    assert (spec.inner, spec.channels) == (1024, 1024 + 2 * 128)
    assert sum(spec.params().values()) == sum(p.numel() for p in Mamba(spec).parameters())
    assert sum(p.weights for p in spec.products()) == 512 * (2 * 1024 + 2 * 128 + 16) + 1024 * 512
    # A square of 128 positions for groups and heads, and a state that is written and read.
    assert spec.mixing_flops(4096) == 2 * 128 * (128 + 1024) + 4 * 1024 * 32 == spec.mixing_flops(131072)
    assert spec.mixing_flops(64) < spec.mixing_flops(128)
    step = StepSpec(seq_len=4096)
    assert spec.kept_bytes(step, Layout(tensor=4)) == spec.kept_bytes(step, Layout()) / 4
    assert spec.context_bytes(step, Layout(context=2)) == 4 * 1024 * 32 / 2048
    assert spec.divides("tensor") == (("model.mamba.heads", 16), ("model.mamba.groups", 4))
    assert spec.divides("context") == spec.divides("pipeline") == ()
    assert spec.masks_documents and not spec.kept_by_selective
