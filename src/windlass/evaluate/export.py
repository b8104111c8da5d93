"""How does a checkpoint become a folder that others can load? Streamed tensor by tensor, checked by logits, and only then named.

llama   a Hugging Face Llama: config.json, generation_config.json, model-*.safetensors with their index, tokenizer, README.md
retnet  the same folder with model_type "windlass_retnet": our own names and the `[model]` table in config.json; `open_model` loads it
hf      the folder of the family that the recipe's config names
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint import files, names
from windlass.checkpoint.load import read_extra, weights_source
from windlass.config import ModelConfig, Recipe, SaveConfig
from windlass.errors import CheckpointError, ConfigError, DataError, RunError
from windlass.evaluate.foreign import is_hf_folder, longest_of
from windlass.evaluate.opened import DTYPES, passed_over, source_of
from windlass.evaluate.stream import Weights, open_weights
from windlass.evaluate.words import end_ids, write_tokenizer
from windlass.files import read_json, write_atomic, write_json
from windlass.models import build
from windlass.runs.folder import Run

SHARD_BYTES = 4 * 10**9
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Exported:
    folder: Path
    dtype: str
    files: int
    bytes: int
    tensors: int
    tokenizer: str
    """What was written for it, in words."""
    step: int | None
    """Of the checkpoint; None for a model that was a folder already."""
    note: str | None
    """What should be known about the choice of the checkpoint."""
    check: Any
    """`verify.Check`, or None where it was left out."""


def export(
    path: Path | str, to: Path | str, *, step: int | None = None, dtype: str | None = None, tokenizer: Path | None = None,
    card: str | None = None, verify: bool = True, text: str | None = None, shard_bytes: int = SHARD_BYTES, tell: Tell = lambda done, total: None,
) -> Exported:  # fmt: skip
    """Write the folder beside its name, compare its logits with ours, then give it its name. An existing folder is refused."""
    target = Path(to)
    if target.exists():
        raise RunError(
            "evaluate.exists", f"{target} exists", hint="choose another folder with --to: an export never overwrites"
        )
    run, recipe, source = source_of(Path(path), step)
    refuse_unknown(recipe.model)
    refuse_damaged(source)
    if shard_bytes < 1:
        raise ConfigError(
            "evaluate.files-most-bytes-hold",
            f"files of at most {shard_bytes} bytes hold nothing",
            hint='write --shard "4 GB"',
        )
    kind = export_dtype(recipe, source, dtype)
    beside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        sizes, tensors = write_weights(recipe.model, open_weights(source), beside, kind, shard_bytes, tell)
        words = write_words(run, recipe, source, beside, tokenizer)
        write_config(recipe, source, beside, kind, words)
        write_atomic(beside / "README.md", card or plain_card(recipe))
        check = _verified(recipe, source, beside, kind, words, text) if verify else None
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    said = "none: the run names no tokenizer" if words is None else f"{words.path.name} ({words.vocab_size:,} tokens)"
    taken = (read_json(source / files.MANIFEST) or {}).get("step")
    note = passed_over(run, source) if step is None else None
    return Exported(target, kind, len(sizes), sum(sizes.values()), tensors, said, taken, note, check)


def refuse_unknown(model: ModelConfig) -> None:
    if model.family == "llama" and model.activation != "swiglu":
        raise ConfigError(
            "evaluate.llama-activation-form-hugging",
            f"a Llama with activation {model.activation!r} has no form in Hugging Face's Llama, whose feed-forward is SwiGLU",
            hint="evaluate and generate work on the run itself",
        )


def refuse_damaged(source: Path) -> None:
    """A flipped bit would go out to others with our name on it: every byte is compared with what was written."""
    if (source / files.MANIFEST).is_file():
        files.complete(source, verify=True)


def export_dtype(recipe: Recipe, source: Path, asked: str | None) -> str:
    """What was asked; an imported model as it came; else bf16 where the run computed in it: master weights are twice as large."""
    if asked is not None and asked not in DTYPES:
        raise ConfigError("evaluate.dtype-unknown", f"dtype {asked!r} is unknown", hint=f"choose {' or '.join(DTYPES)}")
    if asked is not None:
        return asked
    stored = (read_extra(source)["extra"] if (source / files.EXTRA).is_file() else {}).get("dtype")
    return stored if stored in DTYPES else ("fp32" if recipe.train.precision == "fp32" else "bf16")


# -- weights --------------------------------------------------------------------------------------------------------------


def exported_names(model: ModelConfig, weights: Weights) -> dict[str, str]:
    """Name in the folder -> our name, in the folder's order."""
    if model.family == "retnet":
        return {name: name for name in weights}
    if model.family == "hf":
        with torch.device("meta"):  # only transformers knows which of its names stand for one weight
            twins = build(model, seq_len=1).twins
        older = names.OLDER if (_config_json(model).get("model_type") or "").startswith("gpt_neox") else {}
        # As save_pretrained does: a weight with two names is written under its first.
        bare = {name.removeprefix("net."): name for name in weights if name not in twins and f"net.{name}" not in twins}
        return {older.get(new, new): old for new, old in bare.items()}
    found = {new: old for old in weights if (new := names.to_hf(old)) is not None}
    return found or {name: name for name in weights}  # already under Hugging Face's names


def _config_json(model: ModelConfig) -> dict[str, Any]:
    """The config.json that a family hf model is built from."""
    path = Path(model.config or "")
    return dict(json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")))


def exported_tensor(model: ModelConfig, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As others expect it: without the padded rows of our vocabulary."""
    if model.family == "llama" and name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensor = tensor[: model.vocab]
    return tensor.to(dtype).contiguous()


def write_weights(
    model: ModelConfig, weights: Weights, folder: Path, dtype: str, limit: int, tell: Tell
) -> tuple[dict[str, int], int]:
    """One shard in memory at a time; file -> bytes, and the number of tensors."""
    from safetensors.torch import save_file

    plan = list(shards(model, weights, DTYPES[dtype], limit))
    total, done, index, sizes = sum(len(part) for part in plan), 0, {}, {}
    for number, part in enumerate(plan, start=1):
        name = "model.safetensors" if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        held = {}
        for new, old in part.items():
            held[new] = exported_tensor(model, new, weights[old], DTYPES[dtype])
            done += 1
            tell(done, total)
        save_file(held, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors writes for the owner only; others are to load this
        sizes[name] = sum(t.numel() * t.element_size() for t in held.values())
        index.update(dict.fromkeys(part, name))
    if len(plan) > 1:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index},
        )
    return sizes, len(index)


def shards(model: ModelConfig, weights: Weights, dtype: torch.dtype, limit: int) -> Iterator[dict[str, str]]:
    """Names of each file, at most `limit` bytes of tensors in it (a larger tensor has a file of its own)."""
    part: dict[str, str] = {}
    size = 0
    for new, old in exported_names(model, weights).items():
        one = dtype.itemsize
        for length in weights.shape(old):
            one *= length
        if part and size + one > limit:
            yield part
            part, size = {}, 0
        part[new] = old
        size += one
    yield part


# -- what stands beside them ----------------------------------------------------------------------------------------------


def write_words(run: Run | None, recipe: Recipe, source: Path, folder: Path, given: Path | None) -> Any:
    """The tokenizer, in a form that transformers reads; None when the run has none."""
    from windlass.evaluate.opened import tokenizer_of

    try:
        made = tokenizer_of(run, recipe, source, given)
    except DataError:
        if given is not None:
            raise
        return None
    write_tokenizer(made, folder, longest=recipe.data.seq_len)
    return made


def write_config(recipe: Recipe, source: Path, folder: Path, dtype: str, words: Any) -> None:
    config, ends = config_of(recipe, dtype, positions_of(recipe, source)), end_ids(words) if words is not None else {}
    write_json(folder / "config.json", {**config, **ends})
    write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.8, "top_p": 0.95, **ends},
    )


def positions_of(recipe: Recipe, source: Path) -> int:
    """The longest sequence the model is made for: what it was trained with, or what a model from elsewhere brought along."""
    brought = (read_json(source / files.EXTRA) or {}).get("extra", {}).get("positions")
    if brought is None and is_hf_folder(source):
        brought = longest_of(read_json(source / "config.json") or {})
    if brought is None and recipe.save.load is not None:
        with contextlib.suppress(CheckpointError):  # what it went on from may be gone
            start = weights_source(recipe.save.load)
            brought = positions_of(recipe.model_copy(update={"save": SaveConfig()}), start)
    return max(recipe.data.seq_len, brought or 0)


def config_of(recipe: Recipe, dtype: str, positions: int) -> dict[str, Any]:
    """config.json, in words that transformers 4 and 5 both read."""
    model, kind = recipe.model, str(DTYPES[dtype]).removeprefix("torch.")
    if model.family == "retnet":
        table = model.model_dump(mode="json", exclude_none=True)
        return {
            "model_type": "windlass_retnet", "architectures": ["WindlassRetNet"], "torch_dtype": kind, "dtype": kind, "vocab_size": model.vocab,
            "max_position_embeddings": positions, "model": table,
        }  # fmt: skip
    if model.family == "hf":
        return {**_config_json(model), "torch_dtype": kind, "dtype": kind}
    head_dim = model.head_dim or model.width // model.heads
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": model.vocab, "hidden_size": model.width,
        "intermediate_size": model.ffn, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads, "head_dim": head_dim, "hidden_act": "silu", "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "max_position_embeddings": positions, "tie_word_embeddings": model.tied, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": model.init_std, "use_cache": True, "pretraining_tp": 1,
        "torch_dtype": kind, "dtype": kind,
    }  # fmt: skip


def plain_card(recipe: Recipe) -> str:
    return f"# {recipe.name}\n\nTrained with windlass. No run folder was at hand for a fuller card.\n"


def _verified(recipe: Recipe, source: Path, folder: Path, dtype: str, words: Any, text: str | None) -> Any:
    from windlass.evaluate.verify import check_export

    check = check_export(recipe, source, folder, dtype, words, text)
    if not check.ok:
        raise CheckpointError(
            "evaluate.exported-model-does-compute",
            f"the exported model does not compute what ours does: largest difference of logits {check.difference:.3g}, "
            f"the same first choice at {check.agreement:.2%} of {check.positions:,} positions",
            hint="nothing was written; this is a fault in windlass: report the recipe's [model] table",
        )
    return check
