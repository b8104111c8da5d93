"""What may a line of metrics.jsonl and events.jsonl say? The vocabulary that writers and readers share; the reference page is made from it."""

from __future__ import annotations

METRICS: dict[str, str] = {
    "step": "optimizer steps done",
    "tokens": "tokens trained on since the run began, over all restarts",
    "loss": "mean cross-entropy of the step over all ranks, nats per token",
    "grad_norm": "global gradient norm before clipping",
    "lr": "learning rate of the step",
    "step_seconds": "wall time of the step without validation passes, mean over the steps since the last line",
    "tokens_per_second": "of the whole job",
    "mfu": "model FLOP utilisation, 0 to 1; null when the device's peak is unknown",
    "memory_bytes": "highest allocator peak of any rank so far",
    "energy_joules": "energy of the whole job since the run began, carried over restarts; null when not measured",
    "time": "seconds since 1970",
    # further keys; absent or null when unknown
    "tokens_per_second_per_device": "tokens_per_second / devices",
    "hfu": "hardware FLOP utilisation: recomputation counted as work",
    "watts": "mean power of the job since the last line",
    "joules_per_token": "energy per token of the last ten seconds of training or more, without validation; unknown in the first two",
    "energy_nodes": "nodes whose energy is in energy_joules",
    "nodes": "nodes of the job",
    "utilization": "GPU utilisation that the driver reports, 0 to 1",
    "data_seconds": "time the step waited for data",
    "spread_seconds": "slowest rank's compute time minus the fastest's",
    "slowest_rank": "that rank",
    "val_loss": "mean cross-entropy on the validation split, on lines that follow a validation pass; `val_loss/NAME` is that of a source",
    "val_bits_per_byte": "the same per byte of text, in bits: comparable between tokenizers; `val_bits_per_byte/NAME` is that of a source",
    "skipped": "1 when the step changed no weights (non-finite or spike)",
    "z_loss": "auxiliary loss",
}

EVENTS: dict[str, str] = {
    "started": "a process group began from nothing: world_size, nodes, layout, device, devices_per_node",
    "resumed": "a process group began from a checkpoint: step, tokens, checkpoint, world_size, lost_steps, layout",
    "compiled": "the first step was done: seconds since the start",
    "saved": "a checkpoint is complete: step, tokens, bytes, stall_seconds, write_seconds, checkpoint",
    "save_failed": "a save failed and will be retried: step, error",
    "removed": "a superseded checkpoint was deleted: step, reason",
    "damaged": "a checkpoint was set aside: checkpoint, reason",
    "evaluated": "a validation pass: step, val_loss, bits_per_byte, seconds, and loss and bits_per_byte by sources and languages",
    "skipped": "a step changed no weights: step, reason, value",
    "rollback": "went back to an earlier checkpoint: step, to_step, skipped_tokens, sequences (from and to: the data range that is left out), reason",
    "signal": "a signal or the wall-time limit asked the run to stop: signal, step",
    "stopped": "the run ended early after a save and can be resumed: step, tokens, reason",
    "fault": "a rank failed: rank, kind, error, host",
    "restarted": "the local launcher started the workers again: attempt, reason",
    "hang": "the watchdog named a rank: rank, seconds, where",
    "profiled": "a trace was written: steps, files",
    "interval": "save.every = auto chose an interval: seconds, steps, reason",
    "finished": "the last step is done: step, tokens, loss",
    "gave_up": "the launcher or chain stopped trying: reason",
}
