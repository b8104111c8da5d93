"""TensorBoard event files in the run folder."""

from typing import Any

from windlass.config import Recipe
from windlass.runs.folder import Run
from windlass.train.tracking import numbers


class TensorboardTracker:
    uploads_later = False

    def __init__(self, run: Run, recipe: Recipe, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what a crashed process wrote beyond the checkpoint, because those steps are repeated now.
        self._writer: Any = SummaryWriter(
            str(run.trackers / "tensorboard"), purge_step=first_step + 1 if first_step else None, flush_secs=30
        )

    def log(self, line: dict[str, Any], count: int) -> None:
        values = numbers(line)
        step = int(values.get("step", count))
        for key, value in values.items():
            if key not in ("step", "time"):
                self._writer.add_scalar(key, value, step, walltime=values.get("time"))

    def close(self) -> None:
        self._writer.close()


open_tracker = TensorboardTracker
