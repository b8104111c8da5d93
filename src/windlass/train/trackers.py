"""How do W&B, TensorBoard and MLflow get to see a run? As exports of metrics.jsonl, in a thread of their own; none can stop training.

Offline by default: W&B writes parts that `windlass sync` sends later. All parts of a run carry one id, kept in the run folder, and
a counter that goes on over restarts, because the server drops lines whose number goes back. Keys and passwords are the tracker's
own affair and are never written by us.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from windlass.config import Recipe
from windlass.files import write_atomic
from windlass.runs.folder import Run
from windlass.train.hooks import Hook

Line = dict[str, Any]
MOST_WAITING = 10_000
"""Lines that may wait for a slow tracker; beyond that new ones are let go and counted (they are in metrics.jsonl)."""
MOST_FAILURES = 3
"""Failures in a row after which a tracker is closed."""
CLOSE_SECONDS = 30.0
LOOK_SECONDS = 5.0
"""How often the exporter looks whether somebody asks for a closed part."""


class Sink(Protocol):
    name: str

    def log(self, line: Line, count: int) -> None: ...

    def close(self) -> None: ...


class Trackers(Hook):
    """The hook; does something on the main rank only."""

    def __init__(self, openers: dict[str, Callable[[Run, Recipe, int], Sink]] | None = None) -> None:
        self._openers = OPENERS if openers is None else openers
        self._exporter: Exporter | None = None
        self._every = 1
        self._seen = 0

    def on_start(self, job: Any) -> None:
        wanted = [name for name in ("wandb", "tensorboard", "mlflow") if getattr(job.recipe.trackers, name)]
        if not wanted or not job.world.is_main:
            return
        self._every = job.recipe.trackers.every
        self._exporter = Exporter(
            job.run, job.recipe, {n: self._openers[n] for n in wanted}, first_step=job.step, say=job.say
        )
        self._exporter.start()

    def on_log(self, job: Any, line: Line) -> None:
        self._seen += 1
        if self._exporter is not None and (self._seen - 1) % self._every == 0:
            self._exporter.put(line)

    def on_stop(self, job: Any, reason: str | None) -> None:
        if self._exporter is not None:
            self._exporter.stop()


class Exporter:
    """Lines go into a queue; one thread opens the trackers and feeds them, so that neither a slow disk nor a hang is felt."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        openers: dict[str, Callable[[Run, Recipe, int], Sink]],
        *,
        first_step: int,
        say: Callable[[str], None],
    ) -> None:
        self._run, self._recipe, self._openers, self._first, self._say = run, recipe, openers, first_step, say
        self._queue: queue.Queue[Line | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="windlass-trackers", daemon=True)
        self._sinks: dict[str, Sink] = {}
        self._failures: dict[str, int] = {}
        self._looked_at = self._opened_at = time.monotonic()
        self._count = 0
        self.dropped = 0

    def start(self) -> None:
        self._count = written_lines(
            self._run
        )  # before the first new line: those that wait while W&B opens are counted once
        self._thread.start()

    def put(self, line: Line) -> None:
        try:
            self._queue.put_nowait(dict(line))
        except queue.Full:
            self.dropped += 1

    def stop(self) -> None:
        """Wait a little for what is in the queue; a tracker that hangs is left behind."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self.dropped:
            self._say(
                f"trackers were too slow for {self.dropped:,} lines, which they lack; metrics.jsonl has every line"
            )
        if self._thread.is_alive():
            self._say(
                f"trackers did not close within {CLOSE_SECONDS:.0f} s and were left behind; metrics.jsonl has every line"
            )

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        for name, opener in self._openers.items():
            try:
                self._sinks[name] = opener(self._run, self._recipe, self._first)
            except (Exception, SystemExit) as error:  # a tracker is never worth a training run; some leave by exit()
                self._say(f"tracker {name} is off: {_short(error)}; metrics.jsonl has every line")
        self._opened_at = time.monotonic()
        count = self._count
        while (line := self._queue.get()) is not None:
            count += 1
            for name in list(self._sinks):
                self._log(name, line, count)
            self._part_if_asked()
        offline = self._writes_parts()
        for name in list(self._sinks):
            with contextlib.suppress(Exception, SystemExit):
                self._sinks[name].close()
        if offline:
            self._ask_for_sync()

    def _log(self, name: str, line: Line, count: int) -> None:
        try:
            self._sinks[name].log(line, count)
            self._failures[name] = 0
        except (Exception, SystemExit) as error:
            self._failures[name] = self._failures.get(name, 0) + 1
            if self._failures[name] >= MOST_FAILURES:
                self._say(f"tracker {name} is off after {MOST_FAILURES} failures: {_short(error)}")
                sink = self._sinks.pop(name)
                with contextlib.suppress(Exception, SystemExit):
                    sink.close()

    def _writes_parts(self) -> bool:
        return "wandb" in self._sinks and not self._recipe.trackers.online

    def _part_if_asked(self) -> None:
        """`windlass sync` asks for the part to be closed: it sends whole parts only, because W&B appends whatever it is sent, also twice."""
        if not self._writes_parts() or time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        request = self._run.requests / "part"
        if request.exists():
            self._begin_part()
            with contextlib.suppress(OSError):
                request.unlink()
            self._ask_for_sync()

    def _begin_part(self) -> None:
        sink = self._sinks.pop("wandb")
        try:
            sink.close()
            # A part is named by the second it began in: a second one of that name would write over the first.
            time.sleep(max(0.0, 1.1 - (time.monotonic() - self._opened_at)))
            self._opened_at = time.monotonic()
            self._sinks["wandb"] = self._openers["wandb"](self._run, self._recipe, self._first)
        except (Exception, SystemExit) as error:
            self._say(f"tracker wandb is off: {_short(error)}; metrics.jsonl has every line")

    def _ask_for_sync(self) -> None:
        """Leave the trigger that `windlass sync --watch` looks for."""
        with contextlib.suppress(OSError):
            write_atomic(self._run.requests / "sync", f"{time.time()}\n", sync=False)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def written_lines(run: Run) -> int:
    """How many lines the record holds: the counter of a resumed export goes on from there."""
    try:
        with run.metrics_file.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def numbers(line: Line) -> dict[str, float]:
    return {k: float(v) for k, v in line.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def run_id(run: Run) -> str:
    """One id for all parts of a run on all machines it moves to."""
    file = run.trackers / "id"
    with contextlib.suppress(OSError):
        known = file.read_text().strip()
        if known:
            return known
    made = f"{re.sub(r'[^A-Za-z0-9-]+', '-', run.name)[:40].strip('-')}-{uuid.uuid4().hex[:8]}"
    write_atomic(file, made + "\n")
    return made


def shown_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe as the tracker shows it; environment variables of the launch may hold keys and stay out."""
    value: dict[str, Any] = recipe.model_dump(mode="json")
    value["launch"] = {k: v for k, v in value.get("launch", {}).items() if k != "env"}
    return value


class WandbSink:
    name = "wandb"

    def __init__(self, run: Run, recipe: Recipe, first_step: int) -> None:
        import wandb

        folder = run.trackers / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", disable_git=True, save_code=False, silent=True, disable_code=True)
        self._run = wandb.init(
            project=recipe.trackers.project, name=recipe.name, id=run_id(run), resume="allow", dir=str(folder),
            mode="online" if recipe.trackers.online else "offline", config=shown_config(recipe), settings=settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="tokens")

    def log(self, line: Line, count: int) -> None:
        self._run.log(numbers(line), step=count)

    def close(self) -> None:
        self._run.finish()  # quiet by its settings; the keyword is gone from new releases


class TensorboardSink:
    name = "tensorboard"

    def __init__(self, run: Run, recipe: Recipe, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: what a crashed process wrote beyond the checkpoint is hidden, as it is repeated now.
        self._writer = SummaryWriter(
            str(run.trackers / "tensorboard"), purge_step=first_step + 1 if first_step else None, flush_secs=30
        )

    def log(self, line: Line, count: int) -> None:
        values = numbers(line)
        step = int(values.get("step", count))
        for key, value in values.items():
            if key not in ("step", "time"):
                self._writer.add_scalar(key, value, step, walltime=values.get("time"))

    def close(self) -> None:
        self._writer.close()


class MlflowSink:
    name = "mlflow"

    def __init__(self, run: Run, recipe: Recipe, first_step: int) -> None:
        import os

        # The plain-file store needs no database and travels with the run folder; newer releases want to be told that it is meant.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        folder = (run.trackers / "mlflow").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=folder.as_uri())
        found = self._client.get_experiment_by_name(recipe.trackers.project)
        experiment = found.experiment_id if found else self._client.create_experiment(recipe.trackers.project)
        self._id = self._open(experiment, run, recipe)

    def _open(self, experiment: str, run: Run, recipe: Recipe) -> str:
        wanted = run_id(run)
        known = self._client.search_runs([experiment], filter_string=f"tags.windlass_id = '{wanted}'", max_results=1)
        if known:
            self._client.update_run(known[0].info.run_id, status="RUNNING")
            return str(known[0].info.run_id)
        made = self._client.create_run(experiment, tags={"windlass_id": wanted, "mlflow.runName": recipe.name})
        for key, value in _flat(shown_config(recipe)):
            self._client.log_param(made.info.run_id, key, str(value)[:500])
        return str(made.info.run_id)

    def log(self, line: Line, count: int) -> None:
        from mlflow.entities import Metric

        values = numbers(line)
        step, at = int(values.get("step", count)), int(values.get("time", time.time()) * 1000)
        self._client.log_batch(
            self._id, [Metric(mlflow_name(k), v, at, step) for k, v in values.items() if k not in ("step", "time")]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_name(key: str) -> str:
    """MLflow refuses a whole line for one name outside its alphabet; a source of the validation split may be called anything."""
    plain = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)
    return "/".join(part for part in plain.split("/") if part.strip(".")) or "_"


def _flat(value: dict[str, Any]) -> list[tuple[str, Any]]:
    from windlass.config.load import flatten

    return [(k, v) for k, v in flatten(value) if v not in (None, [], {})]


OPENERS: dict[str, Callable[[Run, Recipe, int], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": TensorboardSink,
    "mlflow": MlflowSink,
}
