"""A reduce-scatter by level, for a state that is sharded over all replicas: the replicas of a node sum first, then the
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.compress.codecs.buffers import Scratch
from hpctrain.compress.collectives.reduce_scatter import (
    DenseReduceScatter,
    LevelBytes,
    ReduceScatter,
    ScatterUnderWay,
)


class LevelGroups(NamedTuple):
    """The process groups of the two levels of a sum.

    The ranks over which a state is sharded lie node by node, with equally many on each, in the order of all ranks.
    """

    within: dist.ProcessGroup
    """The ranks of this rank's node."""
    between: dist.ProcessGroup
    """The ranks with this rank's place within their nodes, one of each node."""


class LevelReduceScatter(ReduceScatter):
    """The reduce-scatter of one `fully_shard` module by level.

    Within a node, each rank gets the sums of the parts that the ranks with its place own, in all nodes. It then sends
    each of them its part, by another reduce-scatter. At n nodes of k ranks, the numbers that a rank sends are (k−1)/k
    of its gradient within the node, and (n−1)/(n·k) of it between nodes.

    `begin` waits for the ranks of the node: the messages between nodes take longer, and these are on their way when it
    returns.
    """

    def __init__(self, within: ReduceScatter, between: ReduceScatter, groups: LevelGroups, scratch: Scratch) -> None:
        """Create the reduce-scatter before the first step.

        Args:
            within: sums among the ranks of a node.
            between: sums among the nodes.
            groups: the ranks of both levels.
            scratch: memory in fp32 for the gradient in another order.
        """
        self._within, self._between, self._groups = within, between, groups
        self._ordered = scratch
        self.residuals = between.residuals
        self.sent = LevelBytes(0, 0)
        """Bytes that this rank sent since `take_level_bytes` was last called."""

    def begin(self, gradient: Tensor, group: dist.ProcessGroup) -> ScatterUnderWay:
        ranks, nodes = dist.get_world_size(self._groups.within), dist.get_world_size(self._groups.between)
        by_node = gradient.view(nodes, ranks, -1)
        ordered = self._ordered.take((ranks, nodes, by_node.shape[-1]), gradient)
        ordered.copy_(by_node.transpose(0, 1))
        sums = gradient.new_empty(gradient.numel() // ranks)
        with ACTIVITY.doing("reduce-scatter over dp, within the node", waits="dp"):
            within = self._within(sums, ordered.view(-1), self._groups.within)
        between = self._between.begin(sums, self._groups.between)
        self.sent = LevelBytes(self.sent.intra_node + within, self.sent.inter_node + between.sent_bytes)
        return replace(between, sent_bytes=within + between.sent_bytes)


def scatters_by_level(
    scatters: Sequence[ReduceScatter | None], groups: LevelGroups, dtype: torch.dtype | None
) -> list[ReduceScatter | None]:
    """Return reduce-scatters by level for the `fully_shard` modules of a stage.

    Args:
        scatters: for each module, what sums among the nodes; None: exact sums. A plan has no codec that selects numbers
            here, because its selection is over whole parameters.
        groups: the ranks of both levels.
        dtype: dtype of the numbers in messages within a node; None: fp32.
    """
    within, exact, scratch = DenseReduceScatter(dtype or torch.float32), DenseReduceScatter(), Scratch()
    return [LevelReduceScatter(within, scatter or exact, groups, scratch) for scatter in scatters]


def take_level_bytes(scatters: Sequence[ReduceScatter | None]) -> LevelBytes | None:
    """Return the bytes that this rank sent by the reduce-scatters of a stage, by level, since this function was last
    called; None if they do not sum by level."""
    by_level = [scatter for scatter in scatters if isinstance(scatter, LevelReduceScatter)]
    if not by_level:
        return None
    total = LevelBytes(*map(sum, zip(*(scatter.sent for scatter in by_level), strict=True)))
    for scatter in by_level:
        scatter.sent = LevelBytes(0, 0)
    return total
