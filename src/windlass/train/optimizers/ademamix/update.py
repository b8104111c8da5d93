"""AdEMAMix (arXiv 2409.03137): AdamW with a second, slow mean of the gradient added to the first.

Weight and decay of the slow mean grow over the first `optim.slow_warmup` steps, the decay so that the half-life grows
by a straight line."""

import math

import torch
from torch import Tensor

from windlass.train.optimizers.base import Optimizer


class AdEMAMix(Optimizer):
    def constants(self) -> tuple[float, ...]:
        return self.config.beta1, self.config.beta2, self.config.eps

    def numbers(self, lr: float, scale: Tensor) -> Tensor:
        beta1, beta2, _ = self.constants()
        done = (self.count / max(1, self.config.slow_warmup)).clamp(max=1.0)
        # Half-lives in steps.
        fast, slow = (math.log(0.5) / math.log(beta) for beta in (beta1, self.config.beta3))
        return torch.stack(
            (
                scale,
                torch.full_like(self.count, lr),
                1.0 - beta1**self.count,
                torch.sqrt(1.0 - beta2**self.count),
                self.config.alpha * done,
                # 1 - beta3, written so that it keeps its digits in fp32.
                -torch.expm1(math.log(0.5) / ((1.0 - done) * fast + done * slow)),
            )
        )

    @staticmethod
    def rule(
        weights: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], numbers: Tensor, decay: float, *constants: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        _, lr, first_share, second_root, alpha, slow_share = numbers.unbind()
        beta1, beta2, eps = constants
        first, second, slow = moments
        first = first + (gradient - first) * (1.0 - beta1)
        second = second * beta2 + gradient * gradient * (1.0 - beta2)
        slow = slow + (gradient - slow) * slow_share
        step = (first / first_share + alpha * slow) / (torch.sqrt(second) / second_root + eps)
        return weights * (1.0 - lr * decay) - lr * step, (first, second, slow)
