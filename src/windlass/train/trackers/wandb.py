"""Weights & Biases. Offline by default: it writes files that `windlass sync` uploads later."""

from typing import Any

from windlass.config import Recipe
from windlass.runs.folder import Run
from windlass.train.tracking import numbers, public_config, tracker_id


class WandbTracker:
    def __init__(self, run: Run, recipe: Recipe, first_step: int) -> None:
        import wandb

        folder = run.trackers / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self.uploads_later = not recipe.trackers.online
        self._run = wandb.init(
            project=recipe.trackers.project,
            name=recipe.name,
            id=tracker_id(run),
            resume="allow",
            dir=str(folder),
            mode="offline" if self.uploads_later else "online",
            config=public_config(recipe),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True, disable_code=True),
        )
        self._run.define_metric("*", step_metric="tokens")

    def log(self, line: dict[str, Any], count: int) -> None:
        self._run.log(numbers(line), step=count)

    def close(self) -> None:
        self._run.finish()


open_tracker = WandbTracker
