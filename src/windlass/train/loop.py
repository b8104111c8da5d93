"""How does a run go from a recipe to its last step? Top to bottom: mesh, model, parallelize, optimizer, stream, restore, hooks, loop."""

from __future__ import annotations

import contextlib
import gc
import time

import torch

from windlass.clusters.scheduler import Place, place
from windlass.config import Recipe
from windlass.errors import EXIT_DONE, EXIT_RESUMABLE
from windlass.runs.events import Compiled, Evaluated, Finished, SignalReceived, Stopped
from windlass.runs.faults import record_fault
from windlass.runs.folder import Run
from windlass.train import failure
from windlass.train.attention import attention_backend
from windlass.train.batches import open_batches
from windlass.train.build import build
from windlass.train.hooks import Hook, each
from windlass.train.interval import process_seconds
from windlass.train.job import Job, Say
from windlass.train.saving import final_save, is_best, rollback, save_if, seconds_each, tell_interval
from windlass.train.schedules import learning_rate
from windlass.train.signals import listening
from windlass.train.trial import trial_step
from windlass.train.watchdog import Heartbeat


def run(
    recipe: Recipe,
    run_folder: Run,
    *,
    where: Place | None = None,
    hooks: list[Hook] | None = None,
    say: Say | None = None,
) -> int:
    """Train; the exit code says whether the run is finished or can be resumed. Errors leave a record per rank and are raised."""
    where = where or place()
    rank = where.rank
    job: Job | None = None
    heart = Heartbeat(
        run_folder, rank, world_size=where.world_size, timeout_seconds=recipe.train.watchdog_seconds
    ).start()
    try:
        with listening():  # from the start: a signal while the model is built is not lost
            job = build(
                recipe, run_folder, where, [heart, *(hooks or [])], say or (lambda text: None), beat=heart.step_phase
            )
            with attention_backend(recipe.train.attention, job.world.device), job.stop.installed():
                return train(job)
    except BaseException as error:
        known = failure.explain(error)
        record_fault(run_folder, job.world.rank if job else rank, known)
        if job is not None:
            with contextlib.suppress(Exception):
                each(job.hooks, "on_stop", job, "error")
        if known is error:
            raise
        raise known from error
    finally:
        heart.close()


def train(job: Job) -> int:
    """The loop itself."""
    gc.disable()
    try:
        job.say(job.saver.prepare(job.state()))
        job.say(
            job.saver.forecast(job.state(), steps=job.geometry.steps, batch_tokens=job.geometry.tokens_per_step).text
        )
        if job.world.device.type == "cuda" and job.recipe.train.engine == "native":
            job.say(trial_step(job))
        job.interval.restart(job.step, job.tokens)
        job.first_step = job.step
        each(job.hooks, "on_start", job)
        reason = _steps(job)
        if reason is None:
            _last_validation(job)
        final_save(job, reason)
        each(job.hooks, "on_stop", job, reason)
        return _end(job, reason)
    finally:
        gc.enable()
        job.saver.close()
        if job.meter is not None:
            job.meter.stop()


def _steps(job: Job) -> str | None:
    """Steps until the end (None) or until somebody asked to stop (why)."""
    batches = open_batches(job)
    try:
        while job.step < job.geometry.steps:
            tokens, documents = next(batches)
            each(job.hooks, "on_step_begin", job)
            lr = learning_rate(job.recipe.optim, job.tokens + job.geometry.tokens_per_step, job.geometry.total_tokens)
            result = job.stepper.step(tokens, documents, lr)
            advance(job)
            each(job.hooks, "on_step_end", job, result)
            if job.step == job.first_step + 1:
                _first_step(job)
            if job.recorder.too_many is not None:
                batches = rollback(job, batches)
            _validate(job)
            agreed = job.stop.agree(save=job.interval.due_by_clock(job.step) or job.saver.retry_due)
            save_if(job, is_best(job) or agreed.save or job.interval.due_by_count(job.step, job.tokens))
            tell_interval(job)
            job.stop.measured(step_seconds=seconds_each(job))
            if agreed.stop is not None:
                return agreed.stop
    finally:
        batches.close()
    return None


def advance(job: Job) -> None:
    job.step += 1
    job.tokens += job.geometry.tokens_per_step
    job.sequences += job.geometry.batch
    if job.step % job.recipe.train.gc_every == 0:
        gc.collect(1)


def _validate(job: Job) -> None:
    every = job.recipe.train.eval_every
    if job.validator is not None and every and job.step % every == 0:
        validate_now(job)


def _last_validation(job: Job) -> None:
    every = job.recipe.train.eval_every
    if job.validator is not None and not (every and job.step % every == 0):
        validate_now(job)


def validate_now(job: Job) -> None:
    job.recorder.drain(job, 0)  # waits for the device: from here on its time is the validation's
    begin, before = time.monotonic(), job.energy()["joules"]
    found = job.validator.run(lambda: _between_batches(job))
    seconds, after = time.monotonic() - begin, job.energy()["joules"]
    job.recorder.leave_out(seconds, None if before is None or after is None else after - before)
    if found is None:  # asked to stop on the way: the save comes first
        return
    job.validation, job.val_loss, job.val_step = found, found.overall.loss, job.step
    if job.world.is_main:
        job.run.record(Evaluated(step=job.step, **found.event(), seconds=seconds))
    each(job.hooks, "on_eval", job, job.val_loss)


def _between_batches(job: Job) -> str | None:
    """A long pass shows signs of life, and hears who wants to stop."""
    each(job.hooks, "on_wait", job, "validation")
    return job.stop.agreed_to_stop()


def _first_step(job: Job) -> None:
    """Start-up is over: its time decides how often saving is worth it."""
    if job.world.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = process_seconds()
    if job.world.is_main:
        job.run.record(Compiled(seconds=seconds))
    job.interval.measured(startup_seconds=seconds)
    job.first_done = time.monotonic()


def _end(job: Job, reason: str | None) -> int:
    if job.world.is_main:
        if reason is None:
            job.run.record(Finished(step=job.step, tokens=job.tokens, loss=job.recorder.last_loss))
        else:
            job.run.record(SignalReceived(signal=reason, step=job.step))
            job.run.record(Stopped(step=job.step, tokens=job.tokens, reason=reason))
    job.world.barrier()
    return EXIT_DONE if reason is None else EXIT_RESUMABLE
