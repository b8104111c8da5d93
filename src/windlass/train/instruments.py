"""What each layer does in a step: norms of gradient, weights and update, scale of its output, largest attention logit.

Everything is summed where it lies and brought together by one sum and one maximum over the ranks; nothing here waits
for the device.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.blocks.initial_values import local_bounds, local_tensor
from windlass.train.mesh import World
from windlass.train.optimizers.base import Optimizer, ParameterState
from windlass.train.parallelize import ModelParts

# Weights of a parameter on a rank whose change is measured; a copy of all would need as much memory as the model.
SAMPLED_WEIGHTS = 65_536


class AttentionLogits:
    """The largest logit of each head in the newest step, (layers, heads); layers without attention have none."""

    def __init__(self, parts: ModelParts, world: World) -> None:
        self.world = world
        self.blocks: dict[int, tuple[str, Any]] = {
            int(key): (f"layers.{key}.{branch.name}", block)
            for module in parts.modules
            for key, layer in (zip(module.layers, module.typed_layers(), strict=True) if module.divisible else ())
            for branch, block in zip(layer.spec.branches, layer.blocks(), strict=True)
            if block.measures_logits
        }
        first = parts.modules[0]
        specs = [branch.block for layer in first.spec.layers() for branch in layer.branches] if first.divisible else []
        self.shape = (first.num_layers, max((getattr(spec, "heads", 0) for spec in specs), default=0))
        self.own = {
            row: torch.full((block.wq.weight.shape[0] // block.head_dim // world.layout.tensor,), -math.inf).to(
                world.device
            )
            for row, (_, block) in self.blocks.items()
        }

    def attach(self) -> None:
        """From now on forward passes look for the largest logits, at about 1 % of a step."""
        for row, (_, block) in self.blocks.items():
            block.max_logits = self.own[row]

    def detach(self) -> None:
        for _, block in self.blocks.values():
            block.max_logits = None

    def clear(self) -> None:
        for values in self.own.values():
            values.fill_(-math.inf)

    def largest(self) -> Tensor:
        """Over all ranks; minus infinity where there is none."""
        values = torch.full(self.shape, -math.inf, device=self.world.device)
        for row, own in self.own.items():
            first = self.world.coordinate("tp") * len(own)
            values[row, first : first + len(own)] = own
        if self.world.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


class QKClip:
    """After an update, scales the queries and keys of a head whose largest logit exceeded `limit` (MuonClip of Kimi K2,
    arXiv 2507.20534): its logits of the step would just have reached the limit.

    Query heads that share a key head get what the key's factor leaves, so that the others' logits do not change."""

    def __init__(self, logits: AttentionLogits, optimizer: Optimizer, limit: float) -> None:
        self.limit, slots = limit, {slot.name: slot for slot in optimizer.slots}
        self.layers = {
            row: [
                (block, [slot for name, slot in slots.items() if name.startswith(f"{path}.{side}.")])
                for side in ("wq", "wk")
            ]
            for row, (path, block) in logits.blocks.items()
        }

    @torch.no_grad()
    def apply(self, largest: Tensor, is_good: Tensor) -> None:
        for row, ((block, queries), (_, keys)) in self.layers.items():
            heads, kv_heads = (layer.weight.shape[0] // block.head_dim for layer in (block.wq, block.wk))
            factor = (self.limit / largest[row, :heads].clamp(min=self.limit)).where(is_good, 1.0)
            key_factor = factor.view(kv_heads, -1).amin(1).sqrt()
            query_factor = factor / key_factor.repeat_interleave(heads // kv_heads)
            for slots, by_head in ((queries, query_factor), (keys, key_factor)):
                for slot in slots:
                    self._scale(slot, by_head.repeat_interleave(block.head_dim))

    def _scale(self, slot: ParameterState, rows: Tensor) -> None:
        start, length = local_bounds(slot.weights)[0]
        weights = local_tensor(slot.weights)
        part = rows[start : start + length].to(weights.device).view(-1, *(1 for _ in weights.shape[1:]))
        weights.mul_(part)
        if slot.master is not None:
            local_tensor(slot.parameter).copy_(weights)


class Instruments:
    """Measures one step: `begin`, the forward and backward pass, `before_update`, the update, `finish`."""

    # Columns of `finish`.
    NAMES = ("gradient_norm", "weight_norm", "update_norm", "activation_rms", "max_logit")

    def __init__(self, parts: ModelParts, optimizer: Optimizer, world: World, replication: list[float]) -> None:
        self.parts, self.world, self.slots, self.replication = parts, world, optimizer.slots, replication
        self.num_layers = parts.modules[0].num_layers
        self.rows = [_layer_of(slot.name, self.num_layers) for slot in self.slots]
        # For each layer, and in the last row for what is outside of them: squares of gradients, weights and updates;
        # squares and number of activations.
        self.sums = torch.zeros(self.num_layers + 1, 5, device=world.device)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        self.sums.zero_()
        for module in self.parts.modules:
            module.observer = self

    @torch.no_grad()
    def observe(self, layer: int, hidden: Tensor) -> None:
        part = local_tensor(hidden.detach())
        self.sums[layer, 3] += torch.linalg.vector_norm(part, dtype=torch.float32).square()
        self.sums[layer, 4] += part.numel()

    def clear_counts(self) -> None:
        """What was observed so far was not of the batch."""
        self.sums[:, 3:] = 0.0

    @torch.no_grad()
    def before_update(self) -> None:
        for module in self.parts.modules:
            module.observer = None
        self._add_squares(0, [slot.gradient for slot in self.slots])
        self._before = [_sample(slot.weights).clone() for slot in self.slots]

    @torch.no_grad()
    def finish(self, largest_logits: Tensor) -> Tensor:
        """(layers and one row for the rest, NAMES), over all ranks; NaN where something does not exist."""
        self._add_squares(1, [slot.weights for slot in self.slots])
        changes = [_sample(slot.weights) - before for slot, before in zip(self.slots, self._before, strict=True)]
        strides = [_stride(slot.weights) for slot in self.slots]
        self._add_squares(2, changes, strides)
        self._before = []
        total = self.world.sum_(self.sums.clone())
        norms = torch.cat((total[:, :3], total[:, 3:4] / total[:, 4:]), dim=1).sqrt()
        logits = norms.new_full((self.num_layers + 1,), math.nan)
        if largest_logits.numel():
            logits[:-1] = largest_logits.amax(1)
        return torch.cat((norms, logits[:, None]), dim=1)

    def _add_squares(self, column: int, tensors: list[Any], factors: list[int] | None = None) -> None:
        parts = [local_tensor(tensor) for tensor in tensors]
        held = [number for number, part in enumerate(parts) if part.numel()]
        if not held:
            return
        norms = torch.stack(torch._foreach_norm([parts[number] for number in held], 2, dtype=torch.float32))
        weights = [(1 if factors is None else factors[number]) / self.replication[number] for number in held]
        rows = torch.tensor([self.rows[number] for number in held]).to(self.sums.device, non_blocking=True)
        squares = norms.to(self.sums.device).square()
        squares = squares * torch.tensor(weights).to(self.sums.device, non_blocking=True)
        self.sums[:, column].index_add_(0, rows, squares)


def _layer_of(name: str, num_layers: int) -> int:
    """The number of a parameter's layer; that after the last for embedding, last norm and head."""
    return next((int(part) for part in name.split(".") if part.isdigit()), num_layers)


def _stride(tensor: Tensor) -> int:
    return max(1, local_tensor(tensor).numel() // SAMPLED_WEIGHTS)


def _sample(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).reshape(-1)[:: _stride(tensor)]
