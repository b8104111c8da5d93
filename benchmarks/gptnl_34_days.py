"""GPT-NL's projection (30B parameters, 450B tokens, 88 H100: 34 days, 14 t of CO2) beside our prediction.

    python benchmarks/gptnl_34_days.py [--json] [--out benchmarks/results]

One set of assumptions was written down and committed before the first run of this script (docs/concepts/predictions-gptnl.md). The script reports
its error, then changes one assumption at a time, then pairs of them, and lists which changes give 34 days.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # this folder: its tokenize.py would hide Python's own module

import argparse
import json
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from windlass.cli.output import print_json
from windlass.clusters import load_cluster, load_device
from windlass.config import ModelConfig
from windlass.cost.memory import memory
from windlass.cost.power import busy_share, energy, node_power
from windlass.cost.step import Machine, estimate_step
from windlass.layout.types import Layout, StepSpec
from windlass.models.presets import model_spec

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "8B": {"layers": 32, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8},
    "30B": {"layers": 60, "width": 6656, "ffn": 17920, "heads": 52, "kv_heads": 13},
}
PUBLISHED = {"days": 34.0, "tonnes": 14.0}
TOKENS = 450e9
GRID_BATCHES = (24, 16, 10, 8, 4)
CLUSTER = load_cluster("snellius-h100")
DEVICE = load_device(CLUSTER.device)
MACHINE = Machine(DEVICE, CLUSTER.links, CLUSTER.node.devices)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The set of docs/concepts/predictions-gptnl.md."""

    size: str = "30B"
    vocab: int = 128_256
    nodes: int = 22
    engine: str = "torch"
    compile: bool = False
    shard: str = "full"
    shard_size: int | None = None
    """None: all devices."""
    seq_len: int = 4096
    batch: int | None = None
    """Sequences per device; None: the largest of the grid that fits."""
    recompute: str = "full"
    attention: str = "flash"
    gradients: str = "fp32"
    stops: float = 0.0
    """Share of the time lost to saves, faults and restarts."""


CHANGES: dict[str, dict[str, Any]] = {
    "vocabulary of 32,000": {"vocab": 32_000},
    "sequences of 2,048": {"seq_len": 2048},
    "sequences of 8,192": {"seq_len": 8192},
    "batch of 4 per device": {"batch": 4},
    "batch of 1 per device": {"batch": 1},
    "selective recomputation": {"recompute": "selective"},
    "no recomputation": {"recompute": "none"},
    "FlashAttention 3": {"attention": "flash3"},
    "no fused attention": {"attention": "math"},
    "compiled": {"compile": True},
    "gradients reduced in bf16": {"gradients": "bf16"},
    "shards inside a node, copies across (HYBRID_SHARD)": {"shard": "hybrid", "shard_size": 4},
    "Hugging Face and DeepSpeed Zero 3": {"engine": "deepspeed"},
    "10 % of the time lost to stops": {"stops": 0.10},
    "20 % of the time lost to stops": {"stops": 0.20},
    "windlass's own engine, compiled": {"engine": "native", "compile": True, "attention": "auto"},
}


def predict(a: Assumptions) -> dict[str, Any] | None:
    """Days, energy and carbon; None when it does not fit."""
    shape = SHAPES[a.size] | {"vocab": a.vocab}
    model, devices = model_spec(ModelConfig.model_validate(shape)), a.nodes * CLUSTER.node.devices
    step = StepSpec(
        seq_len=a.seq_len,
        engine=a.engine,
        compile=a.compile,
        attention=a.attention,
        recompute=a.recompute,
        gradient_precision=a.gradients,
        loss="chunked" if a.engine == "native" else "plain",
    )
    for batch in GRID_BATCHES if a.batch is None else (a.batch,):
        shard_size = 1 if a.shard == "none" else a.shard_size or devices
        layout = Layout(data=devices, shard=a.shard, shard_size=shard_size, micro_batch=batch)
        needed = memory(model, step, layout).needed
        if needed <= (DEVICE.usable_memory or 0):
            break
    else:
        return None
    estimate = estimate_step(model, step, layout, MACHINE)
    rate = estimate.tokens_per_second_per_device * (1 - a.stops)
    hours = TOKENS / rate / devices / 3600
    power = node_power(DEVICE, CLUSTER.node, busy_share(estimate) * (1 - a.stops))
    used = energy(power, a.nodes, hours, CLUSTER.grid.model_copy(update={"pue": 1.0}))
    return {
        "parameters": model.params.total,
        "batch": batch,
        "memory_gib": needed / 2**30,
        "tokens_per_second_per_device": rate,
        "mfu": None if estimate.mfu is None else estimate.mfu * (1 - a.stops),
        "busy_share": busy_share(estimate),
        "node_watts": power.node_watts,
        "days": hours / 24,
        "days_error": hours / 24 / PUBLISHED["days"] - 1,
        "mwh_at_nodes": None if used.it_kwh is None else used.it_kwh / 1000,
        "tonnes": used.tco2e,
        "tonnes_error": None if used.tco2e is None else used.tco2e / PUBLISHED["tonnes"] - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the result")
    arguments = parser.parse_args()
    base = predict(Assumptions())
    assert base is not None
    single = {name: predict(replace(Assumptions(), **change)) for name, change in CHANGES.items()}
    pairs = {}
    for one, two in combinations(CHANGES, 2):
        if set(CHANGES[one]) & set(CHANGES[two]):
            continue
        result = predict(replace(Assumptions(), **CHANGES[one], **CHANGES[two]))
        if result and abs(result["days_error"]) <= 0.05:
            pairs[f"{one}; {two}"] = result
    document = {
        "published": PUBLISHED,
        "assumed": base,
        "changes": single,
        "pairs_within_5_percent": pairs,
    }
    (arguments.out / "gptnl_34_days.json").write_text(json.dumps(document, indent=1) + "\n")
    if arguments.json:
        print_json(document)
        return 0
    for name, result in {"as assumed": base, **single, **pairs}.items():
        figures = "does not fit" if result is None else (
            f"batch {result['batch']:2}, MFU {result['mfu']:.2f}, {result['days']:5.1f} days ({result['days_error']:+.0%}), "
            f"{result['tonnes']:.1f} t ({result['tonnes_error']:+.0%})"
        )  # fmt: skip
        print(f"{name:80} {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
