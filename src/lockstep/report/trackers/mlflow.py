"""MLflow, at the place that its own environment names (``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``)."""

from __future__ import annotations

import math
import os
from typing import Any, Final

from lockstep.report.trackers.tracker import Row, TrackerContext, values_of


def open_tracker(context: TrackerContext) -> MlflowTracker:
    """The tracker; the settings of the run are its parameters, and a run that goes on is the same run there."""
    return MlflowTracker(context)


class MlflowTracker:
    """Logs rows as metrics of one MLflow run."""

    replays = False

    def __init__(self, context: TrackerContext) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric: Final[Any] = Metric
        self._client: Final[Any] = MlflowClient()
        self.run_id: Final[str] = context.run_id or self._create(context, Param)

    def _create(self, context: TrackerContext, param: Any) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run_id: str = self._client.create_run(experiment, run_name=context.directory.name).info.run_id
        self._client.log_batch(run_id, params=[param(key, str(value)) for key, value in context.settings.items()])
        return run_id

    def write(self, row: Row) -> None:
        """Log one row."""
        at_ms, step = int(row["wall_s"] * 1000), int(row["step"])
        known = {name: value for name, value in values_of(row).items() if not math.isnan(value)}
        self._client.log_batch(self.run_id, metrics=[self._metric(n, float(v), at_ms, step) for n, v in known.items()])

    def close(self) -> None:
        """The run is finished there."""
        self._client.set_terminated(self.run_id)
