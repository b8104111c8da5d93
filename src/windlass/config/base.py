"""What all tables of a recipe share: frozen values, unknown keys refused, units parsed."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import core_schema

from windlass.errors import WindlassError
from windlass.registry import Registry
from windlass.units import parse_bytes, parse_seconds, parse_tokens


class Table(BaseModel):
    """One table of a recipe: frozen data; an unknown key is an error that names similar keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, str_strip_whitespace=True, allow_inf_nan=False
    )


def _with_unit(parse: Any) -> BeforeValidator:
    def validator(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"expected a number or a text with a unit, not {type(value).__name__} {value!r}")
        try:
            return parse(value)
        except WindlassError as error:  # pydantic collects ValueErrors, so that all problems come in one message
            raise ValueError(error.message + (f" ({error.hint})" if error.hint else "")) from None

    return BeforeValidator(validator)


def _schema(example: str, meaning: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"type": "string"}], "description": f"{meaning}, for example {example}"}
    )


Tokens = Annotated[int, _with_unit(parse_tokens), Field(ge=0), _schema('"450B" or "4Mi"', "A token count")]
Bytes = Annotated[int, _with_unit(parse_bytes), Field(ge=0), _schema('"94 GiB"', "A size")]
Seconds = Annotated[float, _with_unit(parse_seconds), Field(ge=0), _schema('"30m"', "A duration")]
# One validator for both, so that a wrong value is one problem and not one per member of a union.
SecondsOrAuto = Annotated[
    float | Literal["auto"],
    _with_unit(lambda value: value if value == "auto" else parse_seconds(value)),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"const": "auto", "type": "string"}]}),
]


@dataclass(frozen=True)
class Registered:
    """Annotation of a text key: its value is a name in `registry`. Checking a built-in name imports nothing."""

    registry: Registry

    def check(self, name: str) -> str:
        try:
            self.registry.target(name)
        except WindlassError as error:  # pydantic collects ValueErrors
            raise ValueError(f"{error.message}; {error.hint}") from None
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        # Editors offer the built-in names; those of installed packages are valid too.
        return {"anyOf": [{"enum": list(self.registry.builtin)}, {"type": "string"}]}
