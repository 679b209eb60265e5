"""The key `tracking` of run.yaml."""

from __future__ import annotations

from typing import Literal

from hpctrain.records.format.document import Part
from hpctrain.records.format.file_name import OptionalPath

TrackerName = Literal["tensorboard", "mlflow", "wandb", "openmetrics"]


class Tracking(Part):
    """Trackers, tools that keep experiments, into which a job writes the run's metrics while it goes on."""

    trackers: list[TrackerName] = []
    """tensorboard: event files. mlflow: a store of files, or the server MLFLOW_TRACKING_URI. wandb: an offline run for
    `wandb sync`. openmetrics: a text file for each node, for the Prometheus node exporter. The package of each tool has
    to be installed: tensorboard, mlflow-skinny, wandb, prometheus-client."""
    output: OptionalPath = None
    """Folder for the files, on a file system that the nodes share; each tracker has its folder in it. Default:
    `tracking` in the run folder."""
