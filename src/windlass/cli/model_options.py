"""Options that the commands on a model share, written once so that help is the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder or Hugging Face folder.")]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Step of the checkpoint (default: the newest).")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:1 (default: a GPU if any).")]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16 or fp16 (default: the run's on a GPU, fp32 on a CPU).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SaveOption = Annotated[bool, typer.Option("--save/--no-save", help="Append the results to the run's eval.jsonl.")]
