"""What does Hugging Face call our weights? One table for both ways; export and warm start use the same. Pure text but for padding.

Our rotary embedding turns the two halves of a head as Hugging Face's does, so no weight needs reordering.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
OLDER = {"lm_head.weight": "embed_out.weight"}
"""What transformers called a weight in files that are still around (GPT-NeoX, Pythia)."""
_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")


def to_hf(name: str) -> str | None:
    """Our Llama's name -> Hugging Face's; None where there is none."""
    if match := _LAYER.match(name):
        inner = BLOCK.get(match[2])
        return None if inner is None else f"model.layers.{match[1]}.{inner}"
    return TOP.get(name)


def from_hf(
    weights: Mapping[str, Any], own: Mapping[str, Any], twins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A Hugging Face folder's weights under the names of `own` (a state of our Llama, or of a transformers model we wrap).

    Our vocabulary may be padded: the rows that are added are zero. A tied head is taken from the embedding; `twins` says which
    names of a wrapped model stand for the same weight.
    """
    if any(name.startswith("net.") for name in own):
        return _wrapped(weights, own, twins or {})
    found = {}
    for name, target in own.items():
        source = to_hf(name)
        if source == "lm_head.weight" and source not in weights:
            source = TOP["embed.weight"]
        if source in weights:
            found[name] = (
                _padded(weights[source], target) if name in ("embed.weight", "head.weight") else weights[source]
            )
    return found


def _wrapped(weights: Mapping[str, Any], own: Mapping[str, Any], twins: Mapping[str, str]) -> dict[str, Any]:
    """Under a transformers model's own names, or what older folders call them: GPT-2's and Bloom's hold the body alone."""
    found = {}
    for name in own:
        whole = name.removeprefix("net.")
        there = next((n for n in (whole, whole.partition(".")[2], OLDER.get(whole)) if n and n in weights), None)
        if there is not None:
            found[name] = weights[there]
    return found | {name: found[twin] for name, twin in twins.items() if name not in found and twin in found}


def _padded(tensor: Any, like: Any) -> Any:
    missing = like.shape[0] - tensor.shape[0]
    if missing <= 0 or tensor.shape[1:] != like.shape[1:]:
        return tensor
    import torch

    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
