"""Real workers that also say which phase they have reached: `python -m tests.faults.marked worker|supervisor|tokenize ...`.

A mark is a datagram "phase" to the Unix socket in MARKS. Nothing else is changed, so that a kill finds what users run.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

MARKS = "FAULT_MARKS"
PHASES = ("start-up", "step", "save", "validation", "shutdown")


def mark(phase: str) -> None:
    # A full buffer or a reader that has gone must not stop a worker.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(phase.encode(), os.environ[MARKS])


def marked(function: Callable[..., Any], phase: str, afterwards: str | None = None) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        mark(phase)
        result = function(*args, **options)
        if afterwards is not None:
            mark(afterwards)
        return result

    return call


def worker(arguments: list[str]) -> int:
    from tests.faults.lab import Witness

    from windlass.checkpoint.save import Saver
    from windlass.train import hooks, loop
    from windlass.train.worker import script

    class Marks(hooks.Hook):
        def on_step_begin(self, training: Any) -> None:
            mark("step")

        def on_wait(self, training: Any, phase: str) -> None:
            mark(phase)

        def on_stop(self, training: Any, reason: str | None) -> None:
            mark("shutdown")

    train = loop.run
    loop.run = lambda recipe, run, start, place, own, say: train(  # type: ignore[assignment]
        recipe, run, start, place, [*own, Witness(), Marks()], say
    )
    Saver._write = marked(Saver._write, "save", "saved")  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    return script()


def supervisor(arguments: list[str]) -> int:
    from windlass.train import supervisor as product

    argv_of = product.worker_argv

    def argv(*args: Any) -> Callable[[int], list[str]]:
        inner = argv_of(*args)
        return lambda attempt: [sys.executable, "-m", "tests.faults.marked", "worker", *inner(attempt)[3:]]

    product.worker_argv = argv  # type: ignore[assignment]
    return product.main(arguments)


def tokenize(arguments: list[str]) -> int:
    from windlass.config.sources import load_data_file
    from windlass.data import chunks, joining
    from windlass.data import tokenize as product

    chunks.ChunkWorker.process = marked(chunks.ChunkWorker.process, "step")  # type: ignore[method-assign]
    joining._write_shards = marked(joining._write_shards, "save")
    joining._write_manifest = marked(joining._write_manifest, "shutdown")
    product.tokenize(load_data_file(arguments[0]))
    return 0


if __name__ == "__main__":
    mark("start-up")
    sys.exit({"worker": worker, "supervisor": supervisor, "tokenize": tokenize}[sys.argv[1]](sys.argv[2:]))
