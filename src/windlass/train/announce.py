"""What a run reports before its first step: manifest, first event, and every automatic choice with its reason."""

from __future__ import annotations

from typing import Any

import torch

from windlass.data.mix import passes_line
from windlass.runs import manifest
from windlass.runs.events import Resumed, Started
from windlass.train.job import Job
from windlass.train.metrics import peak_of
from windlass.train.schedules import schedule_note


def announce(job: Job, restored: Any) -> None:
    """`restored`: the checkpoint that the run continues from, or None."""
    world, recipe, geometry = job.world, job.recipe, job.geometry
    if job.meter is not None:
        job.meter.start(job.energy_carried if world.place.node_rank == 0 else None)
    if not world.is_main:
        return
    peak, denominator = peak_of(world.device, recipe.train.precision)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else (manifest.cpu_name() or "cpu")
    common = {
        "world_size": world.size,
        "nodes": world.place.nodes,
        "layout": recipe.layout.model_dump() if recipe.layout is not None else {},
        "device": device,
        "devices_per_node": world.place.local_world_size,
    }
    record = manifest.collect(
        recipe,
        **common,
        data_ledger=job.stream.ledger_hash,
        data=data_record(job),
        steps=geometry.steps,
        tokens_per_step=geometry.tokens_per_step,
        mfu_denominator=denominator,
    )
    manifest.write(job.run, record)
    if restored is None:
        job.run.record(Started(**common))
    else:
        last_step = job.run.last_metrics().step or job.step
        lost_steps, name = max(0, last_step - job.step), restored.path.name
        job.run.record(
            Resumed(step=job.step, tokens=job.tokens, checkpoint=name, lost_steps=lost_steps, **common)
        )
        for sentence in restored.set_aside:
            job.say(f"damaged: {sentence}")
        repeated = f"; {lost_steps} steps are repeated" if lost_steps else ""
        job.say(f"resumed at step {job.step} from {name}{repeated}")
    notes = [
        passes_line(job.stream.epochs(geometry.total_tokens)),
        best_note(job),
        *job.parts.notes,
        job.stepper.sync.note,
        schedule_note(recipe.optim, geometry.total_tokens),
        f"MFU: of {denominator}" if peak else f"MFU: unknown, {denominator}",
    ]
    for note in notes:
        if note:
            job.say(note)


def data_record(job: Job) -> dict[str, Any] | None:
    """The store's ledger without its file lists, kept with the run, because a report must work on a copy of the folder."""
    store = job.stream.store
    if store is None:
        return None
    sources = store.ledger().get("sources", {})
    return {
        "store": job.recipe.data.store,
        "ledger_hash": store.ledger_hash,
        "settings": store.manifest.get("settings"),
        "sources": {name: {k: v for k, v in entry.items() if k != "paths"} for name, entry in sources.items()},
    }


def best_note(job: Job) -> str:
    """Why save.keep_best keeps less than it seems to; empty when it does not."""
    save, every = job.recipe.save, job.recipe.train.eval_every
    if not save.keep_best or save.metric == "loss" or (job.validator is not None and every):
        return ""
    reason = (
        "nothing is held out" if job.validator is None else "train.eval_every = 0, so only the last step is validated"
    )
    return f"save.keep_best = {save.keep_best} keeps no checkpoint by {save.metric}: {reason}"
