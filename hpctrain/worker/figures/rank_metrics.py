"""Where the time of each rank goes: measured on each rank, gathered with the figures of a step, and written by rank 0
as means over several steps. Some steps are measured in more detail."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY, WaitsFor
from hpctrain.base.atomic import append_line
from hpctrain.base.errors import StorageError
from hpctrain.base.net.tcp_counters import TcpCounters, tcp_counters
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.history.rank_log import RANK_LOG, PeerTraffic, RankRow
from hpctrain.worker.build import Trainer
from hpctrain.worker.figures.collective_counter import CollectiveCounter
from hpctrain.worker.figures.layer_figures import LayerWatch

WAITS = (*(f"wait_{kind}_s" for kind in get_args(WaitsFor)), "hidden_dp_s")
"""Names of the figures of `own_waits`."""
LEAST_STEPS = 5
"""Fewest steps of a mean."""
FIGURES_OF_LAYERS = "figures of layers"
"""Name of the operation in which a rank looks at its layers."""
GATHER_FIGURES = "gather the figures of layers"
"""Name of the operation that brings the figures of layers to rank 0."""
RANKS_A_STEP = 4
"""Most lines of metrics-ranks.jsonl a step, as a mean: with more ranks, the means are over more steps."""


def own_waits() -> dict[str, float]:
    """Return name of a figure -> seconds in which this rank waited, or hid a message behind its computation, since the
    last call."""
    waited = ACTIVITY.take_waits()
    seconds = {f"wait_{kind}_s": waited.get(kind, 0.0) for kind in get_args(WaitsFor)}
    return seconds | {"hidden_dp_s": ACTIVITY.take_hidden_s()}


@dataclass(frozen=True)
class StepTimesByRank:
    """Where each rank's time went in a step."""

    passes: Tensor
    """[ranks, 2, stages], fp64: seconds of the forward and of the backward passes of each stage on each rank."""
    figures: Mapping[str, Tensor]
    """Name in `WAITS`, or memory_bytes -> [ranks], fp64."""


class RankMetrics:
    """Adds up the times of the ranks on rank 0, and writes their means. Lines that cannot be written are lost.

    A window begins with the second step of a generation, or after the window before. In the last step of every second
    window, ranks also look at their layers: only the ranks of one replica, if all replicas have the same sums and no
    times of blocks are asked for.
    """

    def __init__(self, trainer: Trainer) -> None:
        plan, compiled = trainer.plan, trainer.run.compile
        self._plan, self._rank = plan, trainer.coordinate.rank
        self._path = trainer.folder / RANK_LOG
        self._fence = trainer.fence
        owner = plan.stage_owner()
        self._stages = {
            rank: [stage for stage in owner if owner[stage] == pipeline_rank]
            for pipeline_rank, column in enumerate(plan.mesh())
            for row in column
            for rank in row
        }
        self._generation = trainer.generation
        self._every = max(LEAST_STEPS, -(-plan.world_size // RANKS_A_STEP))
        self._done = 0
        """Steps of this generation that are done."""
        self._times: list[StepTimesByRank] = []
        self._gathered: list[_Measured] = []
        has_times = trainer.run.profile.layers and not compiled
        differ = has_times or plan.codec.lossy or plan.shards > 1 or not plan.codec.sums_gradients
        self._layers = LayerWatch(trainer.pipeline, has_times) if differ or trainer.coordinate.dp == 0 else None
        self._counters: dict[str, TcpCounters] = {}
        self._wait_tp_s: float | None = None
        self._has_host_waits = plan.tp > 1 and trainer.device.type == "cpu"
        self.tp_bytes = 0
        """Bytes that this rank sends in a step for tensor parallelism."""

    @property
    def is_measured(self) -> bool:
        """Whether the step under way is measured in more detail. It is the same on all ranks."""
        return self._done > 0 and self._done % (2 * self._every) == 0

    @contextlib.contextmanager
    def watched_passes(self) -> Iterator[None]:
        """Within the `with` block, which runs a step's forward and backward passes, count what tensor parallelism sends
        (in the first step and in measured steps, `is_measured`), and time the blocks (in measured steps)."""
        counter = CollectiveCounter() if self._plan.tp > 1 and (self._done == 0 or self.is_measured) else None
        with contextlib.ExitStack() as stack:
            if self._layers is not None and self.is_measured:
                stack.enter_context(self._layers.recorded_times())
            if counter is not None:
                stack.enter_context(counter)
            yield
        if counter is not None:
            self.tp_bytes = counter.sent_bytes
            self._wait_tp_s = counter.wait_s if self._has_host_waits else None

    def observe(self, gradients: Sequence[Tensor], summed: bool) -> None:
        """Look at the gradients of a measured step: at the sums over replicas or, if the codec is lossy, at this rank's
        gradients before the sum.

        Args:
            gradients: those of `Trainer.parameters`, without a loss scale.
            summed: whether they were summed over the replicas.
        """
        if self._layers is not None and self.is_measured and summed is not self._plan.codec.lossy:
            with ACTIVITY.doing(FIGURES_OF_LAYERS):
                self._layers.observe(gradients)

    def gather(self) -> None:
        """End a step, and if it was measured, bring the figures of all ranks to rank 0. The call is then
        collective."""
        if self.is_measured:
            with ACTIVITY.doing(FIGURES_OF_LAYERS):
                layers = self._layers.take() if self._layers is not None else None
                here = _Measured(self._wait_tp_s, layers, self._take_traffic())
                everyone: list[Any] | None = [None] * self._plan.world_size if self._rank == 0 else None
            with ACTIVITY.doing(GATHER_FIGURES, waits="world"):
                dist.gather_object(here, everyone)
            self._gathered = everyone or []
        self._done += 1

    def _take_traffic(self) -> list[PeerTraffic] | None:
        """Return what this process sent to other nodes since the last call; None if there is nothing new."""
        before, self._counters = self._counters, tcp_counters()
        new = [
            PeerTraffic(
                address=address,
                sent_bytes=now.sent_bytes - before.get(address, TcpCounters()).sent_bytes,
                busy_s=round(now.busy_s - before.get(address, TcpCounters()).busy_s, 6),
            )
            for address, now in self._counters.items()
        ]
        return [traffic for traffic in new if traffic.sent_bytes > 0 and traffic.busy_s > 0] or None

    def add(self, step: int, times: StepTimesByRank) -> None:
        """Add the times of a step on rank 0, after `gather`. Those of the generation's first step are left out.

        Args:
            step: number of the step.

        Raises:
            Superseded: the generation is over.
        """
        if self._done <= 1:
            return
        self._times.append(times)
        if len(self._times) >= self._every:
            lines = [json.dumps(row.to_json(), allow_nan=False) for row in self._rows(step)]
            self._times, self._gathered = [], []
            self._fence.check()
            with contextlib.suppress(StorageError):  # the training is worth more than these figures
                append_line(self._path, "\n".join(lines))

    def _rows(self, step: int) -> list[RankRow]:
        times, gathered = self._times, self._gathered or [_Measured(None, None, None)] * self._plan.world_size
        passes = torch.stack([of_step.passes for of_step in times]).mean(0).tolist()
        means = {name: torch.stack([of_step.figures[name] for of_step in times]).mean(0).tolist() for name in WAITS}
        memory = torch.stack([of_step.figures["memory_bytes"] for of_step in times]).amax(0).tolist()
        return [
            RankRow(
                step=step, steps=len(times), generation=self._generation, rank=rank, device=device,
                stages=(stages := self._stages[rank]),
                forward_s=[round(passes[rank][0][stage], 6) for stage in stages],
                backward_s=[round(passes[rank][1][stage], 6) for stage in stages],
                **{name: round(mean[rank], 6) for name, mean in means.items()},
                memory_bytes=memory[rank],
                wait_tp_s=measured.wait_tp_s,
                layers=measured.layers,
                traffic=measured.traffic,
            )
            for rank, (device, measured) in enumerate(zip(self._plan.ranks, gathered, strict=True))
        ]  # fmt: skip


class _Measured(NamedTuple):
    """What a rank measured in the last step of a window, and since the last step of the window before."""

    wait_tp_s: float | None
    layers: list[LayerFigures] | None
    traffic: list[PeerTraffic] | None
    """What it sent since the last step that was measured."""
