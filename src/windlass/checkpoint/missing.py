"""Checkpoints that events.jsonl knows and the disk no longer has: a scratch purge, a wrong mount. No torch."""

import contextlib
import time
from collections.abc import Iterable

from windlass.checkpoint.files import SavedCheckpoint, steps_on_disk
from windlass.errors import CheckpointError
from windlass.runs.events import CheckpointDamaged, CheckpointRemoved, CheckpointsLost, Event, RolledBack, Saved
from windlass.runs.folder import Run

SCRATCH_OPTION = "--restart-from-scratch"


def expected_saves(events: Iterable[Event]) -> list[Saved]:
    """The saves whose checkpoints should be on the disk, by step: not removed by a keep rule, not set aside, not newer
    than where a rollback or an earlier loss went back to."""
    saves: dict[int, Saved] = {}
    for event in events:
        if isinstance(event, Saved) and event.step is not None:
            saves[event.step] = event
        elif isinstance(event, CheckpointRemoved):
            saves.pop(event.step if event.step is not None else -1, None)
        elif isinstance(event, CheckpointDamaged):
            saves = {step: save for step, save in saves.items() if save.checkpoint != event.checkpoint}
        elif isinstance(event, (RolledBack, CheckpointsLost)):
            saves = {step: save for step, save in saves.items() if step <= (event.to_step or 0)}
    return [saves[step] for step in sorted(saves)]


def report_missing(run: Run, latest: SavedCheckpoint | None) -> str | None:
    """Compare the checkpoint to resume from with the newest save; only rank 0.

    An error when nothing is left of what was saved: to start again from nothing, unasked, could lose months. An older
    checkpoint is used; what is lost is recorded and returned as a sentence.
    """
    newest = next(reversed(expected_saves(run.events())), None)
    if newest is None or (latest is not None and latest.step >= (newest.step or 0)):
        return None
    if latest is None:
        raise CheckpointError(
            "checkpoint.gone",
            f"all checkpoints of this run are gone: step {newest.step} was saved{_when_and_where(run, newest)}, and "
            f"{run.checkpoints} holds none",
            hint="mount the disk or copy the checkpoints back; to start again at step 0, add "
            f"{SCRATCH_OPTION} to `windlass train`, `resume` or `launch`",
        )
    event = _loss(newest, latest.step, latest.tokens)
    with contextlib.suppress(OSError):
        run.record(event)
    return f"{event.describe()}; it was saved{_when_and_where(run, newest)}"


def restart_from_scratch(run: Run) -> None:
    """Allow the next start to begin at step 0 although checkpoints were saved, by recording that they are lost."""
    if on_disk := steps_on_disk(run):
        raise CheckpointError(
            "checkpoint.not-gone",
            f"{SCRATCH_OPTION} was given, but {run.checkpoints} holds {len(on_disk)} checkpoints, the newest of step "
            f"{on_disk[-1][0]}",
            hint="omit the option to resume; to train from step 0 and keep them, choose a new folder with --run",
        )
    if saves := expected_saves(run.events()):
        run.record(_loss(saves[-1], 0, 0))


def _loss(newest: Saved, to_step: int, to_tokens: int | None) -> CheckpointsLost:
    return CheckpointsLost(
        step=newest.step,
        to_step=to_step,
        lost_steps=(newest.step or 0) - to_step,
        lost_tokens=None if newest.tokens is None or to_tokens is None else newest.tokens - to_tokens,
        checkpoint=newest.checkpoint,
    )


def _when_and_where(run: Run, save: Saved) -> str:
    when = "" if save.time is None else time.strftime(" on %Y-%m-%d at %H:%M:%S", time.localtime(save.time))
    return f"{when} in {run.checkpoint(save.step or 0)}"
