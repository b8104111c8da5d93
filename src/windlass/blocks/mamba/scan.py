"""The state-space recurrence of Mamba-2 by matrix products in chunks (its dual form); memory grows linearly with time.

Each head has a state (head_dim x state). At each position it decays by exp(step * decay), takes in step * value x B,
and is read by C. Inside a chunk that is a causal product like attention's; between chunks only states pass.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# (state that a stretch of positions leaves by itself, share of an earlier state that outlives it) -> state before it.
Incoming = Callable[[Tensor, Tensor], Tensor]


def chunked_scan(
    values: Tensor,
    steps: Tensor,
    decay: Tensor,
    write: Tensor,
    read: Tensor,
    chunk: int,
    documents: Tensor | None = None,
    incoming: Incoming | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (batch, time, heads, head_dim) in fp32, and the state after the last position (batch, groups, heads of a
    group, head_dim, state) in fp32.

    `values` is (batch, time, heads, head_dim); `steps` (batch, time, heads) and `decay` (heads) are in fp32; `write`
    (B) and `read` (C) are (batch, time, groups, state). `documents` (batch, 1 + time) begins with the document of the
    position before the first; a state does not pass from one document to another.
    """
    time, dim = values.shape[1], values.shape[3]
    groups, chunk = write.shape[2], min(chunk, time)
    if padding := -time % chunk:  # steps of 0 change nothing
        values, write, read = (F.pad(part, (0, 0, 0, 0, 0, padding)) for part in (values, write, read))
        steps = F.pad(steps, (0, 0, 0, padding))
        if documents is not None:
            documents = torch.cat((documents, documents[:, -1:].expand(-1, padding)), dim=1)

    def divided(x: Tensor) -> Tensor:
        """(batch, chunks, groups, heads of a group, positions, ...)"""
        chunked: Tensor = x.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1))
        return chunked.movedim(2, 4)

    values, steps = divided(values), divided(steps)
    write, read = (x.unflatten(1, (-1, chunk)).transpose(2, 3) for x in (write, read))
    logs = (steps * decay.view(groups, -1, 1)).cumsum(-1)  # of decays from the chunk's beginning
    chunks, dtype = values.shape[1], values.dtype

    places = torch.arange(chunk, device=values.device)
    reaches = (places[:, None] >= places).view(1, 1, 1, 1, chunk, chunk)
    survives, entered = torch.ones((), dtype=torch.bool, device=values.device), None
    if documents is not None:
        inside = documents[:, 1:].unflatten(1, (-1, chunk))[:, :, None, None]
        last, before = inside[..., -1:], documents[:, :-1].unflatten(1, (-1, chunk))[:, :, None, None, :1]
        reaches = reaches & (inside[..., :, None] == inside[..., None, :])
        survives, entered = inside == last, inside == before

    # Inside a chunk. The mask stands before the exponential, which would be infinite above the diagonal.
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~reaches, float("-inf")).exp()
    scores = (read @ write.transpose(-1, -2)).unsqueeze(3)
    within = (scores * (decays * steps[..., None, :])).to(dtype) @ values

    # What each chunk leaves: values decayed to its end, by B.
    weight = (logs[..., -1:] - logs).exp() * steps * survives
    weighted = (values * weight[..., None].to(dtype)).transpose(-1, -2).flatten(3, 4)
    left = (weighted @ write).unflatten(3, (-1, dim))
    states = passed_states(left.float(), logs[..., -1], documents, chunk, incoming)

    recalled = (read @ states[:, :-1].to(dtype).flatten(3, 4).transpose(-1, -2)).unflatten(-1, (-1, dim)).movedim(3, 4)
    kept = logs.exp() if entered is None else logs.exp() * entered
    out = within.float() + recalled.float() * kept[..., None]
    return out.movedim(4, 2).flatten(3, 4).flatten(1, 2)[:, :time], states[:, chunks]


def passed_states(
    left: Tensor, logs: Tensor, documents: Tensor | None, chunk: int, incoming: Incoming | None
) -> Tensor:
    """The state before each chunk and after the last (batch, 1 + chunks, groups, heads, head_dim, state), of what each
    leaves and the logarithm of each chunk's decay (batch, chunks, groups, heads): one product instead of a loop."""
    logs = logs.movedim(1, -1).double().cumsum(-1)  # a sum over a long sequence would have too few digits in fp32
    places = torch.arange(logs.shape[-1], device=logs.device)
    reaches, outlives = places[:, None] >= places, None
    if documents is not None:
        last = documents[:, chunk::chunk][:, None, None]
        reaches = reaches & (last[..., :, None] == last[..., None, :])
        outlives = last == documents[:, None, None, :1]
    weight = (logs[..., :, None] - logs[..., None, :]).masked_fill(~reaches, float("-inf")).exp().float()
    sums = (weight @ left.movedim(1, 3).flatten(4)).unflatten(-1, left.shape[-2:]).movedim(3, 1)
    if incoming is None:
        return torch.cat((torch.zeros_like(sums[:, :1]), sums), dim=1)
    through = logs.exp().float() if outlives is None else logs.exp().float() * outlives
    first = incoming(sums[:, -1], through[..., -1])
    return torch.cat((first[:, None], sums + first[:, None] * through.movedim(-1, 1)[..., None, None]), dim=1)
