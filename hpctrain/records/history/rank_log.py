"""The log of the ranks: metrics-ranks.jsonl says where the time of each rank went."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.layer_figures import LayerFigures

RANK_LOG = "metrics-ranks.jsonl"
"""Name of the file in a run folder."""


class PeerTraffic(Part):
    """What a rank's process sent to one address over TCP between two measured steps, as its kernel counted."""

    address: str
    """Address of the other node."""
    sent_bytes: int
    """Bytes that arrived there."""
    busy_s: float
    """Seconds in which bytes were on the way, without those in which the receiver had no room."""


class RankRow(Document):
    """A line of metrics-ranks.jsonl: where the time of one rank went, as means over several steps.

    The first step of a generation is left out, because it takes longer. Waits are seconds of the host. On a GPU, a sum
    between replicas does not stop the host, so it counts in `wait_device_s`.
    """

    schema_kind: ClassVar[str] = "rank_metric"

    step: int
    """The last of the steps."""
    steps: int
    """How many steps the means are over; they follow each other."""
    generation: int
    """Number of the generation that did the steps."""
    rank: int
    """Number of the rank in the plan, from 0."""
    device: str
    """Device of the rank, as in the plan: node:device."""
    stages: list[int]
    """Stages of the rank, by number from 0."""
    forward_s: list[float]
    """Seconds a step of each of `stages` in forward passes and the loss. Collectives of tensor parallelism are
    included, and those of sharding."""
    backward_s: list[float]
    """Seconds a step of each of `stages` in backward passes, with the same collectives. Of the sums of gradients, only
    what the rank does for them within these passes counts: coding, and waits. Sums that end later count as waits
    alone."""
    wait_pp_s: float
    """Seconds a step in which the rank waited for messages between stages."""
    wait_dp_s: float
    """Seconds a step in which the rank waited for sums over replicas, and for collectives of sharded weights and
    gradients. Sums that begin after the backward pass include the coding of compressed gradients."""
    wait_world_s: float
    """Seconds a step in which the rank waited for all others: gradient norm, metrics, validation. The slowest rank
    waits least."""
    wait_device_s: float
    """Seconds a step in which the host waited for the rank's GPU; 0 on a CPU."""
    hidden_dp_s: float
    """Seconds a step in which sums over replicas were under way while the rank computed, without those in which it
    waited for stage messages; 0 on a GPU, where the host does not see their end."""
    memory_bytes: float
    """Peak memory in bytes, the largest of the steps, as in `memory_bytes_max` of metrics.jsonl."""
    wait_tp_s: float | None = None
    """Seconds in which the host waited for sums of tensor parallelism in the last of the steps; they are part of
    `forward_s` and `backward_s`. In every second line of a rank; absent without tensor parallelism, and on a GPU,
    where the host does not wait."""
    layers: list[LayerFigures] | None = None
    """The layers of the rank, measured in the last of the steps. In every second line of a rank; of the first replica
    alone where all replicas have the same sums, and the time of blocks (`profile.layers`) is not measured."""

    traffic: list[PeerTraffic] | None = None
    """What the rank sent to other nodes over TCP since it was measured last. In every second line of a rank; absent
    without such connections."""

    @property
    def compute_s(self) -> float:
        """Return the seconds a step in forward and backward passes, summed over the stages of the rank."""
        return sum(self.forward_s) + sum(self.backward_s)


def read_rank_log(folder: Path) -> list[RankRow]:
    """Return all rows of metrics-ranks.jsonl in a run folder, in file order; [] without the file. Incomplete lines are
    skipped: their writer was killed.

    Raises:
        FileError: the file cannot be read, or a line is no row of this version.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    path = folder / RANK_LOG
    return [RankRow.from_json(value, str(path)) for value in read_jsonl(path)] if path.exists() else []
