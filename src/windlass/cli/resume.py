"""`windlass resume RUN`: continue a stopped run on this machine, on any number of devices."""

from typing import Annotated

import typer

from windlass.cli.options import NewDataOption, OverridesArgument, QuietOption, RunArgument, ScratchOption
from windlass.cli.train import train_start
from windlass.errors import RunError


def resume(
    run: RunArgument,
    overrides: OverridesArgument = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, help="Processes on this machine, one per device (default: as in the last start)."
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="Maximum number of times to restart failed workers.")
    ] = 3,
    new_data: NewDataOption = False,
    from_scratch: ScratchOption = False,
    quiet: QuietOption = False,
) -> None:
    """Continue a stopped run from its newest complete checkpoint; the layout and the number of devices may change."""
    from windlass.config import Loaded, Recipe, check, load, validate
    from windlass.launch.chain import finished
    from windlass.launch.start import check_store
    from windlass.runs import create_run, open_run
    from windlass.runs.events import Finished, ProcessStart

    folder = open_run(run)

    def prepare(devices_per_node: int, nodes: int) -> str:
        if overrides:  # the new values are the run's from now on; those that may not change are refused with a diff
            raw = folder.recipe().model_dump(mode="json")
            for override in overrides:
                load.apply_override(raw, *load.parse_override(override))
            recipe = validate(Recipe, raw, str(folder.config_file))
            check(recipe)
            check_store(recipe)  # before the run takes the new values
            text = folder.recipe_file.read_text(encoding="utf-8") if folder.recipe_file.is_file() else ""
            chosen_here = any(override.startswith("layout") for override in overrides)
            layout_from = "recipe" if chosen_here else folder.layout_from() or "recipe"
            create_run(folder.path, Loaded(recipe, text, folder.recipe_file, {}), layout_from=layout_from)
        if finished(folder):
            last = list(folder.events(Finished))[-1]
            raise RunError(
                "runs.finished",
                f"{folder.path} is finished (step {last.step}, {last.tokens or 0:,} tokens)",
                hint=f"to train further: windlass resume {folder.argument} train.steps=... (or data.tokens=...)",
            )
        if not overrides:
            check_store(folder.recipe())
        return ""

    # Devices at the last start; 1 when that is unknown or it ran on several nodes.
    starts = [ProcessStart(), *folder.events(ProcessStart)]
    last_count = (starts[-1].world_size or 1) if starts[-1].nodes in (None, 1) else 1
    raise typer.Exit(
        train_start(
            folder,
            prepare,
            devices=devices or last_count,
            restarts=restarts,
            from_scratch=from_scratch,
            new_data=new_data,
            quiet=quiet,
        )
    )
