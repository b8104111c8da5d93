"""What do many viewers of many runs share? One reader per run: columns kept, summaries made again only when files have changed."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from windlass.report.collect import RunSummary, collect, find_runs
from windlass.report.columns import AXES, LONG_FILE, Columns, Still, axis, quick, thin
from windlass.runs.folder import Run
from windlass.units import print_text

FRESH_SECONDS = 0.5
"""Files are looked at again at most this often, however many viewers ask."""
LIST_SECONDS = 5.0
PIECE = 4 << 20
MOST_POINTS = 4000
Series = tuple[list[float | None], list[float | None]]


class RunView:
    """One run, live. A long file is shown from a sample at once and read whole in the background."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.id = hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:12]
        self._lock = threading.Lock()
        self._whole = Columns(run.metrics_file)
        self._sample: Columns | None = None
        self._reading = False
        self._looked_at = -1e9
        self._summary: tuple[tuple[float, ...], RunSummary] | None = None
        self.making = threading.RLock()
        """Held while a summary or a page is made: of many viewers who find it out of date, one makes the next."""
        self.page: tuple[RunSummary, dict[str, Any]] | None = None
        """The run's page as it was last made, and from which summary."""
        self._series: dict[tuple[Any, ...], Series] = {}
        self._series_version = -1

    def columns(self) -> Columns:
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= FRESH_SECONDS and not self._reading:
                self._looked_at = now
                if self._is_long_and_new():
                    self._sample = quick(self.run.metrics_file)
                    self._reading = True
                    threading.Thread(target=self._read_whole, name="windlass-dash-read", daemon=True).start()
                else:
                    self._whole.refresh()
            return Still(self._sample if self._sample is not None else self._whole)

    def _is_long_and_new(self) -> bool:
        try:
            return len(self._whole) == 0 and self.run.metrics_file.stat().st_size > LONG_FILE
        except OSError:
            return False

    def _read_whole(self) -> None:
        while not self._whole.refresh(PIECE):
            time.sleep(0.01)  # let requests in between
        with self._lock:
            self._sample, self._reading = None, False
            self._summary = None

    def version(self) -> str:
        columns = self.columns()
        return f"{'s' if columns.sampled else 'w'}{columns.version}"

    def summary(self) -> RunSummary:
        with self.making:
            columns = self.columns()
            stamp = self._stamp()
            known = self._summary
            if known is None or known[0] != stamp:
                known = (stamp, collect(self.run, columns=columns))
                self._summary = known
            return known[1]

    def _stamp(self) -> tuple[float, ...]:
        run = self.run
        found = [
            f.stat()
            for f in (
                run.metrics_file,
                run.events_file,
                run.energy_file,
                run.manifest_file,
                run.plan_file,
                run.eval_file,
            )
            if f.exists()
        ]
        return (float(self._sample is not None), *(v for s in found for v in (s.st_mtime, float(s.st_size))))

    def series(self, key: str, x: str, points: int) -> Series:
        columns = self.columns()
        version = columns.version * 2 + columns.sampled
        with self._lock:
            if version != self._series_version:
                self._series, self._series_version = {}, version
            found = self._series.get((key, x, points))
        if found is None:
            found = thin(axis(columns, x), columns.get(key), points)
            with self._lock:
                if len(self._series) < 256:
                    self._series[key, x, points] = found
        return found


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
            now = time.monotonic()
            if now - self._listed_at >= LIST_SECONDS:
                self._listed_at = now
                self._list()
            return list(self._views.values())

    def _list(self) -> None:
        found = {}
        for run in find_runs(self.root):
            inner = run.path.resolve().relative_to(self.root.resolve())
            view = RunView(run, print_text(str(inner) if str(inner) != "." else run.name))
            found[view.id] = self._views.get(view.id, view)
        self._views = found

    def get(self, run_id: str) -> RunView | None:
        self.views()
        return self._views.get(run_id)


def known_axis(name: str) -> str:
    return name if name in AXES else "step"
