"""Weights of a Hugging Face folder under our parameter names and back, by the tables of `windlass.models.presets`."""

from collections.abc import Callable, Mapping
from typing import Any

from windlass.registry import PRESETS


def pad_vocabulary(tensor: Any, rows: int) -> Any:
    """Zero rows up to our aligned vocabulary."""
    import torch

    return (
        torch.cat((tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:]))) if len(tensor) < rows else tensor
    )


def cut_vocabulary(tensor: Any, rows: int) -> Any:
    """The vocabulary without the rows that we add for aligned shapes."""
    return tensor[:rows]


TRANSFORMS: dict[str, tuple[Callable[[Any, int], Any], Callable[[Any, int], Any]]] = {
    "pad-vocabulary": (pad_vocabulary, cut_vocabulary),
}
"""Name in a preset -> (to our weight with so many rows, to the folder's weight with so many rows)."""


def from_hf(
    weights: Mapping[str, Any], own: Mapping[str, Any], twins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A Hugging Face folder's weights under the names of `own`, the state of one of our models.

    A tied head is taken from the embedding; `twins` says which names of a transformers model stand for one weight.
    """
    for preset in PRESETS.names():
        format = PRESETS.load(preset).hf
        if format.wraps_transformers and any(name.startswith(format.prefix) for name in own):
            return _wrapped(format, weights, own, twins or {})
        if format.weights and all(format.hf_name(name) for name in own):
            break
    else:
        return {}
    loaded = {}
    for name, target in own.items():
        source = format.hf_name(name)
        if source not in weights and name in format.tied:
            source = format.hf_name(format.tied[name])
        if source in weights:
            loaded[name] = weights[source]
            if (kind := format.transforms.get(name)) and loaded[name].shape[1:] == target.shape[1:]:
                loaded[name] = TRANSFORMS[kind][0](loaded[name], len(target))
    return loaded


def _wrapped(
    format: Any, weights: Mapping[str, Any], own: Mapping[str, Any], twins: Mapping[str, str]
) -> dict[str, Any]:
    """Under a transformers model's own names, or older ones: GPT-2's and Bloom's folders hold the body alone."""
    older = {new: old for table in format.older_names.values() for new, old in table.items()}
    loaded = {}
    for name in own:
        full = format.hf_name(name)
        stored = next((n for n in (full, full.partition(".")[2], older.get(full)) if n and n in weights), None)
        if stored is not None:
            loaded[name] = weights[stored]
    return loaded | {name: loaded[twin] for name, twin in twins.items() if name not in loaded and twin in loaded}
