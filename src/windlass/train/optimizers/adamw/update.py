"""AdamW with decoupled weight decay; the same arithmetic as torch.optim.AdamW."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.train.optimizers.base import Optimizer, Tensors


class AdamW(Optimizer):
    def constants(self) -> tuple[float, ...]:
        return self.config.beta1, self.config.beta2, self.config.eps

    def numbers(self, lr: float, scale: Tensor) -> Tensor:
        beta1, beta2, _ = self.constants()
        step_size = lr / (1.0 - beta1**self.count)
        inverse_root = 1.0 / torch.sqrt(1.0 - beta2**self.count)
        return torch.stack((scale, step_size, inverse_root, torch.full_like(self.count, lr)))

    @staticmethod
    def rule(
        weights: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], numbers: Tensor, decay: float, *constants: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        _, step_size, inverse_root, lr = numbers.unbind()
        beta1, beta2, eps = constants
        first, second = moments
        first = first + (gradient - first) * (1.0 - beta1)
        second = second * beta2 + gradient * gradient * (1.0 - beta2)
        new = weights * (1.0 - lr * decay) - step_size * first / (torch.sqrt(second) * inverse_root + eps)
        return new, (first, second)

    def update_lists(
        self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors], decay: list[float], lr: float
    ) -> None:
        beta1, beta2, eps = self.constants()
        first, second = moments
        count = float(self.count)
        torch._foreach_mul_(weights, [1.0 - lr * factor for factor in decay])
        torch._foreach_lerp_(first, gradients, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta2)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, math.sqrt(1.0 - beta2**count))
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(weights, first, denominator, -lr / (1.0 - beta1**count))
