"""What does a run say of itself before it begins? Its manifest, its first event, and every automatic choice with its reason."""

from __future__ import annotations

from typing import Any

import torch

from windlass.data.mix import passes_line
from windlass.runs import manifest
from windlass.runs.events import Resumed, Started
from windlass.train.job import Job
from windlass.train.metrics import peak_of
from windlass.train.schedule import schedule_note


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
        job.run.record(Started(**common))
    else:
        lost = max(0, (job.run.last_metrics().step or job.step) - job.step)
        job.run.record(
            Resumed(step=job.step, tokens=job.tokens, checkpoint=restored.path.name, lost_steps=lost, **common)
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
        schedule_note(job.recipe.optim, job.geometry.total_tokens),
        f"MFU: of {denominator}" if peak else f"MFU: unknown, {denominator}",
    ]:
        if note:
            job.say(note)


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


def best_note(job: Job) -> str:
    """What save.keep_best can judge by, where that is less than it seems."""
    save, every = job.recipe.save, job.recipe.train.eval_every
    if not save.keep_best or save.metric == "loss" or (job.validator is not None and every):
        return ""
    why = "nothing is held out" if job.validator is None else "train.eval_every = 0, so only the last step is validated"
    return f"save.keep_best = {save.keep_best} keeps no checkpoint by {save.metric}: {why}"
