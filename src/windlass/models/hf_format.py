"""The Hugging Face folder of a model family as data: config.json, weight names and weight transforms. No torch."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.config import ModelConfig
from windlass.models.spec import ModelSpec

LAYER_NUMBER = re.compile(r"\.(\d+)\.")
# Keys of the [model] table that change what the model computes.
STRUCTURE = set(ModelConfig.model_fields) - {
    "family",
    "config",
    "assumed",
    "init_std",
    "retention",
    "chunk",
    "value_width",
}


def structure(model: ModelConfig) -> dict[str, Any]:
    """Values of the [model] table that change what the model computes, those of its tables with dotted keys."""
    tables = {"experts": model.experts is not None, "mamba": model.mamba is not None}
    values = {key: getattr(model, key) for key in STRUCTURE} | tables
    experts, mamba = (
        dict[str, Any](),
        {} if model.mamba is None else model.mamba.model_dump(exclude={"chunk", "dt_max"}),
    )
    if model.experts is not None:
        experts = model.experts.model_dump(exclude={"balance_weight", "bias_step", "z_loss"})
        # Losses are not part of the model.
        experts["balance"] = "bias" if model.experts.bias_strength else "loss"
    dotted = {"experts": experts, "mamba": mamba}
    return values | {f"{table}.{key}": value for table, keys in dotted.items() for key, value in keys.items()}


@dataclass(frozen=True)
class ConfigSlot:
    """A place in a config.json template that is filled from the model."""

    name: str
    # A key of the recipe's [model] table, "*" for the whole table, or a fact of the export: "positions", "dtype".
    required: bool = False
    # An import fails without it: transformers would silently use the value of some other model.
    default: Callable[[Mapping[str, Any]], Any] = lambda model: None
    # Value where this side has none, from the other keys of the table.


@dataclass(frozen=True)
class Requirement:
    """A config.json value that our module needs; with any other value the model is built by transformers."""

    keys: tuple[str, ...]
    # Dotted names; the first one with a value counts.
    accepted: tuple[Any, ...]
    reason: str
    # Shown to the user; {value} is the value in the folder.
    model_type: str | None = None
    # Checked for this model_type only.


@dataclass(frozen=True)
class ConfigPart:
    """Keys of config.json that stand for keys of the recipe's [model] table in another form."""

    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Mapping[str, Any]], dict[str, Any]]
    keys: tuple[str, ...]
    # Of the [model] table.


@dataclass(frozen=True)
class HFFormat:
    """How one family of recipes is written as a Hugging Face folder and read back."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    # Template of config.json, in file order: constants, nested objects and slots.
    model_types: tuple[str, ...] = ()
    # Values of model_type that are read as this family.
    requirements: tuple[Requirement, ...] = ()
    parts: tuple[ConfigPart, ...] = ()
    # Keys that a slot of the template cannot fill.
    constants: Mapping[str, float] = field(default_factory=dict)
    # Names of tensors of the folder, with {layer}, that always hold this one number.
    weights: Mapping[str, str] | None = None
    # Our parameter names -> names in the folder, {layer} is the layer index; None: stored under our names. With
    # {expert} the folder has one tensor per expert, of which ours is the stack. Several of our parameters may have one
    # name: see `joined`.
    joined: Literal["rows", "turns"] = "rows"
    # Of several parameters with one name the folder has one tensor: the rows of each, in the order of `weights`; or its
    # last dimension takes numbers from each in turn.
    transforms: Mapping[str, str] = field(default_factory=dict)
    # Our parameter name, with {layer} -> name of a weight transform (checkpoint.names.TRANSFORMS).
    tied: Mapping[str, str] = field(default_factory=dict)
    # A parameter that a tied folder leaves out -> the parameter it is equal to.
    library: str = "transformers"
    # Python package that loads the folder.
    layerwise: bool = False
    # A large model may be verified layer by layer (transformers' class has `layers` and `rotary_emb`).
    wraps_transformers: bool = False
    # The module is transformers' own; `prefix` stands before its parameter names.
    prefix: str = ""
    older_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # model_type (its beginning) -> parameter name in transformers -> name in published folders.
    left_out: tuple[Requirement, ...] = ()
    # Parts of a folder that an import leaves out, with a message.

    def hf_name(self, name: str) -> str | None:
        """Name in the folder of one of our parameters; None when the folder has no such weight."""
        if self.weights is None:
            return name.removeprefix(self.prefix)
        layer = LAYER_NUMBER.search(name)
        target = self.weights.get(without_layer(name))
        return target.replace("{layer}", layer[1]) if target and layer else target

    def transform(self, name: str) -> str | None:
        return self.transforms.get(without_layer(name))

    def folder_tensors(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Name in the folder -> our parameters that it holds, in the order of the table; see `joined`."""
        tensors: dict[str, list[str]] = {}
        for name in names:
            if (target := self.hf_name(name)) is not None:
                tensors.setdefault(target, []).append(name)
        order = {name: place for place, name in enumerate(self.weights or ())}
        for parts in tensors.values():
            parts.sort(key=lambda name: order.get(without_layer(name), 0))
        return tensors

    def write_config(self, model: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of a model table; `facts` are the values that do not come from the recipe."""

        def filled(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: filled(inner) for key, inner in value.items()}
            if not isinstance(value, ConfigSlot):
                return value
            if value.name == "*":
                return {key: inner for key, inner in model.items() if inner is not None}
            content = model.get(value.name, facts.get(value.name))
            return value.default(model) if content is None else content

        config = {key: filled(value) for key, value in self.config.items()}
        for part in self.parts:
            config |= part.write(model)
        return config

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's [model] table of a config.json. Where two keys fill one slot, the later one counts."""
        model: dict[str, Any] = {"family": self.family}
        slots = {key: slot for key, slot in self._slots() if slot.name not in ("positions", "dtype")}
        for key, slot in slots.items():
            value = value_at(config, key)
            if slot.name == "*":
                return dict(value) if isinstance(value, Mapping) else {}
            if value is not None:
                model[slot.name] = value
        for slot in slots.values():
            model.setdefault(slot.name, slot.default(model))
        for part in self.parts:
            model |= part.read(config)
        return {key: value for key, value in model.items() if value is not None}

    def aliases(self) -> dict[str, str]:
        """Keys of config.json -> keys of the [model] table, where one stands for the other under another name."""
        ours = set(ModelConfig.model_fields)
        return {key: slot.name for key, slot in self._slots() if slot.name in ours and key not in ours}

    def expressed_keys(self) -> set[str]:
        """Keys of the [model] table that the folder holds."""
        return {slot.name for _, slot in self._slots()}.union(*(part.keys for part in self.parts))

    def required_keys(self) -> list[str]:
        """Keys without which transformers would silently use the value of some other model: sizes, all of them."""
        return [key for key, slot in self._slots() if slot.required]

    def missing_keys(self, config: Mapping[str, Any]) -> list[str]:
        return [key for key in self.required_keys() if value_at(config, key) is None]

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """Why our module would not compute what this model computes; empty when it does."""
        reasons = [] if config["model_type"] in self.model_types else [f"its family is {config['model_type']}"]
        if not any("pattern" in part.keys for part in self.parts):  # such a part reads the kinds of layers itself
            kinds = config.get("layer_types")
            others = {str(kind) for kind in kinds} - {"full_attention"} if isinstance(kinds, list) else set()
            reasons += [f"some of its layers are {kind}" for kind in sorted(others)]
        return reasons + unmet(self.requirements, config)

    def _slots(self) -> Iterator[tuple[str, ConfigSlot]]:
        for key, value in self.config.items():
            nested = (
                {f"{key}.{name}": slot for name, slot in value.items()} if isinstance(value, Mapping) else {key: value}
            )
            yield from ((name, slot) for name, slot in nested.items() if isinstance(slot, ConfigSlot))


@dataclass(frozen=True)
class Preset:
    """A model family: what its recipe keys mean, and how a Hugging Face folder stores it."""

    spec: Callable[[ModelConfig], ModelSpec]
    hf: HFFormat
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Values of [model] keys that a recipe of this family leaves out.
    table_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # The same for keys of a table ("experts", "mamba") that not every model of the family has.

    def inexpressible(self, model: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
        """(key, value, the value that the folder stands for) of keys that the folder cannot hold."""
        if self.hf.wraps_transformers or "*" in (expressed := self.hf.expressed_keys()):
            return
        tables = {}
        for name in self.table_defaults:
            if (table := getattr(model, name)) is not None:
                required = {key for key, field in type(table).model_fields.items() if field.is_required()}
                tables[name] = table.model_dump(include=required)
        values, standards = structure(model), structure(ModelConfig(family=self.hf.family, **tables))
        for key in sorted(set(values) - expressed):
            if values[key] != standards.get(key):
                yield key, values[key], standards.get(key)


LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def without_layer(name: str) -> str:
    """A parameter name with {layer} instead of the number of its layer."""
    return LAYER_NUMBER.sub(".{layer}.", name, count=1)


def unmet(requirements: tuple[Requirement, ...], config: Mapping[str, Any]) -> list[str]:
    """The reasons of the requirements that a config.json does not meet."""
    reasons = []
    for requirement in requirements:
        values = [value for key in requirement.keys if (value := value_at(config, key)) is not None]
        if requirement.model_type in (None, config["model_type"]) and values and values[0] not in requirement.accepted:
            try:
                reasons.append(requirement.reason.format(value=values[0]))
            except (TypeError, ValueError):  # a text where the reason prints a number
                reasons.append(f"its {requirement.keys[0]} is {values[0]!r}")
    return reasons


def value_at(config: Mapping[str, Any], dotted: str) -> Any:
    """The value of a nested key such as rope_parameters.rope_theta; None where there is none."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
