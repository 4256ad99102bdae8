"""A metric backend for MLflow: lockstep run --track mlflow_backend:MLflow (pip install mlflow-skinny).

MLFLOW_TRACKING_URI names the server, or a folder with MLFLOW_ALLOW_FILE_STORE=true.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric


class MLflow:
    """Logs each step as metrics of one MLflow run, across all starts of a Lockstep run."""

    def __init__(self, folder: Path, cursor: Any, *, run: Mapping[str, Any], run_id: str) -> None:
        self.client = MlflowClient()
        self.metrics: list[Any] = []
        name, where = "lockstep", f"tags.lockstep = '{run_id}'"
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        runs = self.client.search_runs([experiment], where)
        tags = {"lockstep": run_id}
        started = runs or [self.client.create_run(experiment, tags=tags, run_name=folder.name)]
        self.run = started[0].info.run_id
        self.client.update_run(self.run, "RUNNING")
        self.client.set_tag(self.run, "configuration", json.dumps(run))

    def add(self, axis: str, step: int, values: Mapping[str, float], now: Any) -> None:
        now_ms = int(1000 * time.time())
        self.metrics += [
            Metric(f"{axis}/{name}", value, now_ms, step) for name, value in values.items()
        ]

    def flush(self) -> None:
        for first in range(0, len(self.metrics), 1000):
            self.client.log_batch(self.run, self.metrics[first : first + 1000])
        self.metrics = []

    def close(self, failed: bool) -> None:
        self.flush()
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")
