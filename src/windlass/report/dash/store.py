"""Runs that many viewers share: one reader per run, summaries made again only when files have changed."""

import hashlib
import os
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from windlass.files import FileStamps, file_stamps
from windlass.report.collect import RunSummary, brief_columns, collect, find_runs, read_events, sample_columns
from windlass.report.columns import LONG_FILE_BYTES, Columns, axis, moving_mean, superseded, thin
from windlass.report.dash.notes import RunNotes, read_notes
from windlass.runs.folder import Run
from windlass.runs.measured import Numbers
from windlass.units import print_text

# Minimum seconds between two checks of the files, for any number of viewers.
LOOK_SECONDS = 0.5
LIST_SECONDS = 5.0
# A folder of ten thousand runs takes a second to list: at most this share of the time is spent on it.
LIST_SHARE = 0.05
PIECE_BYTES = 4 << 20
MAX_CACHED_SERIES = 256
SPARK_POINTS = 60
MAX_REPEATED_PARTS = 100
Span = tuple[float, float]


class RunView:
    """One run, live. A long file is shown from a sample at once and read completely in the background."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.title = run, name
        self.name = name  # unique in its folder
        self.id = hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()[:12]
        # Held while a summary or a page is made: of many viewers who find it out of date, one makes the next.
        self.making = threading.RLock()
        # The run's page as it was last made, and from which summary.
        self.page: tuple[RunSummary, dict[str, Any]] | None = None
        self._lock = threading.Lock()
        self._complete = Columns(run.metrics_file)
        self._sample: Columns | None = None
        self._looked_at = -1e9
        self._summary: tuple[FileStamps, bool, RunSummary] | None = None
        self._glance: tuple[FileStamps, RunSummary, list[float | None], RunNotes] | None = None
        self._thinned = lru_cache(MAX_CACHED_SERIES)(self._thin)
        # Its row of the list: what it was made from, in which version of the list it changed, and the row.
        self.row: tuple[RunSummary, tuple[Any, ...], int, dict[str, Any]] | None = None

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

    def summary(self) -> RunSummary:
        run = self.run
        with self.making:
            columns, kept = self.columns(), self._summary
            stamps = file_stamps(
                run.metrics_file, run.events_file, run.energy_file, run.manifest_file, run.plan_file, run.eval_file
            )
            if kept is None or kept[0] != stamps or kept[1] != columns.is_sample:
                kept = self._summary = (stamps, columns.is_sample, collect(run, columns=columns))
            return kept[2]

    def glance(self) -> tuple[RunSummary, list[float | None], RunNotes]:
        """A brief summary, losses and notes for a list, from few lines of the metrics: a list of 500 runs reads no
        file completely."""
        run = self.run
        with self.making:
            stamps = file_stamps(run.metrics_file, run.events_file, run.energy_file, run.config_file, run.notes_file)
            if self._glance is None or self._glance[0] != stamps:
                events = read_events(run)
                columns = brief_columns(run, events)
                losses = thin(axis(columns, "step"), columns.get("loss"), SPARK_POINTS)[1]
                summary = collect(run, columns=columns, events=events, brief=True)
                self._glance = (stamps, summary, losses, read_notes(run))
            return self._glance[1:]

    def series(self, key: str, x: str, points: int, mean: int = 1, span: Span | None = None) -> dict[str, Any]:
        """`x` and `y` to draw; over steps and tokens without the lines that a resume repeated, which are `repeated`.

        `mean`: also the moving mean over this many lines. `span`: only that part of the x axis.
        """
        columns = self.columns()
        return self._thinned(columns.version, columns.is_sample, key, x, points, mean, span)

    def _thin(
        self, version: int, is_sample: bool, key: str, x: str, points: int, mean: int, span: Span | None
    ) -> dict[str, Any]:
        """Kept by version: of many viewers who ask for a curve, one waits for it."""
        columns = self.columns()
        xs, ys = axis(columns, x), columns.get(key)
        is_known = ~np.isnan(xs) & ~np.isnan(ys)
        xs, ys = xs[is_known], ys[is_known]
        is_repeated = np.zeros(len(xs), bool)
        if x in ("step", "tokens"):  # over time and energy every line has its own place
            is_repeated = superseded(columns.get("step")[is_known])
        is_shown = np.ones(len(xs), bool) if span is None else (xs >= span[0]) & (xs <= span[1])

        def curve(mask: npt.NDArray[np.bool_], values: Numbers) -> dict[str, list[Any]]:
            part = (xs, values) if mask.all() else (xs[mask], values[mask])
            return dict(zip("xy", thin(*part, points), strict=True))

        curves: dict[str, Any] = curve(is_shown & ~is_repeated, ys)
        if len(repeated := np.nonzero(is_repeated & is_shown)[0]):
            # The line is interrupted between the steps lost to one fault and those lost to the next.
            parts = np.split(repeated, np.nonzero(np.diff(repeated) > 1)[0] + 1)[-MAX_REPEATED_PARTS:]
            drawn = [thin(xs[part], ys[part], max(10, points // len(parts))) for part in parts]
            curves["repeated"] = {
                "x": [x for part_x, _ in drawn for x in (*part_x, part_x[-1])],
                "y": [y for _, part_y in drawn for y in (*part_y, None)],
            }
        if mean > 1:
            means = np.full(len(ys), np.nan)
            means[~is_repeated] = moving_mean(ys[~is_repeated], mean)
            curves["mean"] = curve(is_shown & ~is_repeated, means)
        return curves


class Folder:
    """All runs at or below a folder; new ones appear by themselves. Pages name runs by id or by their path below the
    folder; what they send is looked up, never opened."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Held while rows of the list are made; they are looked at again LOOK_SECONDS after `rows_at`.
        self.listing = threading.Lock()
        self.rows_at, self.rows_version, self.runs_version = -1e9, 0, 0
        self._lock = threading.Lock()
        self._views: dict[Path, RunView] = {}
        self._by_name: dict[str, RunView] = {}
        self._listed: list[RunView] = []
        self._listed_at, self._list_seconds = -1e9, LIST_SECONDS
        self.views()

    def views(self) -> list[RunView]:
        with self._lock:
            began = time.monotonic()
            if began - self._listed_at >= self._list_seconds:
                views = {}
                for run in find_runs(self.root):
                    view = self._views.get(run.path)
                    if view is None:
                        relative = str(run.path.resolve().relative_to(self.root.resolve()))
                        view = RunView(run, print_text(run.name if relative == "." else relative))
                    views[run.path] = view
                if self._views.keys() - views.keys() or not self.runs_version:
                    self.runs_version = self.rows_version + 1  # runs have disappeared: the page gets all rows again
                if views.keys() != self._views.keys() or not views:
                    self._by_name = {}
                    # By id: a link is not a second run.
                    self._listed = list({view.id: view for view in views.values()}.values())
                    for view in self._listed:
                        # Two folders whose names differ in control characters only look alike: the second has its id.
                        view.name = view.title if view.title not in self._by_name else f"{view.title} {view.id}"
                        self._by_name |= {view.name: view, view.id: view}
                self._views = views
                self._listed_at = time.monotonic()
                self._list_seconds = max(LIST_SECONDS, (self._listed_at - began) / LIST_SHARE)
            return self._listed

    def newest(self, count: int) -> list[RunView]:
        """At most `count` runs: those whose metrics were written last."""
        views = self.views()
        if len(views) <= count:
            return views
        stamps = {view.id: file_stamps(view.run.metrics_file)[0] or (0, 0) for view in views}
        newest = set(sorted(stamps, key=lambda i: stamps[i])[-count:])
        return [view for view in views if view.id in newest]

    def get(self, name: str) -> RunView | None:
        self.views()
        return self._by_name.get(name)
