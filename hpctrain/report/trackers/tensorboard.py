"""TensorBoard: event files, which the package `tensorboard` writes and its dashboard shows."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import MetricRow
from hpctrain.report.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes event files to `output`/`name`. `tensorboard --logdir OUTPUT` shows all runs in the folder."""

    def open(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder = run.output / run.name
        folder.mkdir(parents=True, exist_ok=True)
        # The package's EventFileWriter writes in a thread, whose errors nobody sees.
        name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._writer = RecordWriter(self._file)
        lines = [f"    {key}: {json.dumps(value)}" for key, value in run.settings.items()]
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(Event(wall_time=time.time(), summary=text_pb("settings", "\n".join(lines))))

    def log(self, rows: Sequence[MetricRow], ranks: Sequence[RankRow]) -> None:
        for row in rows:
            values = [self._summary.Value(tag=name, simple_value=figure) for name, figure in row.figures().items()]
            self._write(self._event(step=row.step, wall_time=row.time_s, summary=self._summary(value=values)))
        self._file.flush()

    def close(self, is_done: bool | None) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
