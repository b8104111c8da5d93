"""LoRA: small adapters beside the matrix products of a model's layers, the only weights that are then trained."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from windlass.blocks.linear import Adapter, Linear
from windlass.config.tune import LoraConfig
from windlass.errors import ConfigError
from windlass.models.decoder import DecoderModel


def add_adapters(module: DecoderModel, lora: LoraConfig) -> str:
    """Give the targets adapters and freeze all other weights but those of a new head; returns a line for the log."""
    names = {id(part): name for name, part in module.named_modules()}
    products = [p for layer in module.layer_modules() for p in layer.modules() if isinstance(p, nn.Linear)]
    kinds = sorted({names[id(part)].rpartition(".")[2] for part in products})
    if unknown := sorted(set(lora.targets) - set(kinds)):
        raise ConfigError(
            "tune.lora-target-unknown",
            f"tune.lora.targets names {', '.join(unknown)}, which the model's layers do not have",
            hint=f"use one of {', '.join(kinds)}",
        )
    is_divided = any(isinstance(part.weight, DTensor) for part in products)
    if lora.dropout and is_divided:
        raise ConfigError(
            "tune.lora-dropout-divided",
            f"tune.lora.dropout = {lora.dropout} is not possible under tensor parallelism",
            hint="set tune.lora.dropout = 0, or layout.tensor = 1",
        )
    new_names = set(getattr(module, "new_names", ()))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in new_names)
    chosen = [p for p in products if not lora.targets or names[id(p)].rpartition(".")[2] in lora.targets]
    for part in chosen:
        adapter = Adapter(*_weights(part.weight, lora.rank), lora.alpha / lora.rank, lora.dropout)
        part.adapter = adapter
        if not isinstance(part, Linear):  # of a transformers model
            part.register_forward_hook(lambda part, inputs, out: out + part.adapter(inputs[0]))
    module.new_names = frozenset(new_names | {name for name in module.state_dict() if ".adapter." in name})
    module.has_dropout = module.has_dropout or lora.dropout > 0
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = sum(p.numel() for p in module.parameters())
    return f"LoRA: {len(chosen)} adapters of rank {lora.rank}; {trained:,} of {total:,} weights are trained"


def _weights(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of an adapter, without values. Where tensor parallelism divides the weight's outputs it divides B's,
    where it divides the inputs it divides A's."""
    outputs, inputs = weight.shape
    a, b = (torch.empty(shape, dtype=weight.dtype, device="meta") for shape in ((rank, inputs), (outputs, rank)))
    if isinstance(weight, DTensor):
        by_outputs = weight.placements[0] == Shard(0)
        a = distribute_tensor(a, weight.device_mesh, [Replicate() if by_outputs else Shard(1)])
        b = distribute_tensor(b, weight.device_mesh, [Shard(0) if by_outputs else Replicate()])
    return a, b
