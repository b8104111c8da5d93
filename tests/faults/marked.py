"""Real commands that also say which phase they have reached: `python -m tests.faults.marked worker|supervisor|COMMAND ...`.

A mark is a datagram "phase" to the Unix socket in MARKS. Nothing else is changed, so that a kill finds what users run.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

MARKS = "FAULT_MARKS"
PHASES = ("start-up", "step", "save", "validation", "shutdown")
# Command of windlass -> the functions with which its phases begin.
COMMANDS = {
    "tokenize": {
        "windlass.data.chunks:ChunkWorker.process": "step",
        "windlass.data.joining:_write_shards": "save",
        "windlass.data.joining:_write_manifest": "shutdown",
    },
    "sweep": {
        "windlass.launch.sweep.execute:run_point": "step",
        "windlass.launch.sweep.folder:SweepFolder.add_outcome": "save",
        "windlass.cli.sweep:_finish": "shutdown",
    },
    "eval": {
        "windlass.evaluate.perplexity:token_losses": "step",
        "windlass.evaluate.likelihood:_score_rows": "step",
        "windlass.runs.scores:append_scores": "save",
        "windlass.evaluate.scores:scores_page": "shutdown",
    },
    "stage": {
        "shutil:copy2": "step",
        "windlass.launch.staging:link_checkpoints": "save",
        "windlass.cli.launch:show": "shutdown",
    },
    "export": {
        "windlass.convert.export:write_weights": "save",
        "windlass.convert.export:compare_logits": "validation",
        "windlass.cli.export:show": "shutdown",
    },
    "import": {
        "windlass.convert.imports:write_run": "save",
        "windlass.convert.imports:compare_logits": "validation",
        "windlass.cli.export:show": "shutdown",
    },
    "finetune": {},  # its workers have marks
}


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
        recipe, run, start, place, [*own, *([] if recipe.reads_examples else [Witness()]), Marks()], say
    )
    Saver._write = marked(Saver._write, "save", "saved")  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    return script()


def mark_workers() -> None:
    """The supervisor starts workers with marks."""
    from windlass.train import supervisor as product

    argv_of = product.worker_argv

    def argv(*args: Any) -> Callable[[int], list[str]]:
        inner = argv_of(*args)
        return lambda attempt: [sys.executable, "-m", "tests.faults.marked", "worker", *inner(attempt)[3:]]

    product.worker_argv = argv  # type: ignore[assignment]


def supervisor(arguments: list[str]) -> int:
    from windlass.train import supervisor as product

    mark_workers()
    return product.main(arguments)


def command(arguments: list[str]) -> int:
    from windlass import cli

    mark_workers()
    for place, phase in COMMANDS[arguments[0]].items():
        module, _, path = place.partition(":")
        owner_path, _, name = path.rpartition(".")
        owner = attrgetter(owner_path)(import_module(module)) if owner_path else import_module(module)
        setattr(owner, name, marked(getattr(owner, name), phase, "saved" if phase == "save" else None))
    sys.argv[1:] = arguments
    cli.main()
    return 0


if __name__ == "__main__":
    mark("start-up")
    programs = {"worker": worker, "supervisor": supervisor}
    sys.exit(programs[sys.argv[1]](sys.argv[2:]) if sys.argv[1] in programs else command(sys.argv[1:]))
