"""Arguments and options that several commands share, written once so that help is the same everywhere."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="Recipe keys to change: layout.micro_batch=4.", metavar="KEY=VALUE")
]
ModelArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, its name in runs/, or a Hugging Face folder.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or its name in runs/.")]
NewRunOption = Annotated[Path | None, typer.Option("--run", help="Run folder (default: runs/<name>).")]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Step of the checkpoint (default: the newest).")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one).")
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16 or fp16 (default: the run's on a GPU, fp32 on a CPU).")
]
ProcessesOption = Annotated[
    int | None, typer.Option("--devices", min=1, help="Processes on this machine, one per device.")
]
AccountOption = Annotated[str | None, typer.Option("--account", help="SLURM account to charge.")]
NewDataOption = Annotated[
    bool, typer.Option("--new-data", help="Continue even if the token store has changed since the last start.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress lines.")]
ScratchOption = Annotated[
    bool,
    typer.Option("--restart-from-scratch", help="Restart at step 0 if all saved checkpoints are gone."),
]
EngineProfileOption = Annotated[
    str | None,
    typer.Option(
        "--engine-profile", help="Predict for another engine as teams used it in 2024: torch, deepspeed or megatron."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SaveOption = Annotated[bool, typer.Option("--save/--no-save", help="Append the results to the run's eval.jsonl.")]
AdjustOption = Annotated[
    bool,
    typer.Option("--adjust", help="Use the nearest global batch that divides evenly over the devices, and print it."),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Sample from the most likely tokens with this total probability.")
]


def option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command with dataclasses as parameters: every field becomes an option of the command, in the order written.

    The command gets options that belong together as one value, instead of twenty parameters.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
                )
            )

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        function(**values)

    del command.__wrapped__  # typer would read the original's parameters
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    run: ModelArgument
    step: StepOption = None
    device: DeviceOption = None
    dtype: DtypeOption = None
