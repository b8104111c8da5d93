"""Costs of the output head with its loss: the logits of one micro-batch."""

from windlass.layout.types import Layout, StepSpec

# train.loss = "auto": fp32 logits of a micro-batch up to this size are made whole; larger ones are computed in chunks.
MAX_PLAIN_LOGITS_BYTES = 64 * 2**20


def choose_loss(wish: str, rows: int, tokens: int, tensor: int) -> tuple[str, str]:
    """plain or chunked, and the reason. `tokens` are those of a micro-batch on one rank."""
    if tensor > 1:
        return "chunked", f"the vocabulary is divided over {tensor} ranks"
    if wish != "auto":
        return ("plain" if wish == "plain" else "chunked"), "as the recipe says"
    size = tokens * rows * 4
    kind = "plain" if size <= MAX_PLAIN_LOGITS_BYTES else "chunked"
    return kind, f"logits of a micro-batch would take {size / 2**20:.0f} MiB"


def loss_bytes(width: int, rows: int, tokens: float, step: StepSpec, layout: Layout, plain_bytes: float) -> float:
    """Peak bytes of logits and loss. `plain_bytes` per logit are what the engine's plain loss holds."""
    divided = layout.tensor > 1
    vocab = rows / layout.tensor
    if step.loss not in ("chunked", "fused") and not (step.native and divided):
        return tokens * vocab * plain_bytes
    # One chunk's logits, their gradient and that of the chunk before; then the old and the new sum of the weights'
    # gradient.
    chunk = min(tokens, step.loss_chunk)
    hidden = tokens * width * step.bytes_per_value
    if not step.native:
        return chunk * vocab * 6.0 + 4.0 * vocab * width + hidden
    again = 0.0 if tokens <= chunk else 2.0
    sums = (1.0 if tokens <= chunk else 2.0) * 4.0 * vocab * width
    # On a divided vocabulary the softmax is not compiled (25 bytes per logit) and the hidden states are gathered.
    softmax = chunk * vocab * ((23.0 if divided else 4.0) + again) + (4.0 * vocab * width if again else 0.0)
    return max(softmax, chunk * vocab * 2.0 + sums) + hidden * (2.0 if divided else 1.0)
