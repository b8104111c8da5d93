"""How does a run go from a recipe to its last step? Top to bottom: mesh, model, parallelize, optimizer, stream, restore, hooks, loop."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from windlass import models
from windlass.checkpoint.load import discard_after, find_latest, load_model_weights, restore
from windlass.checkpoint.save import Outcome, Saver
from windlass.clusters.load import load_cluster
from windlass.clusters.scheduler import Place, place
from windlass.config import LayoutConfig, Recipe, recipe_hash
from windlass.data.loader import Loader
from windlass.data.mix import passes_line
from windlass.data.stream import open_stream
from windlass.energy.meter import Meter
from windlass.errors import EXIT_DONE, EXIT_RESUMABLE, CheckpointError, ConfigError, DataError, WindlassError
from windlass.runs import manifest
from windlass.runs.folder import Run
from windlass.train import failure
from windlass.train.attention import attention_backend
from windlass.train.geometry import Geometry, geometry_of
from windlass.train.hooks import Hook, each
from windlass.train.interval import Choice, Interval, process_seconds
from windlass.train.mesh import World, open_world
from windlass.train.metrics import Recorder, peak_of
from windlass.train.optimizers import Optimizer, build_optimizer
from windlass.train.parallelize import Parts, parallelize
from windlass.train.profiler import marked
from windlass.train.schedule import learning_rate
from windlass.train.signals import StopFlag, listening
from windlass.train.state import after_restore, training_state
from windlass.train.step import Stepper
from windlass.train.supervise import record_error
from windlass.train.trial import trial_step
from windlass.train.validate import Validation, Validator, open_validator
from windlass.train.watchdog import Heartbeat

Say = Callable[[str], None]


@dataclass
class Job:
    """A run in the making: what the loop and its hooks share."""

    recipe: Recipe
    run: Run
    world: World
    geometry: Geometry
    parts: Parts
    optimizer: Optimizer
    stepper: Stepper
    stream: Any
    say: Say
    recorder: Recorder
    saver: Saver
    stop: StopFlag
    interval: Interval
    meter: Meter | None
    validator: Validator | None = None
    hooks: list[Hook] = field(default_factory=list)
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    sequences: int = 0
    """The stream's position: global sequences consumed, skipped ranges included."""
    energy_carried: float | None = None
    data_seconds: float = 0.0
    validation: Validation | None = None
    """The newest validation pass, done after `val_step` steps."""
    val_loss: float | None = None
    val_step: int | None = None
    best: list[float] = field(default_factory=list)
    """The lowest values of save.metric that were saved, at most save.keep_best."""
    rolled_back: bool = False
    began: float = field(default_factory=time.monotonic)
    first_step: int = 0
    """Where this process began."""
    first_done: float = 0.0
    """When its first step was done."""
    told: Choice | None = None
    """The saving interval that was last announced."""

    def state(self) -> dict[str, Any]:
        return training_state(self.optimizer, self.stepper.guard)

    def extra(self) -> dict[str, Any]:
        """The small values of a checkpoint."""
        return {
            "step": self.step, "tokens": self.tokens, "sequences": self.sequences, "energy_joules": self.energy_total(),
            "recipe_hash": recipe_hash(self.recipe), "seed": self.recipe.seed, "rolled_back": self.rolled_back, "best": self.best, "config": self.recipe.model_dump(mode="json"),
            "schedule": {"total_tokens": self.geometry.total_tokens, "name": self.recipe.optim.schedule, "lr": self.recipe.optim.lr},
        }  # fmt: skip

    def energy(self) -> dict[str, float | None]:
        """Of this node; only one rank per node knows it."""
        if self.meter is None:
            return {"joules": None, "watts": None, "utilization": None}
        return {"joules": self.meter.joules(), "watts": self.meter.watts(), "utilization": self.meter.utilization()}

    def energy_total(self) -> float | None:
        """Of the whole job, all restarts together."""
        mine = None if self.meter is None else self.meter.joules()
        if self.world.size == 1:
            return mine
        values: list[float | None] = [None] * self.world.size
        dist.all_gather_object(values, mine)
        known = [v for v in values if v is not None]
        return sum(known) if known else None


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
            job = build(recipe, run_folder, where, [heart, *(hooks or [])], say or (lambda text: None))
            with attention_backend(recipe.train.attention, job.world.device), job.stop.installed():
                return train(job)
    except BaseException as error:
        known = failure.explain(error)
        record_error(run_folder, job.world.rank if job else rank, known)
        if job is not None:
            with contextlib.suppress(Exception):
                each(job.hooks, "on_stop", job, "error")
        if known is error:
            raise
        raise known from error
    finally:
        heart.close()


def build(recipe: Recipe, run_folder: Run, where: Place, hooks: list[Hook], say: Say, *, announced: bool = True) -> Job:
    """Everything before the first step, in order. Without `announced` nothing is written to the run folder."""
    recipe = recipe if recipe.layout is not None else recipe.model_copy(update={"layout": LayoutConfig()})
    torch.manual_seed(recipe.seed)
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    # mesh
    # The watchdog speaks first: torch's own limit would end the job without naming a rank.
    world = open_world(recipe.layout, where, timeout_seconds=max(600.0, 4 * recipe.train.watchdog_seconds))
    geometry = geometry_of(recipe, world.axes.data)
    check_device(recipe, world)
    # model
    with torch.device("meta"):
        model = models.build(recipe.model, seq_len=recipe.data.seq_len)
    # parallelize, optimizer
    parts, optimizer, stepper = assemble(model, recipe, world, geometry)
    # stream
    stream = open_stream(recipe.data, seed=recipe.seed, split="train", vocab=model.vocab)
    # A run by train.steps names no tokens, so the stream could not know before how often it repeats a source.
    stream.check(geometry.total_tokens)
    job = Job(
        recipe, run_folder, world, geometry, parts, optimizer, stepper, stream, say, recorder=Recorder(),
        saver=Saver(run_folder, recipe.save, rank=world.rank, world_size=world.size, local_world_size=world.place.local_world_size),
        stop=StopFlag(run_folder, recipe.save, rank=world.rank, world_size=world.size),
        interval=Interval(recipe.save), meter=open_meter(recipe, run_folder, world),
    )  # fmt: skip
    job.validator = open_validator(recipe, world, parts, stepper, model.vocab)
    check_metric(recipe, job.validator)
    # restore
    restored = resume(job)
    # hooks
    job.hooks = [job.recorder, *hooks]
    if announced:
        announce(job, restored)
    return job


def assemble(model: Any, recipe: Recipe, world: World, geometry: Geometry) -> tuple[Parts, Any, Any]:
    """The model divided over devices, its optimizer and its step, by the recipe's engine."""
    if recipe.train.engine == "deepspeed":
        from windlass.train.engines import deepspeed

        return deepspeed.assemble(model, recipe, world, geometry)
    parts = parallelize(model, recipe, world)
    for module in parts.modules:
        module.init_weights(recipe.seed)
    optimizer = build_optimizer(
        parts.named_parameters(), recipe.optim, master=parts.shadow, offload=recipe.layout.offload == "optimizer"
    )
    if parts.shadow:
        # The master copy begins with its own fp32 numbers, not with those that bf16 has rounded: as under sharding.
        for slot in optimizer.slots:
            parts.modules[0].fill(slot.name, slot.master, recipe.seed)
        optimizer.refresh()
    return parts, optimizer, Stepper(parts, optimizer, recipe, world, geometry)


def check_device(recipe: Recipe, world: World) -> None:
    """Refuse what this device, or this family, cannot compute."""
    if recipe.data.mask_documents and recipe.model.family != "llama":
        raise ConfigError(
            f"data.mask_documents is not possible with model.family = {recipe.model.family!r}",
            hint="use family llama, or data.mask_documents = false",
        )
    if (
        recipe.train.precision in ("bf16", "bf16_pure", "fp8")
        and world.device.type == "cuda"
        and not torch.cuda.is_bf16_supported()
    ):
        raise ConfigError(
            f"train.precision = {recipe.train.precision!r}, but {torch.cuda.get_device_name(world.device)} has no bf16",
            hint='use train.precision = "fp32", or a device of the Ampere or CDNA generation or later',
        )


def check_metric(recipe: Recipe, validator: Validator | None) -> None:
    """Refuse to judge checkpoints by a source that is not held out."""
    name = recipe.save.metric.removeprefix("val_loss/")
    sources = [part.name for part in validator.held] if validator is not None else []
    if name != recipe.save.metric and name not in sources:
        raise ConfigError(
            f"save.metric = {recipe.save.metric!r}, but nothing of {name!r} is held out",
            hint=f"held out are: {', '.join(sources)}" if sources else "the store has no validation split",
        )


def best_note(job: Job) -> str:
    """What save.keep_best can judge by, where that is less than it seems."""
    save, every = job.recipe.save, job.recipe.train.eval_every
    if not save.keep_best or save.metric == "loss" or (job.validator is not None and every):
        return ""
    why = "nothing is held out" if job.validator is None else "train.eval_every = 0, so only the last step is validated"
    return f"save.keep_best = {save.keep_best} keeps no checkpoint by {save.metric}: {why}"


def open_meter(recipe: Recipe, run_folder: Run, world: World) -> Meter | None:
    """One per node."""
    if world.place.local_rank != 0 or not recipe.energy.enabled:
        return None
    try:
        cluster = load_cluster(recipe.cluster)
    except WindlassError:
        cluster = None
    # A launcher may show each rank one device only; the node's meter wants those of all its ranks.
    devices = list(range(world.place.local_world_size)) if world.device.type == "cuda" else None
    return Meter(cluster, recipe.energy, run=run_folder, devices=devices)


def resume(job: Job) -> Any:
    """Go on from the newest whole checkpoint; else begin, from given weights if the recipe names some."""
    found = find_latest(job.run, verify=job.recipe.save.verify)
    if found is None:
        if job.recipe.save.load is not None:
            for module in job.parts.modules:
                load_model_weights(job.recipe.save.load, module)
            job.optimizer.adopt()
        return None
    go_back(job, found)
    job.energy_carried = _energy_so_far(job)
    job.stop.measured(save_seconds=found.save_seconds)
    return found


def _energy_so_far(job: Job) -> float | None:
    """What the run has used: the steps since the checkpoint are lost, their energy is spent. Each total contains the ones before it."""
    last = (job.run.last_metric() or {}).get("energy_joules")
    known = [value for value in (job.energy_carried, last) if isinstance(value, (int, float))]
    return max(known, default=None)


def go_back(job: Job, found: Any) -> dict[str, Any]:
    state = job.state()
    extra = restore(found, state, seed=job.recipe.seed)
    after_restore(job.optimizer, job.parts.tie)
    job.step, job.tokens, job.sequences = extra["step"], extra["tokens"], extra["sequences"]
    job.energy_carried, job.rolled_back = extra.get("energy_joules"), extra.get("rolled_back", False)
    job.best = [loss for loss in extra.get("best", []) if loss is not None]
    return extra


def trained_on(job: Job) -> dict[str, Any] | None:
    """The store's ledger, kept with the run: a report must work on a copy of the folder. File lists stay in the store."""
    store = job.stream.store
    if store is None:
        return None
    sources = {
        name: {key: value for key, value in entry.items() if key != "paths"}
        for name, entry in store.ledger().get("sources", {}).items()
    }
    about = {
        "store": job.recipe.data.store,
        "ledger_hash": store.ledger_hash,
        "settings": store.manifest.get("settings"),
    }
    return {**about, "sources": sources}


def announce(job: Job, restored: Any) -> None:
    """The manifest, the first event, and every automatic choice with its reason."""
    world, recipe = job.world, job.recipe
    if job.meter is not None:
        job.meter.start(job.energy_carried if world.place.node_rank == 0 else None)
    if not world.is_main:
        return
    peak, denominator = peak_of(world.device, recipe.train.precision)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else (manifest.cpu_name() or "cpu")
    common = {
        "world_size": world.size,
        "nodes": world.place.nodes,
        "layout": recipe.layout.model_dump(),
        "device": device,
        "devices_per_node": world.place.local_world_size,
    }
    manifest.write(
        job.run,
        manifest.collect(
            recipe,
            **common,
            data_ledger=job.stream.ledger_hash,
            data=trained_on(job),
            steps=job.geometry.steps,
            tokens_per_step=job.geometry.tokens_per_step,
            mfu_denominator=denominator,
        ),
    )
    if restored is None:
        job.run.event("started", **common)
    else:
        last = job.run.last_metric() or {}
        lost = max(0, int(last.get("step") or job.step) - job.step)
        job.run.event(
            "resumed", step=job.step, tokens=job.tokens, checkpoint=restored.path.name, lost_steps=lost, **common
        )
        for sentence in restored.set_aside:
            job.say(f"damaged: {sentence}")
        job.say(
            f"resumed at step {job.step} from {restored.path.name}" + (f"; {lost} steps are done again" if lost else "")
        )
    for note in [
        passes_line(job.stream.epochs(job.geometry.total_tokens)),
        best_note(job),
        *job.parts.notes,
        job.stepper.sync.note,
        f"MFU: of {denominator}" if peak else f"MFU: unknown, {denominator}",
    ]:
        if note:
            job.say(note)


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
        job.interval.began(job.step, job.tokens)
        job.first_step = job.step
        each(job.hooks, "on_start", job)
        reason = _steps(job)
        if reason is None:
            _last_validation(job)
        _final_save(job, reason)
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
                batches = _rollback(job, batches)
            _validate(job)
            agreed = job.stop.agree(save=job.interval.due_by_clock(job.step) or job.saver.retry_due)
            _save(job, _is_best(job) or agreed.save or job.interval.due_by_count(job.step, job.tokens))
            _tell_interval(job)
            job.stop.measured(step_seconds=_seconds_each(job))
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


def open_batches(job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Batches from the stream's position on, already on the device, read ahead by a thread."""
    geometry, world, documents = job.geometry, job.world, job.recipe.data.mask_documents
    start, cuda = job.sequences, world.device.type == "cuda"
    # Our own stores know their largest token, and it was compared before; of a foreign one each batch is looked at.
    unknown_tokens = job.stream.store is not None and job.stream.store.max_token is None
    loader = Loader(
        job.stream,
        lambda n: geometry.indexes(start + n * geometry.batch, world.data_rank),
        pin=cuda,
        documents=documents,
    )
    try:
        for item in marked(loader):
            tokens, numbers = item if documents else (item, None)
            if unknown_tokens:
                check_tokens(tokens, job.parts.modules[0].vocab)
            job.data_seconds = loader.last_wait_seconds
            yield to_device(tokens, world.device), None if numbers is None else to_device(numbers, world.device)
    finally:
        loader.close()


def check_tokens(tokens: Any, vocab: int) -> None:
    """Refuse a token that the model does not know: on a GPU the look-up would end the process without a word."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise DataError(
            f"a batch holds token {low if low < 0 else high:,}, but model.vocab is {vocab:,}",
            hint=f"set model.vocab to at least {high + 1:,}, or tokenize with the model's tokenizer",
        )


def to_device(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True).long()


def _validate(job: Job) -> None:
    every = job.recipe.train.eval_every
    if job.validator is not None and every and job.step % every == 0:
        validate_now(job)


def _last_validation(job: Job) -> None:
    every = job.recipe.train.eval_every
    if job.validator is not None and not (every and job.step % every == 0):
        validate_now(job)


def validate_now(job: Job) -> None:
    begin = time.monotonic()
    found = job.validator.judge(lambda: _between_batches(job))
    if found is None:  # asked to stop on the way: the save comes first
        return
    job.validation, job.val_loss, job.val_step = found, found.whole.loss, job.step
    if job.world.is_main:
        job.run.event("evaluated", step=job.step, **found.event(), seconds=time.monotonic() - begin)
    each(job.hooks, "on_eval", job, job.val_loss)


def _between_batches(job: Job) -> str | None:
    """A long pass shows signs of life, and hears who wants to stop."""
    each(job.hooks, "on_wait", job, "validation")
    return job.stop.agreed_to_stop()


def _save(job: Job, due: bool) -> None:
    """The one place where checkpoints begin."""
    done = job.saver.poll()
    if done is not None and done.ok:
        job.stop.measured(save_seconds=job.saver.seconds_needed())
        job.interval.measured(stall_seconds=done.stall_seconds, write_seconds=done.write_seconds)
    if due:
        begin_save(job)
        job.interval.saved(job.step, job.tokens)
        each(job.hooks, "on_save", job)


def begin_save(job: Job, *, block: bool = False) -> Outcome | None:
    """Everything that belongs to a step is on its way to the disk before its checkpoint is: a kill in between must lose no line."""
    began = time.perf_counter()
    each(job.hooks, "on_wait", job, "save")
    job.recorder.drain(job, 0)
    job.saver.finish()
    before = job.saver.last
    if before is not None and not before.ok and before.step != job.step:
        job.best = [loss for loss in job.best if loss != before.metric]  # it is not on the disk
    return job.saver.save(job.step, job.state(), job.extra(), metric=_save_metric(job), block=block, began=began)


def _tell_interval(job: Job) -> None:
    """What save.every = "auto" has chosen, once a few steps say how many of them it is."""
    choice, steps = job.interval.choice, job.step - job.first_step - 1
    if choice is None or choice is job.told or steps < 2:
        return
    job.told = choice
    count = max(1, round(choice.seconds / (_seconds_each(job) or choice.seconds)))
    if job.world.is_main:
        job.run.event("interval", seconds=choice.seconds, steps=count, reason=choice.reason)
        job.say(f"{choice.reason} (about {count:,} steps)")


def _seconds_each(job: Job) -> float | None:
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
    found = job.validation.whole if name == "val_loss" else job.validation.sources[source]
    return found.loss if math.isfinite(found.loss) else None


def _is_best(job: Job) -> bool:
    """The weights that were just validated belong to the best: save them now, whatever the interval says."""
    loss = _save_metric(job) if job.recipe.save.metric != "loss" else None
    count = job.recipe.save.keep_best
    if loss is None or not count or (len(job.best) >= count and loss >= max(job.best)):
        return False
    job.best = sorted([*job.best, loss])[:count]
    return True


def _first_step(job: Job) -> None:
    """Start-up is over: its time decides how often saving is worth it."""
    if job.world.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = process_seconds()
    if job.world.is_main:
        job.run.event("compiled", seconds=seconds)
    job.interval.measured(startup_seconds=seconds)
    job.first_done = time.monotonic()


def _final_save(job: Job, reason: str | None) -> None:
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
        f"the last save, at step {job.step}, failed twice: {outcome.error}",
        hint=f"the newest good checkpoint of this start is {last}; make room and `windlass resume {job.run.path}`",
    )


def _rollback(job: Job, batches: Any) -> Any:
    """Too many skipped steps: stop, or go back once to an earlier checkpoint and leave the data range out."""
    why = job.recorder.too_many
    if not job.recipe.train.rollback or job.rolled_back:
        raise failure.DivergedError(
            why,
            hint="look at the data of these steps and at the learning rate; train.rollback = true skips the range once",
        )
    job.saver.finish()
    found = find_latest(job.run, verify=job.recipe.save.verify, before=job.step - job.recorder.skipped_in_a_row + 1)
    if found is None:
        raise failure.DivergedError(why, hint="there is no earlier checkpoint to go back to")
    batches.close()
    from_step, position = job.step, job.sequences
    go_back(job, found)
    left_out = [job.sequences, position]
    skipped = (position - job.sequences) * job.geometry.seq_len
    job.sequences, job.rolled_back = position, True
    if job.world.is_main:  # a crash from here on must not go on from what we turned away from
        discard_after(job.run, job.step, f"rolled back to step {job.step}: {why}")
    job.recorder.forget()
    job.interval.began(job.step, job.tokens)  # else the saves up to where it went wrong would be left out
    if job.world.is_main:
        job.run.event(
            "rollback", step=from_step, to_step=job.step, skipped_tokens=skipped, sequences=left_out, reason=why
        )
    job.say(f"went back from step {from_step} to {job.step} and skip {skipped:,} tokens: {why}")
    return open_batches(job)


def _end(job: Job, reason: str | None) -> int:
    if job.world.is_main:
        if reason is None:
            job.run.event("finished", step=job.step, tokens=job.tokens, loss=job.recorder.last_loss)
        else:
            job.run.event("signal", signal=reason, step=job.step)
            job.run.event("stopped", step=job.step, tokens=job.tokens, reason=reason)
    job.world.barrier()
    return EXIT_DONE if reason is None else EXIT_RESUMABLE
