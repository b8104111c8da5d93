"""When does the loop save, and when does it go back? Every checkpoint of a run begins here."""

from __future__ import annotations

import math
import time
from typing import Any

from windlass.checkpoint.load import discard_after, find_latest
from windlass.checkpoint.save import Outcome
from windlass.errors import CheckpointError
from windlass.runs.events import RolledBack, SaveInterval
from windlass.train import failure
from windlass.train.batches import open_batches
from windlass.train.build import go_back
from windlass.train.hooks import each
from windlass.train.job import Job


def save_if(job: Job, due: bool) -> None:
    """The one place where checkpoints begin."""
    _heed(job, job.saver.poll())
    if due:
        begin_save(job)
        job.interval.restart(job.step, job.tokens)
        each(job.hooks, "on_save", job)


def _heed(job: Job, done: Outcome | None) -> None:
    """A save in the background has ended: what it took decides when the next ones come; that it failed must not go unheard."""
    if done is None:
        return
    if done.ok:
        job.stop.measured(save_seconds=job.saver.seconds_needed())
        job.interval.measured(stall_seconds=done.stall_seconds, write_seconds=done.write_seconds)
    elif job.saver.trouble:
        job.say(job.saver.trouble)


def begin_save(job: Job, *, block: bool = False) -> Outcome | None:
    """Everything that belongs to a step is on its way to the disk before its checkpoint is: a kill in between must lose no line."""
    began = time.perf_counter()
    each(job.hooks, "on_wait", job, "save")
    job.recorder.drain(job, 0)
    _heed(job, job.saver.finish())
    before = job.saver.last
    if before is not None and not before.ok and before.step != job.step:
        job.best = [loss for loss in job.best if loss != before.metric]  # it is not on the disk
    return job.saver.save(job.step, job.state(), job.extra(), metric=_save_metric(job), block=block, began=began)


def tell_interval(job: Job) -> None:
    """What save.every = "auto" has chosen, once a few steps say how many of them it is."""
    choice, steps = job.interval.choice, job.step - job.first_step - 1
    if choice is None or choice is job.told or steps < 2:
        return
    job.told = choice
    count = max(1, round(choice.seconds / (seconds_each(job) or choice.seconds)))
    if job.world.is_main:
        job.run.record(SaveInterval(seconds=choice.seconds, steps=count, reason=choice.reason))
        job.say(f"{choice.reason} (about {count:,} steps)")


def seconds_each(job: Job) -> float | None:
    """A step of this process, with its share of saves and validation; the first one compiles and does not count."""
    steps = job.step - job.first_step - 1
    return (time.monotonic() - job.first_done) / steps if steps > 0 else None


def _save_metric(job: Job) -> float | None:
    """A checkpoint is judged by its own weights: a validation loss of other steps does not count."""
    name = job.recipe.save.metric
    if name == "loss":
        return job.recorder.last_loss
    if job.validation is None or job.val_step != job.step:
        return None
    source = name.removeprefix("val_loss/")
    found = job.validation.overall if name == "val_loss" else job.validation.sources[source]
    return found.loss if math.isfinite(found.loss) else None


def is_best(job: Job) -> bool:
    """The weights that were just validated belong to the best: save them now, whatever the interval says."""
    loss = _save_metric(job) if job.recipe.save.metric != "loss" else None
    count = job.recipe.save.keep_best
    if loss is None or not count or (len(job.best) >= count and loss >= max(job.best)):
        return False
    job.best = sorted([*job.best, loss])[:count]
    return True


def final_save(job: Job, reason: str | None) -> None:
    job.recorder.drain(job, 0)
    job.saver.finish()
    saved = job.saver.good is not None and job.saver.good.step == job.step
    if saved or job.step == 0 or (reason is None and not job.recipe.save.at_end):
        return
    for _ in range(2):
        outcome = begin_save(job, block=True)
        if outcome is None or outcome.ok:
            return
    last = job.saver.good.step if job.saver.good else "none"
    raise CheckpointError(
        "train.last-save-step-failed",
        f"the last save, at step {job.step}, failed twice: {outcome.error}",
        hint=f"the newest good checkpoint of this start is {last}; make room and `windlass resume {job.run.path}`",
    )


def rollback(job: Job, batches: Any) -> Any:
    """Too many skipped steps: stop, or go back once to an earlier checkpoint and leave the data range out."""
    why = job.recorder.too_many
    if not job.recipe.train.rollback or job.rolled_back:
        raise failure.DivergedError(
            "train.diverged",
            why,
            hint="look at the data of these steps and at the learning rate; train.rollback = true skips the range once",
        )
    job.saver.finish()
    found = find_latest(job.run, verify=job.recipe.save.verify, before=job.step - job.recorder.skipped_in_a_row + 1)
    if found is None:
        raise failure.DivergedError("train.diverged", why, hint="there is no earlier checkpoint to go back to")
    batches.close()
    from_step, position = job.step, job.sequences
    go_back(job, found)
    left_out = [job.sequences, position]
    skipped = (position - job.sequences) * job.geometry.seq_len
    job.sequences, job.rolled_back = position, True
    if job.world.is_main:  # a crash from here on must not go on from what we turned away from
        discard_after(job.run, job.step, f"rolled back to step {job.step}: {why}")
    job.recorder.forget()
    job.interval.restart(job.step, job.tokens)  # else the saves up to where it went wrong would be left out
    if job.world.is_main:
        job.run.record(
            RolledBack(step=from_step, to_step=job.step, skipped_tokens=skipped, sequences=left_out, reason=why)
        )
    job.say(f"went back from step {from_step} to {job.step} and skip {skipped:,} tokens: {why}")
    return open_batches(job)
