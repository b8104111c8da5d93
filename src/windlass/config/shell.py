"""Texts that reach a job script: what each kind may hold, and the one way in which they are quoted."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import core_schema

from windlass.config.secret import find_secret, looks_secret

T = TypeVar("T")
# Context of a validation that reads a run folder: scripts are never written from it, and older ones stay readable.
RECORDED = "recorded"
# The only expansion in a job script that a recipe or a cluster file may ask for.
VARIABLE = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*(?::-[A-Za-z0-9_./-]*)?\})"
SECRET_HINT = "export it in the shell that submits, or keep it in a file of mode 600 (`wandb login` does)"


def quote(text: str, *, expand: bool = False) -> str:
    """One argument of a shell or of an #SBATCH line.

    `expand`: $NAME, ${NAME} and ${NAME:-word} are filled in where the job runs. Everything else stays as written.
    """
    if not expand or re.search(VARIABLE, text) is None:
        return shlex.quote(text)
    parts = re.split(f"({VARIABLE})", text)
    literals = (re.sub(r'([\\"`$])', r"\\\1", part) for part in parts[::2])
    variables = [*parts[1::2], ""]
    return '"' + "".join(literal + variable for literal, variable in zip(literals, variables, strict=True)) + '"'


@dataclass(frozen=True)
class ScriptText:
    """Annotation of a text key whose value is written into job scripts."""

    pattern: str
    rule: str

    def check(self, text: T) -> T:
        """The same text, or a ValueError, which pydantic collects; numbers and booleans pass."""
        if not isinstance(text, str):
            return text
        if not text.isprintable():
            raise ValueError("line breaks and control characters are not allowed in a job script")
        if secret := find_secret(text):
            raise ValueError(f"holds {secret}, which would be written into a job script; {SECRET_HINT}")
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(f"not {self.rule}")
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        def check_new(text: Any, info: ValidationInfo) -> Any:
            return text if info.context == RECORDED else self.check(text)

        return core_schema.with_info_after_validator_function(check_new, handler(source))


LINE = ScriptText(r".*", "one line of text")
SLURM_NAME = ScriptText(
    r"[A-Za-z0-9_][A-Za-z0-9_.,@+:/-]*", "a name for SLURM: letters, digits and . , _ @ + : / -, not beginning with -"
)
SBATCH_KEY = ScriptText(r"-{0,2}[A-Za-z][A-Za-z0-9_-]*", "the name of an sbatch option: letters, digits and -")
SBATCH_VALUE = ScriptText(r"[^\\]*", "a value for sbatch, which drops backslashes from a script's options")
OPTION = ScriptText(r"--?[A-Za-z].*", "an option: --name or --name=value")
OPTIONS = ScriptText(r"(--?[A-Za-z]\S*( --?[A-Za-z]\S*)*)?", "options with spaces between them: --name --name=value")
MODULE = ScriptText(r"[A-Za-z0-9_/][A-Za-z0-9_.+@:=/-]*", "one module per entry: letters, digits and . _ + @ : = / -")
MASK = ScriptText(r"0[xX][0-9a-fA-F]+", "a hexadecimal CPU mask: 0xfe00")
HOST_SUFFIX = ScriptText(r"[A-Za-z0-9.-]*", "part of a host name: letters, digits, . and -")
PATH = ScriptText(
    rf"(?!-)(?:[^$`]|{VARIABLE})*", "a path: $NAME and ${NAME} are filled in; no other $, no backtick, no - in front"
)
# Folders of the command line: $NAME would be filled in where the folder's own name is meant.
FOLDER = ScriptText(
    r"(?!-)[^$\\]*", "a folder whose path has no $ and no backslash, because a job script has to name it"
)
# SLURM_JOB_*: the scheduler's own, and the script computes with them, which executes `a[$(command)]`.
VARIABLE_NAME = ScriptText(
    r"(?!SLURM_JOB_)[A-Za-z_][A-Za-z0-9_]*",
    "the name of a variable: letters, digits and _; SLURM_JOB_* is the scheduler's",
)


def _check_variables(variables: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
    if info.context == RECORDED:
        return variables
    if secrets := ", ".join(name for name in variables if looks_secret(name)):
        raise ValueError(f"{secrets} would be written into the run folder; {SECRET_HINT}")
    for name in {"BASH_ENV", "ENV"} & variables.keys():  # a shell executes `$(command)` in their values when it starts
        PATH.check(getattr(variables[name], "value", variables[name]))
    return variables


Line = Annotated[str, LINE]
SlurmName = Annotated[str, SLURM_NAME]
SbatchKey = Annotated[str, SBATCH_KEY]
SbatchValue = Annotated[str, SBATCH_VALUE]
SbatchSetting = Annotated[str | int | bool, SBATCH_VALUE]
PathText = Annotated[str, PATH]
ModuleName = Annotated[str, MODULE]
VariableName = Annotated[str, VARIABLE_NAME]
SafeVariables = AfterValidator(_check_variables)
