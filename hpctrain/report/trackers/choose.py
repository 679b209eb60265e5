"""The trackers by name, and the packages that they need."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.records.run.tracking import TrackerName
from hpctrain.report.trackers.mlflow import MLflow
from hpctrain.report.trackers.openmetrics import OpenMetrics
from hpctrain.report.trackers.tensorboard import TensorBoard
from hpctrain.report.trackers.tracker import Tracker
from hpctrain.report.trackers.wandb import WeightsAndBiases

TRACKERS: Mapping[TrackerName, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow-skinny"),
    "wandb": (WeightsAndBiases, "wandb"),
    "openmetrics": (OpenMetrics, "prometheus-client"),
}
"""Name -> (class, package that pip installs)."""
