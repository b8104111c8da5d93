"""Which words do the commands around a checkpoint share? Options written once, so that help says the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Which = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (or a Hugging Face folder).")]
AtStep = Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint of this step; the newest when left out.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1; a GPU when there is one.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16 or fp16; as the run computed on a GPU, fp32 on a CPU.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Save = Annotated[bool, typer.Option("--save/--no-save", help="Append the results to the run's eval.jsonl.")]
