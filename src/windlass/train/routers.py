"""Routers of a mixture of experts in a training step: the factor of their losses, their biases, numbers for the log."""

import torch
from torch import Tensor

from windlass.blocks.experts.module import Experts
from windlass.blocks.experts.spec import ExpertsSpec
from windlass.train.mesh import World
from windlass.train.parallelize import ModelParts


class Routers:
    """Of all layers with experts; a model without them has none, and everything here is empty."""

    def __init__(self, parts: ModelParts, world: World, scale: float) -> None:
        """`scale` is the factor of a sum over tokens in the loss."""
        self.world, first = world, parts.modules[0]
        specs = {
            number: branch.block
            for number, layer in enumerate(first.spec.layers() if first.divisible else ())
            for branch in layer.branches
            if isinstance(branch.block, ExpertsSpec)
        }
        # The layers with experts of all pipeline stages, each a row of sums; all have one size.
        self.layers, self.spec = list(specs), next(iter(specs.values()), None)
        self.shape = (len(self.layers), 0 if self.spec is None else self.spec.count + 2)
        self.blocks = {
            self.layers.index(int(key)): block
            for module in parts.modules
            for key, layer in (module.layers.items() if self.layers else ())
            for block in layer.children()
            if isinstance(block, Experts)
        }
        self.set_scale(scale)

    def set_scale(self, scale: float) -> None:
        for block in self.blocks.values():
            # Every tensor-parallel rank computes the loss and adds its share of the gradient.
            block.auxiliary_scale = scale / self.world.layout.tensor

    def clear(self) -> None:
        for block in self.blocks.values():
            block.clear_counts()

    def local_sums(self) -> Tensor:
        """Statistics of this rank's layers and tokens among those of all layers, as one row of numbers."""
        sums = torch.zeros(self.shape, device=self.world.device)
        for row, block in self.blocks.items() if self.world.counts_loss else ():
            sums[row] = block.statistics
        return sums.flatten()

    @torch.no_grad()
    def finish(self, sums: Tensor, is_good: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Move the biases by the sums of all ranks. Returns, over all layers: the highest load of an expert relative to
        the mean, the mean entropy of the routers in nats, and the sum of the auxiliary losses; and the loads
        themselves, in rows of each expert (layers, experts)."""
        if self.spec is None:
            return (), None
        sums = sums.view(self.shape)
        loads = sums[:, : self.spec.count]
        for row, block in self.blocks.items():
            block.move_bias(loads[row], is_good)
        # A layer that is computed again counts its tokens twice, in every sum.
        tokens = loads.sum(1) / self.spec.top_k
        entropy, losses = (sums[:, -2:] / tokens[:, None]).unbind(1)
        return ((loads.amax(1) / loads.mean(1)).amax(), entropy.mean(), losses.sum()), loads
