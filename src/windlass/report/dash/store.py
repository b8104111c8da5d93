"""Runs that many viewers share: one reader per run, summaries made again only when files have changed."""

import hashlib
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from windlass.files import FileStamps, file_stamps
from windlass.report.collect import RunSummary, brief_columns, collect, find_runs, read_events, sample_columns
from windlass.report.columns import LONG_FILE_BYTES, Columns, axis, thin
from windlass.runs.folder import Run
from windlass.units import print_text

# Files are looked at again at most this often, however many viewers ask.
LOOK_SECONDS = 0.5
LIST_SECONDS = 5.0
PIECE_BYTES = 4 << 20
MAX_CACHED_SERIES = 256
SPARK_POINTS = 60
Curve = tuple[list[float], list[float | None]]


class RunView:
    """One run, live. A long file is shown from a sample at once and read completely in the background."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.id = hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:12]
        # Held while a summary or a page is made: of many viewers who find it out of date, one makes the next.
        self.making = threading.RLock()
        # The run's page as it was last made, and from which summary.
        self.page: tuple[RunSummary, dict[str, Any]] | None = None
        self._lock = threading.Lock()
        self._complete = Columns(run.metrics_file)
        self._sample: Columns | None = None
        self._looked_at = -1e9
        self._summary: tuple[FileStamps, bool, RunSummary] | None = None
        self._glance: tuple[FileStamps, RunSummary, list[float | None]] | None = None
        self._thinned = lru_cache(MAX_CACHED_SERIES)(self._thin)

    def columns(self) -> Columns:
        with self._lock:
            now = time.monotonic()
            if self._sample is None and now - self._looked_at >= LOOK_SECONDS:
                self._looked_at = now
                file = self.run.metrics_file
                if not len(self._complete) and file.exists() and file.stat().st_size > LONG_FILE_BYTES:
                    self._sample = sample_columns(self.run, self.run.events())
                    threading.Thread(target=self._read_completely, name="windlass-dash-read", daemon=True).start()
                else:
                    self._complete.refresh()
            return (self._complete if self._sample is None else self._sample).snapshot()

    def _read_completely(self) -> None:
        while not self._complete.refresh(PIECE_BYTES):
            time.sleep(0.01)  # let requests in between
        with self._lock:
            self._sample = self._summary = None

    def version(self) -> str:
        columns = self.columns()
        return f"{'s' if columns.is_sample else 'w'}{columns.version}"

    def _stamps(self) -> FileStamps:
        run = self.run
        return file_stamps(
            run.metrics_file, run.events_file, run.energy_file, run.manifest_file, run.plan_file, run.eval_file
        )

    def summary(self) -> RunSummary:
        with self.making:
            columns, stamps = self.columns(), self._stamps()
            kept = self._summary
            if kept is None or kept[0] != stamps or kept[1] != columns.is_sample:
                kept = self._summary = (stamps, columns.is_sample, collect(self.run, columns=columns))
            return kept[2]

    def glance(self) -> tuple[RunSummary, list[float | None]]:
        """A brief summary and losses for a list, from few lines of the metrics: a list of 500 runs reads no file
        whole."""
        run = self.run
        with self.making:
            stamps = file_stamps(run.metrics_file, run.events_file, run.energy_file, run.config_file)
            if self._glance is None or self._glance[0] != stamps:
                events = read_events(run)
                columns = brief_columns(run, events)
                losses = thin(axis(columns, "step"), columns.get("loss"), SPARK_POINTS)[1]
                self._glance = (stamps, collect(run, columns=columns, events=events, brief=True), losses)
            return self._glance[1:]

    def series(self, key: str, x: str, points: int) -> Curve:
        columns = self.columns()
        return self._thinned(columns.version, columns.is_sample, key, x, points)

    def _thin(self, version: int, is_sample: bool, key: str, x: str, points: int) -> Curve:
        """Kept by version: of many viewers who ask for a curve, one waits for it."""
        columns = self.columns()
        return thin(axis(columns, x), columns.get(key), points)


class Folder:
    """All runs at or below a folder; new ones appear by themselves. Pages name runs by id, never by path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._views: dict[str, RunView] = {}
        self._listed_at = -1e9
        self.views()

    def views(self) -> list[RunView]:
        with self._lock:
            if time.monotonic() - self._listed_at >= LIST_SECONDS:
                self._listed_at = time.monotonic()
                views = {}
                for run in find_runs(self.root):
                    relative = str(run.path.resolve().relative_to(self.root.resolve()))
                    view = RunView(run, print_text(run.name if relative == "." else relative))
                    views[view.id] = self._views.get(view.id, view)
                self._views = views
            return list(self._views.values())

    def get(self, run_id: str) -> RunView | None:
        self.views()
        return self._views.get(run_id)
