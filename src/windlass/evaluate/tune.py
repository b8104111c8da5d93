"""How does a fine-tune run on several processes? Each opens the model, joins the others and takes its part; rank 0 writes the result."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.evaluate.classify import HowToTune, classify, read_tsv, scores_of
from windlass.evaluate.opened import find_tokenizer, open_model
from windlass.evaluate.record import Score, append


@dataclass(frozen=True)
class Result:
    train: str
    labels: list[str]
    processes: int
    scores: list[Score]


def work(
    run: Path,
    train: Path,
    test: Path | None,
    how: HowToTune,
    *,
    where: Any,
    step: int | None = None,
    device: str | None = None,
    save: bool = True,
) -> Result:
    """One process's part of a fine-tune. Files are read first: a bad one costs no model."""
    lines, tests = read_tsv(train), read_tsv(test) if test is not None else None
    chosen = device or (f"cuda:{where.local_rank}" if torch.cuda.is_available() else "cpu")
    joined = join(where, chosen)
    try:
        first = open_model(run, step=step, device=chosen, dtype="fp32")
        words, kept = find_tokenizer(first), [first]

        def fresh() -> Any:
            return kept.pop() if kept else open_model(run, step=step, device=chosen, dtype="fp32")

        found, labels = classify(fresh, words, lines, tests, how)
        scores = scores_of(Path(train).stem, found, labels, how)
        if where.rank == 0 and save and first.run is not None:
            append(first.run, scores, step=first.step, tokens=first.tokens)
        return Result(str(train), labels, where.world_size, scores)
    finally:
        if joined:
            dist.destroy_process_group()


def join(where: Any, device: str) -> bool:
    """A process group, unless this process is alone or already in one."""
    if where.world_size == 1 or dist.is_initialized():
        return False
    os.environ.setdefault("MASTER_ADDR", getattr(where, "master_addr", None) or "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(getattr(where, "master_port", None) or 29577))
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.startswith("cuda") else "gloo", rank=where.rank, world_size=where.world_size
    )
    return True


def start_workers(devices: int) -> int:
    """This very command once per device; the first exit code that is not 0, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "windlass", *sys.argv[1:]]
    children = []
    for rank in range(devices):
        seat = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": devices,
            "LOCAL_WORLD_SIZE": devices,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        children.append(subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in seat.items()}}))
    try:
        return _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Until all are done, or one fails: the others would wait for it for ever."""
    import time

    while True:
        codes = [child.poll() for child in children]
        if any(codes):
            return next(code for code in codes if code) or 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)
