"""Causes every fault we can, for real, and proves that the run comes out the same.

A small Llama is trained on the CPU by several processes, forked from this one so that torch is imported once. The uninterrupted
run is the reference: losses are compared as hexadecimal floats, final weights and moments bit by bit, and the sequences that
every step was really given are compared with the stream's own order. `python -m benchmarks.faults` runs the long form.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from windlass.checkpoint import files, save
from windlass.checkpoint.load import read_extra
from windlass.clusters.scheduler import place
from windlass.config import Loaded, Recipe, validate
from windlass.data import shards as megatron
from windlass.data.stream import open_stream
from windlass.errors import EXIT_HANG, EXIT_RESUMABLE, CheckpointError
from windlass.files import append_line_buffered, read_json_lines
from windlass.launch.start import bind_start
from windlass.runs.faults import exit_code_of
from windlass.runs.folder import Run, create_run
from windlass.runs.lock import locked
from windlass.runs.starts import Start
from windlass.train import hooks, loop, watchdog
from windlass.train import validate as validation
from windlass.train.batches import BatchReader, TokenBatch
from windlass.train.checkpointing import Checkpointing
from windlass.train.hooks import Progress, Training
from windlass.train.step import Stepper
from windlass.train.supervisor import LISTEN_HANDLE, find_fault

Harm = Callable[[int], None]
"""Called in a worker (with its rank) before it trains: it arms the fault."""


# -- the recipe and its data ------------------------------------------------------------------------------------------------


def recipe(store: Path, *, steps: int = 40, every: int = 4, **tables: dict[str, Any]) -> Recipe:
    raw: dict[str, Any] = {
        "name": "faults",
        "model": {"family": "llama", "layers": 2, "width": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 128},
        "data": {"store": str(store), "seq_len": 16, "batch_tokens": 128, "max_epochs": 1.0},
        "optim": {"lr": 3e-3, "warmup": 512},
        "train": {"precision": "fp32", "steps": steps, "eval_every": 10, "eval_tokens": 256},
        "layout": {"shard": "full"},
        "save": {"every": every, "keep_last": 3, "keep_best": 1},
        "energy": {"enabled": False},
    }
    for name, table in tables.items():
        raw[name] = {**raw[name], **table}
    return validate(Recipe, raw, "faults")


def write_store(folder: Path, train_tokens: int = 40_000, validation_tokens: int = 2_000) -> Path:
    """A token store of random tokens in which no sequence comes twice."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, dtype = np.random.default_rng(5), np.dtype("<u2")
    shards: dict[str, list[dict[str, Any]]] = {}
    for split, count in (("train", train_tokens), ("validation", validation_tokens)):
        name = f"noise-{split}-00000.bin"
        rng.integers(0, 128, count, dtype=np.uint16).astype(dtype).tofile(folder / name)
        lengths = np.full(count // 100, 100, dtype=np.int32)
        (folder / name).with_suffix(".idx").write_bytes(b"".join(megatron.index_parts(lengths, dtype)))
        shards[split] = [{"file": name, "tokens": count, "documents": len(lengths)}]
    source = {
        "tokens": train_tokens + validation_tokens,
        "documents": (train_tokens + validation_tokens) // 100,
        "documents_in": (train_tokens + validation_tokens) // 100,
        "bytes": None,
        "rejected": {},
        "filtered": {},
        "shards": shards,
    }
    manifest = {
        "kind": "windlass-store", "dtype": "<u2", "sources": {"noise": source}, "max_token": 127, "ledger_hash": "none",
        "tokens": source["tokens"], "documents": source["documents"],
        "tokenizer": {"vocab_size": 128, "eos": 0, "file": "tokenizer.json", "hash": "none"},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


# -- workers ----------------------------------------------------------------------------------------------------------------


class Witness(hooks.Hook):
    """Writes down which sequences each step was really given."""

    def on_start(self, training: Training) -> None:
        inner, path = training.stepper.step, training.run.ranks / f"samples-{training.world.rank:05d}.jsonl"
        mark = {"begun": training.start.created_at, "data_rank": training.world.data_rank}

        def step(batch: TokenBatch, *rest: Any, **options: Any) -> Any:
            sums = [zlib.crc32(row.numpy().astype(np.int32).tobytes()) for row in batch.tokens]
            append_line_buffered(path, {"step": training.step + 1, **mark, "samples": sums})
            return inner(batch, *rest, **options)

        training.stepper.step = step  # type: ignore[method-assign]


@dataclass
class Workers:
    """Forked processes that train one run."""

    run: Run
    pids: list[int]
    codes: dict[int, int] = field(default_factory=dict)
    """Rank -> exit code, negative for a signal."""
    began: float = field(default_factory=time.time)

    def poll(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)

    def wait(self, grace: float = 4.0, limit: float = 240.0) -> list[int]:
        """Exit codes once all are gone. After the first failure the rest get a grace, as the supervisor gives it."""
        end, failed_at = time.monotonic() + limit, None
        while len(self.codes) < len(self.pids):
            self.poll()
            if failed_at is None and any(code not in (0, EXIT_RESUMABLE) for code in self.codes.values()):
                failed_at = time.monotonic()
            if time.monotonic() > (end if failed_at is None else failed_at + grace):
                self.kill()
            time.sleep(0.01)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def kill(self, ranks: list[int] | None = None, number: int = signal.SIGKILL) -> None:
        self.poll()
        for rank in range(len(self.pids)) if ranks is None else ranks:
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], number)

    def wait_for_step(self, step: int, limit: float = 120.0) -> bool:
        """Until the metrics show a step of this start (True), or the workers are gone."""
        end = time.monotonic() + limit
        while time.monotonic() < end and len(self.codes) < len(self.pids):
            last = self.run.last_metrics()
            if (last.time or 0) >= self.began and (last.step or 0) >= step:
                return True
            self.poll()
            time.sleep(0.005)
        return False


def start(recipe: Recipe, run: Run, world: int, harm: Harm | None = None, logs: Path | None = None) -> Workers:
    """Fork the workers of one start. With `logs` elsewhere the run's own folder is not locked and holds no open file."""
    pids: list[int] = []
    meeting = socket.socket()
    meeting.bind(("127.0.0.1", 0))
    meeting.listen(1024)
    bound = bind_start(run, devices=world, devices_per_node=world)
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _worker(recipe, run, bound, rank, meeting, harm, logs)
        pids.append(pid)
    meeting.close()
    return Workers(run, pids)


def _worker(
    recipe: Recipe, run: Run, bound: Start, rank: int, meeting: socket.socket, harm: Harm | None, logs: Path | None
) -> None:
    code = 70
    try:
        world, port, handle = bound.devices, meeting.getsockname()[1], meeting.detach()
        if rank:
            os.close(handle)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        log = os.open((logs or run.logs) / f"worker-{rank:05d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LISTEN_HANDLE: str(handle),
        }  # fmt: skip
        torch.set_num_threads(1)
        if harm is not None:
            harm(rank)
        with locked(run.lock_file) if rank == 0 and logs is None else contextlib.nullcontext():
            code = loop.run(recipe, run, bound, place(), [Witness()])
    except BaseException as error:
        code = exit_code_of(error)
    finally:
        os._exit(code)


# -- faults that are armed inside a worker --------------------------------------------------------------------------------------


def kill_in(owner: Any, name: str, *, call: int = 1, ranks: tuple[int, ...] = (0,), after: bool = False) -> Harm:
    """SIGKILL this process inside the n-th call of a function, before or after it has done its work."""

    def harm(rank: int) -> None:
        if rank not in ranks:
            return
        inner, count = getattr(owner, name), [0]

        def deadly(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == call and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = inner(*args, **kwargs)
            if count[0] == call and after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, deadly)

    return harm


def kill_while_writing(call: int = 1, ranks: tuple[int, ...] = (0,)) -> Harm:
    """SIGKILL with a shard half on the disk: the file is written, cut to half, and the process ends."""

    def harm(rank: int) -> None:
        if rank not in ranks:
            return
        inner, count = dcp.FileSystemWriter.write_data, [0]

        def deadly(self: Any, plan: Any, planner: Any) -> Any:
            count[0] += 1
            result = inner(self, plan, planner)
            if count[0] == call:
                for path in Path(self.path).glob(f"__{rank}_*.distcp"):
                    os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        dcp.FileSystemWriter.write_data = deadly

    return harm


def bad_gradients(positions: range, ranks: tuple[int, ...]) -> Harm:
    """Not-a-number in one rank's gradients while the stream's position is in a range: bad data, as far as training can see."""

    def harm(rank: int) -> None:
        current: dict[str, Training] = {}
        begin, gradients = loop.open_batches, Stepper.gradients

        def batches(training: Training) -> Any:
            current["training"] = training
            return begin(training)

        def poisoned(self: Any, *args: Any) -> Any:
            result = gradients(self, *args)
            if rank in ranks and current["training"].progress.sequences in positions:
                for slot in self.optimizer.gradients():
                    (slot.to_local() if hasattr(slot, "to_local") else slot).fill_(float("nan"))
            return result

        loop.open_batches, Stepper.gradients = batches, poisoned

    return harm


WATCHDOG_SECONDS = 8.0


def patient_start(then: Harm | None = None) -> Harm:
    """A watchdog of a few seconds must not end a start on a busy machine: only steps are timed so strictly."""

    def harm(rank: int) -> None:
        watchdog.PATIENT_PHASES.update(dict.fromkeys(("start", "restore", "compile"), 30.0))
        if then is not None:
            then(rank)

    return harm


def stuck_data(batch: int, ranks: tuple[int, ...]) -> Harm:
    """Reading a batch never comes to an end, as on a file server that has gone away."""

    def harm(rank: int) -> None:
        inner, count = BatchReader.__next__, [0]

        def read(self: BatchReader) -> Any:
            if rank in ranks and count[0] == batch:
                time.sleep(3600)
            count[0] += 1
            return inner(self)

        BatchReader.__next__ = read  # type: ignore[method-assign]

    return harm


def slow_steps(seconds: float) -> Harm:
    """Steps that take a while, so that a fault from outside finds the run at work; a failed save is tried again soon."""

    def harm(rank: int) -> None:
        inner, save.RETRY_SECONDS = Progress.advance, 0.1

        def slow(self: Progress, plan: Any) -> None:
            time.sleep(seconds)
            inner(self, plan)

        Progress.advance = slow  # type: ignore[method-assign]

    return harm


def jumping_clock(seconds: float, after_calls: int) -> Harm:
    """The wall clock jumps; time.monotonic does not."""

    def harm(rank: int) -> None:
        real, calls = time.time, [0]

        def jumped() -> float:
            calls[0] += 1
            return real() + (seconds if calls[0] > after_calls else 0.0)

        time.time = jumped

    return harm


# -- the proof ------------------------------------------------------------------------------------------------------------------


def losses(run: Run) -> dict[int, str]:
    """Step -> loss as a hexadecimal float; of a step that was done again the last counts."""
    return {m.step: float(m.loss).hex() for m in run.metrics_lines() if m.loss is not None}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, whole."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    state = {
        n: torch.empty(m.size, dtype=m.properties.dtype)
        for n, m in metadata.state_dict_metadata.items()
        if hasattr(m, "size")
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def samples(run: Run) -> dict[int, list[int]]:
    """Step -> the sequences it was given over all ranks; of a step that several starts have done the last start counts."""
    found: dict[int, dict[float, dict[int, list[int]]]] = {}
    for path in sorted(run.ranks.glob("samples-*.jsonl")):
        for record in read_json_lines(path):  # ranks that share a sequence (tensor, pipeline) say the same
            found.setdefault(record["step"], {}).setdefault(record["begun"], {})[record["data_rank"]] = record[
                "samples"
            ]
    return {step: [s for part in starts[max(starts)].values() for s in part] for step, starts in sorted(found.items())}


def expected_samples(recipe: Recipe, steps: int) -> dict[int, list[int]]:
    """What every step must be given: sequences 0, 1, 2, ... of the stream, each once."""
    stream = open_stream(recipe.data, seed=recipe.seed, vocab=recipe.model.vocab)
    batch = recipe.data.batch_tokens // recipe.data.seq_len
    rows = stream.sequences(np.arange(steps * batch))
    sums = [zlib.crc32(row.astype(np.int32).tobytes()) for row in rows]
    assert len(set(sums)) == len(sums), "the data repeat a sequence, so nothing would be proved"
    return {step + 1: sums[step * batch : (step + 1) * batch] for step in range(steps)}


def differences(reference: Run, run: Run, recipe: Recipe) -> list[str]:
    """What is not the same as in the uninterrupted run; empty: everything is, to the last bit."""
    found = []
    steps = recipe.train.steps
    left, right = losses(reference), losses(run)
    if wrong := [s for s in range(1, steps + 1) if left.get(s) != right.get(s)]:
        found.append(
            f"losses differ at {len(wrong)} steps, first {wrong[0]}: {left.get(wrong[0])} and {right.get(wrong[0])}"
        )
    if not run.checkpoint(steps).is_dir():
        return [*found, f"there is no checkpoint of step {steps}"]
    a, b = tensors(reference.checkpoint(steps)), tensors(run.checkpoint(steps))
    if set(a) != set(b):
        found.append("the final checkpoints hold different tensors")
    found += [f"{name} differs in its bits" for name in a if name in b and not torch.equal(a[name], b[name])][:3]
    given, wanted = samples(run), expected_samples(recipe, steps)
    if mistaken := [s for s in wanted if sorted(given.get(s, [])) != sorted(wanted[s])]:
        found.append(f"{len(mistaken)} steps were given other sequences than theirs, first step {mistaken[0]}")
    old, new = (read_extra(r.checkpoint(steps))["extra"] for r in (reference, run))
    if (old["tokens"], old["sequences"]) != (new["tokens"], new["sequences"]):
        found.append(
            f"tokens or position differ: {old['tokens']}, {old['sequences']} and {new['tokens']}, {new['sequences']}"
        )
    return found


# -- cases ------------------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of the table."""

    fault: str
    times: int
    outcome: str
    steps_lost: int | None
    seconds_to_recover: float | None
    """Median from the fault to the first step after it."""
    ok: bool


class Lab:
    """A folder, a store, and the uninterrupted run of each recipe."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.store = write_store(folder / "store")
        self._references: dict[str, Run] = {}
        self._count = 0

    def new_run(self, recipe: Recipe, name: str, parent: Path | None = None) -> Run:
        self._count += 1
        return create_run(
            (parent or self.folder) / f"{name.replace(' ', '-')}-{self._count}", Loaded(recipe, "", None, {})
        )

    def reference(self, recipe: Recipe, world: int) -> Run:
        key = f"{world} {recipe.model_dump_json()}"
        if key not in self._references:
            run = self.new_run(recipe, "reference")
            codes = start(recipe, run, world).wait()
            assert codes == [0] * world, f"the uninterrupted run failed: {codes}; see {run.logs}"
            self._references[key] = run
        return self._references[key]

    def finish(self, recipe: Recipe, run: Run, world: int) -> list[int]:
        return start(recipe, run, world).wait()


def recovery(run: Run, moments: list[float]) -> list[float]:
    """Seconds from each fault to the first step of the next start (of the same one, when it needed none)."""
    times = sorted(m.time for m in run.metrics_lines())
    starts = [e.time for e in run.events() if e.event in ("started", "resumed")]
    begins = [next((s for s in starts if s > moment), moment + 0.02) for moment in moments]
    return [
        after[0] - moment
        for moment, begin in zip(moments, begins, strict=True)
        if (after := [t for t in times if t > begin])
    ]


def lost(run: Run) -> int:
    return sum(int(e.lost_steps or 0) for e in run.events() if e.event == "resumed")


def median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def judged(
    lab: Lab,
    fault: str,
    recipe: Recipe,
    world: int,
    run: Run,
    moments: list[float],
    expect: str = "the same to the last bit",
) -> Row:
    problems = differences(lab.reference(recipe, world), run, recipe)
    return Row(
        fault, len(moments), "; ".join(problems) or expect, lost(run), median(recovery(run, moments)), not problems
    )


def killed_at_random(lab: Lab, kills: int = 12, world: int = 2, one: bool = False, steps: int = 40) -> Row:
    """SIGKILL all ranks (or one) at random moments of a run, again and again, until it is finished."""
    made, moments = recipe(lab.store, steps=steps), []
    run = lab.new_run(made, "killed")
    for _ in range(kills):
        reached = files.newest_step(run) or 0
        workers = start(made, run, world)
        if not workers.wait_for_step(min(steps - 1, reached + lab.random.randint(1, 6))):
            break
        time.sleep(lab.random.random() * 0.2)
        moments.append(time.time())
        workers.kill([lab.random.randrange(world)] if one else None)
        workers.wait(grace=2.0)
    lab.finish(made, run, world)
    return judged(lab, f"SIGKILL of {'one rank' if one else 'all ranks'} at a random moment", made, world, run, moments)


def killed_in(lab: Lab, fault: str, harms: list[Harm], world: int = 2, steps: int = 40) -> Row:
    """One start per harm, each of which ends in a SIGKILL at an exact place; then a quiet start to the end."""
    made, moments = recipe(lab.store, steps=steps), []
    run = lab.new_run(made, fault)
    for harm in harms:
        codes = start(made, run, world, harm).wait(grace=2.0)
        if -signal.SIGKILL not in codes:
            return Row(fault, len(moments), f"the fault did not happen: exit codes {codes}", None, None, False)
        moments.append(time.time())
    lab.finish(made, run, world)
    return judged(lab, fault, made, world, run, moments)


def killed_while_saving(lab: Lab, times: int = 3) -> Row:
    return killed_in(
        lab,
        "SIGKILL while a shard is half written",
        [kill_while_writing(call=1 + i % 2, ranks=(i % 2,)) for i in range(times)],
    )


def killed_before_manifest(lab: Lab, times: int = 2) -> Row:
    return killed_in(
        lab,
        "SIGKILL between the shards and the manifest",
        [kill_in(files, "publish", call=1 + i % 2) for i in range(times)],
    )


def killed_before_rename(lab: Lab, times: int = 2) -> Row:
    return killed_in(
        lab,
        "SIGKILL between the manifest and the rename",
        [kill_in(files, "adopt", call=1 + i % 2) for i in range(times)],
    )


def killed_after_rename(lab: Lab, times: int = 2) -> Row:
    return killed_in(
        lab,
        "SIGKILL just after the rename",
        [kill_in(files, "adopt", call=1 + i % 2, after=True) for i in range(times)],
    )


def killed_while_removing(lab: Lab, times: int = 2) -> Row:
    return killed_in(
        lab,
        "SIGKILL while an old checkpoint is deleted",
        [kill_in(files.shutil, "rmtree", call=1 + i) for i in range(times)],
    )


def killed_in_validation(lab: Lab, times: int = 3) -> Row:
    harms = [kill_in(validation.Validator, "_batch", call=2 + i, ranks=(i % 2,)) for i in range(times)]
    return killed_in(lab, "SIGKILL during validation", harms)


def killed_while_restoring(lab: Lab, times: int = 2) -> Row:
    first: list[Harm] = [kill_in(files, "adopt", call=2, after=True)]
    return killed_in(
        lab,
        "SIGKILL while a checkpoint is read",
        first + [kill_in(Checkpointing, "_restore", ranks=(i % 2,)) for i in range(times)],
    )


def signalled(lab: Lab, number: int, whom: tuple[int, ...], world: int = 2, steps: int = 40) -> Row:
    """A signal to some ranks: all finish the step, save, and leave with the code for "go on"."""
    name = signal.Signals(number).name
    fault = f"{name} to {'one rank' if len(whom) < world else 'all ranks'}"
    made = recipe(lab.store, steps=steps, every=1000)
    run = lab.new_run(made, fault)
    workers = start(made, run, world)
    workers.wait_for_step(7)
    moment = time.time()
    workers.kill(list(whom), number)
    codes = workers.wait()
    stopped = [e for e in run.events() if e.event == "stopped"]
    saved = files.newest_step(run)
    if codes != [EXIT_RESUMABLE] * world or not stopped or saved != stopped[0].step:
        return Row(fault, 1, f"exit codes {codes}, saved step {saved}, stopped events {stopped}", None, None, False)
    lab.finish(made, run, world)
    reference = recipe(lab.store, steps=steps)  # the save interval does not change the numbers
    return judged(
        lab,
        fault,
        reference,
        world,
        run,
        [moment],
        f"saved step {saved}, exit code {EXIT_RESUMABLE}, then the same to the last bit",
    )


def damaged(lab: Lab, kind: str, world: int = 2, steps: int = 24) -> Row:
    """Stop, harm the newest checkpoint, go on: it is named, set aside, and the one before is used."""
    made = recipe(lab.store, steps=steps)
    run = lab.new_run(made, kind)
    workers = start(made, run, world)
    workers.wait_for_step(14)
    workers.kill()
    workers.wait()
    newest = files.steps_on_disk(run)[-1][1]
    shard = newest / "__1_0.distcp"
    {
        "bit-flipped shard": lambda: _flip(shard),
        "truncated shard": lambda: os.truncate(shard, shard.stat().st_size - 100),
        "missing shard": shard.unlink,
        "missing manifest": (newest / files.MANIFEST).unlink,
        "damaged metadata": lambda: _flip(newest / ".metadata"),
    }[kind]()
    moment = time.time()
    lab.finish(made, run, world)
    events = [e for e in run.events() if e.event == "damaged" and e.checkpoint == newest.name]
    row = judged(
        lab,
        kind,
        made,
        world,
        run,
        [moment],
        f"set aside ({events[0].reason[:70]}), one before used, same to the last bit" if events else "",
    )
    return row if events else Row(kind, 1, "the damage was not noticed", None, None, False)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of its own; needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_full(lab: Lab, world: int = 2, steps: int = 40) -> Row:
    """The disk fills up to the last byte while the run trains, and is freed again before its end."""
    made = recipe(lab.store, steps=steps)
    with small_disk(lab.folder / "small", "16m") as disk:
        run = lab.new_run(made, "full", disk)
        workers = start(made, run, world, slow_steps(0.15))
        workers.wait_for_step(9)
        moment = time.time()
        _fill(disk / "filler")
        noted = os.statvfs(disk).f_bavail == 0
        time.sleep(2.5)
        (disk / "filler").unlink()
        codes = workers.wait()
        failed = [e for e in run.events() if e.event == "save_failed"]
        if codes != [0] * world or not failed or not noted:
            return Row("disk full", 1, f"exit codes {codes}, {len(failed)} failed saves", None, None, False)
        text = f"{len(failed)} failed saves recorded, training continued, saved again when there was space; same to the last bit"
        return judged(lab, "disk full, then freed", made, world, run, [moment], text)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (2**16, 512, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def _wait_for(true: Callable[[], bool], limit: float) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


def read_only(lab: Lab, world: int = 2, steps: int = 24) -> Row:
    """The file system turns read-only under a run: it trains to its end, says that the last save failed, and loses only those steps."""
    made = recipe(lab.store, steps=steps)
    with small_disk(lab.folder / "fixed", "32m") as disk:
        run = lab.new_run(made, "fixed", disk)
        workers = start(made, run, world, slow_steps(0.15), logs=lab.folder)
        workers.wait_for_step(9)
        moment = time.time()
        turned = _wait_for(
            lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode == 0, 5
        )
        codes = workers.wait()
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        if not turned or codes[0] != CheckpointError.exit_code:
            return Row("read-only folder", 1, f"remounted: {turned}, exit codes {codes}", None, None, False)
        lab.finish(made, run, world)
        text = f"exit code {codes[0]}, earlier checkpoints complete; then the same to the last bit"
        row = judged(lab, "folder turns read-only", made, world, run, [moment], text)
        # It trained to its end on a disk that took no metrics: everything after the last save was lost.
        row.steps_lost = steps - next(e.step for e in run.events() if e.event == "resumed")
        return row


def hung(lab: Lab, world: int = 2, steps: int = 24) -> Row:
    """One rank is stopped (SIGSTOP): the others name it within the watchdog's time and end the job."""
    made = recipe(lab.store, steps=steps, train={"watchdog_seconds": WATCHDOG_SECONDS})
    run = lab.new_run(made, "hung")
    workers = start(made, run, world, patient_start())
    workers.wait_for_step(9)
    moment = time.time()
    workers.kill([1], signal.SIGSTOP)
    return named(lab, "one rank frozen (SIGSTOP)", made, run, workers, moment, "is frozen or gone")


def stuck(lab: Lab, world: int = 2, steps: int = 24) -> Row:
    """One rank waits for data forever, the others for it: the one is named, not the others."""
    made = recipe(lab.store, steps=steps, train={"watchdog_seconds": WATCHDOG_SECONDS})
    run = lab.new_run(made, "stuck")
    workers = start(made, run, world, patient_start(stuck_data(9, (1,))))
    workers.wait_for_step(9)
    return named(
        lab,
        "one rank waits for data forever",
        made,
        run,
        workers,
        time.time(),
        "entered|did not reach the point where the others wait",
    )


def named(lab: Lab, fault: str, made: Recipe, run: Run, workers: Workers, moment: float, words: str) -> Row:
    """Rank 0 has to say that it is rank 1, and why, and leave; then the run is finished quietly."""
    _wait_for(lambda: (workers.poll(), 0 in workers.codes)[1], 240)
    seconds, code = time.time() - moment, workers.codes.get(0)
    workers.kill()
    workers.wait()
    found = find_fault(run, (0, code or 1), [code, None])
    if (code, found.kind, found.rank) != (EXIT_HANG, "hang", 1) or not re.search(words, found.error):
        return Row(fault, 1, f"exit code {code}, {found}", None, None, False)
    lab.finish(made, run, len(workers.pids))
    text = f"rank 1 named and job ended after {seconds:.0f} s, then the same to the last bit"
    return judged(lab, fault, made, len(workers.pids), run, [moment], text)


def nan_on_one_rank(lab: Lab, world: int = 2, steps: int = 24) -> Row:
    """One rank's gradients are not a number for one step: no rank takes the step."""
    made = recipe(lab.store, steps=steps)
    run = lab.new_run(made, "nan")
    codes = start(made, run, world, bad_gradients(range(8 * 8, 8 * 9), (1,))).wait()
    skipped = [e.step for e in run.events() if e.event == "skipped"]
    finite = (
        all(bool(torch.isfinite(t).all()) for t in tensors(run.checkpoint(steps)).values())
        if codes == [0] * world
        else False
    )
    ok = codes == [0] * world and skipped == [9] and finite
    return Row(
        "not-a-number on one rank",
        1,
        "step 9 skipped on all ranks, weights finite" if ok else f"codes {codes}, skipped {skipped}",
        0,
        None,
        ok,
    )


def rolled_back(lab: Lab, world: int = 2, steps: int = 24) -> Row:
    """A stretch of bad data: after three skipped steps the run goes back once and leaves the stretch out."""
    made = recipe(lab.store, steps=steps, train={"max_skipped": 3, "rollback": True})
    run = lab.new_run(made, "rollback")
    codes = start(made, run, world, bad_gradients(range(13 * 8, 16 * 8), (0, 1))).wait()
    back = [(e.step, e.to_step) for e in run.events() if e.event == "rollback"]
    ok = codes == [0] * world and back == [(16, 12)]
    text = (
        f"rolled back from step {back[0][0]} to {back[0][1]}, data range skipped, finished"
        if ok
        else f"codes {codes}, rollbacks {back}"
    )
    return Row("stretch of bad data with train.rollback", 1, text, 4 if ok else None, None, ok)


def clock_jumps(lab: Lab, world: int = 2, steps: int = 24) -> Row:
    """The wall clock goes back a day in the middle, and the run is killed and resumed after it."""
    made, moments = recipe(lab.store, steps=steps), []
    run = lab.new_run(made, "clock")
    codes = start(made, run, world, jumping_clock(-86400.0, 60)).wait()
    if codes != [0] * world:
        return Row("clock jumps back a day", 1, f"exit codes {codes}", None, None, False)
    row = judged(
        lab,
        "clock jumps back a day",
        made,
        world,
        run,
        moments,
        "no change in saves or losses; the same to the last bit",
    )
    row.times = 1
    return row


def unreadable_version(lab: Lab, world: int = 2, steps: int = 24) -> Row:
    """The newest checkpoint is of a format that this version does not read: the run stops with words and touches nothing."""
    made, fault = recipe(lab.store, steps=steps), "checkpoint of an unknown version"
    run = lab.new_run(made, "version")
    workers = start(made, run, world)
    workers.wait_for_step(14)
    workers.kill()
    workers.wait()
    newest = files.steps_on_disk(run)[-1][1] / files.MANIFEST
    manifest = json.loads(newest.read_text())
    newest.write_text(json.dumps(files.sealed({**manifest, "format": 99})))
    moment, codes = time.time(), lab.finish(made, run, world)
    errors = [e.error for e in run.faults()]
    if codes != [CheckpointError.exit_code] * world or not all("format 99" in e for e in errors) or not newest.exists():
        return Row(fault, 1, f"exit codes {codes}, {errors}", None, None, False)
    newest.write_text(json.dumps(manifest))
    lab.finish(made, run, world)
    return judged(
        lab,
        fault,
        made,
        world,
        run,
        [moment],
        "stopped with exit code 7 and the version's number; read again, the same to the last bit",
    )


def locks(lab: Lab, world: int = 1, steps: int = 8) -> Row:
    """A lock left by a dead process is taken over; one that is held refuses the second job and harms nothing."""
    made = recipe(lab.store, steps=steps)
    run = lab.new_run(made, "lock")
    run.lock_file.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": time.time() - 10, "job": "17"}))
    first = start(made, run, world)
    first.wait_for_step(1)
    second = start(made, run, world).wait()
    codes = first.wait()
    ok = codes == [0] and second == [4]
    row = judged(lab, "stale lock, and a second job on one run", made, world, run, [])
    row.times, row.ok = 2, row.ok and ok
    row.outcome = (
        f"stale lock taken over; second job refused with exit code 4; {row.outcome}"
        if ok
        else f"exit codes {codes} and {second}"
    )
    return row


def other_world_sizes(lab: Lab, worlds: tuple[int, ...] = (2, 1, 4, 2), steps: int = 40) -> Row:
    """Killed and resumed on another number of processes each time: the same tokens in the same order, losses within a tolerance."""
    return changing(
        lab, f"resumed on {' then '.join(map(str, worlds))} processes", [(world, {}) for world in worlds], steps
    )


def other_layouts(lab: Lab, steps: int = 40) -> Row:
    """The same with another layout each time."""
    phases = [
        (4, {"shard": "full"}), (4, {"shard": "hybrid", "shard_size": 2}), (2, {"shard": "none", "tensor": 2}), (2, {"shard": "none", "pipeline": 2}),
        (1, {"shard": "none"}), (2, {"shard": "zero1"}),
    ]  # fmt: skip
    return changing(lab, "resumed as full x 4, hybrid x 4, tensor x 2, pipeline x 2, single, zero1 x 2", phases, steps)


def changing(
    lab: Lab, fault: str, phases: list[tuple[int, dict[str, Any]]], steps: int, tolerance: float = 2e-5
) -> Row:
    made, moments = recipe(lab.store, steps=steps), []
    run = lab.new_run(made, "changing")
    for index, (world, layout) in enumerate(phases):
        workers = start(recipe(lab.store, steps=steps, layout=layout), run, world)
        if index == len(phases) - 1:
            workers.wait()
            break
        # One checkpoint of its own at least, so that the next layout reads what this one wrote.
        wanted = (index + 1) * steps // len(phases)
        _wait_for(
            lambda workers=workers, wanted=wanted: (
                workers.poll(),
                bool(workers.codes) or (files.newest_step(run) or 0) >= wanted,
            )[1],
            120,
        )
        moments.append(time.time())
        workers.kill()
        workers.wait()
    given, wanted_samples = samples(run), expected_samples(made, steps)
    order = all(sorted(given.get(s, [])) == sorted(wanted_samples[s]) for s in wanted_samples)
    left, right = losses(lab.reference(made, 2)), losses(run)
    worst = max(
        (abs(float.fromhex(left[s]) - float.fromhex(right[s])) for s in left if s in right), default=float("inf")
    )
    writers = [e.world_size for e in run.events() if e.event in ("started", "resumed")]
    ok = order and worst <= tolerance and set(left) == set(right) and writers == [world for world, _ in phases]
    text = f"every step was given its own sequences, losses within {worst:.1e} of the uninterrupted run (tolerance {tolerance:.0e})"
    text = (
        text
        if ok
        else f"order {order}, worst {worst}, starts {writers}, steps {len(right)}; {[e.error for e in run.faults()]}"
    )
    return Row(fault, len(moments), text, lost(run), median(recovery(run, moments)), ok)
