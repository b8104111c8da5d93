"""The largest attention logit of each head, which fused kernels do not give: from some queries of every sequence."""

import torch
from torch import Tensor

from windlass.blocks.attention.kernels import Scores

# Of each sequence, evenly spaced; each against all keys that it reaches. All of them would cost what attention costs.
PROBED_QUERIES = 16


@torch.no_grad()
def raise_largest(largest: Tensor, q: Tensor, k: Tensor, scores: Scores, documents: Tensor | None) -> None:
    """Raise `largest` (heads) to the logits of these queries and keys, before any soft-cap.

    Under context parallelism a rank has the keys of its own positions only."""
    batch, heads, time, width = q.shape
    step = max(1, time // PROBED_QUERIES)
    places, keys = torch.arange(step - 1, time, step, device=q.device), torch.arange(time, device=q.device)
    queries = q.detach()[:, :, step - 1 :: step].reshape(batch, k.shape[1], -1, width)
    logits = (queries @ k.detach().transpose(-1, -2)).float() * (scores.scale or width**-0.5)
    logits = logits.view(batch, heads, len(places), time)
    distance = places[:, None] - keys
    visible = (distance >= 0) & (distance < (scores.window or time))
    if documents is not None and documents.shape[1] == time:
        visible = (visible & (documents[:, places, None] == documents[:, None, :])).unsqueeze(1)
    largest.copy_(torch.maximum(largest, logits.masked_fill(~visible, float("-inf")).amax((0, 2, 3))))
