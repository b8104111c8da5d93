"""Weights of a Hugging Face folder under our parameter names and back, by the tables of `windlass.models.presets`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.registry import PRESETS

# Name in a preset -> (to our weight with so many rows, to the folder's weight with so many rows).
TRANSFORMS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int], Tensor]]] = {
    # Our vocabulary has zero rows at its end, for aligned shapes.
    "pad-vocabulary": (
        lambda tensor, rows: F.pad(tensor, (0, 0, 0, rows - len(tensor))) if len(tensor) < rows else tensor,
        lambda tensor, rows: tensor[:rows],
    ),
    # Matrices (of experts) that the folder multiplies from the right.
    "transpose": (lambda tensor, rows: tensor.transpose(-1, -2), lambda tensor, rows: tensor.transpose(-1, -2)),
}


def from_hf(
    family: str, weights: Mapping[str, Any], own: Mapping[str, Any], twins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A Hugging Face folder's weights under the names of `own`, the state of a model of this family.

    A tied head is taken from the embedding; `twins` says which names of a transformers model stand for one weight.
    """
    format = PRESETS.load(family).hf
    older = {new: old for table in format.older_names.values() for new, old in table.items()}
    loaded: dict[str, Any] = {}
    divided: dict[str, Any] = {}  # parts of tensors that hold several of our parameters
    for full, parts in format.folder_tensors(own).items():
        if len(parts) > 1 and full in weights:
            divided |= dict(
                zip(parts, divide_joined(weights[full], [own[p] for p in parts], format.joined), strict=True)
            )
    for name, target in own.items():
        full = format.hf_name(name)
        if full and "{expert}" in full:
            stack = [full.replace("{expert}", str(expert)) for expert in range(len(target))]
            if all(part in weights for part in stack):
                loaded[name] = torch.stack([weights[part] for part in stack])
            continue
        # GPT-2's and Bloom's folders hold the body alone.
        body = full.partition(".")[2] if format.wraps_transformers else None
        tied = format.hf_name(format.tied[name]) if name in format.tied else None
        source = next((source for source in (full, body, older.get(full), tied) if source and source in weights), None)
        if source is not None:
            loaded[name] = divided.get(name, weights[source])
            if (kind := format.transform(name)) and loaded[name].ndim == target.ndim:
                loaded[name] = TRANSFORMS[kind][0](loaded[name], len(target))
    twins = twins or {}
    return loaded | {name: loaded[twin] for name, twin in twins.items() if name not in loaded and twin in loaded}


def divide_joined(tensor: Tensor, parts: Sequence[Tensor], joined: str) -> list[Tensor]:
    """The parameters that a folder's tensor holds; of rows that do not add up each is given all, which does not fit."""
    if joined == "turns":
        return [tensor[..., index :: len(parts)] for index in range(len(parts))]
    rows = [len(part) for part in parts]
    return list(tensor.split(rows)) if sum(rows) == len(tensor) else [tensor] * len(parts)


def join_parts(parts: Sequence[Tensor], joined: str) -> Tensor:
    """A folder's tensor of one or several parameters."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(list(parts), dim=-1).flatten(-2) if joined == "turns" else torch.cat(list(parts))


def misfits(weights: Mapping[str, Any], own: Mapping[str, Any], untied: Collection[str] = ()) -> list[str]:
    """What keeps weights from filling the state `own`: missing names (and those of `untied`), other shapes."""
    missing = sorted(name for name in own if name not in weights or name in untied)
    misshapen = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    problems = [f"{len(missing)} missing ({', '.join(missing[:3])})"] if missing else []
    for name in misshapen[:1]:
        shapes = f"{tuple(weights[name].shape)} in the file, {tuple(own[name].shape)} in the model"
        problems.append(f"{len(misshapen)} of another shape ({name}: {shapes})")
    return problems
