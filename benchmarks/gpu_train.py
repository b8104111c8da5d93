"""How fast does windlass train on one GPU, beside its peers and the floor of the step's own arithmetic?

    python benchmarks/gpu_train.py                       # default rows, results to benchmarks/results/
    python benchmarks/gpu_train.py --rows windlass-1.1b,floor-1.1b
    python benchmarks/gpu_train.py --rows ablation       # what each technique brings, on the 1.1B shape
    python benchmarks/gpu_train.py --rows loss --text some.txt   # FP8 against bf16 over 300 steps of text
    python benchmarks/gpu_train.py --tiny                # small shapes, also on a CPU: does it run at all?

Every row runs in a process of its own, so that running out of memory is a result and memory peaks are its own. MFU counts
6 x (parameters without the input embedding) + 12 x layers x width x sequence, as torchtitan does. Energy is NVML's counter.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Ours first, and this folder not at all: its files have names of the standard library.
others = [p for p in sys.path if Path(p or ".").resolve() != ROOT / "benchmarks"]
sys.path[:] = [str(ROOT / "src"), str(ROOT), *others]


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int
    family: str = "llama"

    @property
    def matmul_parameters(self) -> int:
        if self.family == "retnet":
            return self.layers * (2 * self.width**2 + 3 * self.width * self.ffn * 2) + self.vocab * self.width
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.ffn) + self.vocab * self.width

    @property
    def tokens(self) -> int:
        return self.seq * self.micro_batch

    @property
    def flops_per_token(self) -> float | None:
        if self.family in ("retnet", "qwen3_moe"):  # heads whose width is not width / heads
            return None
        return 6 * self.matmul_parameters + 12 * self.layers * self.width * self.seq


SMALL = Shape("1.1b", 22, 2048, 32, 4, 5632, 32000, 4096, 8)
HALF = Shape("8b-half", 16, 4096, 32, 8, 14336, 128256, 8192, 2)
WHOLE = Shape("8b", 32, 4096, 32, 8, 14336, 128256, 8192, 1)
SMALL_8K = Shape("1.1b-8k", 22, 2048, 32, 4, 5632, 32000, 8192, 4)
SMALL_32K = Shape("1.1b-32k", 22, 2048, 32, 4, 5632, 32000, 32768, 1)
DENSE_04 = Shape("0.4b", 24, 1024, 16, 16, 2816, 50304, 2048, 32)
DENSE_3B = Shape("3b", 28, 3072, 24, 8, 8192, 128256, 4096, 3)
# Inner size of all experts that a token uses; one has an eighth of it.
OLMOE_HALF = Shape("olmoe-half", 8, 2048, 16, 16, 8192, 50304, 4096, 4, "olmoe")
QWEN3_MOE = Shape("qwen3-30b-8-layers", 8, 2048, 32, 4, 6144, 151936, 4096, 4, "qwen3_moe")
RET_SHORT = Shape("retnet-2048", 16, 1024, 4, 4, 1728, 50304, 2048, 16, "retnet")
RET_LONG = Shape("retnet-8192", 16, 1024, 4, 4, 1728, 50304, 8192, 4, "retnet")


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    shape: Shape
    train: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    document_tokens: int | None = None  # mean length of packed documents that do not see each other


def rows() -> list[Row]:
    out = [
        Row("windlass-1.1b", "windlass", SMALL),
        Row("startup-1.1b", "startup", SMALL, note="`windlass train`, warm compile cache; the rate is the loop's own"),
        Row("floor-1.1b", "floor", SMALL),
        Row("titan-1.1b", "titan", SMALL),
        Row("hf-1.1b", "hf", SMALL),
        Row("windlass-8b-half", "windlass", HALF),
        Row("floor-8b-half", "floor", HALF),
        Row("titan-8b-half", "titan", HALF),
        Row("hf-8b-half", "hf", replace(HALF, micro_batch=1), note="full recompute"),
        Row("windlass-8b", "windlass", WHOLE, optim={"moments": "bf16"}, note="bf16 moments, stochastic rounding"),
        Row("windlass-1.1b-fp8", "windlass", SMALL, {"precision": "fp8"}),
        Row("windlass-8b-half-fp8", "windlass", HALF, {"precision": "fp8"}),
    ]
    out += [
        Row("windlass-0.4b", "windlass", DENSE_04),
        Row("windlass-0.4b-mb2", "windlass", replace(DENSE_04, micro_batch=2)),
        Row("windlass-0.4b-mb2-capture", "windlass", replace(DENSE_04, micro_batch=2), {"capture": True}),
        Row("windlass-3b", "windlass", DENSE_3B),
        Row("windlass-1.1b-32k", "windlass", SMALL_32K),
        Row("windlass-1.1b-muon", "windlass", SMALL, optim={"name": "muon"}),
        Row("windlass-1.1b-instruments", "windlass", SMALL, {"instruments": 10}, note="every layer, one step of ten"),
        Row("windlass-1.1b-qk-norm", "windlass", SMALL, model={"qk_norm": "head"}),
        Row("windlass-1.1b-8k", "windlass", SMALL_8K),
        Row("windlass-1.1b-8k-documents", "windlass", SMALL_8K, document_tokens=1024),
        Row("windlass-1.1b-8k-window", "windlass", SMALL_8K, model={"pattern": "WWWF...", "window": 1024}),
    ]
    for shape, count in ((OLMOE_HALF, 64), (QWEN3_MOE, 128)):
        experts = {"count": count, "top_k": 8, "ffn": shape.ffn // 8}
        out.append(Row(f"windlass-{shape.name}", "windlass", shape, model={"head_dim": 128, "experts": experts}))
        precision = {"precision": "fp8"}
        out.append(Row(f"windlass-{shape.name}-fp8", "windlass", shape, precision, model=out[-1].model))
    for shape in (RET_SHORT, RET_LONG):
        out += [
            Row(f"windlass-{shape.name}-parallel", "windlass", shape, model={"retention": "parallel"}),
            Row(f"windlass-{shape.name}-chunkwise", "windlass", shape, model={"retention": "chunkwise", "chunk": 256}),
        ]
    return out


def extra_rows() -> list[Row]:
    """Not run by default: ablations, other choices, and the loss comparison."""
    changes: dict[str, dict[str, Any]] = {
        "no-compile": {"compile": False}, "flash2": {"attention": "flash"}, "plain-loss": {"loss": "plain"}, "fuse": {"fuse": True},
        "recompute-full": {"recompute": "full"}, "recompute-selective": {"recompute": "selective"}, "chunk-2048": {"loss_chunk": 2048},
        "chunk-8192": {"loss_chunk": 8192}, "chunk-16384": {"loss_chunk": 16384},
    }  # fmt: skip
    out = [Row(f"ablation-1.1b-{name}", "windlass", SMALL, change) for name, change in changes.items()]
    changes |= {"capture": {"capture": True}, "fuse-capture": {"fuse": True, "capture": True}}
    out += [Row(f"ablation-0.4b-{name}", "windlass", DENSE_04, change) for name, change in changes.items()]
    out += [Row(f"ablation-8b-half-{name}", "windlass", HALF, change) for name, change in changes.items()]
    out += [
        Row("ablation-1.1b-bf16-moments", "windlass", SMALL, optim={"moments": "bf16"}),
        Row("ablation-1.1b-pure", "windlass", SMALL, {"precision": "bf16_pure"}, {"moments": "bf16"}),
        Row("windlass-1.1b-fp8-row", "windlass", SMALL, {"precision": "fp8", "fp8_scaling": "row"}),
        Row("windlass-8b-half-fp8-row", "windlass", HALF, {"precision": "fp8", "fp8_scaling": "row"}),
        Row(
            "windlass-8b-budget",
            "windlass",
            WHOLE,
            {"recompute": "budget", "recompute_budget": 0.7},
            {"moments": "bf16"},
        ),
        Row("windlass-8b-selective", "windlass", WHOLE, {"recompute": "selective"}, {"moments": "bf16"}),
        Row("windlass-8b-pure", "windlass", WHOLE, {"precision": "bf16_pure"}, {"moments": "bf16"}),
        Row("windlass-8b-fp8", "windlass", WHOLE, {"precision": "fp8"}, {"moments": "bf16"}),
        Row("loss-bf16", "loss", SMALL),
        Row("loss-fp8", "loss", SMALL, {"precision": "fp8"}),
        Row("loss-bf16-seed1", "loss", SMALL, note="another seed: the size of noise"),
    ]
    return out


def tiny(shape: Shape) -> Shape:
    return replace(
        shape,
        layers=2,
        width=64,
        heads=4,
        kv_heads=4 if shape.family == "retnet" else 2,
        ffn=96,
        vocab=512,
        seq=64,
        micro_batch=2,
    )


# -- measuring ------------------------------------------------------------------------------------------------------------


class Energy:
    """Millijoules since driver load, by NVML; None where there is none."""

    def __init__(self) -> None:
        self.handle: Any = None
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self.nvml.nvmlInit_v2()
            handle = ctypes.c_void_p()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            if (
                self.nvml.nvmlDeviceGetHandleByIndex_v2(int(visible) if visible.isdigit() else 0, ctypes.byref(handle))
                == 0
            ):
                self.handle = handle
        except OSError:
            pass

    def joules(self) -> float | None:
        value = ctypes.c_ulonglong()
        if self.handle is None or self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(value)):
            return None
        return value.value / 1e3


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(
    step: Callable[[], Any], tokens: int, *, warm: int, timed: int, flops_per_token: float | None
) -> dict[str, Any]:
    """Median step, and energy over all timed steps together (NVML's counter moves in steps of about 100 ms)."""
    import torch

    began = time.perf_counter()
    step()
    synchronize()
    first = time.perf_counter() - began
    for _ in range(warm):
        step()
    synchronize()
    gc.collect()
    gc.disable()
    meter = Energy()
    cuda = torch.cuda.is_available()
    joules, begin = meter.joules(), time.perf_counter()
    marks = []
    for _ in range(timed):
        step()
        if cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())
    synchronize()
    seconds, used = time.perf_counter() - begin, meter.joules()
    pairs = itertools.pairwise(marks)
    gaps = [a.elapsed_time(b) / 1e3 for a, b in pairs] if cuda else [b - a for a, b in pairs]
    median = statistics.median(gaps) if gaps else seconds
    joules_used = None if joules is None or used is None else used - joules
    return {
        "tokens_per_second": tokens / median, "step_ms": median * 1e3, "step_ms_min": min(gaps, default=seconds) * 1e3,
        "step_ms_mean": seconds / timed * 1e3,
        "mfu": None if flops_per_token is None else flops_per_token * tokens / median / 989e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "mj_per_token": None if joules_used is None else joules_used / (tokens * timed) * 1e3,
        "watts": None if joules_used is None else joules_used / seconds, "first_step_s": first,
    }  # fmt: skip


# -- windlass -------------------------------------------------------------------------------------------------------------


def recipe_of(row: Row, steps: int) -> Any:
    from windlass.config import Recipe

    s = row.shape
    model: dict[str, Any] = {
        "family": s.family,
        "layers": s.layers,
        "width": s.width,
        "ffn": s.ffn,
        "heads": s.heads,
        "vocab": s.vocab,
        **row.model,
    }
    if s.family != "retnet":
        model["kv_heads"] = s.kv_heads
    import torch

    train = {"precision": "bf16", "steps": steps, **row.train}
    if not torch.cuda.is_available():
        train["precision"] = "bf16" if train["precision"] == "fp8" else train["precision"]
        train["compile"] = False
    return Recipe.model_validate({
        "name": "bench", "model": model, "data": {"seq_len": s.seq, "batch_tokens": s.tokens, "mask_documents": row.document_tokens is not None}, "optim": {"lr": 3e-4, "clip": 1.0, "warmup": s.tokens * 100, **row.optim},
        "train": train, "layout": {"micro_batch": s.micro_batch}, "energy": {"enabled": False}, "save": {"at_end": False, "every": 10**9},
    })  # fmt: skip


def run_windlass(row: Row, warm: int, timed: int) -> dict[str, Any]:
    from benchmarks.one_process import open_training, stepping

    training = open_training(recipe_of(row, warm + timed + 2), say=print)
    if row.document_tokens is not None:
        training.stream.document_ids = partial(random_documents, length=row.shape.seq + 1, mean=row.document_tokens)
    last: list[Any] = []
    with stepping(training) as next_step:

        def step() -> None:
            last[:] = [next_step(3e-4)]

        result = measure(step, row.shape.tokens, warm=warm, timed=timed, flops_per_token=row.shape.flops_per_token)
    return result | {"loss": last[0].values[0].item()}


def random_documents(indexes: Any, length: int, mean: int) -> Any:
    """Document numbers of sequences whose documents end at random, the same for the same index."""
    import numpy as np

    ends = [np.random.default_rng(int(index)).random(length) < 1 / mean for index in indexes]
    return np.stack([np.cumsum(end) for end in ends])


def run_loss(row: Row, warm: int, timed: int) -> dict[str, Any]:
    """300 steps on the bytes of a text; the curve's end is what is compared."""
    import numpy as np
    from benchmarks.one_process import open_training, stepping

    text = os.environ.get("WINDLASS_BENCH_TEXT")
    if not text:
        return {"error": "no --text was given"}
    data = np.frombuffer(Path(text).read_bytes(), dtype=np.uint8)
    shape = replace(
        row.shape, layers=min(row.shape.layers, 12), vocab=256, seq=min(1024, row.shape.seq), micro_batch=16
    )
    steps = timed if timed < 10 else 300
    training = open_training(recipe_of(replace(row, shape=shape), steps), say=print)
    training.stream.sequences = lambda indexes: np.stack(
        [_window(data, int(i), shape.seq, 1 if "seed1" in row.name else 0) for i in indexes]
    )
    with stepping(training) as next_step:
        losses = [next_step(3e-4).values[0] for _ in range(steps)]
    values = [float(v) for v in losses]
    return {"loss": sum(values[-30:]) / len(values[-30:]), "losses": values[:: max(1, steps // 30)]}


def _window(data: Any, index: int, seq: int, seed: int) -> Any:
    import numpy as np

    start = (index * 2654435761 + seed * 97) % max(1, len(data) - seq - 1)
    return data[start : start + seq + 1].astype(np.int32)


def run_startup(row: Row, warm: int, timed: int) -> dict[str, Any]:
    """`windlass train` as a user starts it, with an empty compile cache and once more: seconds to the end of the first step."""
    seconds: dict[str, float] = {}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="windlass-start-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(_toml(recipe_of(row, warm + timed).model_dump(mode="json", exclude_unset=True)))
        environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | {
            "XDG_CACHE_HOME": folder
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        for name in ("cold", "warm"):
            run = Path(folder) / name
            command = [sys.executable, "-m", "windlass", "train", str(file), "--run", str(run), "energy.enabled=true"]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
            events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
            seconds[name] = next(e["seconds"] for e in events if e["event"] == "compiled")
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines[2:] if line.get("tokens_per_second")]
    return {
        "first_step_s": seconds["warm"],
        "first_step_cold_s": seconds["cold"],
        "tokens_per_second": statistics.median(rates) if rates else None,
    }


def _toml(tables: dict[str, Any]) -> str:
    """Enough TOML for a recipe: plain values first, then one table each."""
    plain = [f"{k} = {json.dumps(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            plain += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(plain) + "\n"


# -- peers ----------------------------------------------------------------------------------------------------------------


def run_hf(row: Row, warm: int, timed: int) -> dict[str, Any]:
    """transformers' own model in a plain compiled loop with autocast and fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    s, device = row.shape, "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=s.width, intermediate_size=s.ffn, num_hidden_layers=s.layers, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads,
        vocab_size=s.vocab, max_position_embeddings=s.seq, rope_theta=500000.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if row.note == "full recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    forward = torch.compile(model) if device == "cuda" else model
    x = torch.randint(0, s.vocab, (s.micro_batch, s.seq), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return measure(step, s.tokens, warm=warm, timed=timed, flops_per_token=s.flops_per_token)


def run_titan(row: Row, warm: int, timed: int) -> dict[str, Any]:
    """torchtitan's Llama 3 with its per-block compile under FSDP2 on one rank, where it can be imported (0.2 series)."""
    try:
        import torchtitan  # noqa: F401
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    except ImportError as error:
        return {"error": f"torchtitan is not importable: {error}"}
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    s, device = row.shape, "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{file.name}x", rank=0, world_size=1
        )
    multiple = 256
    args = TransformerModelArgs(
        dim=s.width,
        n_layers=s.layers,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        vocab_size=s.vocab,
        max_seq_len=s.seq,
        multiple_of=multiple,
        ffn_dim_multiplier=s.ffn / (8 * s.width / 3),
        rope_theta=500000,
    )
    with torch.device("meta"):
        model = Transformer(args)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        if device == "cuda":
            block.compile(fullgraph=True)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    inner = model.layers["0"].feed_forward.w1.weight.shape[0]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    entropy = lambda out, goal: torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), goal.flatten(0, 1))  # noqa: E731
    loss_function = torch.compile(entropy) if device == "cuda" else entropy
    x = torch.randint(0, s.vocab, (s.micro_batch, s.seq), device=device)

    def step() -> None:
        loss_function(model(x), x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    result = measure(step, s.tokens, warm=warm, timed=timed, flops_per_token=s.flops_per_token)
    dist.destroy_process_group()
    return result | {"ffn": inner}


# -- the floor ------------------------------------------------------------------------------------------------------------


def run_floor(row: Row, warm: int, timed: int) -> dict[str, Any]:
    """The step's own matrix products, its attention and its optimizer traffic, one after the other and nothing else."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    s, device = row.shape, "cuda" if torch.cuda.is_available() else "cpu"
    head = s.width // s.heads
    m = s.tokens
    kinds = [
        (s.width, head * (s.heads + 2 * s.kv_heads)),
        (head * s.heads, s.width),
        (s.width, 2 * s.ffn),
        (s.ffn, s.width),
    ]
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    weights = [make(outer, inner) * 0.02 for inner, outer in kinds]
    inputs = [make(m, inner) for inner, _ in kinds]
    slopes = [make(m, outer) for _, outer in kinds]
    head_weight, chunk = make(s.vocab, s.width) * 0.02, min(4096, m)
    logits = make(chunk, s.vocab)
    q = make(s.micro_batch, s.heads, s.seq, head).requires_grad_()
    k, v = (make(s.micro_batch, s.kv_heads, s.seq, head).requires_grad_() for _ in range(2))
    parameters = s.matmul_parameters + s.vocab * s.width
    # bf16 weight and gradient, fp32 master and two moments: read all, write all but the gradient.
    state = torch.empty(min(parameters, 2**28), device=device, dtype=torch.float32)
    passes = parameters * 28 / (state.numel() * 8)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def products() -> None:
        for _ in range(s.layers):
            for w, x, g in zip(weights, inputs, slopes, strict=True):
                _ = x @ w.t(), g @ w, g.t() @ x
        for _ in range(m // chunk):
            x = inputs[0][:chunk]
            _ = x @ head_weight.t(), logits @ head_weight, logits.t() @ x

    def attention() -> None:
        for _ in range(s.layers):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads
            )
            out.backward(out.detach())
            q.grad = k.grad = v.grad = None

    def step() -> None:
        products()
        with sdpa_kernel(backends, set_priority=True):
            attention()
        for _ in range(max(1, round(passes))):
            state.mul_(1.0)

    return measure(step, s.tokens, warm=warm, timed=timed, flops_per_token=s.flops_per_token)


# -- running --------------------------------------------------------------------------------------------------------------

RUN = {
    "windlass": run_windlass,
    "hf": run_hf,
    "titan": run_titan,
    "floor": run_floor,
    "loss": run_loss,
    "startup": run_startup,
}


def one(name: str, small: bool, warm: int, timed: int) -> dict[str, Any]:
    row = next(r for r in rows() + extra_rows() if r.name == name)
    warm_imports(row.kind)
    sys.stdin.readline()
    if small:
        row = replace(row, shape=tiny(row.shape), model=row.model | ({"chunk": 16} if "chunk" in row.model else {}))
    try:
        result = RUN[row.kind](row, warm, timed)
    except Exception as error:  # out of memory and a missing package are results, too
        result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        if os.environ.get("WINDLASS_DEBUG"):
            raise
    return {
        "row": name,
        "kind": row.kind,
        "shape": asdict(row.shape),
        "note": row.note,
        "train": row.train,
        "optim": row.optim,
        **result,
    }


def start(name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that imports what its row needs and then waits for a line before it touches the device."""
    options = ["--warm", str(args.warm), "--timed", str(args.timed), *(["--tiny"] if args.tiny else [])]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ
    if args.text:
        environment["WINDLASS_BENCH_TEXT"] = args.text
    return subprocess.Popen(
        [sys.executable, __file__, "--one", name, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(name: str, process: subprocess.Popen[str], timeout: float) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        out, err = process.communicate("go\n", timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"row": name, "error": f"not done within {timeout:.0f} s", "wall_s": time.perf_counter() - began}
    found = [line for line in out.splitlines() if line.startswith("{")]
    failed = {"row": name, "error": (err.strip().splitlines() or ["no output"])[-1][:300]}
    return (json.loads(found[-1]) if found else failed) | {"wall_s": time.perf_counter() - began}


def run_rows(names: list[str], args: argparse.Namespace) -> None:
    """One row at a time on the device; the next one's imports run beside it. Each row is written as soon as it is known."""
    done = earlier(args)
    names = [name for name in names if name not in {row["row"] for row in done}]
    processes = {name: start(name, args) for name in names[:1]}
    try:
        for name, following in itertools.zip_longest(names, names[1:]):
            if following:
                processes[following] = start(following, args)
            done.append(finish(name, processes.pop(name), args.row_timeout))
            print(line_of(done[-1]), flush=True)
            write(done, args)
    finally:
        for process in processes.values():
            process.kill()


def stem(args: argparse.Namespace) -> str:
    return args.name or ("gpu_train_tiny" if args.tiny else "gpu_train")


def earlier(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a run that was cut off, when asked for."""
    file = args.out / f"{stem(args)}.json"
    return json.loads(file.read_text())["rows"] if args.append and file.exists() else []


def warm_imports(kind: str) -> None:
    """Before the gate: what takes seconds to load and touches no device."""
    import importlib

    for module in {
        "windlass": ("torch", "benchmarks.one_process"),
        "loss": ("torch", "benchmarks.one_process"),
        "hf": ("torch", "transformers.models.llama.modeling_llama"),
        "titan": ("torch", "torchtitan.models.llama3"),
    }.get(kind, ("torch",)):
        try:
            importlib.import_module(module)
        except ImportError:
            return  # the row itself will say so


COLUMNS = ("row", "tok/s", "step ms", "MFU %", "peak GiB", "mJ/token", "W", "first step s", "note")


def cells(row: dict[str, Any]) -> list[str]:
    if row.get("error"):
        return [row["row"], row["error"], *[""] * (len(COLUMNS) - 2)]
    show = lambda key, digits=1, factor=1.0: "" if row.get(key) is None else f"{row[key] * factor:,.{digits}f}"  # noqa: E731
    loss = f"loss {row['loss']:.4f}" if row.get("kind") == "loss" else ""
    note = ", ".join(filter(None, [loss, row.get("note")]))
    return [
        row["row"],
        show("tokens_per_second", 0),
        show("step_ms"),
        show("mfu", 1, 100),
        show("peak_gib"),
        show("mj_per_token", 2),
        show("watts", 0),
        show("first_step_s"),
        note,
    ]


def line_of(row: dict[str, Any]) -> str:
    return "| " + " | ".join(cells(row)) + " |"


def write(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    import torch

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = (
        os.environ.get("WINDLASS_COMMIT")
        or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    )
    about = {
        "command": "python benchmarks/gpu_train.py " + " ".join(sys.argv[1:]), "commit": commit or None, "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu", "warm": args.warm, "timed": args.timed,
        "mfu": "6 x (parameters without the input embedding) + 12 x layers x width x sequence, of 989 TFLOP/s", "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{stem(args)}.json").write_text(json.dumps({"about": about, "rows": results}, indent=2) + "\n")
    head = "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS) + "\n"
    text = (
        "# Training on one GPU\n\n"
        + "".join(f"- {k}: {v}\n" for k, v in about.items())
        + "\n"
        + head
        + "\n".join(line_of(r) for r in results)
        + "\n"
    )
    (args.out / f"{stem(args)}.md").write_text(text)


COMPARED = (
    ("1.1B against the floor of its own work", "windlass-1.1b", "floor-1.1b"),
    ("1.1B against torchtitan", "windlass-1.1b", "titan-1.1b"),
    ("1.1B against the Hugging Face loop", "windlass-1.1b", "hf-1.1b"),
    ("`windlass train` against the bare step, 1.1B", "startup-1.1b", "windlass-1.1b"),
    ("8B at half depth against the floor", "windlass-8b-half", "floor-8b-half"),
    ("8B at half depth against torchtitan", "windlass-8b-half", "titan-8b-half"),
    ("8B at half depth against the Hugging Face loop with recompute", "windlass-8b-half", "hf-8b-half"),
    ("FP8 against bf16, 1.1B", "windlass-1.1b-fp8", "windlass-1.1b"),
    ("FP8 against bf16, 8B at half depth", "windlass-8b-half-fp8", "windlass-8b-half"),
    ("RetNet at 2,048 tokens, chunkwise against parallel", "windlass-retnet-2048-chunkwise", "windlass-retnet-2048-parallel"),
    ("RetNet at 8,192 tokens, chunkwise against parallel", "windlass-retnet-8192-chunkwise", "windlass-retnet-8192-parallel"),
)  # fmt: skip


def join(files: list[Path], args: argparse.Namespace) -> None:
    """Several result files into the one that is kept: the first holds what is compared."""
    runs = [json.loads(file.read_text()) for file in files]
    by_name = {row["row"]: row for run in runs for row in run["rows"]}
    (args.out / f"{stem(args)}.json").write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    head = "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS) + "\n"
    parts = [f"# Training on one {runs[0]['about']['device']}\n\nMFU: {runs[0]['about']['mfu']}.\n"]
    ratios = [
        f"| {words} | {by_name[a]['tokens_per_second'] / by_name[b]['tokens_per_second']:.3f} |"
        for words, a, b in COMPARED
        if by_name.get(a, {}).get("tokens_per_second") and by_name.get(b, {}).get("tokens_per_second")
    ]
    parts.append("\n| compared, by tokens/s | ratio |\n|---|---|\n" + "\n".join(ratios) + "\n")
    for run in runs:
        about = run["about"]
        parts.append(
            f"\n`{about['command']}`, {about['time']}, commit {about['commit']}, torch {about['torch']}, Python {about['python']}."
        )
        parts.append(
            f"{' ' + about['note'] if about.get('note') else ''}\n\n{head}"
            + "\n".join(map(line_of, run["rows"]))
            + "\n"
        )
    (args.out / f"{stem(args)}.md").write_text("".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="comma-separated names or prefixes; default: the standard rows")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--timed", type=int, default=10)
    parser.add_argument(
        "--append", action="store_true", help="go on with a run that was cut off: rows in its file are kept"
    )
    parser.add_argument("--text", help="a text file for the loss rows")
    parser.add_argument("--row-timeout", type=float, default=300)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks" / "results")))
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="only join these result files")
    parser.add_argument("--name", help="stem of the result files")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.tiny, args.warm, args.timed)))
        return
    if args.join:
        join(args.join, args)
        return
    every = [r.name for r in rows() + extra_rows()]
    if args.list:
        print("\n".join(every))
        return
    wanted = args.rows.split(",") if args.rows else None
    names = (
        [r.name for r in rows()]
        if wanted is None
        else [n for w in wanted for n in every if n == w or (n.startswith(w) and w not in every)]
    )
    run_rows(list(dict.fromkeys(names)), args)


if __name__ == "__main__":
    main()
