"""An MLflow store of plain files in the run folder."""

import os
import re
import time
from typing import Any

from windlass.config import Recipe
from windlass.config.load import flatten
from windlass.runs.folder import Run
from windlass.train.tracking import numbers, public_config, tracker_id


class MlflowTracker:
    uploads_later = False

    def __init__(self, run: Run, recipe: Recipe, first_step: int) -> None:
        # The file store needs no database and moves with the run folder; newer releases want this confirmed.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        folder = (run.trackers / "mlflow").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._client = client = MlflowClient(tracking_uri=folder.as_uri())
        project, windlass_id = recipe.trackers.project, tracker_id(run)
        experiment = client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(project)
        runs = client.search_runs([experiment_id], filter_string=f"tags.windlass_id = '{windlass_id}'", max_results=1)
        if runs:
            self._id = str(runs[0].info.run_id)
            client.update_run(self._id, status="RUNNING")
            return
        tags = {"windlass_id": windlass_id, "mlflow.runName": recipe.name}
        self._id = str(client.create_run(experiment_id, tags=tags).info.run_id)
        for key, value in flatten(public_config(recipe)):
            if value not in (None, [], {}):
                client.log_param(self._id, key, str(value)[:500])

    def log(self, line: dict[str, Any], count: int) -> None:
        from mlflow.entities import Metric

        values = numbers(line)
        step, milliseconds = int(values.pop("step", count)), int(values.pop("time", time.time()) * 1000)
        metrics = [Metric(metric_name(key), value, milliseconds, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


open_tracker = MlflowTracker


def metric_name(key: str) -> str:
    """`key` in MLflow's alphabet: it refuses a line with any other name, and a data source may have any name."""
    plain = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)
    return "/".join(part for part in plain.split("/") if part.strip(".")) or "_"
