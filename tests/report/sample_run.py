"""A run folder as training leaves it: a crash and a resume, a node without a sensor, torn lines. For tests and benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RECIPE = """name = "sample"
cluster = "snellius-h100"
nodes = 2
[model]
family = "llama"
layers = 8
width = 512
heads = 8
ffn = 1408
kv_heads = 4
vocab = 32000
[data]
tokens = "40M"
seq_len = 1024
batch_tokens = 131072
[layout]
shard = "full"
micro_batch = 4
"""
BEGIN = 1_790_000_000.0
BATCH = 131_072
STEP_SECONDS = 1.25


def metric(step: int, at: float, joules: float | None) -> dict[str, Any]:
    noise = math.sin(step * 12.9898) * 0.03
    rate = BATCH / STEP_SECONDS * (1 + noise / 3)
    return {
        "step": step, "tokens": step * BATCH, "loss": 2.1 + 8.3 / (1 + step / 9) + noise, "grad_norm": 1 + abs(noise) * 8,
        "lr": 3e-4 * min(1, step / 20), "step_seconds": STEP_SECONDS * (1 - noise / 3), "tokens_per_second": rate,
        "mfu": 0.412 + noise / 10, "memory_bytes": 61_203_283_968, "energy_joules": joules, "time": at,
        "tokens_per_second_per_device": rate / 8, "hfu": 0.45, "watts": None if joules is None else 2650 + 900 * noise,
        "joules_per_token": None if joules is None else 0.0251, "energy_nodes": 1, "nodes": 2, "utilization": 0.97 + noise / 10,
        "data_seconds": 0.002, "spread_seconds": 0.031, "slowest_rank": 5,
    }  # fmt: skip


def _write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def energy_line(
    at: float, node: str, session: str, source: str, scope: str, joules: float, seconds: float, **more: Any
) -> dict[str, Any]:
    return {
        "time": at, "node": node, "session": session, "job": more.pop("job", "4711"), "source": source, "scope": scope, "method": more.pop("method", "counter"),
        "joules": joules, "seconds": seconds, "resets": 0, "note": "", "watts": joules / seconds if seconds else None, **more,
    }  # fmt: skip


def make_run(
    path: Path,
    *,
    steps: int = 300,
    crash_at: int = 180,
    resume_from: int = 150,
    finished: bool = True,
    name: str = "sample",
) -> Path:
    """Two nodes of four devices; node 2 has no sensor. The first process group dies at `crash_at` and the second goes on from `resume_from`."""
    from windlass.config import load_recipe
    from windlass.runs.folder import create_run

    path.parent.mkdir(parents=True, exist_ok=True)
    recipe = path.parent / f".{path.name}.toml"
    recipe.write_text(RECIPE.replace('"sample"', f'"{name}"'))
    run = create_run(path, load_recipe(recipe))
    recipe.unlink()
    second = BEGIN + 30 + crash_at * STEP_SECONDS + 90
    layout = {"shard": "full", "micro_batch": 4}
    first_session, second_session = f"{int((BEGIN - 2) * 1000)}-101", f"{int((second - 2) * 1000)}-202"
    events = [
        {"time": BEGIN, "event": "started", "world_size": 8, "nodes": 2, "layout": layout, "device": "NVIDIA H100", "devices_per_node": 4},
        {"time": BEGIN + 31, "event": "compiled", "seconds": 31.0},
        {"time": BEGIN + 30 + resume_from * STEP_SECONDS, "event": "saved", "step": resume_from, "tokens": resume_from * BATCH, "bytes": 730_000_000,
         "stall_seconds": 0.21, "write_seconds": 3.4, "checkpoint": f"step-{resume_from:09d}"},
        {"time": BEGIN + 30 + crash_at * STEP_SECONDS, "event": "fault", "rank": 5, "kind": "node", "error": "NCCL: peer closed the connection", "host": "gcn2"},
        {"time": second, "event": "resumed", "step": resume_from, "tokens": resume_from * BATCH, "checkpoint": f"step-{resume_from:09d}", "world_size": 8,
         "nodes": 2, "lost_steps": crash_at - resume_from, "layout": layout, "device": "NVIDIA H100"},
        {"time": second + 21, "event": "compiled", "seconds": 21.0},
    ]  # fmt: skip
    metrics: list[Any] = [metric(s, BEGIN + 30 + s * STEP_SECONDS, s * 3300.0) for s in range(1, crash_at + 1)]
    metrics.append('{"step": 181, "tokens": 2372')  # torn by the crash
    metrics.append("\n")
    metrics += [
        metric(s, second + 20 + (s - resume_from) * STEP_SECONDS, 3300.0 * (crash_at - resume_from + s))
        for s in range(resume_from + 1, steps + 1)
    ]
    end = second + 20 + (steps - resume_from) * STEP_SECONDS
    if finished:
        metrics.append({**metric(steps, end, 3300.0 * (crash_at - resume_from + steps)), "val_loss": 2.61})
        events += [
            {
                "time": end,
                "event": "saved",
                "step": steps,
                "tokens": steps * BATCH,
                "bytes": 730_000_000,
                "stall_seconds": 0.2,
                "write_seconds": 3.1,
            },
            {"time": end + 1, "event": "finished", "step": steps, "tokens": steps * BATCH, "loss": 2.34},
        ]
    run.checkpoint(steps if finished else resume_from).mkdir(parents=True)
    first_seconds, second_seconds = 30 + crash_at * STEP_SECONDS, end - second
    why = {
        "nvml": "NVML does not start: Driver Not Loaded",
        "rapl": "2 RAPL zones exist but only root may read them: CPU energy is not measured",
    }
    energy = [
        {"time": BEGIN, "node": "gcn1", "session": first_session, "job": "4711", "missing": {"rapl": why["rapl"]}},
        energy_line(BEGIN + 30, "gcn1", first_session, "nvml", "device", 30 * 900.0, 30.0),
        energy_line(BEGIN + first_seconds, "gcn1", first_session, "nvml", "device", 600_000.0, first_seconds),
        '{"time": 17900, "node": "gcn1", "sess\n',
        {"time": second, "node": "gcn2", "session": second_session, "job": "4712", "missing": why},
        energy_line(end, "gcn1", second_session, "nvml", "device", 500_000.0, second_seconds, job="4712"),
        energy_line(
            end,
            "gcn2",
            second_session + "9",
            "model",
            "node",
            640_000.0,
            second_seconds,
            job="4712",
            method="modelled",
            note="modelled: 4 x 700 W",
        ),
    ]
    sources = [
        {"name": "dutch-news", "licence": "CC-BY-4.0", "origin": "https://example.org/news", "tokens": 24_000_000, "documents": 51_000, "languages": ["nl"],
         "kind": "public-dataset", "collected": "2025-01"},
        {"name": "code", "licence": "Apache-2.0", "origin": "https://example.org/code", "tokens": 16_000_000, "documents": 9_000, "languages": ["code"], "kind": "web"},
    ]  # fmt: skip
    manifest = {
        "windlass": "0.1.0", "commit": "0123456789ab", "python": "3.12.3", "packages": {"torch": "2.11.0"}, "host": "gcn1", "cpu": "AMD EPYC 9334",
        "system": "Linux", "started_at": BEGIN, "device": "NVIDIA H100", "data": {"store": "data/sample", "ledger_hash": "abc123", "sources": sources},
    }  # fmt: skip
    _write(run.metrics_file, metrics)
    _write(run.events_file, events)
    _write(run.energy_file, energy)
    run.manifest_file.write_text(json.dumps(manifest))
    run.jobs_file.write_text(
        json.dumps({"job": "4711", "time": BEGIN}) + "\n" + json.dumps({"job": "4712", "time": second}) + "\n"
    )
    return path
