"""Hugging Face's names of our weights, for export and warm start. Pure text except for padding.

Our rotary embedding rotates the two halves of a head as Hugging Face's does, so no weight needs reordering.
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
# Names in older files of transformers that are still in use (GPT-NeoX, Pythia).
OLDER = {"lm_head.weight": "embed_out.weight"}


def to_hf(name: str) -> str | None:
    """Hugging Face's name of a weight of our Llama; None where there is none."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match and match[2] in BLOCK:
        return f"model.layers.{match[1]}.{BLOCK[match[2]]}"
    return TOP.get(name)


def from_hf(
    weights: Mapping[str, Any], own: Mapping[str, Any], twins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Weights of a Hugging Face folder under the names of `own`: the state of our Llama or of a wrapped model.

    Rows that pad our vocabulary are zero. A tied head is taken from the embedding; `twins` maps names of a wrapped
    model that stand for the same weight.
    """
    renamed: dict[str, Any] = {}
    if any(name.startswith("net.") for name in own):
        for name in own:  # older folders of GPT-2 and Bloom hold the body alone
            plain = name.removeprefix("net.")
            candidates = (plain, plain.partition(".")[2], OLDER.get(plain))
            source = next((candidate for candidate in candidates if candidate and candidate in weights), None)
            if source is not None:
                renamed[name] = weights[source]
        return renamed | {n: renamed[t] for n, t in (twins or {}).items() if n not in renamed and t in renamed}
    for name, target in own.items():
        source = to_hf(name)
        if source == "lm_head.weight" and source not in weights:
            source = TOP["embed.weight"]
        if source is not None and source in weights:
            is_padded = name in ("embed.weight", "head.weight")
            renamed[name] = _padded(weights[source], target) if is_padded else weights[source]
    return renamed


def _padded(tensor: Any, like: Any) -> Any:
    rows = like.shape[0] - tensor.shape[0]
    if rows <= 0 or tensor.shape[1:] != like.shape[1:]:
        return tensor
    import torch

    return torch.cat((tensor, tensor.new_zeros(rows, *tensor.shape[1:])))
