"""What can this device, or this family, not compute? Refused before memory is taken, with the key that has to change."""

from __future__ import annotations

import os

import torch

from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.train.mesh import World
from windlass.train.validate import Validator


def check(recipe: Recipe, world: World) -> None:
    _family(recipe)
    _precision(recipe, world)
    _offload(recipe, world)


def _family(recipe: Recipe) -> None:
    family, train = recipe.model.family, recipe.train
    if recipe.data.mask_documents and family != "llama":
        raise ConfigError(
            "train.data-mask-documents-possible",
            f"data.mask_documents is not possible with model.family = {family!r}",
            hint="use family llama, or data.mask_documents = false",
        )
    if family != "hf":
        return
    # What is asked for and could only be ignored: a network of transformers has its own blocks and head.
    ignored = [f'train.loss = "{train.loss}"'] if train.loss in ("chunked", "fused") else []
    ignored += ['train.precision = "fp8"'] if train.precision == "fp8" else []
    ignored += ["train.fuse = true"] if train.fuse else []
    ignored += [f'train.objective = "{train.objective}"'] if train.objective != "next_token" else []
    ignored += ['train.attention = "flash3"'] if train.attention == "flash3" else []
    if ignored:
        raise ConfigError(
            "train.only-our-own-families",
            f"{', '.join(ignored)}: only for our own families, not for model.family = 'hf'",
            hint="leave it out, or describe the network as family llama",
        )


def _precision(recipe: Recipe, world: World) -> None:
    wanted = recipe.train.precision
    if wanted in ("bf16", "bf16_pure", "fp8") and world.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            "train.train-precision-but-bf",
            f"train.precision = {wanted!r}, but {torch.cuda.get_device_name(world.device)} has no bf16",
            hint='use train.precision = "fp32", or a device of the Ampere or CDNA generation or later',
        )


def _offload(recipe: Recipe, world: World) -> None:
    native = recipe.train.engine == "native"
    if recipe.layout is not None and recipe.layout.offload == "parameters" and world.size == 1 and native:
        raise ConfigError(
            "train.layout-offload-parameters-needs",
            'layout.offload = "parameters" needs several processes',
            hint='use layout.offload = "optimizer" on one device',
        )


def check_metric(recipe: Recipe, validator: Validator | None) -> None:
    """Refuse to judge checkpoints by a source that is not held out."""
    name = recipe.save.metric.removeprefix("val_loss/")
    sources = [part.name for part in validator.held] if validator is not None else []
    if name != recipe.save.metric and name not in sources:
        raise ConfigError(
            "train.save-metric-but-nothing",
            f"save.metric = {recipe.save.metric!r}, but nothing of {name!r} is held out",
            hint=f"held out are: {', '.join(sources)}" if sources else "the store has no validation split",
        )


def make_deterministic() -> None:
    """Ask torch for its repeatable kernels; cuBLAS wants its workspace fixed before the first product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
