"""Weights & Biases: files of an offline run, which `wandb sync` sends to a server."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import MetricRow
from hpctrain.report.trackers.tracker import TrackedRun, Tracker

PROJECT = "hpctrain"
"""Project that the runs belong to, unless WANDB_PROJECT names another one."""


class WeightsAndBiases(Tracker):
    """Writes an offline run to `output`/wandb. With WANDB_MODE=online, it goes to the server at once."""

    def open(self, run: TrackedRun) -> None:
        import wandb

        run.output.mkdir(parents=True, exist_ok=True)
        # A run that is continued gets one more folder of the same id; `wandb sync` puts them together.
        self._run = wandb.init(
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            dir=str(run.output),
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.name,
            name=run.title,
            resume="allow",
            config=dict(run.settings),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )
        # Steps that come again after a fault are refused as W&B's own steps, but not as an axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, rows: Sequence[MetricRow], ranks: Sequence[RankRow]) -> None:
        for row in rows:
            self._run.log({"step": row.step, "time_s": row.time_s, **row.figures()})

    def close(self, is_done: bool | None) -> None:
        import wandb

        self._run.finish(exit_code=1 if is_done is False else 0)
        wandb.teardown()  # its helper process
