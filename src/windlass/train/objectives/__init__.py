"""Objectives: what training minimizes. Each is one module with a value `OBJECTIVE`.

`windlass.registry.OBJECTIVES` finds them by module name, and those of other packages by the entry point group
"windlass.objectives", which names such a value.
"""

from __future__ import annotations

from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from windlass.config import TrainConfig
from windlass.models.parts import LossFunction


class Objective(Protocol):
    """Chooses the loss function of a model's head.

    A loss function takes (hidden, weight, targets, *, vocab), hidden states before the head and the head's weights, and
    returns one tensor of two sums over tokens: the loss to minimize and the cross-entropy to report.
    """

    def choose_loss(self, config: TrainConfig, *, rows: int, tokens: int) -> tuple[LossFunction, str]:
        """The loss function for a head of `rows` rows and micro-batches of `tokens`, and the reason for the log."""

    def parallel_loss(self, config: TrainConfig, mesh: DeviceMesh) -> LossFunction:
        """The same where each rank of `mesh` holds some rows of the head (layout.tensor > 1)."""
