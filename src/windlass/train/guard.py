"""Should this step change the weights? A decision on the device, the same on every rank because its inputs were reduced over all."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.config import TrainConfig

OK, NONFINITE, LOSS_SPIKE, NORM_SPIKE = range(4)
REASONS = {
    NONFINITE: "loss or gradient norm is not finite",
    LOSS_SPIKE: "loss spike",
    NORM_SPIKE: "gradient norm spike",
}
MEMORY = 128
"""Steps over which mean and spread are remembered, with exponential weights."""


class Guard:
    """Remembers mean and spread of loss and norm. Its memory is part of the checkpoint."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.config = config
        self.memory = torch.zeros(5, dtype=torch.float32, device=device)
        """steps seen; mean and variance of the loss; mean and variance of the norm."""

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """0 to go on, else why not."""
        reason = torch.zeros((), dtype=torch.int32, device=loss.device)
        if self.config.skip_spike_sigma:
            reason = torch.where(self._far(norm, 3), NORM_SPIKE, reason)
            reason = torch.where(self._far(loss, 1), LOSS_SPIKE, reason)
        if self.config.skip_nonfinite:
            finite = torch.isfinite(loss) & torch.isfinite(norm)
            reason = torch.where(finite, reason, NONFINITE)
        if self.config.skip_spike_sigma:
            self._learn(loss, norm, reason == OK)
        return reason

    def _far(self, value: Tensor, at: int) -> Tensor:
        """Only once enough steps were seen: the first loss of a run is always the highest."""
        mean, variance = self.memory[at], self.memory[at + 1]
        return (value - mean > self.config.skip_spike_sigma * variance.sqrt().clamp(min=1e-6)) & (
            self.memory[0] >= MEMORY // 4
        )

    def _learn(self, loss: Tensor, norm: Tensor, good: Tensor) -> None:
        weight = torch.maximum(1.0 / (self.memory[0] + 1), torch.full_like(loss, 1.0 / MEMORY))
        new = self.memory.clone()
        new[0] += 1
        for value, at in ((loss, 1), (norm, 3)):
            change = value - self.memory[at]
            new[at] = self.memory[at] + weight * change
            new[at + 1] = (1 - weight) * (self.memory[at + 1] + weight * change * change)
        self.memory.copy_(torch.where(good, new, self.memory))
