"""Does the exported folder compute what our model computes? Only logits on real text say so; names and shapes do not.

A model that fits into memory twice is compared whole, loaded by transformers itself. A larger Llama goes layer by layer: the same
hidden states run through both sides, and only one layer of each is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint import names
from windlass.checkpoint.stage import available_bytes
from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.evaluate.export import exported_names
from windlass.evaluate.opened import DTYPES, load, sample_text
from windlass.evaluate.stream import Weights, open_weights

TOLERANCE = 1e-4
AGREEMENT = 0.999
LENGTH = 256
SEQUENCES = 4


@dataclass(frozen=True)
class Check:
    """How far apart the two sides are, in fp32 on the same (already rounded) weights."""

    difference: float
    """Largest absolute difference of any logit."""
    agreement: float
    """Share of positions with the same first choice."""
    positions: int
    text: str
    """What was compared on."""
    how: str
    """whole, or layer by layer."""
    scale: float = 1.0
    """Root mean square of the logits; beyond 1 the tolerance grows with it, as rounding does."""

    @property
    def ok(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.scale) and self.agreement >= AGREEMENT


def check_export(recipe: Recipe, source: Path, folder: Path, dtype: str, words: Any, text: str | None = None) -> Check:
    """Compare the folder with the checkpoint it was made from."""
    tokens, what = sample_text(recipe, words, text, SEQUENCES, min(LENGTH, recipe.data.seq_len))
    weights = open_weights(source)
    numbers = sum(torch.Size(weights.shape(name)).numel() for name in weights)
    free = available_bytes()
    if recipe.model.family == "llama" and free is not None and numbers * 9 > free:
        pairs = _layerwise(recipe, weights, folder, dtype, tokens)
        return _compare(pairs, what, "layer by layer")
    return _compare(_whole(recipe, source, folder, dtype, tokens), what, "whole")


def _compare(pairs: Iterator[tuple[Tensor, Tensor]], what: str, how: str) -> Check:
    difference, same, count, square, numbers = 0.0, 0, 0, 0.0, 0
    for ours, theirs in pairs:
        difference = max(difference, float((ours - theirs).abs().max()))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += ours.shape[0] * ours.shape[1]
        square, numbers = square + float(ours.double().pow(2).sum()), numbers + ours.numel()
    return Check(
        difference if difference == difference else float("inf"),
        same / count,
        count,
        what,
        how,
        (square / numbers) ** 0.5,
    )


@torch.inference_mode()
def _whole(recipe: Recipe, source: Path, folder: Path, dtype: str, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    cpu = torch.device("cpu")
    ours = load(recipe, source, cpu, DTYPES[dtype], verify=False).float()  # whoever exports has just checked the files
    if recipe.model.family == "retnet":
        from windlass.evaluate.foreign import recipe_of

        theirs = load(recipe_of(folder, seq_len=recipe.data.seq_len), folder, cpu, torch.float32)
        for row in tokens.split(1):
            yield ours(row)[..., : ours.vocab], theirs(row)[..., : ours.vocab]
        return
    net = (
        _transformers().AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    )
    for row in tokens.split(1):
        yield ours(row)[..., : ours.vocab].float(), net(input_ids=row).logits.float()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "evaluate.exported-model-cannot-checked",
            "the exported model cannot be checked: transformers is not installed",
            hint="pip install 'windlass[eval]', or export with --no-verify",
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


@torch.inference_mode()
def _layerwise(
    recipe: Recipe, weights: Weights, folder: Path, dtype: str, tokens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Both sides, one layer in memory at a time."""
    from windlass.models import build

    made, kind = open_weights(folder), DTYPES[dtype]
    model = recipe.model.model_copy(update={"layers": 1})
    with torch.device("meta"):
        ours = build(model, seq_len=tokens.shape[1])
    block = ours.layers["0"].to_empty(device="cpu")
    ours.table = ours.make_table(torch.device("cpu"))
    layer, turn = _their_layer(folder, tokens.shape[1])
    own = exported_names(recipe.model, weights)
    places = torch.arange(tokens.shape[1])[None]

    def mine(name: str) -> Tensor:
        return weights[own[names.to_hf(name)]].to(kind).float()

    x = mine("embed.weight")[tokens]
    y = made["model.embed_tokens.weight"].float()[tokens]
    for number in range(recipe.model.layers):
        block.load_state_dict({key: mine(f"layers.{number}.{key}") for key in block.state_dict()})
        begin = f"model.layers.{number}."
        layer.load_state_dict({key: made[begin + key].float() for key in layer.state_dict()})
        x = block.run(x, ours.table, None)
        out = layer(y, attention_mask=None, position_ids=places, position_embeddings=turn(y, places))
        y = out[0] if isinstance(out, tuple) else out
    head = "embed.weight" if recipe.model.tied else "head.weight"
    final, ours_head = _norm(x, mine("norm.weight"), recipe.model.norm_eps), mine(head)[: recipe.model.vocab]
    theirs = _norm(y, made["model.norm.weight"].float(), recipe.model.norm_eps)
    their_head = made[names.to_hf(head)].float()
    for a, b in zip(final.split(1), theirs.split(1), strict=True):
        yield a @ ours_head.t(), b @ their_head.t()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _their_layer(folder: Path, length: int) -> tuple[Any, Any]:
    """One decoder layer and the rotary positions of transformers' Llama, from the exported config."""
    config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    config.num_hidden_layers, config.vocab_size, config._attn_implementation = 1, 8, "sdpa"
    net = _transformers().LlamaModel(config).eval()
    return net.layers[0].float(), net.rotary_emb
