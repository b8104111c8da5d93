"""`windlass resume RUN`: go on with a stopped run on this machine, on any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from windlass.config import Loaded
    from windlass.runs.folder import Run


def register(app: typer.Typer) -> None:
    app.command("resume")(resume)


def resume(
    run: Annotated[Path, typer.Argument(help="Run folder, or its name under runs/.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change: layout.micro_batch=4.", metavar="KEY=VALUE"),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Processes here, one per device; as last time when left out.")
    ] = None,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="How often failed workers are started again.")] = 3,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress lines.")] = False,
) -> None:
    """Continue a stopped run from its newest whole checkpoint; the layout and the number of devices may change."""
    from windlass.cli.train import _supervise, _work
    from windlass.clusters.scheduler import place
    from windlass.runs import open_run

    found = open_run(run)
    loaded = _loaded(found, overrides or [])
    where = place()
    if where.source == "single":
        if overrides:
            _keep(found, loaded)
        _refuse_finished(found)
        count = devices or _last_devices(found)
        if count > 1:
            raise typer.Exit(_supervise(found, count, restarts))
    raise typer.Exit(_work(loaded, found, where, quiet))


def _loaded(run: Run, overrides: list[str]) -> Loaded:
    """The resolved recipe of the run folder: what was overridden at the start still holds."""
    from windlass.config import Loaded, Recipe, check, validate
    from windlass.config.load import apply_override, parse_override

    raw = run.recipe().model_dump(mode="json")
    for word in overrides:
        apply_override(raw, *parse_override(word))
    recipe = validate(Recipe, raw, str(run.config_file))
    check(recipe)
    text = run.recipe_file.read_text(encoding="utf-8") if run.recipe_file.is_file() else ""
    return Loaded(recipe, text, run.recipe_file, {})


def _keep(run: Run, loaded: Loaded) -> None:
    """The new values are the run's from now on; another model or data is another run."""
    from windlass.runs import create_run
    from windlass.runs.lock import refuse_held

    refuse_held(run.lock_file)
    create_run(run.path, loaded)


def _refuse_finished(run: Run) -> None:
    from windlass.errors import RunError
    from windlass.launch.chain import finished
    from windlass.runs.events import Finished

    if finished(run):
        last = list(run.events(Finished))[-1]
        raise RunError(
            "cli.finished-step-tokens",
            f"{run.path} is finished (step {last.step}, {last.tokens or 0:,} tokens)",
            hint=f"to train further give it more: windlass resume {run.path} train.steps=... (or data.tokens=...)",
        )


def _last_devices(run: Run) -> int:
    """Devices of this machine at the last start; 1 when that is unknown or it ran on several nodes."""
    from windlass.runs.events import ProcessStart

    starts = list(run.events(ProcessStart))
    if not starts or starts[-1].nodes not in (None, 1):
        return 1
    return starts[-1].world_size or 1
