"""Objectives: what training minimizes. Each is one module with a value `OBJECTIVE`.

`windlass.registry.OBJECTIVES` finds them by module name, and those of other packages by the entry point group
"windlass.objectives", which names such a value.
"""

from typing import Protocol

from windlass.blocks.head.module import LossFunction
from windlass.layout.types import StepSpec


class Objective(Protocol):
    def loss_function(self, step: StepSpec) -> LossFunction:
        """The loss function of a model's head.

        It takes (hidden, weight, targets, *, vocab), hidden states before the head and the head's weights, and
        returns one tensor of two sums over tokens: the loss to minimize and the cross-entropy to report."""
