"""Traces built by hand, small enough to check every number on paper."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

HOST, MAIN, WORKER = 4000, 4000, 4001


class TraceBuilder:
    """Writes the events of a Kineto trace; times in microseconds."""

    def __init__(self, *, old: bool = False, device: int | None = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {"schemaVersion": 1}
        self.old = old
        self.device = device
        self._ids = itertools.count(1)
        self._correlations = itertools.count(1000)

    def span(
        self, cat: str, name: str, start: float, end: float, *, pid: Any = HOST, tid: Any = MAIN, **args: Any
    ) -> dict[str, Any]:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": start,
            "dur": end - start,
            "args": args,
        }
        self.events.append(event)
        return event

    def op(self, name: str, start: float, end: float, *, tid: Any = MAIN, **args: Any) -> int:
        number = next(self._ids)
        self.span("Operator" if self.old else "cpu_op", name, start, end, tid=tid, **{"External id": number, **args})
        return number

    def step(self, number: int, start: float, end: float) -> None:
        self.span(
            "Operator" if self.old else "user_annotation",
            f"ProfilerStep#{number}",
            start,
            end,
            **{"External id": next(self._ids)},
        )

    def annotation(self, name: str, start: float, end: float, *, tid: Any = MAIN) -> int:
        number = next(self._ids)
        self.span("user_annotation", name, start, end, tid=tid, **{"External id": number})
        return number

    def launch(
        self, kernel: str, call: float, start: float, end: float, *, external: int = 0, kind: str = "kernel", stream: int = 7, tid: Any = MAIN,
        runtime: str | None = None, call_us: float = 2, **args: Any,
    ) -> None:  # fmt: skip
        """A runtime call of `call_us` and the device work it starts."""
        correlation = next(self._correlations)
        runtime = runtime or ("Runtime" if self.old else "cuda_runtime")
        ids = {"External id": external, "correlation": correlation}
        self.span(runtime, "cudaLaunchKernel", call, call + call_us, tid=tid, **ids)
        where = {} if self.device is None else {"device": self.device}
        cat = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}[kind] if self.old else kind
        self.span(cat, kernel, start, end, pid=self.device or 0, tid=stream, stream=stream, **where, **ids, **args)

    def document(self) -> dict[str, Any]:
        return {**self.meta, "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        text = json.dumps(self.document()).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


@pytest.fixture
def builder() -> type[TraceBuilder]:
    return TraceBuilder


@pytest.fixture
def overlapped(builder: type[TraceBuilder]) -> TraceBuilder:
    """Two equal steps of 100 us on one GPU, with a collective half behind computation.

    Per step (from its start): host op 0-30, launches at 2, 10, 20; GEMM kernel 10-50, all-reduce 40-80 on another stream,
    copy 85-90, nothing after; the host op `aten::mm` 0-30, the runtime calls 2-4, 10-12, 20-22.
    """
    trace = builder()
    trace.meta["distributedInfo"] = {"backend": "nccl", "rank": 2, "world_size": 4}
    trace.meta["deviceProperties"] = [
        {"id": 0, "name": "Test GPU", "totalGlobalMem": 1000, "computeMajor": 8, "computeMinor": 0}
    ]
    for number, t in ((5, 1000.0), (6, 1100.0)):
        trace.step(number, t, t + 100)
        op = trace.op("aten::mm", t, t + 30)
        gemm = {"blocks per SM": 0.5, "est. achieved occupancy %": 40}
        trace.launch("sm80_xmma_gemm_bf16", t + 2, t + 10, t + 50, external=op, **gemm)
        trace.launch(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            t + 10,
            t + 40,
            t + 80,
            external=999,
            stream=20,
        )
        trace.launch("Memcpy DtoH (Device -> Pinned)", t + 20, t + 85, t + 90, external=op, kind="gpu_memcpy")
    return trace


@pytest.fixture
def shipped() -> Path:
    """The public traces, where they are: WINDLASS_TRACES names the folder."""
    folder = os.environ.get("WINDLASS_TRACES")
    if not folder:
        pytest.skip("set WINDLASS_TRACES to the folder of public traces")
    return Path(folder)
