"""The training loop, top to bottom: mesh, model, parallelize, optimizer, data, restore, loop."""

import contextlib
import gc
import os
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from windlass.blocks.attention.kernels import attention_kernel
from windlass.blocks.cpu_products import use_onednn
from windlass.checkpoint.files import SavedCheckpoint
from windlass.clusters.load import load_cluster
from windlass.clusters.scheduler import Place
from windlass.config import Recipe
from windlass.cost.memory import memory
from windlass.data.complete_tune import check_form
from windlass.data.mix import passes_line
from windlass.data.run_check import check_data
from windlass.data.stream import open_stream
from windlass.energy.meter import Meter
from windlass.errors import EXIT_DONE, EXIT_RESUMABLE, ConfigError, WindlassError
from windlass.files import set_compile_cache
from windlass.layout.rules import check_step
from windlass.models.build import build_model
from windlass.models.presets import model_spec
from windlass.models.task_head import build_task_model, masked_head
from windlass.registry import ENGINES
from windlass.runs import manifest
from windlass.runs.events import Compiled, Evaluated, Finished, Resumed, SignalReceived, Started, Stopped
from windlass.runs.faults import record_fault
from windlass.runs.folder import Run
from windlass.runs.starts import Start
from windlass.train.batches import Batch, BatchReader, BatchSource, TokenBatch, batch_plan
from windlass.train.checkpointing import Checkpointing
from windlass.train.failure import OutOfMemoryError, explain
from windlass.train.hooks import Hook, Progress, Say, Training, each
from windlass.train.interval import process_seconds
from windlass.train.mesh import World, open_world
from windlass.train.metrics import Recorder, peak_of
from windlass.train.parallelize import check_compile
from windlass.train.preference import attach_references
from windlass.train.schedules import learning_rate, schedule_note
from windlass.train.signals import StopFlag, listening
from windlass.train.step import Stepper
from windlass.train.tuning import (
    ExamplePlan,
    ExampleReader,
    ExampleStream,
    ExampleValidator,
    example_plan,
    longest_batch,
    record_test,
)
from windlass.train.validate import Validator, open_validator
from windlass.train.watchdog import Heartbeat
from windlass.units import print_bytes, print_seconds, print_share


def run(recipe: Recipe, folder: Run, start: Start, place: Place, hooks: Sequence[Hook] = (), say: Say = print) -> int:
    """Train; the exit code says whether the run is finished or can be resumed. An error leaves a fault record per
    rank."""
    heartbeat = Heartbeat(
        folder,
        place.rank,
        world_size=place.world_size,
        timeout_seconds=recipe.train.watchdog_seconds,
        started_at=start.created_at,
    ).start()
    recorder = Recorder(listeners=[heartbeat, *hooks])
    all_hooks: list[Hook] = [recorder, heartbeat, *hooks]
    training: Training | None = None
    checkpoints: Checkpointing | None = None
    gc.disable()
    try:
        with listening():  # from the start: a signal while the model is built is not lost
            check_data(recipe, folder, place, say)
            training = build(recipe, folder, start, place, heartbeat, say)
            stop = StopFlag(folder, recipe.save, rank=place.rank, world_size=place.world_size)
            checkpoints = Checkpointing(training, recorder, stop)
            # restore
            began = time.monotonic()
            restored = checkpoints.resume()
            announce(training, checkpoints, restored, time.monotonic() - began)
            with attention_kernel(recipe.train.attention, training.world.device), contextlib.closing(stop):
                prepare(training, checkpoints)
                # loop
                each(all_hooks, "on_start", training)
                reason = run_steps(training, checkpoints, all_hooks)
                # A run without a step left, or one that ran out of patience.
                if reason is None and training.validator is not None and not checkpoints.is_validated:
                    validate(training, checkpoints, all_hooks)
                checkpoints.final_save(reason, all_hooks)
                if reason is None and isinstance(training.stream, ExampleStream) and len(training.stream.test):
                    test(training, checkpoints)
                each(all_hooks, "on_stop", training, reason)
                if training.world.is_main:
                    step, tokens = training.step, training.tokens
                    if reason is None:
                        folder.record(Finished(step=step, tokens=tokens, loss=recorder.last_loss))
                    else:
                        folder.record(SignalReceived(signal=reason, step=step))
                        folder.record(Stopped(step=step, tokens=tokens, reason=reason))
                training.world.barrier()
                return EXIT_DONE if reason is None else EXIT_RESUMABLE
    except BaseException as error:
        record_fault(folder, place.rank, explained := explain(error, folder))
        if training is not None:
            with contextlib.suppress(Exception):
                each(all_hooks, "on_stop", training, "error")
        if explained is error:
            raise
        raise explained from error
    finally:
        gc.enable()
        if checkpoints is not None:
            checkpoints.saver.close()
        if training is not None and training.meter is not None:
            training.meter.stop()
        heartbeat.close()


def build(
    recipe: Recipe, folder: Run, start: Start, place: Place, heartbeat: Heartbeat | None = None, say: Say = print
) -> Training:
    """Everything before the first step except restoring. Writes nothing to the run folder."""
    torch.manual_seed(recipe.seed)
    if recipe.train.deterministic:
        # cuBLAS wants its workspace fixed before the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    # mesh
    # The watchdog reports first: torch's own limit would end the job without naming a rank.
    world = open_world(start.layout, place, start.device, max(600.0, 4 * recipe.train.watchdog_seconds))
    if world.cuda or start.step.compile:
        set_compile_cache()
    examples = ExampleStream(recipe) if recipe.reads_examples else None
    plan = batch_plan(recipe, start.layout) if examples is None else example_plan(recipe, start.layout, examples.order)
    # model
    spec = model_spec(recipe.model)
    check_step(recipe, spec, tensor=start.layout.tensor)
    check_compile(start.step)
    check_precision(recipe, world)
    with torch.device("meta"):
        head = masked_head(recipe.tune) if examples is None else examples.head()
        if head is None:
            model = build_model(recipe.model, seq_len=recipe.data.seq_len)
        else:
            frozen = recipe.tune is not None and recipe.tune.frozen
            model = build_task_model(recipe.model, recipe.data.seq_len, head, frozen=frozen)
    # parallelize, optimizer
    beat = (lambda phase: None) if heartbeat is None else heartbeat.step_phase
    parts, optimizer, stepper = ENGINES.load(recipe.train.engine)(model, recipe, start.step, world, plan, beat)
    if not world.cuda and use_onednn():
        parts.notes.append("fp32 products: by oneDNN (an AMD processor with AVX-512)")
    # data
    stream = examples or open_stream(recipe.data, seed=recipe.seed, split="train", vocab=model.vocab)
    stream.check(plan.total_tokens)  # a run by train.steps names no tokens, so repetition is only known now
    check_form(recipe, stream.store)  # the store may not have been there when the run was created
    if examples is not None:
        validator: ExampleValidator | Validator | None = ExampleValidator(examples, world, parts)
    else:
        validator = open_validator(recipe, world, parts, stepper, model.vocab)
    held_out = [part.name for part in validator.held] if validator is not None else []
    metric = recipe.save.metric
    if metric.startswith("val_loss/") and (name := metric.removeprefix("val_loss/")) not in held_out:
        raise ConfigError(
            "train.metric-source-missing",
            f"save.metric = {metric!r}, but source {name!r} has no held-out documents",
            hint=f"sources with held-out documents: {', '.join(held_out)}"
            if held_out
            else "the store has no validation split",
        )
    meter = None
    if place.local_rank == 0 and recipe.energy.enabled:
        cluster = None
        with contextlib.suppress(WindlassError):
            cluster = load_cluster(recipe.cluster)
        # A launcher may show each rank one device only; the node's meter wants those of all its ranks.
        devices = list(range(place.local_world_size)) if world.cuda else None
        meter = Meter(cluster, recipe.energy, run=folder, devices=devices)
    return Training(
        recipe=recipe,
        run=folder,
        start=start,
        spec=spec,
        world=world,
        plan=plan,
        parts=parts,
        optimizer=optimizer,
        stepper=stepper,
        stream=stream,
        validator=validator,
        meter=meter,
        progress=Progress(),
        say=say,
    )


def run_steps(training: Training, checkpoints: Checkpointing, hooks: Sequence[Hook]) -> str | None:
    """Train to the last step and return None, or return the reason why all ranks agreed to stop."""
    recipe, plan, progress, stop = training.recipe, training.plan, training.progress, checkpoints.stop
    recorder, first_step, first_done_at = checkpoints.recorder, progress.step, 0.0
    batches = open_batches(training)
    try:
        while progress.step < plan.steps and not checkpoints.out_of_patience():
            batch = next(batches)
            each(hooks, "on_step_begin", training)
            lr = learning_rate(recipe.optim, *plan.schedule_position(progress.step, progress.tokens))
            result = training.stepper.step(batch, lr, measure=measures_layers(training))
            result.data_seconds = batches.wait_seconds
            progress.advance(plan)
            if progress.step % recipe.train.gc_every == 0:
                gc.collect(1)
            each(hooks, "on_step_end", training, result)
            if progress.step == first_step + 1:
                # Start-up is over: its time decides how often saving is worth it.
                if training.world.cuda:
                    torch.cuda.synchronize()
                startup_seconds, first_done_at = startup(training.start), time.monotonic()
                if training.world.is_main:
                    training.run.record(Compiled(seconds=startup_seconds))
                checkpoints.timer.measured(startup_seconds=startup_seconds)
            if recorder.too_many is not None:
                batches.close()
                checkpoints.roll_back(recorder.too_many)
                batches = open_batches(training)
            if training.validator is not None and _validates_at(training):
                validate(training, checkpoints, hooks)
            # Clocks differ, so the ranks agree on a save by the clock; one that failed is tried again.
            agreed = stop.agree(save=checkpoints.timer.due_by_clock(progress.step) or bool(checkpoints.saver.retry_due))
            checkpoints.save_if_due(agreed.save, hooks)
            # The first step compiles and does not count.
            timed = progress.step - first_step - 1
            step_seconds = (time.monotonic() - first_done_at) / timed if timed > 0 else None
            checkpoints.announce_interval(step_seconds if timed > 1 else None)
            stop.measured(step_seconds=step_seconds)
            if agreed.stop is not None:
                return agreed.stop
    finally:
        batches.close()
    return None


def startup(start: Start) -> float:
    """Seconds since the processes started; in a process that trains one run after another, since this run's start."""
    since_start = time.time() - start.created_at
    return min(process_seconds(), since_start) if since_start > 0 else process_seconds()


def open_batches(training: Training) -> BatchSource:
    stream, plan, progress = training.stream, training.plan, training.progress
    if isinstance(stream, ExampleStream):
        return ExampleReader(stream, cast(ExamplePlan, plan), training.world, progress.step)
    position, documents = (progress.tokens, progress.sequences), training.start.step.mask_documents
    return BatchReader(stream, plan, training.world, position, documents=documents)


def _validates_at(training: Training) -> bool:
    """Whether to validate after this step, before it is saved; always after the last."""
    every = training.recipe.train.eval_every
    return training.step == training.plan.steps or (bool(every) and training.step % every == 0)


def validate(training: Training, checkpoints: Checkpointing, hooks: Sequence[Hook]) -> None:
    assert training.validator is not None
    checkpoints.recorder.drain(training, 0)  # waits for the device: from here on its time is the validation's
    started_at, joules_before = time.monotonic(), training.energy()["joules"]

    def stopping() -> str | None:
        """Called between batches of a long pass: writes a heartbeat and returns the reason of a requested stop."""
        each(hooks, "on_wait", training, "validation")
        return checkpoints.stop.agreed_to_stop()

    validation = training.validator.run(stopping)
    seconds, joules = time.monotonic() - started_at, training.energy()["joules"]
    checkpoints.recorder.leave_out(seconds, None if joules_before is None or joules is None else joules - joules_before)
    if validation is None:  # a stop was requested during validation: save first
        return
    checkpoints.validated(validation)
    if training.world.is_main:
        training.run.record(Evaluated(step=training.step, **validation.event(), seconds=seconds))
    each(hooks, "on_eval", training, validation)


def test(training: Training, checkpoints: Checkpointing) -> None:
    """Scores of the test examples with the best weights, once, at the end of a fine-tuning."""
    validator = cast(ExampleValidator, training.validator)
    stream = validator.stream
    step, tokens = checkpoints.load_best()
    scores = validator.run(examples=stream.test)
    assert scores is not None
    if training.world.is_main:
        record_test(training.run, scores, stream.tune, step=step, tokens=tokens, count=len(stream.test))
        listed = ", ".join(f"{name} {value:.4f}" for name, value in scores.scores.items() if value is not None)
        training.say(f"test ({len(stream.test):,} examples, weights of step {step}): {listed}")


# -- before the first step
# ----------------------------------------------------------------------------------------------


def check_precision(recipe: Recipe, world: World) -> None:
    wanted = recipe.train.precision
    if wanted != "fp32" and world.cuda and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            "train.no-bf16",
            f"train.precision = {wanted!r}, but {torch.cuda.get_device_name(world.device)} has no bf16",
            hint='use train.precision = "fp32", or a device of the Ampere or CDNA generation or later',
        )


def prepare(training: Training, checkpoints: Checkpointing) -> None:
    """Reserve memory for saves, forecast their disk use, and try one step on a GPU."""
    if training.recipe.task == "prefer":
        attach_references(training)
    plan, state, saver = training.plan, checkpoints.state(), checkpoints.saver
    training.say(saver.prepare(state))
    training.say(saver.forecast(state, steps=plan.steps, batch_tokens=plan.total_tokens // plan.steps).text)
    if training.world.cuda and training.recipe.train.engine == "native":
        training.say(trial_step(training))
    checkpoints.timer.restart(training.step, training.tokens)


def measures_layers(training: Training) -> bool:
    """Whether the next step measures every layer (train.instruments)."""
    every = training.recipe.train.instruments
    return bool(every) and (training.step + 1) % every == 0


def trial_step(training: Training) -> str:
    """One forward and backward pass over token 0, so that running out of memory costs seconds, not hours.

    Gradients are thrown away: weights, moments, random numbers and data position stay as they were. The log line gives
    the memory it needed and the planner's prediction."""
    device, plan, layout = training.world.device, training.plan, training.start.layout
    tokens = torch.zeros((plan.sequences_per_rank, plan.seq_len + 1), dtype=torch.long, device=device)
    batch: Batch = TokenBatch(tokens, torch.zeros_like(tokens) if training.start.step.mask_documents else None)
    predicted = memory(training.spec, training.start.step, layout).allocated
    if isinstance(training.stream, ExampleStream):
        batch = longest_batch(training.stream, plan, training.world)
    elif training.recipe.task == "prefer":
        batches = open_batches(training)
        batch = next(batches)
        batches.close()
    try:
        cast(Stepper, training.stepper).gradients(batch)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            "train.out-of-memory",
            f"a trial step of micro_batch {layout.micro_batch} x {plan.seq_len:,} tokens does not fit in "
            f"{print_bytes(torch.cuda.mem_get_info(device)[1])}; the planner predicts {print_bytes(predicted)}",
            hint="use a smaller layout.micro_batch, train.recompute or more sharding; `windlass plan` lists layouts "
            "that fit",
        ) from error
    training.optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated(device)
    needed, difference = print_bytes(peak), (predicted - peak) / peak
    return f"memory: a trial step needed {needed}; predicted {print_bytes(predicted)} ({print_share(difference, digits=0, signed=True)})"


def announce(
    training: Training, checkpoints: Checkpointing, restored: SavedCheckpoint | None, load_seconds: float
) -> None:
    """Write the manifest and the first event, and print every automatic choice with its reason."""
    world, recipe, plan, run_folder = training.world, training.recipe, training.plan, training.run
    if training.meter is not None:
        training.meter.start(checkpoints.carried_joules if world.place.node_rank == 0 else None)
    if not world.is_main:
        return
    peak, denominator = peak_of(world.device, recipe.train.precision)
    common: dict[str, Any] = {
        "world_size": world.size,
        "nodes": world.place.nodes,
        "layout": training.start.layout.config().model_dump(),
        "device": torch.cuda.get_device_name(world.device) if world.cuda else (manifest.cpu_name() or "cpu"),
        "devices_per_node": world.place.local_world_size,
    }
    store, data = training.stream.store, None
    if store is not None:  # without the file lists: a report must work on a copy of the folder
        sources = store.ledger().get("sources", {})
        data = {
            "store": recipe.data.store,
            "ledger_hash": store.ledger_hash,
            "settings": store.manifest.get("settings"),
            "sources": {name: {k: v for k, v in entry.items() if k != "paths"} for name, entry in sources.items()},
        }
    record = manifest.collect(
        recipe,
        **common,
        data_ledger=training.stream.ledger_hash,
        data=data,
        steps=plan.steps,
        tokens_per_step=plan.tokens_per_step,
        mfu_denominator=denominator,
    )
    manifest.write(run_folder, record)
    notes: list[str] = []
    if restored is None:
        run_folder.record(Started(**common))
    else:
        step, name = training.step, restored.path.name
        lost_steps = max(0, (run_folder.last_metrics().step or step) - step)
        resumed = Resumed(
            step=step,
            tokens=training.tokens,
            checkpoint=name,
            load_seconds=load_seconds,
            lost_steps=lost_steps,
            **common,
        )
        run_folder.record(resumed)
        repeated = f"; {lost_steps} steps are repeated" if lost_steps else ""
        notes += [
            *(f"damaged: {sentence}" for sentence in restored.set_aside),
            restored.missing or "",
            f"resumed at step {step} from {name}, which took {print_seconds(load_seconds)} to load{repeated}",
        ]
    notes.append(passes_line(training.stream.epochs(plan.total_tokens)))
    notes.append(training.stream.packing_line())
    save, held_out = recipe.save, training.validator is not None
    if save.keep_best and save.metric != "loss" and not (held_out and recipe.train.eval_every):
        reason = (
            "train.eval_every = 0, so only the last step is validated"
            if held_out
            else "the token store has no validation split"
        )
        notes.append(f"save.keep_best = {save.keep_best} keeps no checkpoint by {save.metric}: {reason}")
    notes += [
        *training.parts.notes,
        training.start.step.sync.reason,
        schedule_note(recipe.optim, plan.total_tokens),
        f"MFU: of {denominator}" if peak else f"MFU: not measured, {denominator}",
    ]
    for note in filter(None, notes):
        training.say(note)
