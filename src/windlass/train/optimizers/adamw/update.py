"""AdamW with decoupled weight decay; the same arithmetic as torch.optim.AdamW."""

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
        for factor in set(decay):
            chosen = [index for index, own in enumerate(decay) if own == factor]
            own_weights, grads, first, second = (
                [values[index] for index in chosen] for values in (weights, gradients, *moments)
            )
            # One pass over memory instead of nine. Only AMSGrad keeps maxima.
            torch._fused_adamw_(
                own_weights, grads, first, second, [], [self.count] * len(chosen), lr=lr, beta1=beta1, beta2=beta2,
                weight_decay=factor, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
