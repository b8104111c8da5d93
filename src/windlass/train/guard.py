"""Decides on the device whether a step may change the weights; the same on every rank, as its inputs are reduced."""

import torch
from torch import Tensor

from windlass.config import TrainConfig

OK, NONFINITE, LOSS_SPIKE, NORM_SPIKE = range(4)
SKIP_REASONS = {
    NONFINITE: "loss or gradient norm is not finite",
    LOSS_SPIKE: "loss spike",
    NORM_SPIKE: "gradient norm spike",
}
# Steps over which mean and spread are remembered, with exponential weights.
MEMORY_STEPS = 128


class Guard:
    """Remembers mean and variance of loss and gradient norm. Its memory is part of the checkpoint."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.config = config
        # Steps remembered; mean and variance of the loss; mean and variance of the norm.
        self.memory = torch.zeros(5, dtype=torch.float32, device=device)

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """OK or the reason to skip this step; a step that is not skipped is remembered."""
        reason = torch.zeros((), dtype=torch.int32, device=loss.device)
        if self.config.skip_spike_sigma:
            reason = torch.where(self._is_spike(norm, 3), NORM_SPIKE, reason)
            reason = torch.where(self._is_spike(loss, 1), LOSS_SPIKE, reason)
        if self.config.skip_nonfinite:
            reason = torch.where(torch.isfinite(loss) & torch.isfinite(norm), reason, NONFINITE)
        if self.config.skip_spike_sigma:
            weight = torch.maximum(1.0 / (self.memory[0] + 1), torch.full_like(loss, 1.0 / MEMORY_STEPS))
            new = self.memory.clone()
            new[0] += 1
            for value, index in ((loss, 1), (norm, 3)):
                change = value - self.memory[index]
                new[index] = self.memory[index] + weight * change
                new[index + 1] = (1 - weight) * (self.memory[index + 1] + weight * change * change)
            self.memory.copy_(torch.where(reason == OK, new, self.memory))
        return reason

    def _is_spike(self, value: Tensor, index: int) -> Tensor:
        """Only after enough steps: the first loss of a run is always the highest."""
        mean, deviation = self.memory[index], self.memory[index + 1].sqrt().clamp(min=1e-6)
        return (value - mean > self.config.skip_spike_sigma * deviation) & (self.memory[0] >= MEMORY_STEPS // 4)
