"""Lion (arXiv 2302.06675): a step of the same size for every weight, by the sign of a mixed gradient."""

import torch
from torch import Tensor

from windlass.train.optimizers.base import Optimizer


class Lion(Optimizer):
    def constants(self) -> tuple[float, ...]:
        return self.config.beta1, self.config.beta2

    @staticmethod
    def rule(
        weights: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], numbers: Tensor, decay: float, *constants: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        lr, (beta1, beta2), (mean,) = numbers[1], constants, moments
        direction = torch.sign(mean * beta1 + gradient * (1.0 - beta1))
        return weights * (1.0 - lr * decay) - lr * direction, (mean * beta2 + gradient * (1.0 - beta2),)
