"""Prometheus: one text file a node, for the textfile collector of the node exporter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import MetricRow
from hpctrain.report.trackers.tracker import TrackedRun, Tracker

RANK_FIGURES = ("compute_s", "wait_pp_s", "wait_dp_s", "wait_world_s", "wait_device_s", "memory_bytes")
"""Attributes of a row of metrics-ranks.jsonl that become gauges."""


class OpenMetrics(Tracker):
    """Writes `output`/NODE.prom for each node of the run: gauges of the node's ranks, with the labels `run`, `rank` and
    `device`, and in the file of rank 0's node also the newest figures of the run, with the label `run`.

    A file is replaced as a whole. At the end of the run the files are removed, because what a file says is taken for
    the present.
    """

    def open(self, run: TrackedRun) -> None:
        import prometheus_client

        self._client = prometheus_client
        self._run = run
        run.output.mkdir(parents=True, exist_ok=True)
        self._figures: Mapping[str, float] = {}
        self._nodes: set[str] = set()

    def log(self, rows: Sequence[MetricRow], ranks: Sequence[RankRow]) -> None:
        self._figures = rows[-1].figures() if rows else self._figures
        nodes: dict[str, list[RankRow]] = {}
        for row in ranks:
            nodes.setdefault(row.device.rpartition(":")[0], []).append(row)
        self._remove(self._nodes - nodes.keys())
        self._nodes = set(nodes)
        for node, there in nodes.items():
            gauges = self._client.CollectorRegistry()
            if any(row.rank == 0 for row in there):
                for name, figure in self._figures.items():
                    self._gauge(gauges, name).labels(self._run.name).set(figure)
            for name in RANK_FIGURES:
                gauge = self._gauge(gauges, f"rank_{name}", "rank", "device")
                for row in there:
                    gauge.labels(self._run.name, str(row.rank), row.device).set(getattr(row, name))
            self._client.write_to_textfile(str(self._run.output / f"{node}.prom"), gauges)

    def close(self, is_done: bool | None) -> None:
        if is_done is not None:
            self._remove(self._nodes)

    def _gauge(self, gauges: Any, name: str, *labels: str) -> Any:
        name = f"hpctrain_{name.replace('.', '_')}"
        return self._client.Gauge(name, "See metrics.jsonl and metrics-ranks.jsonl.", ("run", *labels), registry=gauges)

    def _remove(self, nodes: Collection[str]) -> None:
        for node in nodes:
            (self._run.output / f"{node}.prom").unlink(missing_ok=True)
