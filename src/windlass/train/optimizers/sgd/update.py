"""SGD with momentum; weight decay is part of the gradient, as in torch.optim.SGD."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.train.optimizers.base import Optimizer, Tensors


class SGD(Optimizer):
    def constants(self) -> tuple[float, ...]:
        return (self.config.momentum,)

    @staticmethod
    def rule(
        weights: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], numbers: Tensor, decay: float, *constants: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        velocity = moments[0] * constants[0] + gradient + weights * decay
        return weights - numbers[1] * velocity, (velocity,)

    def update_lists(
        self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors], decay: list[float], lr: float
    ) -> None:
        (velocity,) = moments
        if any(decay):
            torch._foreach_add_(gradients, torch._foreach_mul(weights, decay))
        torch._foreach_mul_(velocity, self.config.momentum)
        torch._foreach_add_(velocity, gradients)
        torch._foreach_add_(weights, velocity, alpha=-lr)
