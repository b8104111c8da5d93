"""Comparison of logits: a folder must compute what our model computes on real text. Names and shapes prove nothing.

A model that fits in memory twice is compared as a whole, loaded by transformers itself. A larger Llama is compared
layer by layer: the same text runs through both sides, and only one layer of each is in memory.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.checkpoint.load import load_model_weights
from windlass.checkpoint.stage import available_bytes
from windlass.config import Recipe
from windlass.convert.config_json import format_of, recipe_of_folder
from windlass.convert.source import load_model
from windlass.convert.weights import StoredWeights, exported_names, open_weights
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.models.build import build_model
from windlass.models.hf import refuse_later_tokens
from windlass.models.presets.hf import import_transformers, read_config_json
from windlass.models.task_head import HFTaskModel, tuned_model
from windlass.runs.events import known_int

TOLERANCE = 1e-4
MIN_AGREEMENT = 0.999
SEQUENCES, MAX_LENGTH = 4, 256
BYTES_PER_WEIGHT = 9  # both models in fp32, and some room


@dataclass(frozen=True)
class LogitComparison:
    """How far apart the two sides are, in fp32 on the same (already rounded) weights."""

    difference: float  # largest absolute difference of any logit
    agreement: float  # share of positions with the same most likely token
    positions: int
    text: str  # description of the text
    how: str  # "whole" or "layer by layer"
    scale: float = 1.0  # root mean square of the logits; above 1 the tolerance grows with it, as rounding does

    @property
    def ok(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.scale) and self.agreement >= MIN_AGREEMENT


def compare_logits(
    recipe: Recipe,
    checkpoint: Path,
    folder: Path,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    text: str | None = None,
) -> LogitComparison:
    """Compare a Hugging Face folder with a checkpoint of the same model, rounded to `dtype` first."""
    tokens, description = sample_tokens(recipe, tokenizer, text)
    weights = open_weights(checkpoint)
    needed_bytes = sum(torch.Size(weights.shape(name)).numel() for name in weights) * BYTES_PER_WEIGHT
    free_bytes = available_bytes()
    layerwise = format_of(recipe.model).layerwise and free_bytes is not None and needed_bytes > free_bytes
    pairs = (
        layer_by_layer(recipe, weights, folder, dtype, tokens)
        if layerwise
        else whole(recipe, checkpoint, folder, dtype, tokens)
    )
    difference, same, positions, squares, count = 0.0, 0, 0, 0.0, 0
    for ours, theirs in pairs:
        distance = float((ours - theirs).abs().max())
        difference = max(difference, float("inf") if distance != distance else distance)
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        positions += ours.shape[0] * ours.shape[1]
        squares += float(ours.double().pow(2).sum())
        count += ours.numel()
    how = "layer by layer" if layerwise else "whole"
    return LogitComparison(difference, same / positions, positions, description, how, (squares / count) ** 0.5)


def sample_tokens(recipe: Recipe, tokenizer: Tokenizer | None, text: str | None) -> tuple[Tensor, str]:
    """Tokens of the given text, else of Python's own library, and a description of them."""
    length = min(MAX_LENGTH, recipe.data.seq_len)
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        vocab = recipe.model.vocab or known_int(read_config_json(recipe.model).get("vocab_size")) or 256
        tokens = torch.randint(0, vocab, (SEQUENCES, length), generator=generator)
        return tokens, "random tokens (no tokenizer)"
    description = "the given text" if text is not None else "text of Python's library"
    content = Path(argparse.__file__).read_text(encoding="utf-8") if text is None else text
    ids = tokenizer.encode(content[: 40 * SEQUENCES * length])
    if not ids:
        raise DataError(
            "convert.sample-text-empty",
            "the text to compare on has no tokens",
            hint="give a longer one with --text",
        )
    repeated = ids * (SEQUENCES * length // len(ids) + 1)
    return torch.tensor(repeated[: SEQUENCES * length]).view(SEQUENCES, length), description


@torch.inference_mode()
def whole(
    recipe: Recipe, checkpoint: Path, folder: Path, dtype: torch.dtype, tokens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    cpu = torch.device("cpu")
    if (tuned := tuned_model(recipe)) is not None:
        yield from task_logits(tuned, checkpoint, folder, dtype, tokens)
        return
    ours = load_model(recipe, checkpoint, cpu, dtype, verify=False).float()  # the caller has checked the files
    if format_of(recipe.model).library == "transformers":
        loader = _transformers().AutoModelForCausalLM
        is_safetensors = any(folder.glob("*.safetensors"))
        theirs = loader.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=is_safetensors, dtype=torch.float32
        ).eval()
    else:
        theirs = load_model(recipe_of_folder(folder, seq_len=recipe.data.seq_len), folder, cpu, torch.float32)
    for row in tokens.split(1):
        output = theirs(row)
        logits = output if isinstance(output, Tensor) else output.logits
        own = ours(row)[..., : ours.vocab].float()
        # Both sides are the same class, so that a fault would be in both: check that the model is causal.
        if format_of(recipe.model).wraps_transformers:
            changed = torch.cat((row[:, :1], (row[:, 1:] + 1) % ours.vocab), dim=1)
            if not torch.allclose(ours(changed)[:, 0, : ours.vocab].float(), own[:, 0], atol=TOLERANCE):
                raise refuse_later_tokens(str(folder))
        yield own, logits[..., : ours.vocab].float()


def task_logits(
    ours: HFTaskModel, checkpoint: Path, folder: Path, dtype: torch.dtype, tokens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of a model with a task's head, which transformers loads by the class that config.json names."""
    load_model_weights(checkpoint, ours, verify=False)
    ours = ours.to(dtype).float().eval()
    _transformers()  # without its progress bars
    options = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
    theirs = type(ours.net).from_pretrained(folder, trust_remote_code=False, **options)
    for row in tokens.split(1):
        pair = ours(row).float(), theirs.eval()(row).logits.float()
        yield pair if pair[0].ndim == 3 else (pair[0][None], pair[1][None])


def _transformers() -> Any:
    try:
        transformers = import_transformers()
    except ImportError:
        raise ConfigError(
            "convert.transformers-missing",
            "the model cannot be verified: transformers is not installed",
            hint="pip install 'windlass[eval]', or use --no-verify",
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


@torch.inference_mode()
def layer_by_layer(
    recipe: Recipe, weights: StoredWeights, folder: Path, dtype: torch.dtype, tokens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    model, format, exported = recipe.model, format_of(recipe.model), open_weights(folder)
    own_names = exported_names(recipe, weights)
    with torch.device("meta"):
        stage = build_model(model.model_copy(update={"layers": 1}), seq_len=tokens.shape[1])
    stage.keep_stage(range(1), first=False, last=False)  # one layer: hidden states in, hidden states out
    stage = stage.to_empty(device="cpu")
    stage.prepare("cpu")
    transformers = _transformers()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.num_hidden_layers, config.vocab_size, config._attn_implementation = 1, 8, "sdpa"
    network = transformers.AutoModel.from_config(config, trust_remote_code=False).eval().float()
    layer, positions = network.layers[0], torch.arange(tokens.shape[1])[None]

    def both(name: str) -> tuple[Tensor, Tensor]:
        """A weight of our checkpoint (rounded as exported) and of the folder, by our name."""
        hf_name = format.hf_name(name) or name
        return weights[own_names[hf_name][0][0]].to(dtype).float(), exported[hf_name].float()

    x, y = (table[tokens] for table in both("embed.weight"))
    for number in range(model.layers or 0):
        stage.load_state_dict(
            {name: both(name.replace("layers.0.", f"layers.{number}.", 1))[0] for name in stage.state_dict()}
        )
        start = f"model.layers.{number}."
        layer.load_state_dict({name: exported[start + name].float() for name in layer.state_dict()})
        x = stage(x)
        output = layer(
            y, attention_mask=None, position_ids=positions, position_embeddings=network.rotary_emb(y, positions)
        )
        y = output[0] if isinstance(output, tuple) else output
    our_head, their_head = both("embed.weight" if model.tied else "head.weight")
    sides = zip((x, y), both("norm.weight"), strict=True)
    x, y = (F.rms_norm(hidden, hidden.shape[-1:], weight, model.norm_eps) for hidden, weight in sides)
    for ours, theirs in zip(x.split(1), y.split(1), strict=True):
        yield ours @ our_head[: model.vocab].t(), theirs @ their_head.t()
