"""Next-token cross-entropy: from all logits at once, or in chunks of tokens."""

from functools import partial

from windlass.blocks.head.loss import chunked_loss, next_token_loss
from windlass.blocks.head.module import LossFunction
from windlass.layout.types import StepSpec


class NextToken:
    def loss_function(self, step: StepSpec) -> LossFunction:
        if step.loss == "plain":
            return partial(next_token_loss, z_loss=step.z_loss)
        return partial(chunked_loss, chunk=step.loss_chunk, z_loss=step.z_loss)


OBJECTIVE = NextToken()
