"""Checkpoints of a training run: when to save, what is in one, restoring, and going back after divergence."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from windlass.checkpoint.files import SavedCheckpoint
from windlass.checkpoint.load import discard_after, find_best, find_latest, load_model_weights, restore
from windlass.checkpoint.save import Saver, SaveResult
from windlass.config import recipe_hash
from windlass.errors import CheckpointError
from windlass.runs.events import RolledBack, SaveInterval
from windlass.train.failure import DivergedError
from windlass.train.hooks import Hook, Training, each
from windlass.train.interval import SaveTimer
from windlass.train.metrics import Recorder
from windlass.train.signals import StopFlag
from windlass.train.validate import Validation


class Checkpointing:
    """Owns everything that a checkpoint depends on, apart from the training parts themselves."""

    def __init__(self, training: Training, recorder: Recorder, stop: StopFlag) -> None:
        self.training, self.recorder, self.stop = training, recorder, stop
        save, place = training.recipe.save, training.world.place
        self.saver = Saver(
            training.run,
            save,
            rank=place.rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
        )
        self.timer = SaveTimer(save)
        # Energy of earlier starts.
        self.carried_joules: float | None = None
        self.rolled_back = False
        # The lowest values of save.metric that were saved, at most save.keep_best.
        self.best: list[float] = []
        # save.metric of every validation of a fine-tuning.
        self.compared: list[float] = []
        self.validation: Validation | None = None
        self._validated_step: int | None = None
        self._announced: object = None

    def state(self) -> dict[str, Any]:
        """Tensors for torch.distributed.checkpoint, to be saved from or filled in place.

        Names are the model's own and do not depend on the layout; a DTensor knows its part of the full tensor, so
        that every layout reads every other's checkpoints. Where weights are computed in bf16, the fp32 master copy is
        what is saved."""
        optimizer = self.training.optimizer
        return {
            "model": {
                **{slot.name: slot.weights.detach() for slot in optimizer.slots},
                **self.training.parts.frozen(),
                **self.training.parts.saved_buffers(),
            },
            "optim": {
                name: {slot.name: slot.moments[name] for slot in optimizer.slots if name in slot.moments}
                for name in optimizer.moment_names
            },
            "count": optimizer.count,
            "guard": self.training.stepper.guard.memory,
        }

    def resume(self) -> SavedCheckpoint | None:
        """Continue from the newest complete checkpoint; else begin, from given weights if the recipe names some."""
        training, save = self.training, self.training.recipe.save
        latest = find_latest(training.run, verify=save.verify)
        if latest is not None:
            self._restore(latest)
            self.stop.measured(save_seconds=latest.save_seconds)
        elif save.load is not None:
            for module in training.parts.modules:
                load_model_weights(save.load, module, verify=save.verify)
            training.optimizer.adopt()
        # Steps since the checkpoint are lost, their energy is spent; each total contains the ones before it.
        totals = (self.carried_joules, training.run.last_metrics().energy_joules)
        self.carried_joules = max((total for total in totals if total is not None), default=None)
        return latest

    def _restore(self, latest: SavedCheckpoint) -> None:
        training, progress = self.training, self.training.progress
        extra = restore(latest, self.state(), seed=training.recipe.seed)
        training.optimizer.refresh()
        if training.parts.tie is not None:
            training.parts.tie.spread()
        progress.step, progress.tokens, progress.sequences = extra["step"], extra["tokens"], extra["sequences"]
        self.carried_joules, self.rolled_back = extra.get("energy_joules"), extra.get("rolled_back", False)
        self.best = [loss for loss in extra.get("best", []) if loss is not None]
        self.compared = extra.get("compared", [])

    def load_best(self) -> tuple[int, int]:
        """Step and tokens of the best validated checkpoint, whose weights the model now has; the last where none was
        kept for its metric."""
        training = self.training
        best = find_best(training.run)
        if best is None or best.step == training.step:
            return training.step, training.tokens
        restore(best, self.state(), seed=training.recipe.seed)
        training.optimizer.refresh()
        return best.step, best.tokens or 0

    def roll_back(self, reason: str) -> None:
        """After too many skipped steps: fail, or return once to an earlier checkpoint and skip that range of data."""
        training, progress = self.training, self.training.progress
        if not training.recipe.train.rollback or self.rolled_back:
            hint = "check the data of these steps and the learning rate; train.rollback = true skips this range once"
            raise DivergedError("train.diverged", reason, hint=hint)
        self.saver.finish()
        latest = find_latest(
            training.run,
            verify=training.recipe.save.verify,
            before=progress.step - self.recorder.skipped_in_a_row + 1,
        )
        if latest is None:
            raise DivergedError(
                "train.diverged",
                reason,
                hint="check the data of these steps and the learning rate: there is no earlier checkpoint to return to",
            )
        from_step, position = progress.step, progress.sequences
        self._restore(latest)
        left_out = [progress.sequences, position]
        skipped_tokens = (position - progress.sequences) * training.plan.seq_len
        progress.sequences, self.rolled_back = position, True
        self.recorder.forget()
        self.timer.restart(progress.step, progress.tokens)  # else saves up to where it went wrong would be left out
        if training.world.is_main:
            # A crash from here on must not continue from what was discarded.
            discard_after(training.run, progress.step, f"rolled back to step {progress.step}: {reason}")
            training.run.record(
                RolledBack(
                    step=from_step,
                    to_step=progress.step,
                    skipped_tokens=skipped_tokens,
                    sequences=left_out,
                    reason=reason,
                )
            )
        training.say(
            f"rolled back from step {from_step} to {progress.step}, skipping {skipped_tokens:,} tokens: {reason}"
        )

    def validated(self, validation: Validation) -> None:
        self.validation, self._validated_step = validation, self.training.step
        if self.training.recipe.tune is not None and (value := self.metric()) is not None:
            self.compared.append(value)

    @property
    def is_validated(self) -> bool:
        """Whether these very weights were validated by this start."""
        return self._validated_step == self.training.step

    def out_of_patience(self) -> bool:
        """Whether the last tune.patience validations were no better than one before them."""
        patience = 0 if self.training.recipe.tune is None else self.training.recipe.tune.patience
        if not patience or len(self.compared) <= patience:
            return False
        return min(self.compared[-patience:]) >= min(self.compared[:-patience])

    def metric(self) -> float | None:
        """save.metric of these very weights; None when they were not validated."""
        name = self.training.recipe.save.metric
        if name == "loss":
            return self.recorder.last_loss
        validation = self.validation
        if validation is None or not self.is_validated:
            return None
        value = validation.compared(name)
        return value if value is not None and math.isfinite(value) else None

    def save_if_due(self, agreed: bool, hooks: Sequence[Hook]) -> None:
        """The only place where the loop starts a checkpoint."""
        self._check_finished(self.saver.poll())
        training, save, loss = self.training, self.training.recipe.save, self.metric()
        # Weights that were just validated and belong to the best are saved whatever the interval says.
        is_best = (
            loss is not None
            and save.metric != "loss"
            and save.keep_best > 0
            and (len(self.best) < save.keep_best or loss < max(self.best))
        )
        if is_best or agreed or self.timer.due_by_count(training.step, training.tokens):
            if is_best and loss is not None:
                self.best = sorted([*self.best, loss])[: save.keep_best]
            self.save(hooks)
            self.timer.restart(training.step, training.tokens)
            each(hooks, "on_save", training)

    def save(self, hooks: Sequence[Hook], *, block: bool = False) -> SaveResult | None:
        """Everything that belongs to a step is written before its checkpoint: a kill in between must lose no line."""
        started, training, recipe = time.perf_counter(), self.training, self.training.recipe
        each(hooks, "on_wait", training, "save")
        self.recorder.drain(training, 0)
        self._check_finished(self.saver.finish())
        before = self.saver.last
        if before is not None and not before.ok and before.step != training.step:
            self.best = [loss for loss in self.best if loss != before.metric]  # it is not on the disk
        extra = {
            **asdict(training.progress),
            "energy_joules": training.total_joules(),
            "recipe_hash": recipe_hash(recipe),
            "seed": recipe.seed,
            "rolled_back": self.rolled_back,
            "best": self.best,
            "compared": self.compared,
            "config": recipe.model_dump(mode="json"),
            "schedule": {
                "total_tokens": training.plan.total_tokens,
                "name": recipe.optim.schedule,
                "lr": recipe.optim.lr,
            },
        }
        return self.saver.save(training.step, self.state(), extra, metric=self.metric(), block=block, began=started)

    def final_save(self, reason: str | None, hooks: Sequence[Hook]) -> None:
        training = self.training
        self.recorder.drain(training, 0)
        self.saver.finish()
        last = self.saver.good.step if self.saver.good else "none"
        if training.step in (0, last) or (reason is None and not training.recipe.save.at_end):
            return
        for _ in range(2):
            outcome = self.save(hooks, block=True)
            if outcome is None or outcome.ok:
                return
        assert outcome is not None
        raise CheckpointError(
            "checkpoint.last-save-failed",
            f"the last save, at step {training.step}, failed twice: {outcome.error}",
            hint=f"the newest good checkpoint of this start is {last}; "
            f"free some space, then `windlass resume {training.run.argument}`",
        )

    def announce_interval(self, step_seconds: float | None) -> None:
        """Print what save.every = "auto" chose, once step times are known."""
        choice = self.timer.choice
        if choice is None or choice is self._announced or step_seconds is None:
            return
        self._announced = choice
        if self.training.world.is_main:
            steps = max(1, round(choice.seconds / step_seconds))
            self.training.run.record(SaveInterval(seconds=choice.seconds, steps=steps, reason=choice.reason))
            self.training.say(f"{choice.reason} (about {steps:,} steps)")

    def _check_finished(self, outcome: SaveResult | None) -> None:
        """A save in the background has ended: its times decide when the next ones come; a failure is shown."""
        if outcome is None:
            return
        if outcome.ok:
            self.stop.measured(save_seconds=self.saver.seconds_needed())
            self.timer.measured(stall_seconds=outcome.stall_seconds, write_seconds=outcome.write_seconds)
        elif self.saver.trouble:
            self.training.say(self.saver.trouble)
