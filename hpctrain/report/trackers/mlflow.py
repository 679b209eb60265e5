"""MLflow: a store of files, or the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import MetricRow
from hpctrain.report.trackers.tracker import TrackedRun, Tracker

EXPERIMENT = "hpctrain"
"""Experiment that the runs belong to, unless MLFLOW_EXPERIMENT_NAME names another one."""
RUN_TAG = "hpctrain.run"
"""Tag with the name of the run folder, by which a run is found again."""
METRICS_A_BATCH = 1000
"""Most metrics in a request: the limit of MLflow's REST API (`Log Batch`)."""
PARAM_CHARS = 6000
"""Most characters of a setting's value, as in MLflow's documentation of `log_param`."""


class MLflow(Tracker):
    """Writes to the server that MLFLOW_TRACKING_URI names; without it, to a store of files in `output`, which `mlflow
    server --backend-store-uri OUTPUT` shows."""

    def open(self, run: TrackedRun) -> None:
        # Since 3.7 MLflow refuses stores of files unless this is set. A database would need a lock on a shared folder.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or run.output.resolve().as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        known = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run.name}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment_id, run_name=run.title, tags={RUN_TAG: run.name}).info.run_id
        params = [Param(key, str(value)[:PARAM_CHARS]) for key, value in run.settings.items()]
        for begin in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[begin : begin + 100])

    def log(self, rows: Sequence[MetricRow], ranks: Sequence[RankRow]) -> None:
        metrics = [
            self._metric(name, float(figure), int(row.time_s * 1000), row.step)
            for row in rows
            for name, figure in row.figures().items()
        ]
        for begin in range(0, len(metrics), METRICS_A_BATCH):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + METRICS_A_BATCH])

    def close(self, is_done: bool | None) -> None:
        if is_done is not None:
            self._client.set_terminated(self._id, "FINISHED" if is_done else "FAILED")
