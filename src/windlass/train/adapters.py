"""LoRA: small adapters beside the matrix products of a model's layers, the only weights that are then trained."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from windlass.blocks.linear import Adapter, Linear
from windlass.config.tune import LoraConfig
from windlass.errors import ConfigError
from windlass.models.decoder import DecoderModel


def products_of(module: DecoderModel) -> list[tuple[str, nn.Linear]]:
    """(last part of its name, matrix product) of all layers."""
    names = {id(part): name.rpartition(".")[2] for name, part in module.named_modules()}
    parts = [part for layer in module.layer_modules() for part in layer.modules()]
    return [(names[id(part)], part) for part in parts if isinstance(part, nn.Linear)]


def check_targets(model: DecoderModel, lora: LoraConfig) -> None:
    kinds = sorted({name for name, _ in products_of(model)})
    if unknown := sorted(set(lora.targets) - set(kinds)):
        raise ConfigError(
            "tune.lora-target-unknown",
            f"tune.lora.targets names {', '.join(unknown)}, which the model's layers do not have",
            hint=f"use one of {', '.join(kinds)}",
        )


def add_adapters(module: DecoderModel, lora: LoraConfig) -> str:
    """Give the targets adapters and freeze all other weights but those of a new head; returns a line for the log."""
    products = products_of(module)
    new_names = set(getattr(module, "new_names", ()))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in new_names)
    chosen = [part for name, part in products if not lora.targets or name in lora.targets]
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
