"""The `[model]` table: the network that is trained."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from windlass.config.base import Registered, Table
from windlass.registry import BLOCKS, PRESETS, import_target


class ModelConfig(Table):
    """Keys of a block of an installed package are one more table: `[model.<block>]`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any] = Field(init=False)

    family: Annotated[str, Registered(PRESETS)] = "llama"
    """llama and retnet are our own modules; hf builds any causal language model from a local Hugging Face config.
    Installed packages may add families."""
    layers: PositiveInt | None = None
    """Number of transformer layers."""
    width: PositiveInt | None = None
    """Hidden size of the residual stream."""
    ffn: PositiveInt | None = None
    """Inner size of the feed-forward block (for SwiGLU: of each of the two branches)."""
    heads: PositiveInt | None = None
    """Number of attention heads (RetNet: retention heads)."""
    kv_heads: PositiveInt | None = None
    """Key/value heads of grouped-query attention (default: as many as `heads`)."""
    head_dim: PositiveInt | None = None
    """Width of one head (default: width / heads)."""
    vocab: PositiveInt | None = None
    """True vocabulary size; the embedding is padded up to a multiple of 128."""
    tied: bool = False
    """Input embedding and output head share their weights."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation of the feed-forward block."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary position embedding."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside the norms."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    value_width: PositiveInt | None = None
    """RetNet: width of values and gate (dv) (default: the feed-forward width)."""
    retention: Literal["parallel", "chunkwise"] = "chunkwise"
    """RetNet: which of the two equivalent forms training uses."""
    chunk: PositiveInt = 512
    """RetNet: chunk length of the chunkwise form."""
    config: str | None = None
    """hf: folder or file with a Hugging Face config.json."""
    assumed: list[str] = Field(default_factory=list)
    """Keys of this table whose published value is unknown and was assumed by the recipe's author."""

    @classmethod
    def extra_table(cls, key: str) -> type[Table] | None:
        """The table of a block of an installed package; None where no such block has one."""
        if key in BLOCKS.builtin or key not in BLOCKS.names():
            return None
        table: type[Table] | None = getattr(import_target(f"{BLOCKS.target(key)}.spec"), "TABLE", None)
        return table

    def block_table(self, block: str) -> Any:
        """The keys of a block of an installed package, with its defaults where the recipe leaves them out."""
        values = (self.model_extra or {}).get(block)
        table = self.extra_table(block)
        return table() if values is None and table is not None else values

    @model_validator(mode="wrap")
    @classmethod
    def _check_block_tables(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Unknown keys are refused together with the problems of the other keys."""
        if not isinstance(values, dict) or not (extra := set(values).difference(cls.model_fields)):
            return handler(values)
        checked: dict[str, Any] = {key: value for key, value in values.items() if key not in extra}
        problems: list[Any] = []
        for key in sorted(extra):
            table = cls.extra_table(key)
            if table is None:
                problems.append({"type": "extra_forbidden", "loc": (key,), "input": values[key]})
                continue
            try:
                checked[key] = table.model_validate(values[key])
            except ValidationError as error:
                problems += [{**problem, "loc": (key, *problem["loc"])} for problem in error.errors()]
        try:
            model = handler(checked)
        except ValidationError as error:
            problems = [*error.errors(), *problems]
        if problems:
            details: list[Any] = [
                {key: problem[key] for key in ("type", "loc", "input", "ctx") if key in problem} for problem in problems
            ]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return model
