"""config.json of a Hugging Face folder as a recipe, and back, by the tables of `windlass.models.presets`."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.checkpoint.files import EXTRA
from windlass.checkpoint.load import weights_source
from windlass.config import DataConfig, ModelConfig, Recipe, SaveConfig, validate
from windlass.config.load import model_problems, refuse, shorten
from windlass.errors import CheckpointError, ConfigError
from windlass.files import read_json
from windlass.models.hf_format import HFFormat, value_at
from windlass.models.presets.hf import ATTENTION_KEYS, read_config_json, refuse_custom_code
from windlass.registry import PRESETS
from windlass.runs.events import known_int

CONFIG_HINT = "use the config.json that came with the weights"
# Names that families use for the longest sequence; Bloom has none.
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def format_of(model: ModelConfig) -> HFFormat:
    format: HFFormat = PRESETS.load(model.family).hf
    return format


def is_hf_folder(folder: Path) -> bool:
    """True for a folder whose config.json names a model type. ConfigError: one with weights and a damaged config."""
    config = read_json(folder / "config.json") if folder.is_dir() else None
    is_named = isinstance((config or {}).get("model_type"), str)
    if not is_named and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        raise ConfigError(
            "convert.config-json-damaged",
            f"{folder}/config.json "
            f"{'names no model_type' if config is not None else 'is not a JSON object: it is truncated or damaged'}",
            hint=CONFIG_HINT,
        )
    return is_named


def match_format(config: Mapping[str, Any]) -> tuple[HFFormat, list[str]]:
    """The format to read a config.json with, and why it is not one of our own modules (empty when it is)."""
    formats = [PRESETS.load(name).hf for name in PRESETS.names()]
    readable = next((format for format in formats if not format.differences(config)), None)
    if readable is not None:
        return readable, []
    # A family that no format reads is compared with Llama, whose form most others vary.
    candidates = [format for format in formats if config["model_type"] in format.model_types]
    candidates = candidates or [PRESETS.load("llama").hf]
    reasons = dict.fromkeys(reason for format in candidates for reason in format.differences(config))
    return next(format for format in formats if format.wraps_transformers), list(reasons)


def recipe_of_folder(folder: Path, *, seq_len: int | None = None) -> Recipe:
    """A recipe with the model of the folder; a family that none of our modules computes is built by transformers."""
    refuse_custom_code(folder)
    config = read_json(folder / "config.json") or {}
    if method := value_at(config, "quantization_config.quant_method"):
        raise ConfigError(
            "convert.weights-quantized",
            f"the weights in {folder} are quantized ({method}) and can neither be trained nor read exactly",
            hint="use the bf16 or fp16 checkpoint instead"
            + (", or let transformers write one: Mxfp4Config(dequantize=True)" if method == "mxfp4" else ""),
        )
    format, _ = match_format(config)
    if missing := format.missing_keys(config):
        raise ConfigError(
            "convert.config-keys-missing",
            f"{folder}/config.json does not have {', '.join(missing)}",
            hint=CONFIG_HINT,
        )
    sizes = {key: value_at(config, key) for key in format.required_keys()}
    if wrong := {key: size for key, size in sizes.items() if type(size) is not int or size < 1}:
        listed = ", ".join(f"{key} = {shorten(repr(size))}" for key, size in wrong.items())
        raise ConfigError(
            "convert.config-size-invalid",
            f"{folder}/config.json: {listed}; each must be an integer of at least 1",
            hint=CONFIG_HINT,
        )
    table = format.read_config(config)
    if format.wraps_transformers:
        table |= {"config": str(folder), "vocab": config.get("vocab_size")}
    seq_len, where = min(seq_len or 2048, max_positions(config) or 2048), f"{folder}/config.json"
    model = validate(ModelConfig, table, where)
    refuse("config.invalid", where, list(model_problems(model)), CONFIG_HINT)
    return Recipe(name=recipe_name(folder), model=model, data=DataConfig(seq_len=seq_len))


def recipe_name(folder: Path) -> str:
    """A valid recipe name made from the name of a folder."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.resolve().name).lstrip("._-") or "imported"


def max_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that a model was made for; None when its config.json has no such key."""
    positions = (known_int(config.get(key)) for key in POSITION_KEYS)
    return next((count for count in positions if count and count > 0), None)


def positions_of(recipe: Recipe, folder: Path) -> int:
    """The longest sequence of a model: what it was trained with, or what an imported model allows if that is longer."""
    positions = known_int(value_at(read_json(folder / EXTRA) or {}, "extra.positions"))
    if positions is None and is_hf_folder(folder):
        positions = max_positions(read_json(folder / "config.json") or {})
    if positions is None and recipe.save.load is not None:
        with contextlib.suppress(CheckpointError):  # the run it started from may be gone
            origin = weights_source(recipe.save.load)
            positions = positions_of(recipe.model_copy(update={"save": SaveConfig()}), origin)
    return max(recipe.data.seq_len, positions or 0)


def config_json(recipe: Recipe, dtype: str, positions: int) -> dict[str, Any]:
    """config.json of a model; `dtype` is torch's name of the number format."""
    model, format = recipe.model, format_of(recipe.model)
    if format.wraps_transformers:
        # The export has none of the code that these keys may name.
        config = {k: v for k, v in read_config_json(model).items() if k not in ("auto_map", *ATTENTION_KEYS)}
        return {**config, "torch_dtype": dtype, "dtype": dtype}
    return format.write_config(model.model_dump(mode="json"), {"dtype": dtype, "positions": positions})
